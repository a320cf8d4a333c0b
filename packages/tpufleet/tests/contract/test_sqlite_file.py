"""The file of a SQLite database is taken away from a running server: nothing is acknowledged that
would be forgotten, and the error says what to do."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.small_disk import SmallDisk
from tests.contract import store_builders as a
from tpufleet.errors import FleetError, StorageFull, StorageReadOnly, Unreachable
from tpufleet.stores.base import ChangeSet, JobQuery
from tpufleet.stores.open_store import open_store


def delete(path: Path) -> None:
    for each in path.parent.glob(f"{path.name}*"):
        each.unlink()


def delete_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


def delete_log_alone(path: Path) -> None:
    path.with_name(f"{path.name}-wal").unlink()


def replace_with_a_copy(path: Path) -> None:
    copy = path.with_name("copy.db")
    with sqlite3.connect(path) as source, sqlite3.connect(copy) as target:
        source.backup(target)
    os.replace(copy, path)


def move_the_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("moved"))


TAKEN = [delete, delete_folder, delete_log_alone, replace_with_a_copy, move_the_folder]


@pytest.mark.parametrize("take", TAKEN, ids=lambda take: take.__name__)
def test_a_database_that_was_taken_away_acknowledges_nothing(
    tmp_path: Path, take: Callable[[Path], None]
):
    path = tmp_path / "state" / "fleet.db"
    store = open_store(f"sqlite:///{path}")
    store.commit(ChangeSet(new_jobs=[a.job("job-1")], messages=[a.message()]))
    take(path)
    with pytest.raises(Unreachable, match="was deleted or replaced"):
        store.commit(ChangeSet(new_jobs=[a.job("job-2")], messages=[a.message()]))
    with pytest.raises(Unreachable):
        store.put_user(a.user())
    store.close()


def test_a_database_that_became_read_only_says_so(tmp_path):
    path = tmp_path / "fleet.db"
    store = open_store(f"sqlite:///{path}")

    def write_to_a_read_only_one(session) -> None:
        session.run("PRAGMA query_only = ON")  # fails as on a file system that became read-only
        try:
            session.run("DELETE FROM metadata")
        finally:
            session.run("PRAGMA query_only = OFF")

    with pytest.raises(Unreachable, match="read-only"):
        store._database.write(write_to_a_read_only_one)
    store.put_user(a.user())
    store.close()


def test_a_database_that_is_read_only_at_the_start_says_so(tmp_path):
    disk = SmallDisk(tmp_path / "disk")
    if not disk.mounted:
        pytest.skip("only root can mount a disk")
    url = f"sqlite:///{disk.folder}/fleet.db"
    try:
        open_store(url).close()
        subprocess.run(["mount", "-o", "remount,ro", str(disk.folder)], check=True)
        with pytest.raises(StorageReadOnly, match=r"(?s)fleet.db cannot be written.*next: make"):
            open_store(url)
    finally:
        disk.cleanup()


def test_a_damaged_database_says_so(tmp_path):
    path = tmp_path / "fleet.db"
    store = open_store(f"sqlite:///{path}")
    store.commit(ChangeSet(new_jobs=[a.job("job-1")], messages=[a.message()]))
    store.close()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(path.stat().st_size - 4096))
    with pytest.raises(FleetError, match=r"(?s)is damaged.*tpu backup restore"):
        store = open_store(f"sqlite:///{path}")
        store.jobs(JobQuery())


def write_beyond_the_largest_size(session) -> None:
    session.run("PRAGMA max_page_count = 1")  # fails as on a full disk
    try:
        session.run("CREATE TABLE more (value TEXT)")
    finally:
        session.run("PRAGMA max_page_count = 1000000000")


def test_the_last_write_says_whether_anything_can_be_recorded(tmp_path):
    store = open_store(f"sqlite:///{tmp_path / 'fleet.db'}")
    assert store.write_error() is None
    with pytest.raises(StorageFull):
        store._database.write(write_beyond_the_largest_size)
    assert isinstance(store.write_error(), StorageFull)
    assert store.jobs(JobQuery()) == []
    assert isinstance(store.write_error(), StorageFull)  # reading proves nothing
    store.put_user(a.user())
    assert store.write_error() is None
    store.close()
