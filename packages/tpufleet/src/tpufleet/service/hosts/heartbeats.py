"""Heartbeats: each brings the state of a host and gets its assignment back.

A change goes to the controller's inbox; everything else only refreshes the host's liveness.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from tpufleet.model import identifiers
from tpufleet.model.fleet.agent_protocol import Assignment, Heartbeat, HeartbeatReply
from tpufleet.model.fleet.hosts import (
    MAX_HEARTBEAT_POINTS,
    Host,
    HostId,
    HostLiveness,
    Phase,
    ProgressPoint,
)
from tpufleet.model.fleet.server_status import SERVERS_PREFIX
from tpufleet.model.fleet.slices import SliceId, SliceState, TpuSlice
from tpufleet.model.inbox import InboxMessage, InboxMessageKind
from tpufleet.model.job.attempts import Attempt
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import JobId
from tpufleet.model.values.records import replace
from tpufleet.policy.recovery import liveness
from tpufleet.service.hosts.assignments import Assignments
from tpufleet.service.jobs.metric_series import MetricRecorder
from tpufleet.service.lookups import require_host_index
from tpufleet.service.operations.background import log_failure
from tpufleet.service.transport.limits import HEARTBEATS, BoundedDict
from tpufleet.stores.base import ChangeSet, Store

logger = logging.getLogger(__name__)


_RESEND_AFTER = timedelta(seconds=10)  # a change that the controller has not applied is sent again
# Longer than any heartbeat interval: otherwise hosts would be missed, and be asked to report more
# often. Rows of hosts that are gone are deleted.
_COUNT_WINDOW = liveness.AGENT_LEASE
# In a large fleet, how long heartbeats wait for others that are read with them: a thread and three
# queries cost more than what they read.
_GATHER_SECONDS = 0.02
# How often hosts are counted: more often than they report, since all rows are read.
_COUNT_INTERVAL = timedelta(seconds=5)
_COUNTS_PER_INTERVAL = 10
# In a small fleet. In a large one waiting hosts report no more often than the others.
_WAITING_INTERVAL = timedelta(seconds=0.2)
# The same of hosts of a gang: one hears with its heartbeat that another has failed. A fifth of what
# the server can handle.
_GANG_INTERVAL, _GANG_SHARE = timedelta(seconds=0.3), 5
_MAX_REMEMBERED = 100_000
_MAX_PROGRESS_AGE = timedelta(days=365)


@dataclass(frozen=True, slots=True)
class _SentChange:
    """A change that is in the inbox and not yet in the host's row."""

    facts: tuple[object, ...]
    at: datetime


@dataclass(frozen=True, slots=True)
class _HostState:
    """What the store holds about the host of a heartbeat."""

    tpu_slice: TpuSlice | None
    host: Host | None = None
    assignment: Assignment | None = None


@dataclass(frozen=True, slots=True)
class _Lookup:
    host_id: HostId
    slice_id: SliceId
    result: asyncio.Future[_HostState]


@dataclass(frozen=True, slots=True)
class _Rows:
    """What the store holds about the hosts of many heartbeats."""

    slices: Mapping[SliceId, TpuSlice]
    hosts: Mapping[HostId, Host]
    attempts: Mapping[JobId, Attempt]  # live ones

    @classmethod
    def read(cls, store: Store, batch: Sequence[_Lookup]) -> _Rows:
        slices = store.find_slices(list(dict.fromkeys(lookup.slice_id for lookup in batch)))
        hosts = store.find_hosts(list(dict.fromkeys(lookup.host_id for lookup in batch)))
        jobs = dict.fromkeys(each.job_id for each in slices.values() if each.job_id is not None)
        return cls(slices, hosts, store.live_attempts(list(jobs)) if jobs else {})


class Heartbeats:
    """State lives in the event loop's thread. The store is only called from worker threads, by one
    reading and one writing task, each for all heartbeats that came in meanwhile."""

    def __init__(
        self,
        store: Store,
        assignments: Assignments,
        wake: Callable[[], None],
        min_interval: timedelta = timedelta(seconds=1),
    ) -> None:
        self._store = store
        self._metrics = MetricRecorder(store)
        self._assignments = assignments
        self._wake = wake
        self._min_interval = min_interval
        self._liveness: dict[HostId, HostLiveness] = {}
        self._sent = BoundedDict[HostId, _SentChange](_MAX_REMEMBERED)
        self._lookups: list[_Lookup] = []
        self._reading: asyncio.Task[None] | None = None
        self._changes: list[tuple[InboxMessage, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._interval = min_interval
        self._waiting_interval = min_interval  # of hosts that wait for an attempt
        self._gang_interval = min_interval
        self._counted_at: datetime | None = None
        self._counting: asyncio.Task[None] | None = None  # kept, so that it is not collected

    async def receive(
        self, heartbeat: Heartbeat, slice_id: SliceId, now: datetime
    ) -> HeartbeatReply:
        """The caller has been authenticated as an agent of this slice."""
        times_sent = [point.at for point in heartbeat.points]
        heartbeat, points = on_server_clock(heartbeat, now)
        await self._update_interval(now)
        state = await self._look_up(heartbeat.host_id, slice_id)
        tpu_slice, host, assignment = state.tpu_slice, state.host, state.assignment
        if tpu_slice is None or tpu_slice.state is SliceState.GONE:
            return self._reply(None, release=True)
        check_host_exists(heartbeat.host_id, tpu_slice)
        self._record_heartbeats(heartbeat, now)
        if self._is_change(heartbeat, host, now):
            await self._send_change(
                InboxMessage(
                    kind=InboxMessageKind.HEARTBEAT, at=now, slice_id=slice_id, heartbeat=heartbeat
                )
            )
        releasing = tpu_slice.state is SliceState.RELEASING
        reports = assignment is not None and heartbeat.attempt_id == assignment.attempt_id
        if releasing and not reports:
            assignment = None  # nothing is started there
        if assignment is not None and reports and assignment.process_id == 0:
            new_points = self._metrics.new_points(assignment, points, times_sent)
            self._metrics.report(assignment.job_id, heartbeat.progress, now, new_points)
        if assignment is not None and _agent_restarted(heartbeat, host, assignment):
            assignment = replace(assignment, stop=EndReason.HOST_LOST)
        if assignment is not None and not reports:
            assignment = self._assignments.with_token(assignment)
        elif assignment is not None and assignment.secrets:
            assignment = replace(assignment, secrets={})  # this agent already has them
        waits = heartbeat.phase is Phase.EXITED or (
            assignment is None and tpu_slice.job_id is not None
        )
        return self._reply(assignment, release=releasing, waits=waits)

    async def flush(self) -> None:
        """Write the liveness and the metrics gathered since the last flush."""
        if self._liveness:
            gathered, self._liveness = self._liveness, {}
            try:
                await HEARTBEATS.run(self._store.record_heartbeats, list(gathered.values()))
            except Exception:
                self._liveness = gathered | self._liveness  # what came in meanwhile is newer
                raise
        if self._metrics.pending:
            await HEARTBEATS.run(self._metrics.flush)

    async def flush_forever(self, every: float = 1.0) -> None:
        while True:
            await asyncio.sleep(every)
            try:
                await self.flush()
            except Exception as error:
                log_failure(logger, "record host liveness", error)

    # Reading.

    async def _look_up(self, host_id: HostId, slice_id: SliceId) -> _HostState:
        """Together with the other heartbeats that wait: one worker thread for all of them."""
        result: asyncio.Future[_HostState] = asyncio.get_running_loop().create_future()
        self._lookups.append(_Lookup(host_id, slice_id, result))
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_all())
        return await result

    async def _read_all(self) -> None:
        while self._lookups:
            if self._interval > self._min_interval:
                await asyncio.sleep(_GATHER_SECONDS)
            batch, self._lookups = self._lookups, []
            results: Sequence[_HostState | Exception]
            try:
                results = await HEARTBEATS.run(self._read, batch)
            except Exception as error:  # no thread to be had: the server is shutting down
                results = [error] * len(batch)
            for lookup, result in zip(batch, results, strict=True):
                if lookup.result.done():
                    continue  # its client disconnected
                if isinstance(result, Exception):
                    lookup.result.set_exception(result)
                else:
                    lookup.result.set_result(result)

    def _read(self, batch: Sequence[_Lookup]) -> list[_HostState | Exception]:
        """One query per table for all of them."""
        rows = _Rows.read(self._store, batch)
        results: list[_HostState | Exception] = []
        for lookup in batch:
            try:
                results.append(self._host_state(lookup, rows))
            except Exception as error:  # answered to its own agent; the others are not affected
                results.append(error)
        return results

    def _host_state(self, lookup: _Lookup, rows: _Rows) -> _HostState:
        tpu_slice = rows.slices.get(lookup.slice_id)
        if tpu_slice is None or tpu_slice.state is SliceState.GONE:
            return _HostState(tpu_slice)
        host = rows.hosts.get(lookup.host_id)
        attempt = rows.attempts.get(tpu_slice.job_id) if tpu_slice.job_id is not None else None
        if tpu_slice.state is SliceState.RELEASING and not (attempt and attempt.aborted):
            return _HostState(tpu_slice, host)
        assigned = self._assignments.assignment_for(lookup.host_id, tpu_slice, attempt)
        return _HostState(tpu_slice, host, assigned)

    # Replying.

    async def _update_interval(self, now: datetime) -> None:
        """Hosts report less often the more there are. Only the first heartbeat waits for it."""
        interval = max(_COUNT_INTERVAL, self._interval / _COUNTS_PER_INTERVAL)
        if self._counted_at is not None and abs(now - self._counted_at) <= interval:
            return
        is_first, self._counted_at = self._counted_at is None, now
        self._counting = asyncio.create_task(self._count_hosts(now))
        if is_first:
            await self._counting

    async def _count_hosts(self, now: datetime) -> None:
        try:
            interval = await HEARTBEATS.run(self._find_interval, now)
            self._interval = max(self._min_interval, interval)
            self._waiting_interval = max(min(_WAITING_INTERVAL, self._min_interval), interval)
            shared = max(min(_GANG_INTERVAL, self._min_interval), _GANG_SHARE * interval)
            self._gang_interval = min(shared, self._interval)
        except Exception as error:
            log_failure(logger, "count the hosts", error)

    def _find_interval(self, now: datetime) -> timedelta:
        hosts = self._store.count_seen_hosts(now - _COUNT_WINDOW)
        announced = [each.at for each in self._store.objects(SERVERS_PREFIX)]
        servers = liveness.count_servers(announced, self._store.time() or now)
        return liveness.heartbeat_interval(hosts, servers)

    def _reply(
        self, assignment: Assignment | None, *, release: bool, waits: bool = False
    ) -> HeartbeatReply:
        """`waits`: for an attempt, which is to begin at once."""
        interval = self._waiting_interval if waits else self._interval
        if assignment is not None and assignment.num_processes > 1:
            interval = min(interval, self._gang_interval)
        return HeartbeatReply(
            assignment=assignment,
            next_heartbeat=interval,
            lease=liveness.AGENT_LEASE,
            release=release,
        )

    def record_unreadable(self, host_id: HostId, now: datetime) -> None:
        """The host is alive, whatever its heartbeat says."""
        older = self._liveness.get(host_id)
        self._liveness[host_id] = (
            replace(older, seen_at=now) if older else HostLiveness(host_id=host_id, seen_at=now)
        )

    def _record_heartbeats(self, heartbeat: Heartbeat, now: datetime) -> None:
        progress, older = heartbeat.progress, self._liveness.get(heartbeat.host_id)
        if progress is None and older is not None and older.attempt_id == heartbeat.attempt_id:
            progress = older.progress
        self._liveness[heartbeat.host_id] = HostLiveness(
            host_id=heartbeat.host_id,
            seen_at=now,
            attempt_id=heartbeat.attempt_id,
            progress=progress,
        )

    # Changes.

    def _is_change(self, heartbeat: Heartbeat, host: Host | None, now: datetime) -> bool:
        """Compared with what was sent last, or else with the row: a change that is reverted before
        the controller saw it is sent too."""
        facts = reported_facts(heartbeat)
        # Of one that was silent, the first report that comes back is news.
        recorded = reported_facts(host) if host is not None and host.up_at is not None else None
        sent = self._sent.get(heartbeat.host_id)
        if sent is not None and sent.facts == recorded:
            self._sent.pop(heartbeat.host_id)
            sent = None
        if sent is None:
            return facts != recorded
        return facts != sent.facts or abs(now - sent.at) >= _RESEND_AFTER

    async def _send_change(self, message: InboxMessage) -> None:
        """To the inbox, together with the other changes that wait to be written."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changes.append((message, written))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_changes())
        await written

    async def _write_changes(self) -> None:
        while self._changes:
            batch, self._changes = self._changes, []
            messages = [message for message, _ in batch]
            try:
                await HEARTBEATS.run(self._store.commit, ChangeSet(messages=messages))
            except Exception as error:
                for _, written in batch:
                    if not written.done():
                        written.set_exception(error)
                continue
            for message, written in batch:
                self._remember(message)
                if not written.done():
                    written.set_result(None)
            self._wake()

    def _remember(self, message: InboxMessage) -> None:
        heartbeat = message.heartbeat
        assert heartbeat is not None
        self._sent[heartbeat.host_id] = _SentChange(reported_facts(heartbeat), message.at)


def reported_facts(source: Heartbeat | Host) -> tuple[object, ...]:
    """What makes a heartbeat a change when it differs from the host's row."""
    return (
        source.boot,
        source.address,
        source.coordinator_port,
        source.phase,
        source.attempt_id,
        source.exit,
        source.notice,
        source.environment,
        source.startup,
    )


def on_server_clock(
    heartbeat: Heartbeat, now: datetime
) -> tuple[Heartbeat, tuple[ProgressPoint, ...]]:
    """Progress with the time by this server's clock, and the points apart. The clocks of hosts are
    off and can step; only the difference of two of their times is used."""
    if heartbeat.at.tzinfo is None:
        heartbeat = replace(heartbeat, at=_utc(heartbeat.at))

    def on_server(moment: datetime) -> datetime:
        return now - min(max(heartbeat.at - _utc(moment), timedelta(0)), _MAX_PROGRESS_AGE)

    progress = heartbeat.progress
    if progress is not None:
        at, output_at = (each and on_server(each) for each in (progress.at, progress.output_at))
        progress = replace(progress, at=at, output_at=output_at)
    points = tuple(
        replace(point, at=on_server(point.at)) for point in heartbeat.points[-MAX_HEARTBEAT_POINTS:]
    )
    if progress is heartbeat.progress and not heartbeat.points:
        return heartbeat, ()
    return replace(heartbeat, progress=progress, points=()), points


def _utc(moment: datetime) -> datetime:
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _agent_restarted(heartbeat: Heartbeat, host: Host | None, assignment: Assignment) -> bool:
    """An earlier agent process ran the attempt, so it must not be run a second time."""
    return (
        host is not None
        and host.boot not in ("", heartbeat.boot)
        and host.attempt_id == assignment.attempt_id
    )


def check_host_exists(host_id: HostId, tpu_slice: TpuSlice) -> None:
    require_host_index(tpu_slice, identifiers.parse_host_id(host_id)[1])
