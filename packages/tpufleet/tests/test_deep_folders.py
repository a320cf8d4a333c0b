"""Folders that a job wrote: deeper than Python recurses and than a path can name, and hostile."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from tests.nested_folders import make_nested
from tpufleet import deep_folders


@pytest.mark.parametrize("levels", [0, 1, 1400, 3000])
def test_a_folder_is_measured_and_deleted_at_any_depth(tmp_path, levels):
    root = tmp_path / "root"
    make_nested(root, levels, file=b"12345")
    (root / "beside").write_bytes(b"123")
    assert deep_folders.size(root) == 8
    assert deep_folders.disk_usage(root) > levels
    deep_folders.delete(root)
    assert os.listdir(tmp_path) == []


def test_few_descriptors_are_enough(tmp_path):
    make_nested(tmp_path / "root", 3000)
    before = os.listdir("/proc/self/fd")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, before)) + 10, hard))
    try:
        deep_folders.delete(tmp_path / "root")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_many_folders_on_every_level_are_deleted(tmp_path):
    for first in range(5):
        for second in range(5):
            (tmp_path / "root" / str(first) / str(second) / "x").mkdir(parents=True)
            (tmp_path / "root" / str(first) / str(second) / "file").touch()
    walked = {"/".join(folder.names) for folder in deep_folders.walk(tmp_path / "root")}
    assert len(walked) == 1 + 5 + 25 + 25
    deep_folders.delete(tmp_path / "root")
    assert os.listdir(tmp_path) == []


def test_links_are_deleted_and_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"x" * 100_000)
    root = tmp_path / "root"
    root.mkdir()
    (root / "folder").symlink_to(outside)
    (root / "file").symlink_to(outside / "precious")
    (tmp_path / "itself").symlink_to(outside)
    assert deep_folders.size(root) < 1000
    assert deep_folders.size(tmp_path / "itself") == 0
    deep_folders.delete(root)
    deep_folders.delete(tmp_path / "itself")
    assert os.listdir(tmp_path) == ["outside"]
    assert os.listdir(outside) == ["precious"]


def test_a_file_in_place_of_the_folder_is_deleted(tmp_path):
    (tmp_path / "file").write_bytes(b"123")
    assert deep_folders.size(tmp_path / "file") == 3
    deep_folders.delete(tmp_path / "file")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_does_not_exist_is_empty(tmp_path):
    assert deep_folders.size(tmp_path / "none") == 0
    assert list(deep_folders.walk(tmp_path / "none")) == []
    deep_folders.delete(tmp_path / "none")
    deep_folders.delete(tmp_path / "none" / "below")


def test_a_folder_that_vanishes_meanwhile_is_left_out(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "root" / name / "below").mkdir(parents=True)
    walked = []
    for folder in deep_folders.walk(tmp_path / "root"):
        walked.append("/".join(folder.names))
        if not folder.names:
            folder.folders.sort()
            deep_folders.delete(tmp_path / "root" / "b")
    assert walked == ["", "a", "a/below"]


def test_a_walk_ends_when_its_folder_is_moved_meanwhile(tmp_path):
    """Not outside of the root, where `..` would lead."""
    (tmp_path / "root" / "a" / "b").mkdir(parents=True)
    (tmp_path / "root" / "later").mkdir()
    (tmp_path / "elsewhere" / "secret").mkdir(parents=True)
    walked, errors = [], []
    for folder in deep_folders.walk(tmp_path / "root", on_error=errors.append):
        folder.folders.sort()
        walked.append("/".join(folder.names))
        if folder.names == ["a", "b"]:
            (tmp_path / "root" / "a" / "b").rename(tmp_path / "elsewhere" / "b")
    assert walked == ["", "a", "a/b"]
    assert [error.strerror for error in errors] == ["the folder was moved meanwhile"]


def test_a_folder_replaced_by_a_link_meanwhile_is_not_entered(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "root" / "a").mkdir(parents=True)
    errors, walked = [], []
    for folder in deep_folders.walk(tmp_path / "root", on_error=errors.append):
        walked.append(list(folder.names))
        if not folder.names:
            (tmp_path / "root" / "a").rmdir()
            (tmp_path / "root" / "a").symlink_to(outside)
    assert walked == [[]] and len(errors) == 1


# As a user without privileges: nothing keeps root from reading a folder.
UNPRIVILEGED = textwrap.dedent(
    """
    import os, sys
    from pathlib import Path
    from tpufleet import deep_folders
    root = Path(sys.argv[1]) / "root"
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    for name in ("unreadable", "readonly", "open"):
        (root / name / "below").mkdir(parents=True)
        (root / name / "below" / "file").write_bytes(b"123")
    (root / "unreadable").chmod(0)
    (root / "readonly").chmod(0o500)
    errors = []
    walked = ["/".join(f.names) for f in deep_folders.walk(root, on_error=errors.append)]
    assert sorted(walked) == ["", "open", "open/below", "readonly", "readonly/below"], walked
    assert [type(error) for error in errors] == [PermissionError], errors
    assert deep_folders.size(root) == 6
    deep_folders.delete(root)
    assert not root.exists()
    foreign = Path(sys.argv[2])
    if foreign.exists():
        (foreign / "own" / "below").mkdir(parents=True)
        try:
            deep_folders.delete(foreign)
        except PermissionError:
            assert os.listdir(foreign) == ["foreign"], "the rest is deleted"
        else:
            sys.exit("the folder of another user was deleted")
    """
)


def test_an_unreadable_folder_is_passed_over_by_readers_and_deleted_by_its_owner():
    with tempfile.TemporaryDirectory() as name:  # other users have no access to `tmp_path`
        folder = Path(name)
        folder.chmod(0o777)
        mixed = folder / "mixed"
        if os.geteuid() == 0:  # else there is no other user whose files could stay
            (mixed / "foreign" / "below").mkdir(parents=True)
            mixed.chmod(0o777)
        subprocess.run(
            [sys.executable, "-c", UNPRIVILEGED, str(folder), str(mixed)],
            check=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
