"""The folders of attempts, in which programs write whatever they like."""

from __future__ import annotations

import os
from pathlib import Path

from tests.nested_folders import make_nested
from tpufleet import deep_folders
from tpufleet.agent.workload import attempt_folder, untrusted_files
from tpufleet.agent.workload.attempt_folder import AttemptFolder
from tpufleet.model.job.attempts import AttemptId


def test_folders_of_earlier_attempts_are_deleted_at_any_depth(tmp_path):
    for name in ("j.0", "j.1", "j.2"):
        folder = AttemptFolder(tmp_path, AttemptId(name))
        assert folder.create()
        make_nested(folder.run, 3000 if name == "j.0" else 1)
    old = attempt_folder.other_attempt_folders(tmp_path, keep=tmp_path / "j.2")
    attempt_folder.delete_folders(sorted(old))
    assert os.listdir(tmp_path) == ["j.2"]


def test_disk_use_is_measured_at_any_depth(tmp_path):
    make_nested(tmp_path / "deep", 1500, file=b"x" * 2**20)
    try:
        message = attempt_folder.over_limit(tmp_path, 2**19)
        assert message is not None and "more than its limit of 0 MiB" in message
        assert attempt_folder.over_limit(tmp_path, 2**30) is None
    finally:
        deep_folders.delete(tmp_path / "deep")


def test_a_deep_folder_in_the_way_of_a_file_is_replaced(tmp_path):
    make_nested(tmp_path / "secrets" / "key", 1500)
    untrusted_files.write_below(tmp_path, Path("secrets/key"), b"value")
    assert (tmp_path / "secrets" / "key").read_bytes() == b"value"
