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
MAX_LINE_BYTES = 64 * 1024  # a longer one is told in pieces


class LogGap(Conflict):
    """Bytes before this chunk are missing. Send again from `size`."""

    def __init__(self, size: int) -> None:
        super().__init__(f"the log ends at byte {size}; send again from there")
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
        """The size afterwards. What is already there is skipped; a hole is a Gap."""
        path = self.path(attempt, host)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Held by the open file, so it orders threads as well as servers.
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
                    block = block[:-1]  # ends the last line rather than beginning another
                found = block.count(b"\n")
                if found >= count:
                    place = len(block)
                    for _ in range(count):
                        place = block.rindex(b"\n", 0, place)
                    return start + place + 1
                count, at = count - found, start
            return 0

    def lines(self, attempt: AttemptId, host: HostId, offset: int, *, complete: bool) -> LogLines:
        """Up to a block of lines from here. A line without its end waits, unless the log is
        `whole`: nothing more will come."""
        try:
            with self.path(attempt, host).open("rb") as file:
                file.seek(offset)
                block = file.read(_BLOCK)
        except FileNotFoundError:
            block = b""
        found, at = [], 0
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
            found.append((text, offset + at))
        return LogLines(lines=tuple(found), end=offset + at)

    def text(self, attempt: AttemptId, host: HostId, offset: int, prefix: str) -> Iterator[bytes]:
        """The log from here, each line after the prefix, in blocks."""
        label, begun = prefix.encode(), False
        try:
            file = self.path(attempt, host).open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(offset)
            while block := file.read(_BLOCK):
                if label:
                    inner = block[:-1].replace(b"\n", b"\n" + label) + block[-1:]
                    block, begun = (inner if begun else label + inner), not block.endswith(b"\n")
                else:
                    begun = not block.endswith(b"\n")
                yield block
        if begun:
            yield b"\n"
