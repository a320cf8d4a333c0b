"""A heartbeat in, the assignment out. News goes to the controller's inbox; the rest is a pulse."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from tpufleet.errors import BadInput
from tpufleet.model import topology
from tpufleet.model.agent_protocol import Assignment, Heartbeat, HeartbeatReply
from tpufleet.model.end_reasons import EndReason
from tpufleet.model.hosts import Host, HostId, HostLiveness
from tpufleet.model.inbox import InboxMessage, InboxMessageKind
from tpufleet.model.slices import SliceId, SliceState, TpuSlice
from tpufleet.policy import liveness
from tpufleet.service import identifiers
from tpufleet.service.assignments import Assignments
from tpufleet.stores.base import ChangeSet, Store

logger = logging.getLogger(__name__)


HEARTBEATS_PER_SECOND = 700  # what one server takes in beside its other work
_REPEAT_NEWS = timedelta(seconds=10)  # news that the controller has not acted on is told again
_SEEN_LATELY = timedelta(minutes=1)
_COUNT_EVERY = timedelta(seconds=5)
_REMEMBERED = 100_000


@dataclass(frozen=True, slots=True)
class _Told:
    """News already in the inbox, which the host's row does not show yet."""

    facts: tuple[object, ...]
    at: datetime


class Heartbeats:
    """Lives in the event loop's thread; only the writing of batches happens elsewhere."""

    def __init__(
        self,
        store: Store,
        assignments: Assignments,
        wake: Callable[[], None],
        min_interval: timedelta = timedelta(seconds=1),
    ) -> None:
        self._store = store
        self._assignments = assignments
        self._wake = wake
        self._poll = min_interval
        self._pulses: dict[HostId, HostLiveness] = {}
        self._told: OrderedDict[HostId, _Told] = OrderedDict()
        self._news: list[tuple[InboxMessage, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._next_beat = min_interval
        self._counted_at: datetime | None = None

    async def receive(self, beat: Heartbeat, slice_id: SliceId, now: datetime) -> HeartbeatReply:
        """The caller has proved that it is an agent of this slice."""
        tpu_slice = self._store.slice(slice_id)
        if tpu_slice is None or tpu_slice.state is SliceState.GONE:
            return self._reply(None, now, release=True)
        check_host_exists(beat.host_id, tpu_slice)
        self._note_pulse(beat, now)
        host = self._store.host(beat.host_id)
        if self._is_news(beat, host, now):
            await self._tell(
                InboxMessage(
                    kind=InboxMessageKind.HEARTBEAT, at=now, slice_id=slice_id, heartbeat=beat
                )
            )
        releasing = tpu_slice.state is SliceState.RELEASING
        assignment = (
            None if releasing else self._assignments.assignment_for(beat.host_id, tpu_slice)
        )
        if assignment is not None and _was_restarted(beat, host, assignment):
            assignment = replace(assignment, stop=EndReason.HOST_LOST)
        return self._reply(assignment, now, release=releasing)

    async def flush(self) -> None:
        """Write the pulses gathered since the last time."""
        if not self._pulses:
            return
        gathered, self._pulses = self._pulses, {}
        try:
            await asyncio.to_thread(self._store.record_liveness, list(gathered.values()))
        except Exception:
            self._pulses = gathered | self._pulses  # what came in meanwhile is newer
            raise

    async def flush_forever(self, every: float = 1.0) -> None:
        while True:
            await asyncio.sleep(every)
            try:
                await self.flush()
            except Exception:
                logger.exception("pulses could not be recorded; trying again in %s s", every)

    def _reply(self, assignment: object, now: datetime, *, release: bool) -> HeartbeatReply:
        if self._counted_at is None or now - self._counted_at > _COUNT_EVERY:
            hosts = self._store.count_seen_hosts(now - _SEEN_LATELY)
            self._next_beat = max(self._poll, timedelta(seconds=hosts / HEARTBEATS_PER_SECOND))
            self._counted_at = now
        return HeartbeatReply(
            assignment=assignment,  # type: ignore[arg-type]
            next_heartbeat=self._next_beat,
            lease=liveness.AGENT_LEASE,
            release=release,
        )

    def _note_pulse(self, beat: Heartbeat, now: datetime) -> None:
        progress, older = beat.progress, self._pulses.get(beat.host_id)
        if progress is None and older is not None and older.attempt_id == beat.attempt_id:
            progress = older.progress
        self._pulses[beat.host_id] = HostLiveness(
            host_id=beat.host_id, seen_at=now, attempt_id=beat.attempt_id, progress=progress
        )

    def _is_news(self, beat: Heartbeat, host: Host | None, now: datetime) -> bool:
        """Held against what was told last, or else against the row: a change that is undone
        before the controller saw it is told too."""
        facts, known = reported_facts(beat), None if host is None else reported_facts(host)
        told = self._told.get(beat.host_id)
        if told is not None and told.facts == known:
            self._told.pop(beat.host_id)
            told = None
        if told is None:
            return facts != known
        return facts != told.facts or now - told.at >= _REPEAT_NEWS

    async def _tell(self, message: InboxMessage) -> None:
        """Into the inbox, together with whatever else is waiting to be written."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._news.append((message, written))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_news())
        await written

    async def _write_news(self) -> None:
        while self._news:
            batch, self._news = self._news, []
            messages = [message for message, _ in batch]
            try:
                await asyncio.to_thread(self._store.commit, ChangeSet(messages=messages))
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
        beat = message.heartbeat
        assert beat is not None
        self._told[beat.host_id] = _Told(reported_facts(beat), message.at)
        self._told.move_to_end(beat.host_id)
        while len(self._told) > _REMEMBERED:
            self._told.popitem(last=False)


def reported_facts(told: Heartbeat | Host) -> tuple[object, ...]:
    """What makes a beat news when it differs from the host's row."""
    return (
        told.boot,
        told.address,
        told.coordinator_port,
        told.phase,
        told.attempt_id,
        told.exit,
        told.notice,
    )


def _was_restarted(beat: Heartbeat, host: Host | None, assignment: Assignment) -> bool:
    """An agent process before this one ran the attempt: it must not be run a second time."""
    return (
        host is not None
        and host.boot not in ("", beat.boot)
        and host.attempt_id == assignment.attempt_id
    )


def check_host_exists(host_id: HostId, tpu_slice: TpuSlice) -> None:
    _, index = identifiers.parse_host_id(host_id)
    hosts = topology.find(tpu_slice.accelerator).hosts
    if index >= hosts:
        raise BadInput(f"{tpu_slice.id} has {hosts} hosts, so there is no host {index}")
