"""Logs that any of several servers can append to and read. The newest part of each log is in the
store; older parts are moved to the bucket, merged into segments."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol

from tpufleet.clocks import Clock
from tpufleet.errors import NotFound, Unreachable
from tpufleet.model import identifiers
from tpufleet.model.fleet.hosts import HostId
from tpufleet.model.job.attempts import AttemptId
from tpufleet.model.job.jobs import JobId
from tpufleet.service.files.bucket_files import Archive
from tpufleet.service.files.logs import DEFAULT_LIMIT, LogFiles, LogGap
from tpufleet.service.operations.background import log_failure
from tpufleet.service.transport.limits import BoundedDict
from tpufleet.stores.base import Store, StoredObject

logger = logging.getLogger(__name__)

COMPACT_SECONDS = 15.0
SEGMENT_BYTES = 2**20
MAX_CHUNKS = 1_000  # of one log in the store
# A chunk younger than this is not moved. An append finds the end of the log and writes there within
# seconds, so what it found is never moved in between.
MIN_AGE = timedelta(minutes=1)
IDLE_AFTER = timedelta(minutes=10)
_CACHED_SEGMENTS = 32
_REMEMBERED_ENDS = 10_000
_APPEND_ATTEMPTS = 10
_LAST = "~"  # after every digit


class SegmentArchive(Archive, Protocol):
    def read(self, name: str) -> bytes: ...
    def write(self, name: str, data: bytes) -> None: ...


class SharedLogs(LogFiles):
    """Chunk: an object in the store, named by its offset. A new one is created at the end of the
    log, so of two servers that append at once only one succeeds. The last chunk of a log always
    stays in the store, so its end is known without the bucket."""

    def __init__(
        self,
        store: Store,
        archive: SegmentArchive,
        clock: Clock,
        limit: int = DEFAULT_LIMIT,
    ) -> None:
        super().__init__(Path("unused"), limit)
        self._store = store
        self._archive = archive
        self._clock = clock
        self._lock = threading.Lock()
        self._growing: set[str] = set()  # logs with chunks that may be moved
        self._segments: dict[str, list[tuple[int, int]]] = {}
        self._cache = BoundedDict[str, bytes](_CACHED_SEGMENTS)
        self._ends = BoundedDict[str, int](_REMEMBERED_ENDS)  # as readers saw them last

    def append(self, attempt: AttemptId, host: HostId, offset: int, data: bytes) -> int:
        log = _log_name(attempt, host)
        job_id = identifiers.parse_attempt_id(attempt)[0]
        for _ in range(_APPEND_ATTEMPTS):
            last = self._last(log)
            end = _end(last) if last is not None else 0
            if last is not None and self._is_notice(last):
                return offset + len(data)
            if offset > end:
                raise LogGap(end)
            rest = data[end - offset :]
            if not rest:
                return end
            free = self._free(job_id)
            if len(rest) > free and self._drop_oldest(job_id, len(rest) - free):
                free = self._free(job_id)
            kept = rest[:free]
            if kept and not self._create(log, end, kept):
                continue  # another server has appended
            self._count(job_id, len(kept))
            if len(rest) > free:
                self._create(log, end + len(kept), self._notice)
                return offset + len(data)
            return end + len(kept)
        raise Unreachable(f"the log of {host} is being written by several servers; retry")

    def size(self, attempt: AttemptId, host: HostId) -> int:
        last = self._last(_log_name(attempt, host))
        return _end(last) if last is not None else 0

    def read(self, attempt: AttemptId, host: HostId, offset: int, count: int) -> bytes:
        log = _log_name(attempt, host)
        parts: list[bytes] = []
        while count > 0:
            # One query when there is nothing new, as followers ask often.
            chunks = self._store.objects(f"{log}/", since=_chunk_name(log, offset))
            if not chunks:
                break
            self._remember_end(log, _end(chunks[-1]))
            if offset >= _end(chunks[-1]):
                break
            part = self._read_part(log, chunks, offset, count)
            if not part:
                break  # deleted at the limit
            parts.append(part)
            offset, count = offset + len(part), count - len(part)
        return b"".join(parts)

    def next_stored(self, attempt: AttemptId, host: HostId, offset: int) -> int:
        log = _log_name(attempt, host)
        if offset == self._ends.get(log):
            return offset
        chunks = self._store.objects(f"{log}/", since=_chunk_name(log, offset))
        if not chunks or offset >= min(_start(chunks[0]), _end(chunks[-1])):
            return offset
        later = [start for start, end in self._list_segments(log) if end > offset]
        return max(offset, min([*later, _start(chunks[0])]))

    def stored_from(self, attempt: AttemptId, host: HostId, end: int) -> int:
        log = _log_name(attempt, host)
        chunks = self._store.objects(f"{log}/") if end else []
        if not chunks or end > _start(chunks[0]):
            return min(end, _start(chunks[0])) if chunks else end
        found = _covering(self._list_segments(log), end - 1)
        return end if found is None else found[0]

    def compact(self) -> int:
        """Move what is old from the store to the bucket; return how many segments were written."""
        with self._lock:
            logs = sorted(self._growing)
        count = 0
        for log in logs:
            chunks = self._store.objects(f"{log}/")
            now = self._clock.now()
            idle = bool(chunks) and now - chunks[-1].at >= IDLE_AFTER
            for group in _movable(chunks, now, idle):
                self._move(log, group)
                count += 1
            if idle or not chunks:
                with self._lock:
                    self._growing.discard(log)
        return count

    def compact_until(self, stopping: threading.Event) -> None:
        """In a loop until `stopping` is set. Runs in its own thread."""
        started = False
        while not stopping.wait(COMPACT_SECONDS):
            try:
                if not started:
                    self._find_growing()
                    started = True
                self.compact()
            except Exception as error:
                log_failure(logger, "upload logs to the bucket", error)

    def _find_growing(self) -> None:
        """What a server that was lost has left."""
        chunks = Counter(each.name.rpartition("/")[0] for each in self._store.objects("logs/"))
        with self._lock:
            self._growing |= {log for log, count in chunks.items() if count > 1}

    def _create(self, log: str, offset: int, data: bytes) -> bool:
        with self._lock:
            self._growing.add(log)
        return self._store.put_object(_chunk_name(log, offset), data, self._clock.now())

    def _remember_end(self, log: str, end: int) -> None:
        with self._lock:
            self._ends[log] = end

    def _last(self, log: str) -> StoredObject | None:
        chunks = self._store.objects(f"{log}/", since=f"{log}/{_LAST}")
        return chunks[-1] if chunks else None

    def _is_notice(self, chunk: StoredObject) -> bool:
        if chunk.size != len(self._notice):
            return False
        return self._store.read_objects([chunk.name]).get(chunk.name) == self._notice

    def _stored_bytes(self, job_id: JobId) -> int:
        prefix = f"logs/{job_id}/"
        in_store = sum(each.size for each in self._store.objects(prefix))
        return in_store + sum(each.size for each in self._archive.names(prefix).values())

    def _drop(self, job_id: JobId, size: int) -> int:
        """Of what is in the bucket. The beginning of each log is the last to go."""
        listed = self._archive.names(f"logs/{job_id}/")
        segments = [name for name in listed if "-" in name.rpartition("/")[2]]
        dropped: list[str] = []
        total = 0
        for name in sorted(segments, key=_by_age):
            if total >= size:
                break
            dropped.append(name)
            total += listed[name].size
        if dropped:
            self._archive.delete(dropped)
        return total

    def _read_part(
        self, log: str, chunks: Sequence[StoredObject], offset: int, count: int
    ) -> bytes:
        if _start(chunks[0]) > offset:
            return self._read_segment(log, offset)[:count]
        needed = [each for each in chunks if _start(each) < offset + count]
        content = self._store.read_objects([each.name for each in needed])
        data = b""
        for each in needed:
            if each.name not in content:
                break  # moved meanwhile
            data += content[each.name]
        if not data:
            return self._read_segment(log, offset)[:count]
        skipped = offset - _start(needed[0])
        return data[skipped : skipped + count]

    def _read_segment(self, log: str, offset: int) -> bytes:
        """From this offset to the end of a segment; nothing if it was deleted."""
        found = _covering(self._segments.get(log, ()), offset)
        if found is None:
            found = _covering(self._list_segments(log), offset)
        if found is None:
            return b""
        name = _segment_name(log, *found)
        with self._lock:
            data = self._cache.get(name)
        if data is None:
            try:
                data = self._archive.read(name)
            except NotFound:  # by another server, at the limit
                self._segments.pop(log, None)
                return b""
            with self._lock:
                self._cache[name] = data
        return data[offset - found[0] :]

    def _list_segments(self, log: str) -> list[tuple[int, int]]:
        names = self._archive.names(f"{log}/")
        spans = self._segments[log] = sorted(_span(name) for name in names)
        return spans

    def _move(self, log: str, chunks: Sequence[StoredObject]) -> None:
        names = [each.name for each in chunks]
        content = self._store.read_objects(names)
        if len(content) < len(names):
            return  # another server has moved them
        # Named by its range: servers that move the same chunks write the same object.
        name = _segment_name(log, _start(chunks[0]), _end(chunks[-1]))
        self._archive.write(name, b"".join(content[each] for each in names))
        self._store.delete_objects(names)


def _movable(chunks: Sequence[StoredObject], now: datetime, idle: bool) -> list[list[StoredObject]]:
    """Groups of chunks, each of which becomes a segment."""
    old = [each for each in chunks[:-1] if now - each.at >= MIN_AGE]
    groups: list[list[StoredObject]] = []
    while old:
        size, count = 0, 0
        while count < len(old) and size < SEGMENT_BYTES and count < MAX_CHUNKS:
            size, count = size + old[count].size, count + 1
        if size < SEGMENT_BYTES and count < MAX_CHUNKS and not idle:
            break
        groups.append(old[:count])
        old = old[count:]
    return groups


def _log_name(attempt: AttemptId, host: HostId) -> str:
    job, number = identifiers.parse_attempt_id(attempt)
    tpu_slice, index = identifiers.parse_host_id(host)
    return f"logs/{job}/{number}/{tpu_slice}.{index}.log"


def _chunk_name(log: str, offset: int) -> str:
    return f"{log}/{offset:015d}"


def _segment_name(log: str, start: int, end: int) -> str:
    return f"{log}/{start:015d}-{end:015d}"


def _span(segment: str) -> tuple[int, int]:
    start, _, end = segment.rpartition("/")[2].partition("-")
    return int(start), int(end)


def _by_age(segment: str) -> tuple[bool, int, int]:
    """First the inner segments, of earlier attempts before those of later ones."""
    start, _ = _span(segment)
    return start == 0, int(segment.split("/")[2]), start


def _start(chunk: StoredObject) -> int:
    return int(chunk.name.rpartition("/")[2])


def _end(chunk: StoredObject) -> int:
    return _start(chunk) + chunk.size


def _covering(spans: Sequence[tuple[int, int]], offset: int) -> tuple[int, int] | None:
    return next((span for span in spans if span[0] <= offset < span[1]), None)
