"""Observations: the inbox, silent hosts, due timers and results of provider calls."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence, Set
from datetime import datetime, timedelta

import msgspec

from tpufleet.controller.host_silence import HostSilence
from tpufleet.controller.provider_calls import CallKind, CallResult
from tpufleet.controller.working_set import WorkingSet
from tpufleet.model.fleet.hosts import HostId, HostLiveness, Progress, host_id, slice_id_of
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.fleet.reservations import Reservation
from tpufleet.model.fleet.slices import SliceState
from tpufleet.model.inbox import InboxMessage, InboxMessageKind
from tpufleet.model.job.attempts import AttemptId
from tpufleet.model.job.jobs import Job, JobId
from tpufleet.model.people.users import Role
from tpufleet.policy.recovery import liveness
from tpufleet.stores.base import ChangeSet, Store

HANG_CHECK_INTERVAL = timedelta(seconds=30)
MIN_HANG_CHECK_INTERVAL = timedelta(seconds=1)
RESERVATION_INTERVAL = timedelta(seconds=30)
ADMINS_INTERVAL = timedelta(seconds=30)


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    at: datetime
    messages: Sequence[InboxMessage] = ()
    new_jobs: Sequence[Job] = ()
    edited_jobs: Sequence[Job] = ()
    pools: Sequence[Pool] | None = None  # None: unchanged
    reservations: Sequence[Reservation] | None = None  # None: unchanged
    admins: frozenset[str] | None = None  # None: unchanged
    silent_hosts: Sequence[HostId] = ()
    due_jobs: Sequence[JobId] = ()  # jobs whose timer has expired
    results: Sequence[CallResult] = ()
    progress: dict[AttemptId, Progress] = {}


class Observer:
    """Observes for one leadership term."""

    def __init__(
        self, store: Store, working_set: WorkingSet, silence: HostSilence, now: datetime
    ) -> None:
        self._store = store
        self._working_set = working_set
        self._silence = silence
        self._hangs_checked_at = now
        self._unchecked: list[JobId] = []  # in this interval
        self._reservations_read_at: datetime | None = None
        self._admins_read_at: datetime | None = None
        self._last_consumed = 0

    def committed(self, change: ChangeSet) -> None:
        """The inbox position moves only with the commit that handles the messages."""
        self._last_consumed = max(change.consumed, default=self._last_consumed)

    def observe(self, results: Sequence[CallResult], now: datetime) -> Observation:
        self._working_set.present_since = self._silence.tick_started()
        messages = self._store.inbox(self._last_consumed)
        kinds = {message.kind for message in messages}
        heard = [message.heartbeat.host_id for message in messages if message.heartbeat]
        silent = self._silence.check(self._working_set, heard)
        due = self._working_set.pop_due_jobs(now)
        pools = self._store.pools() if InboxMessageKind.POOL_CHANGED in kinds else None
        return Observation(
            at=now,
            messages=messages,
            new_jobs=self._named(messages, InboxMessageKind.SUBMITTED),
            edited_jobs=self._named(messages, InboxMessageKind.EDITED),
            pools=pools,
            reservations=self._reservations(kinds, now),
            admins=self._admins(kinds, pools, now),
            silent_hosts=silent,
            due_jobs=due,
            results=results,
            progress=self._progress(messages, silent, due, results, now),
        )

    def _reservations(
        self, kinds: Collection[InboxMessageKind], now: datetime
    ) -> list[Reservation] | None:
        """Read at the start of a term, when one changed, and now and then."""
        read_at = self._reservations_read_at
        due = read_at is None or now - read_at >= RESERVATION_INTERVAL
        if not due and InboxMessageKind.RESERVED not in kinds:
            return None
        self._reservations_read_at = now
        return [each for each in self._store.documents(Reservation) if each.ends_at > now]

    def _admins(
        self, kinds: Set[InboxMessageKind], pools: Sequence[Pool] | None, now: datetime
    ) -> frozenset[str] | None:
        """Read while a pool has members: now and then, and before a new job or a changed pool is
        judged, since its owner may just have become one."""
        known = self._working_set.pools.values() if pools is None else pools
        if not any(pool.members for pool in known):
            return None
        read_at = self._admins_read_at
        due = read_at is None or now - read_at >= ADMINS_INTERVAL
        if not due and kinds.isdisjoint(
            {InboxMessageKind.SUBMITTED, InboxMessageKind.POOL_CHANGED}
        ):
            return None
        self._admins_read_at = now
        return frozenset(user.name for user in self._store.users() if user.role is Role.ADMIN)

    def _named(self, messages: Sequence[InboxMessage], kind: InboxMessageKind) -> list[Job]:
        """The jobs that these messages name, as stored."""
        named = dict.fromkeys(
            message.job_id for message in messages if message.kind is kind and message.job_id
        )
        return [job for job_id in named if (job := self._store.job(job_id)) is not None]

    def _progress(
        self,
        messages: Sequence[InboxMessage],
        silent: Sequence[HostId],
        due: Sequence[JobId],
        results: Sequence[CallResult],
        now: datetime,
    ) -> dict[AttemptId, Progress]:
        """Progress of the attempts that something happened to, and of each one now and then."""
        checked = self._jobs_to_check(now)
        self._working_set.dirty_jobs.update(
            job_id for job_id in checked if self._working_set.live_attempt(job_id) is not None
        )
        jobs = self._affected_jobs(messages, silent, results) | set(due) | checked
        hosts = [
            host_id(slice_id, index)
            for job_id in jobs
            if (attempt := self._working_set.live_attempt(job_id)) is not None
            for slice_id in attempt.slices
            for index in self._working_set.hosts.get(slice_id, ())
        ]
        return newest_progress(list(self._store.last_heartbeats(hosts).values())) if hosts else {}

    def _jobs_to_check(self, now: datetime) -> set[JobId]:
        """Each job once in an interval, a part of them in each tick: all at once would keep the API
        of a large fleet waiting. Its hosts report progress no more often than this."""
        passed = now - self._hangs_checked_at
        if passed < MIN_HANG_CHECK_INTERVAL:
            return set()
        self._hangs_checked_at = now
        jobs = self._working_set.jobs
        interval = max(HANG_CHECK_INTERVAL, liveness.heartbeat_interval(self._silence.hosts))
        count = min(len(jobs), math.ceil(len(jobs) * (passed / interval)))
        chosen: set[JobId] = set()
        while len(chosen) < count:
            if not self._unchecked:
                self._unchecked = list(jobs)
            job_id = self._unchecked.pop()
            if job_id in jobs:
                chosen.add(job_id)
        return chosen

    def _affected_jobs(
        self,
        messages: Sequence[InboxMessage],
        silent: Sequence[HostId],
        results: Sequence[CallResult],
    ) -> set[JobId]:
        """Jobs whose attempt may end in this tick."""
        slices = {
            slice_id_of(message.heartbeat.host_id) for message in messages if message.heartbeat
        }
        slices.update(slice_id_of(host) for host in silent)
        for result in results:
            if result.call is CallKind.LISTING and result.error is None:
                healthy = {cloud.id for cloud in result.listing if cloud.healthy}
                slices.update(self._working_set.slices_by_state[SliceState.READY] - healthy)
                slices.update(self._working_set.slices_by_state[SliceState.DOOMED] - healthy)
        affected = {message.job_id for message in messages} | set(self._working_set.stopping_jobs)
        affected.update(
            self._working_set.slices[slice_id].job_id
            for slice_id in slices
            if slice_id in self._working_set.slices
        )
        return {job_id for job_id in affected if job_id in self._working_set.jobs}


def newest_progress(pulses: Sequence[HostLiveness]) -> dict[AttemptId, Progress]:
    """Per attempt, the newest step and checkpoint that any of its hosts reported."""
    newest: dict[AttemptId, Progress] = {}
    for pulse in pulses:
        if pulse.attempt_id is None or pulse.progress is None:
            continue
        newest[pulse.attempt_id] = merge_progress(newest.get(pulse.attempt_id), pulse.progress)
    return newest


def merge_progress(one: Progress | None, other: Progress) -> Progress:
    if one is None:
        return other
    later = other if _timestamp(other) > _timestamp(one) else one
    steps = [step for step in (one.checkpoint_step, other.checkpoint_step) if step is not None]
    moments = [moment for moment in (one.at, other.at) if moment is not None]
    return Progress(
        step=later.step,
        total=later.total,
        checkpoint_step=max(steps, default=None),
        at=max(moments, default=None),
        message=later.message,
        metrics=later.metrics,
        save_seconds=max(one.save_seconds, other.save_seconds),
        output_at=max(filter(None, (one.output_at, other.output_at)), default=None),
    )


def _timestamp(progress: Progress) -> float:
    return progress.at.timestamp() if progress.at else 0.0
