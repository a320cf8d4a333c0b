"""Logs: one for each host of each attempt, appended by offset so that nothing is lost, repeated or
reordered. At the limit of a job the oldest output is deleted."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tpufleet.errors import Conflict
from tpufleet.model import identifiers
from tpufleet.model.fleet.hosts import HostId
from tpufleet.model.job.attempts import AttemptId
from tpufleet.model.job.jobs import JobId
from tpufleet.service.files import log_segments
from tpufleet.service.files.log_segments import SegmentedLog
from tpufleet.service.transport.limits import BoundedDict

_BLOCK = 64 * 1024
MAX_LINE_BYTES = 64 * 1024  # a longer line is split
DEFAULT_LIMIT = 2**30  # bytes of all logs of a job
_RECOUNT_SHARE = 16
_DROPPED_SHARE = 16  # of the limit, at a time
_SEGMENT_BYTES, _MIN_SEGMENTS = 2**20, 64  # of a log at the limit
_MAX_COUNTED = 10_000  # jobs
_MAX_LISTED = 10_000  # logs


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
        # For a job with so many hosts that there is nothing to delete but the ends of their logs.
        self._notice = (
            f"\n[tpufleet] the logs of this job have reached {limit} bytes, the limit of this "
            "server (log_limit); later output is not stored\n"
        ).encode()
        self._segment_bytes = max(1, min(_SEGMENT_BYTES, limit // _MIN_SEGMENTS))
        self._usage = BoundedDict[JobId, _Usage](_MAX_COUNTED)
        self._usage_lock = threading.Lock()
        self._opened = BoundedDict[Path, SegmentedLog](_MAX_LISTED)
        self._opened_lock = threading.Lock()

    def path(self, attempt: AttemptId, host: HostId) -> Path:
        job, number = identifiers.parse_attempt_id(attempt)
        tpu_slice, index = identifiers.parse_host_id(host)
        return self._folder / job / str(number) / f"{tpu_slice}.{index}.log"

    def append(self, attempt: AttemptId, host: HostId, offset: int, data: bytes) -> int:
        """Returns the new size. Known bytes are skipped; a hole raises `LogGap`. At the limit the
        oldest output of the job is deleted. If there is none, the log ends with a notice, and
        everything after that is discarded as if it was stored."""
        path = self.path(attempt, host)
        job_id = identifiers.parse_attempt_id(attempt)[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # A lock of the open file, so it excludes threads as well as other servers.
            fcntl.flock(lock, fcntl.LOCK_EX)
            log = SegmentedLog(path)
            last = log.last()
            if self._is_closed(log, last.end):
                return offset + len(data)
            if offset > last.end:
                raise LogGap(last.end)
            rest = memoryview(data)[last.end - offset :]
            free = self._free(job_id)
            if len(rest) > free and self._drop_oldest(job_id, len(rest) - free):
                free = self._free(job_id)
            self._count(job_id, min(free, len(rest)))
            start = last.start if last.size < self._segment_bytes else last.end
            handle = os.open(log.path_from(start), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                size = _write(handle, rest[:free], last.end - start)
                if len(rest) > free:
                    _write(handle, memoryview(self._notice), size)
                    return offset + len(data)
                return start + size
            finally:
                os.close(handle)
        finally:
            os.close(lock)

    def _is_closed(self, log: SegmentedLog, size: int) -> bool:
        start = size - len(self._notice)
        return start >= 0 and log.read(start, len(self._notice)) == self._notice

    def _drop_oldest(self, job_id: JobId, needed: int) -> int:
        """Returns how many bytes of the job were deleted."""
        with self._usage_lock:
            self._usage.pop(job_id, None)  # it is counted again
            return self._drop(job_id, max(needed, self._limit // _DROPPED_SHARE))

    def _drop(self, job_id: JobId, size: int) -> int:
        return log_segments.drop_oldest(self._folder / job_id, size)

    def _free(self, job_id: JobId) -> int:
        """Bytes that the job may still write. Other servers write too, so it is counted again when
        this one has written a part of the limit."""
        with self._usage_lock:
            usage = self._usage.get(job_id)
            if usage is None or usage.added >= self._limit // _RECOUNT_SHARE:
                usage = _Usage(counted=self._stored_bytes(job_id))
            self._usage[job_id] = usage
            return max(0, self._limit - usage.counted - usage.added)

    def _stored_bytes(self, job_id: JobId) -> int:
        logs = log_segments.logs_below(self._folder / job_id)
        return sum(segment.size for log in logs for segment in log.segments())

    def _count(self, job_id: JobId, size: int) -> None:
        with self._usage_lock:
            if (usage := self._usage.get(job_id)) is not None:
                self._usage[job_id] = replace(usage, added=usage.added + size)

    def size(self, attempt: AttemptId, host: HostId) -> int:
        """Where it ends, whether or not all of it is still stored."""
        return self._log(attempt, host).last().end

    def read(self, attempt: AttemptId, host: HostId, offset: int, count: int) -> bytes:
        """At most `count` bytes; fewer only at the end of the log, or before a part that was
        deleted."""
        return self._log(attempt, host).read(offset, count)

    def next_stored(self, attempt: AttemptId, host: HostId, offset: int) -> int:
        """The first offset from this one on that is stored; this one at the end of the log."""
        return self._log(attempt, host).next_stored(offset)

    def stored_from(self, attempt: AttemptId, host: HostId, end: int) -> int:
        """Where a stored part that ends there begins; `end` if what is before it was deleted."""
        segment = self._log(attempt, host).covering(end - 1) if end else None
        return end if segment is None else segment.start

    def _log(self, attempt: AttemptId, host: HostId) -> SegmentedLog:
        """It remembers which segments there are, for readers."""
        path = self.path(attempt, host)
        with self._opened_lock:
            log = self._opened[path] = self._opened.get(path) or SegmentedLog(path)
        return log

    def _deletion_notice(self, size: int) -> str:
        return (
            f"[tpufleet] {size} bytes of output were deleted here: the logs of this job have "
            f"reached {self._limit} bytes, the limit of this server (log_limit)"
        )

    def tail_offset(self, attempt: AttemptId, host: HostId, count: int) -> int:
        """Where the last `count` lines begin, reading from the end only as far as needed."""
        end = at = self.size(attempt, host)
        if count <= 0:
            return end
        while at > 0:
            start = max(self.stored_from(attempt, host, at), at - _BLOCK)
            if start == at:
                break  # what is before it was deleted
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
        return at

    def lines(self, attempt: AttemptId, host: HostId, offset: int, *, complete: bool) -> LogLines:
        """At most one block of lines from this offset. An unterminated line is held back, unless
        the log is `complete`. Of a line that is drawn again and again after a carriage return, as
        progress bars are, the newest complete drawing is a line, so that followers see it move."""
        block = self.read(attempt, host, offset, _BLOCK)
        stored = offset + len(block)
        if len(block) < _BLOCK and (after := self.next_stored(attempt, host, stored)) > stored:
            if not block:
                notice = self._deletion_notice(after - offset)
                return LogLines(lines=((notice, after),), end=after)
            complete = True  # the rest of its last line was deleted
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
        while True:
            block = self.read(attempt, host, offset, _BLOCK)
            offset += len(block)
            if not block:
                after = self.next_stored(attempt, host, offset)
                if after == offset:
                    break
                start = b"\n" if in_line else b""
                block = self._deletion_notice(after - offset).encode() + b"\n"
                yield start + label + block
                offset, in_line = after, False
                continue
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
