"""Snapshots of folders: which files are included, and reproducible archives."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tpufleet.client import snapshots
from tpufleet.errors import BadInput, Conflict


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def paths(folder: Path, **options) -> list[str]:
    return [entry.path for entry in snapshots.scan(folder, **options).entries]


def packed(folder: Path) -> bytes:
    out = io.BytesIO()
    snapshots.pack(snapshots.scan(folder), out)
    return out.getvalue()


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> io.BytesIO:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    out.seek(0)
    return out


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def test_ignore_files_apply_at_every_level(tmp_path):
    write(
        tmp_path,
        {
            ".gitignore": "*.log\n/data/\n",
            "train.py": "",
            "a.log": "",
            "data/big": "",
            "lib/data/small": "",
            "lib/.gitignore": "!keep.log\nsecret*\n",
            "lib/keep.log": "",
            "lib/other.log": "",
            "lib/secret.txt": "",
            "lib/deep/secret.txt": "",
        },
    )
    assert paths(tmp_path) == [
        ".gitignore", "lib/.gitignore", "lib/data/small", "lib/keep.log", "train.py",
    ]  # fmt: skip


def test_tpuignore_overrides_gitignore(tmp_path):
    write(
        tmp_path,
        {".gitignore": "*.bin\n", ".tpuignore": "!model.bin\ndocs/\n", "model.bin": "",
         "other.bin": "", "docs/a.md": ""},
    )  # fmt: skip
    assert paths(tmp_path) == [".gitignore", ".tpuignore", "model.bin"]


def test_ignore_files_of_the_enclosing_repository_apply(tmp_path):
    write(
        tmp_path,
        {".git/HEAD": "", ".gitignore": "*.pt\n/exp/one/out/\n", "exp/.gitignore": "*.tmp\n",
         "exp/one/train.py": "", "exp/one/a.pt": "", "exp/one/b.tmp": "", "exp/one/out/x": ""},
    )  # fmt: skip
    assert paths(tmp_path / "exp/one") == ["train.py"]


def test_an_ignored_folder_can_be_chosen_explicitly(tmp_path):
    write(tmp_path, {".git/HEAD": "", ".gitignore": "build/\n", "build/one/train.py": ""})
    assert paths(tmp_path / "build/one") == ["train.py"]


def test_git_caches_and_virtual_environments_are_excluded(tmp_path):
    write(
        tmp_path,
        {".git/config": "", "__pycache__/a.pyc": "", "pkg/__pycache__/b.pyc": "",
         "pkg/a.py": "", "my-env/pyvenv.cfg": "", "my-env/bin/python": ""},
    )  # fmt: skip
    assert paths(tmp_path) == ["pkg/a.py"]


def test_a_folder_over_the_limit_is_rejected_with_its_five_largest_files(tmp_path):
    write(tmp_path, {f"file{size}": "x" * size * 1024 for size in range(1, 8)})
    with pytest.raises(BadInput) as caught:
        snapshots.scan(tmp_path, limit=10 * 1024)
    lines = str(caught.value).splitlines()
    assert "is 28.0 KiB, more than the limit of 10.0 KiB" in lines[0]
    listed = [line.split()[-1] for line in lines[1:6]]
    assert listed == ["file7", "file6", "file5", "file4", "file3"]
    assert ".tpuignore" in lines[6] and "TPUFLEET_SNAPSHOT_LIMIT" in lines[6]


def test_links_inside_the_folder_are_kept(tmp_path):
    write(tmp_path, {"a/real": "x"})
    (tmp_path / "b").mkdir()
    (tmp_path / "b/link").symlink_to("../a/real")
    (tmp_path / "folder").symlink_to("a")
    targets = {entry.path: entry.target for entry in snapshots.scan(tmp_path).entries}
    assert targets == {"a/real": None, "b/link": "../a/real", "folder": "a"}


@pytest.mark.parametrize("target", ["../outside", "/etc/hostname", "sub/up/../../x"])
def test_a_link_to_the_outside_is_rejected_unless_ignored(tmp_path, target):
    folder = write(tmp_path / "work", {"train.py": ""})
    (folder / "sub").mkdir()
    (folder / "sub/up").symlink_to(".")
    (folder / "link").symlink_to(target)
    with pytest.raises(BadInput, match="the link link points outside"):
        snapshots.scan(folder)
    write(folder, {".tpuignore": "link\n"})
    assert paths(folder) == [".tpuignore", "sub/up", "train.py"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_named(tmp_path):
    write(tmp_path, {"closed": "x"})
    (tmp_path / "closed").chmod(0)
    with pytest.raises(BadInput, match="closed: Permission denied"):
        snapshots.scan(tmp_path)


def test_a_missing_folder_is_rejected(tmp_path):
    with pytest.raises(BadInput, match="is not a folder"):
        snapshots.scan(tmp_path / "nowhere")


def test_times_umask_and_creation_order_do_not_change_the_digest(tmp_path):
    one = write(tmp_path / "one", {"a": "1", "b/c": "2", "run": "3"})
    other = write(tmp_path / "other", {"run": "3", "b/c": "2", "a": "1"})
    (one / "run").chmod(0o755)
    (other / "run").chmod(0o700)
    (other / "a").chmod(0o600)
    os.utime(other / "a", (1, 1))
    assert snapshots.scan(one).digest == snapshots.scan(other).digest
    assert packed(one) == packed(other)


def test_the_executable_bit_changes_the_digest(tmp_path):
    write(tmp_path, {"run": "x"})
    before = snapshots.scan(tmp_path).digest
    (tmp_path / "run").chmod(0o755)
    assert snapshots.scan(tmp_path).digest != before


names = st.from_regex(r"[a-z]{1,3}(/[a-zé ]{1,3})?", fullmatch=True)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(30))
@given(st.dictionaries(names, st.text(max_size=50), max_size=5), st.data())
def test_unpacking_reproduces_the_snapshot(tmp_path_factory, files, data):
    folders = {name.split("/")[0] for name in files if "/" in name}
    files = {name: text for name, text in files.items() if name not in folders}
    folder = write(tmp_path_factory.mktemp("in"), files)
    for name in data.draw(st.sets(st.sampled_from(sorted(files)))) if files else ():
        (folder / name).chmod(0o755)
    (folder / "link").symlink_to("a")
    copy = tmp_path_factory.mktemp("out")
    snapshots.unpack(io.BytesIO(packed(folder)), copy)
    assert snapshots.scan(copy).digest == snapshots.scan(folder).digest


def test_a_file_that_changes_during_packing_is_an_error(tmp_path):
    write(tmp_path, {"a": "1"})
    scanned = snapshots.scan(tmp_path)
    write(tmp_path, {"a": "2"})
    with pytest.raises(Conflict, match=r"^a changed "):
        snapshots.pack(scanned, io.BytesIO())


@pytest.mark.parametrize(
    "members",
    [
        [(member("../evil"), b"x")],
        [(member("/etc/evil"), b"x")],
        [(member("a/../../evil"), b"x")],
        [(member("link", tarfile.SYMTYPE, "/etc"), b"")],
        [(member("link", tarfile.SYMTYPE, ".."), b"")],
        [(member("up", tarfile.SYMTYPE, "."), b""), (member("l", tarfile.SYMTYPE, "up/../x"), b"")],
        [(member("link", tarfile.SYMTYPE, ".."), b""), (member("link/evil"), b"x")],
        [(member("hard", tarfile.LNKTYPE, "/etc/passwd"), b"")],
        [(member("device", tarfile.CHRTYPE), b"")],
        [(member("a"), b"1"), (member("a"), b"2")],
        [(member("a"), b"1"), (member("a/b"), b"2")],
    ],
    ids=["up", "absolute", "up-inside", "absolute-link", "link-up", "link-through-link",
         "write-through-link", "hard-link", "device", "twice", "file-as-folder"],
)  # fmt: skip
def test_an_archive_with_outside_paths_or_duplicates_is_rejected(tmp_path, members):
    folder = tmp_path / "in"
    folder.mkdir()
    with pytest.raises(BadInput, match="snapshot: "):
        snapshots.unpack(archive(*members), folder)
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize(
    "data",
    [b"", b"nonsense", gzip.compress(b"nonsense" * 100)],
    ids=["empty", "not-gzip", "not-tar"],
)
def test_a_damaged_archive_is_rejected(tmp_path, data):
    with pytest.raises(BadInput, match="damaged"):
        snapshots.unpack(io.BytesIO(data), tmp_path)
    whole = packed(write(tmp_path / "w", {"a": "x" * 5000}))
    with pytest.raises(BadInput, match="damaged"):
        snapshots.unpack(io.BytesIO(whole[: len(whole) // 2]), tmp_path / "out")
