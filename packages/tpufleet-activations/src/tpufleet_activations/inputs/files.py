"""Input files: finding them, hashing them, and reading numbered lines from them."""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tpufleet.errors import NotFound, unreadable
from tpufleet_activations.io.file_digests import file_version
from tpufleet_activations.io.remote_files import fetch

# Every STRIDE-th line's offset is kept, so reading a line takes a seek and at most STRIDE lines.
STRIDE = 256


def find_files(path: str, patterns: tuple[str, ...]) -> list[Path]:
    """The local files of a path, folder, glob or object-store URL, sorted by name."""
    local = fetch(path)
    if local.is_file():
        return [local]
    if local.is_dir():
        files = sorted(file for pattern in patterns for file in local.glob(pattern))
    else:
        files = sorted(Path(name) for name in glob.glob(str(local)))
    if not files:
        raise NotFound(f"no data at {path}: no file matches {' or '.join(patterns)}")
    return files


def content_digest(paths: Sequence[Path], *options: Any) -> str:
    """SHA-256 over the options and the contents of the files, in order."""
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    for path in paths:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def check_encoding(paths: Sequence[Path]) -> None:
    """Raise for UTF-16 and UTF-32, whose lines would be cut in the middle of a character."""
    for path in paths:
        with open(path, "rb") as file:
            start = file.read(4096)
        if b"\0" in start or start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise unreadable(path, "no UTF-8 text; convert it with `iconv -f UTF-16 -t UTF-8`")


FileVersions = tuple[tuple[int, ...], ...]


def file_versions(paths: Sequence[Path]) -> FileVersions:
    return tuple(file_version(path) for path in paths)


class IndexedLines:
    """The non-empty lines of some files, numbered over all files, with random access."""

    def __init__(self, paths: Sequence[Path]):
        check_encoding(paths)
        self.paths = list(paths)
        self._offsets: list[tuple[Path, int]] = []  # of every STRIDE-th line
        self._count = 0
        self.ends: list[int] = []  # for each file, the number of lines up to its end
        for path in self.paths:
            self._scan(path)
            self.ends.append(self._count)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        return self.read(range(self._count))

    def read(self, span: range) -> Iterator[bytes]:
        if not len(span):
            return
        number = span.start // STRIDE * STRIDE
        first, offset = self._offsets[span.start // STRIDE]
        for path in self.paths[self.paths.index(first) :]:
            with open(path, "rb") as file:
                file.seek(offset)
                offset = 0
                for line in file:
                    if not line.strip():
                        continue
                    if number >= span.stop:
                        return
                    if number >= span.start:
                        yield line
                    number += 1

    def digest(self, *options: Any) -> str:
        return content_digest(self.paths, *options)

    def _scan(self, path: Path) -> None:
        offset = 0
        with open(path, "rb") as file:
            for line in file:
                if line.strip():
                    if self._count % STRIDE == 0:
                        self._offsets.append((path, offset))
                    self._count += 1
                offset += len(line)
