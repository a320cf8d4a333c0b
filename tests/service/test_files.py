"""Snapshots: what is kept in files, and what never outside its folder of them."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import tarfile
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.service.harness import SPEC
from tpufleet.client import snapshots
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import BadInput, NotFound
from tpufleet.model.api_types import NewJob
from tpufleet.model.jobs import JobId
from tpufleet.model.snapshots import SnapshotEntry, snapshot_digest


def packed(folder) -> tuple[str, bytes]:
    scan = snapshots.scan(folder)
    out = io.BytesIO()
    snapshots.pack(scan, out)
    return scan.digest, out.getvalue()


def archive(*members: tarfile.TarInfo) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return out.getvalue()


@pytest.fixture
def code(tmp_path_factory):
    folder = tmp_path_factory.mktemp("code")
    (folder / "train.py").write_text("print('hello')")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "deep").mkdir()
    (folder / "deep" / "data").write_bytes(os.urandom(200_000))
    (folder / "link").symlink_to("deep/data")
    return folder


def test_code_goes_up_once_and_reaches_the_agents_of_its_job_only(service, code):
    digest, data = packed(code)
    client = service.client("mel")
    assert not client.has_snapshot(digest)
    client.put_snapshot(digest, io.BytesIO(data))
    client.put_snapshot(digest, data)
    assert client.has_snapshot(digest)
    client.submit([NewJob(id=JobId("job-1"), spec=SPEC, snapshot=digest)])
    service.add_slice("s1", "job-1")
    service.add_slice("s2", None)
    with service.http(service.slice_token("s1")) as http:
        assert http.get(f"/agent/snapshots/{digest}").content == data
        assert http.get(f"/agent/snapshots/{'0' * 64}").status_code == 403
    with service.http(service.slice_token("s2")) as http:
        assert http.get(f"/agent/snapshots/{digest}").status_code == 403


def test_the_same_code_may_come_from_many_at_once(service, code):
    digest, data = packed(code)

    def send(_: int) -> None:
        with FleetClient(service.url, service.tokens["mel"]) as client:
            client.put_snapshot(digest, data)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(send, range(48)))
    assert service.client("mel").has_snapshot(digest)
    assert len(list((service.folder / "snapshots").iterdir())) == 1


def test_an_upload_that_is_not_what_its_name_says_leaves_nothing(service, code):
    digest, data = packed(code)
    client = service.client("mel")
    for bad in (b"", b"no archive", data[:-20], data[: len(data) // 2]):
        with pytest.raises(BadInput, match="snapshot"):
            client.put_snapshot(digest, bad)
    with pytest.raises(BadInput, match="not " + "0" * 64):
        client.put_snapshot("0" * 64, data)
    assert not client.has_snapshot(digest)
    assert list((service.folder / "snapshots").iterdir()) == []


def test_an_archive_that_leads_out_of_its_folder_is_refused(service):
    for name in ("../evil", "/etc/evil", "a/../../evil"):
        member = tarfile.TarInfo(name)
        digest = snapshot_digest([SnapshotEntry(path=name)])
        with pytest.raises(BadInput, match="points outside the snapshot"):
            service.client("mel").put_snapshot(digest, archive(member))
    device = tarfile.TarInfo("dev")
    device.type = tarfile.CHRTYPE
    with pytest.raises(BadInput, match="not a file, folder or symlink"):
        service.client("mel").put_snapshot("0" * 64, archive(device))


def tar_member(name: str, kind: bytes = tarfile.REGTYPE, **fields: object) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = kind
    for field, value in fields.items():
        setattr(member, field, value)
    return member


FOLDER, SYMLINK = tarfile.DIRTYPE, tarfile.SYMTYPE
# What an archive can hold beside the file `a`, without a change of its digest.
UNCOVERED = {
    "mode": [tar_member("a", mode=0o000)],
    "set-user-ID": [tar_member("a", mode=0o6644)],
    "owner": [tar_member("a", uid=4711, uname="mallory", mtime=1e9)],
    "headers": [tar_member("a", pax_headers={"comment": "x", "SCHILY.xattr.user.x": "y"})],
    "folder": [tar_member("a"), tar_member("json", FOLDER, mode=0o777)],
    "this folder": [tar_member("a"), tar_member(".", FOLDER, mode=0)],
    "folder above": [tar_member("a"), tar_member("..", FOLDER)],
    "folder in a file": [tar_member("a"), tar_member("a/x", FOLDER)],
    "folder in its place": [tar_member("a", FOLDER), tar_member("a")],
}
DIGEST_OF_A = snapshot_digest([SnapshotEntry(path="a", sha256=hashlib.sha256().hexdigest())])


@pytest.mark.parametrize("members", UNCOVERED.values(), ids=UNCOVERED)
def test_a_digest_decides_what_hosts_unpack_whoever_uploads_it(service, members, tmp_path):
    clean = archive(tar_member("a"))
    client = service.client("mel")
    stored = service.folder / "snapshots" / f"{DIGEST_OF_A}.tar.gz"
    for data in (archive(*members), clean, archive(*members)):
        with contextlib.nullcontext() if data == clean else contextlib.suppress(BadInput):
            client.put_snapshot(DIGEST_OF_A, data)  # refused, or stored without the rest
    with stored.open("rb") as packed_again:
        snapshots.unpack(packed_again, tmp_path / "code")
    assert [path.name for path in (tmp_path / "code").rglob("*")] == ["a"]
    assert (tmp_path / "code" / "a").stat().st_mode & 0o7777 == 0o644
    with tarfile.open(stored) as tar:
        assert [(each.mode, each.uid, each.mtime, each.pax_headers) for each in tar] == [
            (0o644, 0, 0, {})
        ]


@pytest.mark.parametrize("name", ["folder", "folder above", "folder in a file", "damaged"])
def test_what_an_earlier_release_stored_is_replaced_by_the_next_upload(service, name):
    stored = service.folder / "snapshots" / f"{DIGEST_OF_A}.tar.gz"
    stored.parent.mkdir(exist_ok=True)
    stored.write_bytes(b"x" if name == "damaged" else archive(*UNCOVERED[name]))
    client = service.client("mel")
    assert not client.has_snapshot(DIGEST_OF_A), "so that clients upload it"
    client.put_snapshot(DIGEST_OF_A, archive(tar_member("a")))
    assert client.has_snapshot(DIGEST_OF_A)
    with tarfile.open(stored) as tar:
        assert tar.getnames() == ["a"]


def test_what_an_earlier_release_stored_well_is_kept(service, code):
    digest, data = packed(code)
    stored = service.folder / "snapshots" / f"{digest}.tar.gz"
    stored.parent.mkdir(exist_ok=True)
    stored.write_bytes(data)
    assert service.client("mel").has_snapshot(digest)


# Each is refused by hosts, so it is refused at upload.
REFUSED = {
    "twice": [tar_member("a"), tar_member("a")],
    "file and folder": [tar_member("a"), tar_member("a/b")],
    "link and folder": [tar_member("l", SYMLINK, linkname="d"), tar_member("l/b")],
    "absolute link": [tar_member("l", SYMLINK, linkname="/etc/passwd")],
    "link to above": [tar_member("d/l", SYMLINK, linkname="../../x")],
    "link through links": [
        tar_member("d/up", SYMLINK, linkname=".."), tar_member("l", SYMLINK, linkname="d/up/../x")
    ],
    "empty name": [tar_member("d//a")],
    "this folder": [tar_member("./a")],
    "long name": [tar_member("a" * 256)],
    "hard link": [tar_member("a"), tar_member("h", tarfile.LNKTYPE, linkname="a")],
}  # fmt: skip


@pytest.mark.parametrize("members", REFUSED.values(), ids=REFUSED)
def test_an_upload_is_refused_if_hosts_cannot_unpack_it(service, members, tmp_path):
    data = archive(*members)
    with pytest.raises((BadInput, OSError)):
        snapshots.unpack(io.BytesIO(data), tmp_path / "code")
    entries = [
        SnapshotEntry(path=each.name, sha256=hashlib.sha256().hexdigest())
        if each.isreg()
        else SnapshotEntry(path=each.name, target=each.linkname)
        for each in members
    ]
    with pytest.raises(BadInput, match=r"snapshot: |not a file, folder or symlink"):
        service.client("mel").put_snapshot(snapshot_digest(entries), data)


def test_an_archive_that_is_too_large_is_refused_in_words(service):
    with pytest.raises(BadInput, match=r"larger than 1 MiB.*tpuignore"):
        service.client("mel").put_snapshot("0" * 64, os.urandom(1024 * 1024 + 1))
    endless = (os.urandom(64 * 1024) for _ in range(32))
    with pytest.raises(BadInput, match="larger than 1 MiB"):
        service.client("mel").put_snapshot("0" * 64, endless)
    bomb = tarfile.TarInfo("bomb")
    bomb.size = 9 * 1024 * 1024
    with pytest.raises(BadInput, match="too large when unpacked"):
        service.client("mel").put_snapshot("0" * 64, archive(bomb))


@pytest.mark.parametrize(
    "digest", ["..", "../" * 3 + "etc", "x", "0" * 63, "A" * 64, "0" * 64 + "/.."]
)
def test_a_digest_never_leads_out_of_the_folder(shared_service, digest):
    with pytest.raises((BadInput, NotFound)):
        shared_service.client("mel").put_snapshot(digest, b"x")


def pax_header(size: int) -> Iterator[bytes]:
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, size
    yield header.tobuf()
    yield from (b"\0" * 2**20 for _ in range(size // 2**20))


def long_name(size: int) -> Iterator[bytes]:
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, size
    yield header.tobuf()
    yield from (b"a" * 2**20 for _ in range(size // 2**20))


def chained_headers(size: int) -> Iterator[bytes]:
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, 512
    record = b"12 comment=a\n".ljust(512, b"\0")
    yield from (header.tobuf() + record for _ in range(size // 1024))


def sparse_map(size: int) -> Iterator[bytes]:
    records = b"".join(
        (lambda text: b"%d %s" % (len(text) + 3, text))(text)
        for text in (b"GNU.sparse.major=1\n", b"GNU.sparse.minor=0\n", b"GNU.sparse.name=f\n")
    )
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, len(records)
    yield header.tobuf() + records.ljust(512, b"\0")
    content = tarfile.TarInfo("f")
    content.size = 1024
    yield content.tobuf() + b"%d\n" % size
    yield from (b"1\n" * 2**19 for _ in range(size // 2**20))


def long_paths(size: int) -> Iterator[bytes]:
    for number in range(size // 5120):
        name = ("/".join(["a" * 250] * 16) + f"{number:05d}").encode()
        header = tarfile.TarInfo("././@LongLink")
        header.type, header.size = tarfile.GNUTYPE_LONGNAME, len(name)
        yield header.tobuf() + name.ljust(4096, b"\0") + tarfile.TarInfo("a").tobuf()


@pytest.mark.parametrize(
    "content",
    [
        pax_header,
        long_name,
        chained_headers,
        sparse_map,
        pytest.param(long_paths, marks=pytest.mark.slow),
    ],
)
def test_a_small_upload_cannot_take_much_memory(service, content):
    """64 MiB of tar in less than 1 MiB of gzip."""
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=1) as zipped:
        for block in content(2**26):
            zipped.write(block)
    data = out.getvalue()
    assert len(data) < 2**20
    tracemalloc.start()
    try:
        with pytest.raises(BadInput, match=r"headers|too large|not a valid tar"):
            service.client("mel").put_snapshot("0" * 64, data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * len(data) + 32 * 2**20
    assert not list((service.folder / "snapshots").iterdir())
