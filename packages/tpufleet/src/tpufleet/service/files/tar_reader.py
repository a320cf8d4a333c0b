"""Reads tar.gz files that users upload, in bounded time and memory.

`tarfile` is not used for that: it expands sparse files, believes negative sizes, reads headers of
any size, and searches them with regular expressions in quadratic time (CVE-2024-6232,
CVE-2025-8194).
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from typing import IO

from tpufleet.errors import BadInput

# What a damaged archive raises. Not OSError: the disk may be full.
DAMAGED = (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile, ValueError)
TOO_LARGE = "the snapshot is too large when unpacked"
# A path or link target is at most 4 KiB.
_MAX_HEADER_BYTES = 64 * 1024  # of one entry
_MAX_DIGITS = 20  # of a number in a PAX header
_PAX_TYPES = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_CHUNK = 64 * 1024


class TarReader:
    """Raises BadInput, or one of `DAMAGED`."""

    def __init__(self, file: IO[bytes], limit: int) -> None:
        """`limit` is that of all that is decompressed, in bytes."""
        self._unzipped = gzip.GzipFile(fileobj=file, mode="rb")
        self._limit_left = limit
        self._header_left = 0
        self._content_left = 0  # of the current entry
        self._padding = 0
        self._is_empty = True

    def next_entry(self) -> tarfile.TarInfo | None:
        """With its name, link target, type, mode and size. None at the end of the archive."""
        while self._content_left:
            self.read(_CHUNK)
        self._exactly(self._padding)
        self._padding = 0
        self._header_left = _MAX_HEADER_BYTES
        name = target = None
        pax: dict[str, bytes] = {}
        while (header := self._header()) is not None:
            if header.type == tarfile.GNUTYPE_LONGNAME:
                name = _text(self._extended_header(header).split(b"\0", 1)[0])
            elif header.type == tarfile.GNUTYPE_LONGLINK:
                target = _text(self._extended_header(header).split(b"\0", 1)[0])
            elif header.type in _PAX_TYPES:
                pax.update(_pax_records(self._extended_header(header)))
            elif header.type == tarfile.XGLTYPE:
                _require_plain_global(dict(_pax_records(self._extended_header(header))))
            else:
                return self._entry(header, name, target, pax)
        if name is not None or target is not None or pax:
            raise tarfile.ReadError("the archive ends after the header of an entry")
        # To the end of the last record, so that `gzip` verifies its checksum.
        self._unzipped.read(_MAX_HEADER_BYTES)
        return None

    def read(self, size: int) -> bytes:
        """From the content of the current entry."""
        data = self._exactly(min(size, self._content_left))
        self._content_left -= len(data)
        return data

    def _entry(
        self,
        header: tarfile.TarInfo,
        long_name: str | None,
        long_target: str | None,
        pax: dict[str, bytes],
    ) -> tarfile.TarInfo:
        entry = tarfile.TarInfo(header.name if long_name is None else long_name)
        entry.linkname = header.linkname if long_target is None else long_target
        entry.type, entry.mode, entry.size = header.type, header.mode, header.size
        # An empty value of a PAX header stands for that of the header after it.
        if path := pax.get("path"):
            entry.name = _text(path).rstrip("/")
        if linkpath := pax.get("linkpath"):
            entry.linkname = _text(linkpath)
        if digits := pax.get("size"):
            if not digits.isdigit() or len(digits) > _MAX_DIGITS:
                raise _invalid_size(entry.name[:200], _text(digits)[:40])
            entry.size = int(digits)
        if entry.isdir():
            entry.name = entry.name.rstrip("/")
        self._check(entry, pax)
        if entry.isreg():
            self._content_left = entry.size
            self._padding = -entry.size % tarfile.BLOCKSIZE
        return entry

    def _check(self, entry: tarfile.TarInfo, pax: dict[str, bytes]) -> None:
        name = entry.name[:200]
        if entry.type == tarfile.GNUTYPE_SPARSE or any(map(_is_sparse, pax)):
            # A few bytes of it stand for any size.
            raise BadInput(
                f"the snapshot contains {name!r}, a sparse file; create it without --sparse"
            )
        if entry.size < 0 or (entry.size and (entry.isdir() or entry.issym())):
            raise _invalid_size(name, entry.size)

    def _header(self) -> tarfile.TarInfo | None:
        block = self._read_header(tarfile.BLOCKSIZE)
        if not block and not self._is_empty:
            return None  # some programs write no end-of-archive entry
        self._is_empty = False
        if block and not any(block):
            return None
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")

    def _extended_header(self, header: tarfile.TarInfo) -> bytes:
        if header.size < 0:
            raise _invalid_size("a header", header.size)
        data = self._read_header(header.size + -header.size % tarfile.BLOCKSIZE)
        return _complete(data, header.size)[: header.size]

    def _read_header(self, size: int) -> bytes:
        self._header_left -= size
        if self._header_left < 0:
            raise BadInput(
                f"the snapshot has an entry with more than {_MAX_HEADER_BYTES} bytes of headers"
            )
        return self._read(size)

    def _exactly(self, size: int) -> bytes:
        return _complete(self._read(size), size)

    def _read(self, size: int) -> bytes:
        self._limit_left -= size
        if self._limit_left < 0:
            raise BadInput(TOO_LARGE)
        return self._unzipped.read(size)


def _complete(data: bytes, size: int) -> bytes:
    if len(data) < size:
        raise tarfile.ReadError("unexpected end of data")
    return data


def _invalid_size(name: str, size: object) -> tarfile.ReadError:
    return tarfile.ReadError(f"{name!r} has the invalid size {size!r}")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _is_sparse(keyword: str) -> bool:
    return keyword.startswith("GNU.sparse.")


def _require_plain_global(records: dict[str, bytes]) -> None:
    """`git archive` writes a comment. What all entries would have in common is never meant."""
    for keyword in records:
        if keyword in ("path", "linkpath", "size") or _is_sparse(keyword):
            raise tarfile.ReadError(f"a global header sets {keyword[:40]!r}")


def _pax_records(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Each is `LENGTH KEYWORD=VALUE` and a line feed; the length is that of all of it."""
    data = data.rstrip(b"\0")
    start = 0
    while start < len(data):
        space = data.find(b" ", start, start + _MAX_DIGITS)
        digits = data[start : max(space, start)]
        end = start + int(digits) if digits.isdigit() else 0
        keyword, equals, value = data[space + 1 : end].partition(b"=")
        if not space < end <= len(data) or not keyword or not equals or value[-1:] != b"\n":
            raise tarfile.ReadError("a PAX header has an invalid record")
        yield _text(keyword), value[:-1]
        start = end
