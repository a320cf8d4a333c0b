"""Reading and following the logs of a job across hosts and attempts, from any position, without
loss or repetition."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from datetime import timedelta

from tpufleet.clocks import Clock
from tpufleet.errors import NotFound, invalid, no_such_host, not_found
from tpufleet.model.api_types import LogLine
from tpufleet.model.fleet.hosts import HostId
from tpufleet.model.job.attempts import Attempt, AttemptState, attempt_id
from tpufleet.model.job.jobs import Job, JobId
from tpufleet.model.tpu import type_lookup
from tpufleet.service.files.logs import LogFiles
from tpufleet.service.jobs import queries
from tpufleet.service.transport.event_streams import (
    KEEP_ALIVE,
    KEEP_ALIVE_SECONDS,
    EventHub,
    sse_message,
)
from tpufleet.stores.base import Store

LOG_POLL_SECONDS = 0.25
# The last lines of a host may arrive shortly after the attempt has ended.
SETTLE_TIME = timedelta(seconds=2)
_POSITION = re.compile(r"([0-9]{1,6}):([0-9]{1,15}(?:\.[0-9]{1,15})*)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class LogPosition:
    """Position of a reader: an attempt, and an offset in the log of each of its hosts."""

    attempt: int
    offsets: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.attempt}:{'.'.join(map(str, self.offsets))}"


def parse_position(text: str | None) -> LogPosition | None:
    if text is None:
        return None
    match = _POSITION.fullmatch(text)
    if match is None:
        raise invalid(text, "a position of a log", "0:120.7")
    offsets = tuple(int(part) for part in (match[2] or "").split(".") if part)
    return LogPosition(attempt=int(match[1]), offsets=offsets)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSelection:
    """Which part of a job's logs to read."""

    host: str | None = None  # its rank in the gang; None: all
    attempt: int | None = None  # None: the newest, and later ones
    tail: int | None = None  # only the last lines of each host

    def validate(self, job: Job) -> None:
        count = job.spec.max_slices * type_lookup.find(job.spec.accelerator).hosts
        if self.host is None:
            return
        number = re.fullmatch(r"[0-9]{1,9}", self.host)
        if number is None or int(self.host) >= count:
            raise NotFound(str(no_such_host(f"job {job.id}", count, self.host[:40])))

    def hosts(self, store: Store, attempt: Attempt) -> list[tuple[int, HostId]]:
        ranked = list(enumerate(queries.hosts_by_rank(store, attempt)))
        return [each for each in ranked if self.host is None or each[0] == int(self.host)]


def log_text(store: Store, files: LogFiles, job: Job, selection: LogSelection) -> Iterator[bytes]:
    """The current content, one host after the other."""
    selection.validate(job)
    attempt = _newest(store, job, selection.attempt)
    if attempt is None:
        return iter(())
    hosts = selection.hosts(store, attempt)
    return _text(files, attempt, hosts, selection)


def _text(
    files: LogFiles, attempt: Attempt, hosts: list[tuple[int, HostId]], selection: LogSelection
) -> Iterator[bytes]:
    for rank, host in hosts:
        prefix = f"[{rank}] " if selection.host is None else ""
        start = 0 if selection.tail is None else files.tail_offset(attempt.id, host, selection.tail)
        yield from files.text(attempt.id, host, start, prefix)


@dataclass(slots=True)
class LogFollower:
    """Reads one batch at a time. Used by one stream, in one thread at a time."""

    store: Store
    files: LogFiles
    clock: Clock
    job_id: JobId
    selection: LogSelection
    position: LogPosition | None
    ended: bool = False

    def begin(self) -> LogPosition:
        """The position of the first batch, so that a client that is disconnected before it misses
        nothing."""
        if self.position is None:
            attempt = self._attempt()
            number = attempt.number if attempt is not None else self.selection.attempt or 0
            self.position = (
                self._start(attempt)[1] if attempt is not None else LogPosition(attempt=number)
            )
        return self.position

    def read(self) -> list[bytes]:
        """Lines since the last call. Sets `ended` when there will be no more."""
        attempt = self._attempt()
        if attempt is None:
            job = self.store.job(self.job_id)
            self.ended = job is None or job.ended
            return []
        hosts, position = self._start(attempt)
        complete = self._settled(attempt)
        batch, offsets = [], list(position.offsets)
        for at, (rank, host) in enumerate(hosts):
            for line, end in self.files.lines(
                attempt.id, host, offsets[at], complete=complete
            ).lines:
                offsets[at] = end
                number = str(LogPosition(attempt=attempt.number, offsets=tuple(offsets)))
                value = LogLine(host=rank, attempt=attempt.number, line=line)
                batch.append(sse_message("line", value, number))
        self.position = LogPosition(attempt=attempt.number, offsets=tuple(offsets))
        if complete and not batch:
            self._next_attempt(attempt)
        return batch

    def _attempt(self) -> Attempt | None:
        if self.position is not None:
            return self.store.attempt(attempt_id(self.job_id, self.position.attempt))
        if self.selection.attempt is not None:
            return self.store.attempt(attempt_id(self.job_id, self.selection.attempt))
        return self.store.newest_attempts([self.job_id]).get(self.job_id)

    def _start(self, attempt: Attempt) -> tuple[list[tuple[int, HostId]], LogPosition]:
        hosts = self.selection.hosts(self.store, attempt)
        if self.position is not None and len(self.position.offsets) == len(hosts):
            return hosts, self.position
        tail = self.selection.tail if self.position is None else None
        offsets = tuple(
            0 if tail is None else self.files.tail_offset(attempt.id, host, tail)
            for _, host in hosts
        )
        return hosts, LogPosition(attempt=attempt.number, offsets=offsets)

    def _settled(self, attempt: Attempt) -> bool:
        if attempt.state is not AttemptState.ENDED:
            return False
        return attempt.ended_at is None or self.clock.now() - attempt.ended_at >= SETTLE_TIME

    def _next_attempt(self, attempt: Attempt) -> None:
        if self.selection.attempt is not None:
            self.ended = True
            return
        # Read the job first: after it has ended there are no further attempts.
        job = self.store.job(self.job_id)
        if self.store.attempt(attempt_id(self.job_id, attempt.number + 1)) is not None:
            self.position = LogPosition(attempt=attempt.number + 1)
        else:
            self.ended = job is None or job.ended


async def stream_lines(hub: EventHub, follower: LogFollower) -> AsyncGenerator[bytes]:
    position = await asyncio.to_thread(follower.begin)
    yield f"retry: 1000\nid: {position}\n: connected\n\n".encode()
    idle_seconds = 0.0
    while not hub.closed.is_set():
        batch = await asyncio.to_thread(follower.read)
        if batch:
            yield b"".join(batch)
            idle_seconds = 0.0
            continue
        if follower.ended:
            yield sse_message("end", {})
            return
        await hub.pause(LOG_POLL_SECONDS)
        idle_seconds += LOG_POLL_SECONDS
        if idle_seconds >= KEEP_ALIVE_SECONDS:
            yield KEEP_ALIVE
            idle_seconds = 0.0


def _newest(store: Store, job: Job, number: int | None) -> Attempt | None:
    if number is None:
        return store.newest_attempts([job.id]).get(job.id)
    attempt = store.attempt(attempt_id(job.id, number))
    if attempt is None:
        raise not_found("attempt", number, f"show {job.id}")
    return attempt
