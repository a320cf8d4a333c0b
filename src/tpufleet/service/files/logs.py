"""Logs: one file for each host of each attempt, appended by offset so that nothing is lost,
repeated or reordered."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tpufleet.errors import Conflict
from tpufleet.model.attempts import AttemptId
from tpufleet.model.hosts import HostId
from tpufleet.service import identifiers

_BLOCK = 64 * 1024
MAX_LINE_BYTES = 64 * 1024  # a longer line is split


class LogGap(Conflict):
    """Bytes before this chunk are missing; the client must send from `size`."""

    def __init__(self, size: int) -> None:
        super().__init__(f"the log ends at byte {size}; send from there")
        self.size = size


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLines:
    """Whole lines of one log, each with the offset of its end."""

    lines: tuple[tuple[str, int], ...]
    end: int


class LogFiles:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, attempt: AttemptId, host: HostId) -> Path:
        job, number = identifiers.parse_attempt_id(attempt)
        tpu_slice, index = identifiers.parse_host_id(host)
        return self._folder / job / str(number) / f"{tpu_slice}.{index}.log"

    def append(self, attempt: AttemptId, host: HostId, offset: int, data: bytes) -> int:
        """Returns the new size. Known bytes are skipped; a hole raises `LogGap`."""
        path = self.path(attempt, host)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # A lock of the open file, so it excludes threads as well as other servers.
            fcntl.flock(handle, fcntl.LOCK_EX)
            size = os.fstat(handle).st_size
            if offset > size:
                raise LogGap(size)
            rest = memoryview(data)[size - offset :]
            while rest:
                written = os.pwrite(handle, rest, size)
                size, rest = size + written, rest[written:]
            return size
        finally:
            os.close(handle)

    def size(self, attempt: AttemptId, host: HostId) -> int:
        try:
            return self.path(attempt, host).stat().st_size
        except FileNotFoundError:
            return 0

    def tail_offset(self, attempt: AttemptId, host: HostId, count: int) -> int:
        """Where the last `count` lines begin, reading from the end only as far as needed."""
        try:
            file = self.path(attempt, host).open("rb")
        except FileNotFoundError:
            return 0
        with file:
            end = at = file.seek(0, os.SEEK_END)
            if count <= 0:
                return end
            while at > 0:
                start = max(0, at - _BLOCK)
                file.seek(start)
                block = file.read(at - start)
                if at == end and block.endswith(b"\n"):
                    block = block[:-1]  # terminates the last line
                newlines = block.count(b"\n")
                if newlines >= count:
                    position = len(block)
                    for _ in range(count):
                        position = block.rindex(b"\n", 0, position)
                    return start + position + 1
                count, at = count - newlines, start
            return 0

    def lines(self, attempt: AttemptId, host: HostId, offset: int, *, complete: bool) -> LogLines:
        """At most one block of lines from this offset. An unterminated line is held back, unless
        the log is `complete`."""
        try:
            with self.path(attempt, host).open("rb") as file:
                file.seek(offset)
                block = file.read(_BLOCK)
        except FileNotFoundError:
            block = b""
        lines, at = [], 0
        while at < len(block):
            cut = block.find(b"\n", at)
            if (
                cut < 0
                and not (complete and len(block) < _BLOCK)
                and len(block) - at < MAX_LINE_BYTES
            ):
                break
            end = len(block) if cut < 0 else cut
            text = block[at:end].decode(errors="replace").rstrip("\r")
            at = end + (cut >= 0)
            lines.append((text, offset + at))
        return LogLines(lines=tuple(lines), end=offset + at)

    def text(self, attempt: AttemptId, host: HostId, offset: int, prefix: str) -> Iterator[bytes]:
        """The log from this offset in blocks, each line with the prefix."""
        label, in_line = prefix.encode(), False
        try:
            file = self.path(attempt, host).open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(offset)
            while block := file.read(_BLOCK):
                if label:
                    inner = block[:-1].replace(b"\n", b"\n" + label) + block[-1:]
                    block, in_line = (
                        (inner if in_line else label + inner),
                        not block.endswith(b"\n"),
                    )
                else:
                    in_line = not block.endswith(b"\n")
                yield block
        if in_line:
            yield b"\n"
