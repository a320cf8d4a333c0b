"""Following the logs of a job over its hosts and attempts, from any point, with nothing lost or
repeated."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import timedelta

from tpufleet.clocks import Clock
from tpufleet.errors import BadInput, NotFound
from tpufleet.model import topology
from tpufleet.model.api_types import LogLine
from tpufleet.model.attempts import Attempt, AttemptState, attempt_id
from tpufleet.model.hosts import HostId
from tpufleet.model.jobs import Job, JobId
from tpufleet.service import queries
from tpufleet.service.event_streams import KEEP_ALIVE, KEEP_ALIVE_SECONDS, EventHub, sse_message
from tpufleet.service.files.logs import LogFiles
from tpufleet.stores.base import Store

LOG_POLL_SECONDS = 0.25
# The last lines of a host may arrive just after the news of its end.
SETTLE_TIME = timedelta(seconds=2)
_PLACE = re.compile(r"([0-9]{1,6}):([0-9]{1,15}(?:\.[0-9]{1,15})*)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class LogPosition:
    """How far a reader is: an attempt, and an offset in the log of each of its hosts."""

    attempt: int
    offsets: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.attempt}:{'.'.join(map(str, self.offsets))}"


def parse_position(text: str | None) -> LogPosition | None:
    if text is None:
        return None
    match = _PLACE.fullmatch(text)
    if match is None:
        raise BadInput(f"{text[:80]!r} is not a place in a log; they look like 0:120.7")
    offsets = tuple(int(part) for part in (match[2] or "").split(".") if part)
    return LogPosition(attempt=int(match[1]), offsets=offsets)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSelection:
    """Which part of a job's logs somebody wants."""

    host: str | None = None  # its number in the gang; None: all
    attempt: int | None = None  # None: the newest, and those that follow
    tail: int | None = None  # only the last lines of each host

    def validate(self, job: Job) -> None:
        count = job.spec.slices * topology.find(job.spec.accelerator).hosts
        if self.host is not None and not (self.host.isdecimal() and int(self.host) < count):
            raise NotFound(
                f"job {job.id} has no host {self.host[:40]!r}; its hosts are 0 to {count - 1}"
            )

    def hosts(self, store: Store, attempt: Attempt) -> list[tuple[int, HostId]]:
        found = list(enumerate(queries.hosts_by_rank(store, attempt)))
        return [each for each in found if self.host is None or each[0] == int(self.host)]


def log_text(store: Store, files: LogFiles, job: Job, wish: LogSelection) -> Iterator[bytes]:
    """What there is now, one host after the other."""
    wish.validate(job)
    attempt = _newest(store, job, wish.attempt)
    if attempt is None:
        return iter(())
    hosts = wish.hosts(store, attempt)
    return _text(files, attempt, hosts, wish)


def _text(
    files: LogFiles, attempt: Attempt, hosts: list[tuple[int, HostId]], wish: LogSelection
) -> Iterator[bytes]:
    for process, host in hosts:
        prefix = f"[{process}] " if wish.host is None else ""
        start = 0 if wish.tail is None else files.tail_offset(attempt.id, host, wish.tail)
        yield from files.text(attempt.id, host, start, prefix)


class LogFollower:
    """Reads on, a batch at a time. Used by one stream, in one thread at a time."""

    def __init__(
        self,
        store: Store,
        files: LogFiles,
        clock: Clock,
        job_id: JobId,
        wish: LogSelection,
        place: LogPosition | None,
    ) -> None:
        self._store = store
        self._files = files
        self._clock = clock
        self._job_id = job_id
        self._wish = wish
        self._place = place
        self.ended = False

    def begin(self) -> LogPosition:
        """Where the first batch starts, so that a reader who loses us before it misses nothing."""
        if self._place is None:
            attempt = self._attempt()
            number = attempt.number if attempt is not None else self._wish.attempt or 0
            self._place = (
                self._start(attempt)[1] if attempt is not None else LogPosition(attempt=number)
            )
        return self._place

    def read(self) -> list[bytes]:
        """What came since the last time; `ended` once nothing more will."""
        attempt = self._attempt()
        if attempt is None:
            job = self._store.job(self._job_id)
            self.ended = job is None or job.ended
            return []
        hosts, place = self._start(attempt)
        whole = self._settled(attempt)
        found, offsets = [], list(place.offsets)
        for at, (process, host) in enumerate(hosts):
            for line, end in self._files.lines(attempt.id, host, offsets[at], complete=whole).lines:
                offsets[at] = end
                number = str(LogPosition(attempt=attempt.number, offsets=tuple(offsets)))
                value = LogLine(host=process, attempt=attempt.number, line=line)
                found.append(sse_message("line", value, number))
        self._place = LogPosition(attempt=attempt.number, offsets=tuple(offsets))
        if whole and not found:
            self._move_on(attempt)
        return found

    def _attempt(self) -> Attempt | None:
        if self._place is not None:
            return self._store.attempt(attempt_id(self._job_id, self._place.attempt))
        if self._wish.attempt is not None:
            return self._store.attempt(attempt_id(self._job_id, self._wish.attempt))
        return self._store.newest_attempts([self._job_id]).get(self._job_id)

    def _start(self, attempt: Attempt) -> tuple[list[tuple[int, HostId]], LogPosition]:
        hosts = self._wish.hosts(self._store, attempt)
        if self._place is not None and len(self._place.offsets) == len(hosts):
            return hosts, self._place
        tail = self._wish.tail if self._place is None else None
        offsets = tuple(
            0 if tail is None else self._files.tail_offset(attempt.id, host, tail)
            for _, host in hosts
        )
        return hosts, LogPosition(attempt=attempt.number, offsets=offsets)

    def _settled(self, attempt: Attempt) -> bool:
        if attempt.state is not AttemptState.ENDED:
            return False
        return attempt.ended_at is None or self._clock.now() - attempt.ended_at >= SETTLE_TIME

    def _move_on(self, attempt: Attempt) -> None:
        if self._wish.attempt is not None:
            self.ended = True
            return
        # The job is read first: one that has ended gets no further attempt.
        job = self._store.job(self._job_id)
        if self._store.attempt(attempt_id(self._job_id, attempt.number + 1)) is not None:
            self._place = LogPosition(attempt=attempt.number + 1)
        else:
            self.ended = job is None or job.ended


async def stream_lines(hub: EventHub, follower: LogFollower) -> AsyncIterator[bytes]:
    place = await asyncio.to_thread(follower.begin)
    yield f"retry: 1000\nid: {place}\n: hello\n\n".encode()
    quiet = 0.0
    while not hub.closed.is_set():
        found = await asyncio.to_thread(follower.read)
        if found:
            yield b"".join(found)
            quiet = 0.0
            continue
        if follower.ended:
            yield sse_message("end", {})
            return
        await hub.pause(LOG_POLL_SECONDS)
        quiet += LOG_POLL_SECONDS
        if quiet >= KEEP_ALIVE_SECONDS:
            yield KEEP_ALIVE
            quiet = 0.0


def _newest(store: Store, job: Job, number: int | None) -> Attempt | None:
    if number is None:
        return store.newest_attempts([job.id]).get(job.id)
    attempt = store.attempt(attempt_id(job.id, number))
    if attempt is None:
        raise NotFound(f"job {job.id} has no attempt {number}; `tpu show {job.id}` lists them")
    return attempt
