"""The controller's working set: everything that has not ended, indexed, and the changes since the
last commit. It belongs to one leadership term and is dropped when a tick fails."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from tpufleet.model.events import Event
from tpufleet.model.fleet.bootstrap import BootstrapReport
from tpufleet.model.fleet.hosts import Host, HostId, Progress
from tpufleet.model.fleet.pools import CapacityRefusal, Pool, RefusalKind
from tpufleet.model.fleet.reservations import Reservation
from tpufleet.model.fleet.slices import LossReason, SliceId, SliceState, TpuSlice
from tpufleet.model.job.attempts import Attempt, AttemptId, AttemptState
from tpufleet.model.job.jobs import Job, JobId
from tpufleet.model.people.budgets import BudgetUse
from tpufleet.model.tpu.type_lookup import short_name
from tpufleet.model.values.records import replace
from tpufleet.policy.events import slice_event
from tpufleet.policy.recovery import job_step
from tpufleet.policy.recovery.job_step import JobView
from tpufleet.policy.scheduling import placement, source_choice
from tpufleet.policy.scheduling.placement import PendingJob
from tpufleet.policy.scheduling.source_choice import CapacitySource, RefusalHistory
from tpufleet.stores.base import ChangeSet, LiveState


class WorkingSet:
    def __init__(self, live: LiveState) -> None:
        self.jobs: dict[JobId, Job] = {}
        self.attempts: dict[JobId, list[Attempt]] = {}
        self.slices: dict[SliceId, TpuSlice] = {}
        self.hosts: dict[SliceId, dict[int, Host]] = {}
        self.progress: dict[AttemptId, Progress] = {}
        self.pools: dict[str, Pool] = {pool.name: pool for pool in live.pools}
        self.reservations: Sequence[Reservation] = ()
        self.admins: frozenset[str] = frozenset()  # read while a pool has members
        self.refusals = RefusalHistory(live.refusals)
        self.present_since: datetime | None = None  # since when hosts could report without a gap
        # Sources that rejected a job's request as invalid. Not stored: a new controller asks again.
        self.retries: set[JobId] = set()  # jobs that do not wait for the backoff
        self.rejections: dict[JobId, dict[CapacitySource, str]] = {}
        # Slices of a job in a row that ran without agents. Not stored either.
        self.futile_creations: dict[JobId, list[timedelta]] = {}  # for how long each ran
        self.exhausted_budgets: tuple[BudgetUse, ...] = ()
        self.last_queued_at: dict[SliceId, datetime] = {}  # by its provider
        # What hosts without an agent report, and the reason derived from it. Listed again.
        self.bootstrap: dict[SliceId, tuple[BootstrapReport, ...]] = {}
        self.connecting_since: dict[SliceId, datetime] = {}  # in vain, as far as hosts report
        self.probes: dict[str, str] = {}  # by provider: a request while hosts could not connect
        self.boot_reasons: dict[SliceId, str] = {}
        # How far the hosts are, and since when.
        self.boot_progress: dict[SliceId, tuple[tuple[object, ...], datetime]] = {}
        self.silent_slices: set[SliceId] = set()  # explained by an event

        self.slices_by_job: dict[JobId, set[SliceId]] = {}  # slices that a job holds
        self.slices_by_pool: dict[str, set[SliceId]] = {}
        self.slices_by_state: dict[SliceState, set[SliceId]] = {
            state: set() for state in SliceState
        }
        self._last_wait: dict[JobId, tuple[int, str]] = {}  # number of attempts, reason
        self.usage_steps: dict[str, int] = {}  # of users with any usage, see `policy.fair_share`
        self._pending: dict[JobId, PendingJob] = {}  # jobs that lack slices
        self._pending_sorted = True
        self.stopping_jobs: set[JobId] = set()  # jobs whose attempt is stopping
        self.limited_jobs: set[JobId] = set()  # jobs with a limit of cost or hours

        self.dirty_jobs: set[JobId] = set()  # jobs to step
        self.placement_due = True
        self._timers: list[tuple[datetime, JobId]] = []
        self._changed_jobs: dict[JobId, Job] = {}
        self._changed_attempts: dict[AttemptId, Attempt] = {}
        self._changed_slices: dict[SliceId, TpuSlice] = {}
        self._changed_hosts: dict[HostId, Host] = {}
        self._changed_refusals: dict[str, CapacityRefusal] = {}
        self._events: list[Event] = []

        for job in live.jobs:
            self.add_job(job)
        for attempt in live.attempts:
            self.attempts.setdefault(attempt.job_id, []).append(attempt)
        for job_id, attempts in self.attempts.items():
            attempts.sort(key=lambda attempt: attempt.number)
            if attempts[-1].state is AttemptState.STOPPING:
                self.stopping_jobs.add(job_id)
        for tpu_slice in live.slices:
            self._index(tpu_slice)
        for host in live.hosts:
            self.hosts.setdefault(host.slice_id, {})[host.index] = host

    # Reading.
    def live_attempt(self, job_id: JobId) -> Attempt | None:
        attempts = self.attempts.get(job_id)
        return attempts[-1] if attempts and attempts[-1].live else None

    def job_view(self, job_id: JobId) -> JobView:
        attempts = tuple(self.attempts.get(job_id, ()))
        slice_ids = set(self.slices_by_job.get(job_id, ()))
        live = attempts[-1] if attempts and attempts[-1].live else None
        if live:
            slice_ids.update(live.slices)
        return JobView(
            job=self.jobs[job_id],
            attempts=attempts,
            slices={
                slice_id: self.slices[slice_id]
                for slice_id in sorted(slice_ids)
                if slice_id in self.slices
            },
            hosts={
                slice_id: tuple(host for _, host in sorted(self.hosts.get(slice_id, {}).items()))
                for slice_id in slice_ids
            },
            progress=self.progress.get(live.id) if live else None,
            present_since=self.present_since,
        )

    def pending_jobs(self) -> list[PendingJob]:
        """In queue order."""
        if not self._pending_sorted:
            ordered = placement.queue_order(self._pending.values())
            self._pending = {each.job.id: each for each in ordered}
            self._pending_sorted = True
        return list(self._pending.values())

    def hosts_by_slice(self) -> dict[SliceId, int]:
        """How many hosts each slice that is up has."""
        return {
            slice_id: len(self.hosts.get(slice_id, ()))
            for state in (SliceState.READY, SliceState.DOOMED, SliceState.BOOTING)
            for slice_id in self.slices_by_state[state]
            if state is not SliceState.BOOTING or self.slices[slice_id].silent_since is not None
        }

    def is_up(self, host: HostId) -> bool:
        """Whether it reported, and has not been found to be silent."""
        slice_id, _, index = host.rpartition("/")
        known = self.hosts.get(SliceId(slice_id), {}).get(int(index))
        return known is not None and known.up_at is not None

    def pool_slices(self, name: str) -> list[TpuSlice]:
        return [self.slices[slice_id] for slice_id in sorted(self.slices_by_pool.get(name, ()))]

    # Writing: every put goes into the next commit.
    def add_job(self, job: Job) -> None:
        """Add a job that the store already has."""
        self._set_job(job)
        self.dirty_jobs.add(job.id)

    def _set_job(self, job: Job) -> None:
        self.jobs[job.id] = job
        if job.spec.max_cost is not None or job.spec.max_hours is not None:
            self.limited_jobs.add(job.id)
        else:
            self.limited_jobs.discard(job.id)

    def apply_edits(self, stored: Job) -> None:
        """Take over what users changed of a job; the store already has it."""
        job = self.jobs.get(stored.id)
        if job is None:
            return
        self._set_job(
            replace(job, spec=stored.spec, held_by=stored.held_by, queued_at=stored.queued_at)
        )
        self.dirty_jobs.add(job.id)
        self._pending.pop(job.id, None)  # it may have another place in the queue
        self.placement_due = True

    def put_job(self, job: Job) -> None:
        if self.jobs.get(job.id) is not job:
            self._set_job(job)
            self._changed_jobs[job.id] = job

    def put_attempt(self, attempt: Attempt) -> None:
        attempts = self.attempts.setdefault(attempt.job_id, [])
        if attempt.number == len(attempts):
            attempts.append(attempt)
        elif attempts[attempt.number] is attempt:
            return
        else:
            attempts[attempt.number] = attempt
        self._changed_attempts[attempt.id] = attempt
        if attempt.state is AttemptState.STOPPING:
            self.stopping_jobs.add(attempt.job_id)
        if not attempt.live:
            self.stopping_jobs.discard(attempt.job_id)
            self.progress.pop(attempt.id, None)
            for slice_id in attempt.slices:
                if slice_id in self.slices and self.slices[slice_id].state is SliceState.GONE:
                    self._forget_slice(slice_id)

    def put_slice(self, tpu_slice: TpuSlice) -> None:
        before = self.slices.get(tpu_slice.id)
        if before is tpu_slice:
            return
        self._index(tpu_slice)
        self._changed_slices[tpu_slice.id] = tpu_slice
        self.placement_due = True
        for job_id in {tpu_slice.job_id, before.job_id if before else None}:
            if job_id in self.jobs:
                self.dirty_jobs.add(job_id)
        if tpu_slice.state is SliceState.GONE and not self._in_live_attempt(tpu_slice):
            self._forget_slice(tpu_slice.id)

    def release_slice(
        self, tpu_slice: TpuSlice, loss: LossReason, reason: str, now: datetime
    ) -> None:
        released = job_step.release_slice(tpu_slice, loss, reason, now)
        self.put_slice(released)
        self.record_events(slice_event(released, now))

    def put_host(self, host: Host) -> None:
        self.hosts.setdefault(host.slice_id, {})[host.index] = host
        self._changed_hosts[host.id] = host

    def put_refusal(self, refusal: CapacityRefusal) -> None:
        self.refusals.record(refusal)
        self._changed_refusals[refusal.key] = refusal
        self.placement_due = True

    def record_refusal(
        self,
        tpu_slice: TpuSlice,
        reason: str,
        now: datetime,
        kind: RefusalKind = RefusalKind.CAPACITY,
        *,
        detail: str = "",
        late: bool = False,
        until: datetime | None = None,
    ) -> None:
        """Record that the source of this slice refused its type. An invalid request concerns only
        the job that sent it."""
        source = CapacitySource(tpu_slice.provider, tpu_slice.zone, tpu_slice.capacity)
        self._end_probe(tpu_slice, now)
        if tpu_slice.adopted:
            return  # it says nothing about the capacity of its zone
        if kind is RefusalKind.REQUEST and tpu_slice.job_id in self.jobs:
            self.rejections.setdefault(tpu_slice.job_id, {})[source] = reason
            self.dirty_jobs.add(tpu_slice.job_id)
            return
        # Shown for every job that waits for this source, so without the name of one job's slice.
        group = tpu_slice.id.partition(tpu_slice.request_group)[0] + tpu_slice.request_group
        for name in (tpu_slice.id, group):
            reason = reason.replace(name, short_name(tpu_slice.accelerator))
        previous = self.refusals.latest(source, tpu_slice.accelerator)
        self.put_refusal(
            source_choice.new_refusal(
                source,
                tpu_slice.accelerator,
                reason,
                previous=previous,
                now=now,
                kind=kind,
                took=now - tpu_slice.requested_at,
                detail=detail,
                late=late,
                until=until,
            )
        )

    def _end_probe(self, tpu_slice: TpuSlice, now: datetime) -> None:
        """The provider refused it, so another request may try."""
        known = self.refusals.unreachable_from(tpu_slice.provider)
        if known is not None and self.probes.get(tpu_slice.provider) == tpu_slice.request_group:
            del self.probes[tpu_slice.provider]
            self.put_refusal(replace(known, until=now))

    def put_pending_job(self, job_id: JobId, pending: PendingJob | None) -> None:
        """What the job lacks after its last step; None: nothing."""
        if pending is None:
            self._pending.pop(job_id, None)
        else:
            known = self._pending.get(job_id)
            if known is None or known.optional != pending.optional:
                self.placement_due = True
                self._pending_sorted = False
            self._pending[job_id] = pending

    def set_usage_steps(self, steps: dict[str, int]) -> None:
        """Reorders the queue where the usage of a user has changed."""
        if steps == self.usage_steps:
            return
        self.usage_steps = steps
        self._pending = {
            job_id: dataclasses.replace(each, usage_step=steps.get(each.job.owner, 0))
            for job_id, each in self._pending.items()
        }
        self._pending_sorted = False
        self.placement_due = True

    def is_news(self, job_id: JobId, reason: str) -> bool:
        """Whether this reason to wait differs from the last one of this job and attempt."""
        key = (len(self.attempts.get(job_id, ())), reason)
        known = self._last_wait.get(job_id)
        self._last_wait[job_id] = key
        return known != key

    def waits_since_refusal(self, job: Job) -> bool:
        """Whether its reason is still the one that was news in this attempt."""
        return self._last_wait.get(job.id) == (len(self.attempts.get(job.id, ())), job.reason)

    def record_events(self, *events: Event) -> None:
        self._events.extend(events)

    def schedule(self, job_id: JobId, at: datetime | None) -> None:
        if at is not None:
            heapq.heappush(self._timers, (at, job_id))

    def pop_due_jobs(self, now: datetime) -> list[JobId]:
        """Jobs whose timer has expired."""
        ready: list[JobId] = []
        while self._timers and self._timers[0][0] <= now:
            job_id = heapq.heappop(self._timers)[1]
            if job_id in self.jobs:
                ready.append(job_id)
        return ready

    def next_due_at(self) -> datetime | None:
        return self._timers[0][0] if self._timers else None

    def drop_job(self, job_id: JobId) -> None:
        """Forget a job that has ended and holds no slices."""
        self.jobs.pop(job_id, None)
        self.limited_jobs.discard(job_id)
        self.attempts.pop(job_id, None)
        self.slices_by_job.pop(job_id, None)
        self._pending.pop(job_id, None)
        self.rejections.pop(job_id, None)
        self._last_wait.pop(job_id, None)
        self.futile_creations.pop(job_id, None)

    def take_change(self, consumed_messages: Iterable[int]) -> ChangeSet:
        """All changes since the last commit; resets them."""
        change = ChangeSet(
            jobs=tuple(self._changed_jobs.values()),
            attempts=tuple(self._changed_attempts.values()),
            slices=tuple(self._changed_slices.values()),
            hosts=tuple(self._changed_hosts.values()),
            refusals=tuple(self._changed_refusals.values()),
            consumed=tuple(consumed_messages),
            events=tuple(self._events),
        )
        self._changed_jobs = {}
        self._changed_attempts = {}
        self._changed_slices = {}
        self._changed_hosts = {}
        self._changed_refusals = {}
        self._events = []
        return change

    # Indexes.
    def _index(self, tpu_slice: TpuSlice) -> None:
        before = self.slices.get(tpu_slice.id)
        if before is not None:
            self._unindex(before)
        self.slices[tpu_slice.id] = tpu_slice
        self.slices_by_state[tpu_slice.state].add(tpu_slice.id)
        if tpu_slice.job_id:
            self.slices_by_job.setdefault(tpu_slice.job_id, set()).add(tpu_slice.id)
        if tpu_slice.pool:
            self.slices_by_pool.setdefault(tpu_slice.pool, set()).add(tpu_slice.id)

    def _unindex(self, tpu_slice: TpuSlice) -> None:
        self.slices_by_state[tpu_slice.state].discard(tpu_slice.id)
        if tpu_slice.job_id in self.slices_by_job:
            self.slices_by_job[tpu_slice.job_id].discard(tpu_slice.id)
        if tpu_slice.pool in self.slices_by_pool:
            self.slices_by_pool[tpu_slice.pool].discard(tpu_slice.id)

    def _forget_slice(self, slice_id: SliceId) -> None:
        self._unindex(self.slices.pop(slice_id))
        self.last_queued_at.pop(slice_id, None)
        self.bootstrap.pop(slice_id, None)
        self.boot_reasons.pop(slice_id, None)
        self.boot_progress.pop(slice_id, None)
        self.connecting_since.pop(slice_id, None)
        self.silent_slices.discard(slice_id)
        self.hosts.pop(slice_id, None)

    def _in_live_attempt(self, tpu_slice: TpuSlice) -> bool:
        if tpu_slice.job_id is None:
            return False
        attempt = self.live_attempt(tpu_slice.job_id)
        return attempt is not None and tpu_slice.id in attempt.slices
