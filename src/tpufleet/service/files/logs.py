"""Logs: one file for each host of each attempt, appended by offset so that nothing is lost,
repeated or reordered."""

from __future__ import annotations

import fcntl
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tpufleet.errors import Conflict
from tpufleet.model.attempts import AttemptId
from tpufleet.model.hosts import HostId
from tpufleet.model.jobs import JobId
from tpufleet.service import identifiers

_BLOCK = 64 * 1024
MAX_LINE_BYTES = 64 * 1024  # a longer line is split
DEFAULT_LIMIT = 2**30  # bytes of all logs of a job
_RECOUNT_SHARE = 16
_MAX_COUNTED = 10_000  # jobs


class LogGap(Conflict):
    """Bytes before this chunk are missing; the client must send from `size`."""

    def __init__(self, size: int) -> None:
        super().__init__(f"the log ends at byte {size}; send from there")
        self.size = size


@dataclass(frozen=True, kw_only=True, slots=True)
class _Usage:
    """Bytes of the logs of a job."""

    counted: int
    added: int = 0  # by this server, since they were counted


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLines:
    """Whole lines of one log, each with the offset of its end."""

    lines: tuple[tuple[str, int], ...]
    end: int


class LogFiles:
    """The logs of a job, of all its hosts and attempts together, are limited in size."""

    def __init__(self, folder: Path, limit: int = DEFAULT_LIMIT) -> None:
        self._folder = folder
        self._limit = limit
        self._notice = (
            f"\n[tpufleet] the logs of this job have reached {limit} bytes, the limit of this "
            "server (log_limit); later output is not stored\n"
        ).encode()
        self._usage: OrderedDict[JobId, _Usage] = OrderedDict()
        self._usage_lock = threading.Lock()

    def path(self, attempt: AttemptId, host: HostId) -> Path:
        job, number = identifiers.parse_attempt_id(attempt)
        tpu_slice, index = identifiers.parse_host_id(host)
        return self._folder / job / str(number) / f"{tpu_slice}.{index}.log"

    def append(self, attempt: AttemptId, host: HostId, offset: int, data: bytes) -> int:
        """Returns the new size. Known bytes are skipped; a hole raises `LogGap`. At the limit the
        log ends with a notice, and everything after that is discarded as if it was stored."""
        path = self.path(attempt, host)
        job_id = identifiers.parse_attempt_id(attempt)[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # A lock of the open file, so it excludes threads as well as other servers.
            fcntl.flock(handle, fcntl.LOCK_EX)
            size = os.fstat(handle).st_size
            if self._is_closed(handle, size):
                return offset + len(data)
            if offset > size:
                raise LogGap(size)
            rest = memoryview(data)[size - offset :]
            free = self._free(job_id)
            self._count(job_id, min(free, len(rest)))
            size = _write(handle, rest[:free], size)
            if len(rest) > free:
                _write(handle, memoryview(self._notice), size)
                return offset + len(data)
            return size
        finally:
            os.close(handle)

    def _is_closed(self, handle: int, size: int) -> bool:
        start = size - len(self._notice)
        return start >= 0 and os.pread(handle, len(self._notice), start) == self._notice

    def _free(self, job_id: JobId) -> int:
        """Bytes that the job may still write. Other servers write too, so it is counted again when
        this one has written a part of the limit."""
        with self._usage_lock:
            usage = self._usage.get(job_id)
            if usage is None or usage.added >= self._limit // _RECOUNT_SHARE:
                usage = _Usage(counted=self._stored_bytes(job_id))
                self._usage[job_id] = usage
            self._usage.move_to_end(job_id)
            while len(self._usage) > _MAX_COUNTED:
                self._usage.popitem(last=False)
            return max(0, self._limit - usage.counted - usage.added)

    def _stored_bytes(self, job_id: JobId) -> int:
        return sum(file.stat().st_size for file in (self._folder / job_id).glob("*/*.log"))

    def _count(self, job_id: JobId, size: int) -> None:
        with self._usage_lock:
            if (usage := self._usage.get(job_id)) is not None:
                self._usage[job_id] = replace(usage, added=usage.added + size)

    def size(self, attempt: AttemptId, host: HostId) -> int:
        try:
            return self.path(attempt, host).stat().st_size
        except FileNotFoundError:
            return 0

    def read(self, attempt: AttemptId, host: HostId, offset: int, count: int) -> bytes:
        """At most `count` bytes; fewer only at the end of the log."""
        try:
            with self.path(attempt, host).open("rb") as file:
                file.seek(offset)
                return file.read(count)
        except FileNotFoundError:
            return b""

    def tail_offset(self, attempt: AttemptId, host: HostId, count: int) -> int:
        """Where the last `count` lines begin, reading from the end only as far as needed."""
        end = at = self.size(attempt, host)
        if count <= 0:
            return end
        while at > 0:
            start = max(0, at - _BLOCK)
            block = self.read(attempt, host, start, at - start)
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
        the log is `complete`. Of a line that is drawn again and again after a carriage return, as
        progress bars are, the newest complete drawing is a line, so that followers see it move."""
        block = self.read(attempt, host, offset, _BLOCK)
        lines, at = [], 0
        while at < len(block):
            cut = block.find(b"\n", at)
            if (
                cut < 0
                and not (complete and len(block) < _BLOCK)
                and len(block) - at < MAX_LINE_BYTES
            ):
                # The last byte may be the first half of a line end.
                cut = block.rfind(b"\r", at, len(block) - 1)
                if cut < 0 or not (text := _newest_drawing(block[at:cut])):
                    break
                at = cut + 1
                lines.append((text, offset + at))
                break
            end = len(block) if cut < 0 else cut
            text = _newest_drawing(block[at:end])
            at = end + (cut >= 0)
            lines.append((text, offset + at))
        return LogLines(lines=tuple(lines), end=offset + at)

    def text(self, attempt: AttemptId, host: HostId, offset: int, prefix: str) -> Iterator[bytes]:
        """The log from this offset in blocks, each line with the prefix."""
        label, in_line = prefix.encode(), False
        while block := self.read(attempt, host, offset, _BLOCK):
            offset += len(block)
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


def _newest_drawing(line: bytes) -> str:
    """What a terminal shows of a line with carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


def _write(handle: int, data: memoryview, at: int) -> int:
    """Returns the position after the data."""
    while data:
        written = os.pwrite(handle, data, at)
        at, data = at + written, data[written:]
    return at
