"""Snapshots: what is kept in files, and what never outside its folder of them."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import re
import socket
import tarfile
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.polling import wait_until
from tests.service.harness import SPEC
from tpufleet.client import snapshots
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import BadInput, NotFound
from tpufleet.model.api_types import NewJob
from tpufleet.model.job.jobs import JobId
from tpufleet.model.job.snapshots import SnapshotEntry, snapshot_digest
from tpufleet.service.files.snapshots import MAX_UPLOADS_PER_USER, RepackQueue
from tpufleet.service.files.tar_reader import TarReader
from tpufleet.service.transport.limits import TooManyRequests


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
    with pytest.raises(BadInput, match="neither a file nor a folder"):
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


PATHS = {
    "file": tar_member("a"),
    "link": tar_member("a", SYMLINK, linkname="b"),
    "folder": tar_member("a", tarfile.DIRTYPE),
    "file in it": tar_member("a/b"),
    "folder in it": tar_member("a/b", tarfile.DIRTYPE),
}
COMPATIBLE = [{"folder"}, {"folder in it"}, {"folder", "folder in it"}, {"folder", "file in it"}]


@pytest.mark.parametrize("second", PATHS)
@pytest.mark.parametrize("first", PATHS)
def test_no_path_of_an_upload_is_two_things(service, first, second):
    data = archive(PATHS[first], PATHS[second])
    with service.http(service.tokens["mel"]) as http:
        answer = http.post("/snapshots", content=data)
    if {first, second} in COMPATIBLE:
        assert answer.status_code == 200
    else:
        assert answer.status_code == 400
        assert re.search("is a duplicate|is a file and a folder", answer.text)


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
    with pytest.raises(BadInput, match=r"snapshot: |neither a file nor a folder"):
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
        with pytest.raises(BadInput, match=r"headers|too large|not a valid tar|sparse"):
            service.client("mel").put_snapshot("0" * 64, data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * len(data) + 32 * 2**20
    assert not list((service.folder / "snapshots").iterdir())


END = b"\0" * 1024


def raw_header(name: str, size: int | bytes, kind: bytes = tarfile.REGTYPE) -> bytes:
    """Also with sizes that `tarfile` does not write. Bytes are the field itself."""
    block = bytearray(tar_member(name, kind).tobuf(tarfile.USTAR_FORMAT))
    block[124:136] = size if isinstance(size, bytes) else b"%011o\0" % size
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def record(keyword: str, value: object) -> bytes:
    text = f" {keyword}={value}\n".encode()
    length = len(text) + 1
    while len(b"%d" % length) + len(text) != length:
        length = len(b"%d" % length) + len(text)
    return b"%d" % length + text


def extended(records: bytes, after: bytes = b"", kind: bytes = tarfile.XHDTYPE) -> bytes:
    padded = records + b"\0" * (-len(records) % 512)
    return raw_header("pax", len(records), kind) + padded + after


def sparse(*fields: tuple[str, object], content: bytes = b"", kind: bytes = tarfile.XHDTYPE):
    records = b"".join(record(f"GNU.sparse.{name}", value) for name, value in fields)
    return extended(records, raw_header("s", 512) + content.ljust(512, b"\0"), kind)


def base_256(number: int) -> bytes:
    return number.to_bytes(12, "big", signed=True)


FILE, LINK_TO_B = raw_header("a", 0), record("linkpath", "b")
VERSION_1 = (("major", 1), ("minor", 0))
# What `tarfile` expands, believes, or fails to read in one of many ways.
MALFORMED = {
    "negative PAX size": (extended(record("size", -5), FILE), "invalid size '-5'"),
    "negative PAX size of a folder": (
        extended(record("size", -(10**15)), raw_header("d", 0, FOLDER)), "invalid size"
    ),
    "negative PAX size of a link": (
        extended(record("size", -(10**15)) + LINK_TO_B, raw_header("l", 0, SYMLINK)), "invalid size"
    ),
    "PAX size of many digits": (extended(record("size", "9" * 5000), FILE), "invalid size"),
    "negative base-256 size": (raw_header("a", base_256(-512)), "invalid size -512"),
    "huge base-256 size": (
        raw_header("a", b"\x80" + (2**80).to_bytes(11, "big")), "too large when unpacked"
    ),
    "negative octal size": (raw_header("a", b"-0000000005\0"), "invalid size -5"),
    "negative size of a folder": (raw_header("d", base_256(-512), FOLDER), "invalid size -512"),
    "negative size of a PAX header": (
        raw_header("p", base_256(-512), tarfile.XHDTYPE) + FILE, "invalid size -512"
    ),
    "negative size of a long name": (
        raw_header("p", base_256(-5), tarfile.GNUTYPE_LONGNAME) + FILE, "invalid size -5"
    ),
    "size of a folder": (raw_header("d", 512, FOLDER), "invalid size 512"),
    "size of a link": (
        extended(LINK_TO_B, raw_header("l", 5, SYMLINK)), "invalid size 5"
    ),
    "PAX record of 10**20 bytes": (extended(b"99999999999999999999 a=b\n", FILE), "PAX header"),
    "PAX record of 0 bytes": (extended(b"0 a=b\n", FILE), "PAX header"),
    "PAX record without a value": (extended(b"4 a\n", FILE), "PAX header"),
    "PAX record that is cut off": (extended(b"90 a=b\n", FILE), "PAX header"),
    "PAX header without a record": (extended(b"x" * 40, FILE), "PAX header"),
    "global size": (extended(record("size", 10**9), FILE, tarfile.XGLTYPE), "global header"),
    "global sparse file": (sparse(("size", 10**9), kind=tarfile.XGLTYPE), "global header"),
    "sparse 0.0": (
        sparse(("size", 10**6), ("numblocks", 1), ("offset", 0), ("numbytes", 10)), "sparse"
    ),
    "sparse 0.1": (sparse(("map", "0,10"), ("size", 10**6)), "sparse"),
    "sparse 0.1 with negative size": (sparse(("map", "0,-5"), ("size", 100)), "sparse"),
    "sparse 1.0": (
        sparse(*VERSION_1, ("realsize", 10**6), content=b"1\n0\n10\n"), "sparse"
    ),
    "sparse 1.0 with negative size": (
        sparse(*VERSION_1, ("realsize", -7), content=b"1\n0\n0\n"), "sparse"
    ),
    "sparse, of no version": (sparse(("realsize", 10**6)), "sparse"),
    "sparse, old GNU": (raw_header("s", 0, tarfile.GNUTYPE_SPARSE), "sparse"),
    "end in a file": (raw_header("a", 1024) + b"x" * 700, "unexpected end of data"),
    "end before the padding": (raw_header("a", 5) + b"x" * 5, "unexpected end of data"),
    "end in a header": (FILE + FILE[:300], "truncated header"),
    "end after a PAX header": (extended(record("path", "b")), "ends after the header"),
    "end in a PAX header": (raw_header("p", 512, tarfile.XHDTYPE) + b"x", "unexpected end"),
    "no checksum": (FILE + b"x" * 512, "invalid|bad checksum"),
}  # fmt: skip
COMPLETE = {name for name in MALFORMED if not name.startswith("end ")}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_archive_is_refused_with_the_reason(shared_service, name):
    data, message = MALFORMED[name]
    data = gzip.compress(data + END if name in COMPLETE else data)
    with shared_service.http(shared_service.tokens["mel"]) as http:
        response = http.post("/snapshots", content=data, timeout=900)
    assert response.status_code == 400, response.text
    assert re.search(message, response.text), response.text
    assert not list((shared_service.folder / "snapshots").iterdir()), "no draft is left"


def test_a_header_is_read_in_linear_time(shared_service):
    """`tarfile` before Python 3.11.10 takes 18 s for it, in which the server does nothing else."""
    data = gzip.compress(extended(b"1" * 60_000, FILE) + END)
    before = time.thread_time()
    with pytest.raises(tarfile.ReadError, match="PAX header"):
        TarReader(io.BytesIO(data), 2**20).next_entry()
    assert time.thread_time() - before < 1  # of this thread, however busy the machine is


LONG = "/".join(["f" * 60] * 3)
FORMATS = {
    "ustar": tarfile.USTAR_FORMAT, "GNU": tarfile.GNU_FORMAT, "PAX": tarfile.PAX_FORMAT
}  # fmt: skip


@pytest.mark.parametrize("tar_format", FORMATS.values(), ids=FORMATS)
def test_archives_of_each_format_have_the_same_digest(shared_service, tmp_path, tar_format):
    # `ustar` has 100 bytes for the target of a link, and a path in two parts.
    names = [f"{LONG}/a", "ä b", f"{LONG}/é"]
    members = [tar_member(name, size=700, mode=0o755) for name in names]
    members.append(tar_member(f"{LONG}/l", SYMLINK, linkname="a"))
    if tar_format != tarfile.USTAR_FORMAT:
        members.append(tar_member("m", SYMLINK, linkname=f"{LONG}/a"))
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", format=tar_format) as tar:
        tar.addfile(tar_member(LONG, FOLDER))
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    with shared_service.http(shared_service.tokens["mel"]) as http:
        digest = http.post("/snapshots", content=out.getvalue()).json()["digest"]
    sha256 = hashlib.sha256(b"x" * 700).hexdigest()
    assert digest == snapshot_digest(
        SnapshotEntry(path=each.name, target=each.linkname)
        if each.issym()
        else SnapshotEntry(path=each.name, mode=0o755, size=700, sha256=sha256)
        for each in members
    )
    stored = shared_service.folder / "snapshots" / f"{digest}.tar.gz"
    with stored.open("rb") as file:
        snapshots.unpack(file, tmp_path / "code")
    assert (tmp_path / "code" / LONG / "l").read_bytes() == b"x" * 700
    stored.unlink()


def test_an_archive_of_git_is_accepted(shared_service):
    comment = extended(record("comment", "0" * 40), FILE, tarfile.XGLTYPE)
    with shared_service.http(shared_service.tokens["mel"]) as http:
        response = http.post("/snapshots", content=gzip.compress(comment + END))
    assert response.json() == {"digest": DIGEST_OF_A}
    (shared_service.folder / "snapshots" / f"{DIGEST_OF_A}.tar.gz").unlink()


def test_clients_pack_files_with_holes_as_plain_files(tmp_path):
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(2**20)
    _, data = packed(tmp_path)
    entry = TarReader(io.BytesIO(data), 2**22).next_entry()
    assert entry is not None
    assert (entry.type, entry.size) == (tarfile.REGTYPE, 2**20)


class PausedRepacking:
    """No header of an archive is parsed until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.started = threading.Semaphore(0)
        self._lock = threading.Lock()
        self.now = self.most = 0
        parse = tarfile.TarInfo.frombuf

        def paused(*args: Any) -> tarfile.TarInfo:
            with self._lock:
                self.now += 1
                self.most = max(self.most, self.now)
            self.started.release()
            assert self.go.wait(900)
            with self._lock:
                self.now -= 1
            return parse(*args)

        monkeypatch.setattr(tarfile.TarInfo, "frombuf", paused)


@pytest.fixture
def repacking(monkeypatch) -> Iterator[PausedRepacking]:
    paused = PausedRepacking(monkeypatch)
    yield paused
    paused.go.set()


def test_other_requests_are_answered_while_uploads_are_checked(service, repacking):
    """45 uploads: more than the handlers have threads."""
    sent = threading.Semaphore(0)

    def upload(number: int) -> int:
        def body() -> Iterator[bytes]:
            yield archive(tar_member(f"file-{number}"))
            sent.release()

        with service.http(service.tokens[("ada", "mel", "mo")[number % 3]]) as http:
            return http.post("/snapshots", content=body(), timeout=900).status_code

    with ThreadPoolExecutor(45) as pool, service.http(service.tokens["mel"]) as http:
        try:
            uploads = [pool.submit(upload, number) for number in range(45)]
            for _ in uploads:
                assert sent.acquire(timeout=900)
            for _ in range(2):
                assert repacking.started.acquire(timeout=900)
            for _ in range(50):
                assert http.get("/me", timeout=900).status_code == 200
            assert repacking.most == 2
        finally:
            repacking.go.set()
        assert {each.result() for each in uploads} == {200}
    assert repacking.most == 2


def test_uploads_of_one_user_leave_room_for_those_of_others(service, repacking):
    def upload(user: str, name: str) -> int:
        with service.http(service.tokens[user]) as http:
            content = archive(tar_member(name))
            return http.post("/snapshots", content=content, timeout=900).status_code

    with ThreadPoolExecutor(4) as pool:
        try:
            uploads = [pool.submit(upload, "mel", f"file-{number}") for number in range(3)]
            assert repacking.started.acquire(timeout=900)
            uploads.append(pool.submit(upload, "mo", "other"))
            assert repacking.started.acquire(timeout=900), "that of mo"
            assert repacking.now == 2
        finally:
            repacking.go.set()
        assert {each.result() for each in uploads} == {200}


def test_too_many_uploads_of_one_user_are_refused_for_a_while():
    queue = RepackQueue()
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_UPLOADS_PER_USER):
            stack.enter_context(queue.upload_of("mel"))
        with pytest.raises(TooManyRequests, match="retry in 5 s"), queue.upload_of("mel"):
            pass
        with queue.upload_of("mo"):
            pass
    with queue.upload_of("mel"):
        pass


def test_nothing_is_left_of_an_upload_whose_server_is_killed(service):
    folder, data = service.folder / "snapshots", archive(tar_member("a"))
    received, listed = threading.Event(), threading.Event()

    def body() -> Iterator[bytes]:
        yield data
        received.set()
        assert listed.wait(900)

    def upload() -> int:
        with service.http(service.tokens["mel"]) as http:
            return http.post("/snapshots", content=body(), timeout=900).status_code

    with ThreadPoolExecutor(1) as pool:
        response = pool.submit(upload)
        try:
            assert received.wait(900)
            wait_until(folder.is_dir)
            assert service.client("mel").me(), "which is answered after the draft was opened"
            assert not list(folder.iterdir())
        finally:
            listed.set()
        assert response.result() == 200


def test_an_upload_is_dropped_if_its_client_is_gone_before_its_turn(service, repacking):
    def upload(name: str) -> int:
        with service.http(service.tokens["mel"]) as http:
            content = archive(tar_member(name))
            return http.post("/snapshots", content=content, timeout=900).status_code

    with ThreadPoolExecutor(2) as pool:
        try:
            first = pool.submit(upload, "first")
            assert repacking.started.acquire(timeout=900)
            data = archive(tar_member("a"))
            with socket.create_connection(("127.0.0.1", service.port)) as connection:
                connection.sendall(
                    f"POST /api/v1/snapshots HTTP/1.1\r\nHost: localhost\r\n"
                    f"Authorization: Bearer {service.tokens['mel']}\r\n"
                    f"Content-Length: {len(data)}\r\n\r\n".encode()
                    + data
                )
                assert service.client("mel").me(), "so it was read"
            assert service.client("mel").me(), "so it was seen that the connection is closed"
        finally:
            repacking.go.set()
        assert first.result() == 200
        assert upload("last") == 200
    assert not (service.folder / "snapshots" / f"{DIGEST_OF_A}.tar.gz").exists()
    assert len(list((service.folder / "snapshots").iterdir())) == 2
