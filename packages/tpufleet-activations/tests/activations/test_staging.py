"""Staging folders of killed processes are deleted."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

from tpufleet_activations.io import staging
from tpufleet_activations.io.storage import LocalFolder

SCRIPT = """
import sys, time
from tpufleet_activations.io.storage import LocalFolder
folder = LocalFolder(sys.argv[1])
(folder.staging() / "big.draft").write_bytes(b"x" * 1000)
print("written", flush=True)
time.sleep(600)
"""


def writer(path) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "written\n"
    return process


def draft_count(path) -> int:
    return len(list(path.glob(".staging/*/big.draft")))


def test_drafts_of_dead_processes_are_deleted_and_others_kept(tmp_path):
    dead, living = writer(tmp_path), writer(tmp_path)
    try:
        assert draft_count(tmp_path) == 2
        dead.kill()
        dead.wait()
        LocalFolder(tmp_path).staging()
        assert draft_count(tmp_path) == 1
    finally:
        for process in (dead, living):
            process.kill()
            process.wait()
    LocalFolder(tmp_path).staging()
    assert draft_count(tmp_path) == 0


def test_each_storage_has_its_own_staging_folder_and_deletes_it(tmp_path):
    first, second = LocalFolder(tmp_path), LocalFolder(tmp_path)
    assert first.staging() == first.staging() != second.staging()
    del first, second
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_concurrent_writers_share_one_staging_folder(tmp_path):
    for number in range(50):
        folder, start = LocalFolder(tmp_path / str(number)), threading.Barrier(8)

        def begin(_, folder=folder, start=start):
            start.wait()
            (folder.staging() / uuid.uuid4().hex).touch()
            return folder.staging()

        with ThreadPoolExecutor(8) as threads:
            assert len(set(threads.map(begin, range(8)))) == 1
        assert len(list(folder.staging().iterdir())) == 8 + 1, "and the lock"


def test_no_draft_is_deleted_on_a_file_system_without_locks(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError("locks are not supported here")

    monkeypatch.setattr(staging.fcntl, "flock", no_locks)
    first, second = LocalFolder(tmp_path), LocalFolder(tmp_path)
    (first.staging() / "big.draft").write_bytes(b"x")
    second.staging()
    assert draft_count(tmp_path) == 1


def test_folders_come_and_go_while_others_delete_the_empty_base(tmp_path):
    base = tmp_path / ".staging"

    def come_and_go(_):
        for _ in range(200):
            folder = staging.StagingFolder(base)
            assert folder.path.is_dir()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(come_and_go, range(4)))
    assert not base.exists()
