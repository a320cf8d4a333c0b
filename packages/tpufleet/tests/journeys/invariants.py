"""Invariants of the store, the cloud and the hosts, checked after every tick."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from tpufleet.model.fleet.slices import SliceId, SliceState
from tpufleet.model.job.attempts import Attempt, AttemptId
from tpufleet.model.job.end_reasons import END_REASONS, RetryBudget
from tpufleet.model.job.jobs import JobState
from tpufleet.model.job.lifecycle import can_reach, can_transition
from tpufleet.stores.base import EventQuery, JobQuery

if TYPE_CHECKING:
    from tests.journeys.simulated_fleet import SimulatedFleet

# An unneeded slice is deleted from the cloud within this.
RELEASE_BOUND = timedelta(seconds=60)


class Invariants:
    def __init__(self, fleet: SimulatedFleet) -> None:
        self._fleet = fleet
        self.release_bound = RELEASE_BOUND
        self._ended: dict[AttemptId, Attempt] = {}
        self._states: dict[str, object] = {}
        self._unneeded_since: dict[SliceId, datetime] = {}
        self._assigned_at: dict[SliceId, datetime] = {}
        self._failed_by_themselves: set[AttemptId] = set()

    def check(self) -> None:
        self._one_live_attempt_and_ended_ones_never_change()
        self._no_workload_without_a_live_attempt()
        self._slices_are_of_the_type_of_their_job()
        self._jobs_get_idle_slices_only_as_their_pool_provides_them()
        self._nothing_is_paid_for_and_unused()
        self._only_own_failures_are_charged()
        self._work_is_finished_once()
        self._readers_change_nothing()
        self._every_state_has_a_reason_and_transitions_are_legal()

    def _one_live_attempt_and_ended_ones_never_change(self) -> None:
        for job in self._fleet.programs:
            attempts = self._fleet.store.attempts(job)
            live = [attempt for attempt in attempts if attempt.live]
            assert len(live) <= 1, f"{job} has {len(live)} live attempts"
            assert [attempt.number for attempt in attempts] == list(range(len(attempts)))
            if self._fleet.job(job).ended:
                assert not live, f"{job} has ended and {live[0].id} lives"
            for attempt in attempts:
                if not attempt.live:
                    assert self._ended.setdefault(attempt.id, attempt) == attempt

    def _no_workload_without_a_live_attempt(self) -> None:
        for host in self._fleet.all_hosts():
            if host.runs is None:
                continue
            attempt = self._fleet.store.attempt(host.runs)
            assert attempt is not None and attempt.live, (
                f"{host.id} runs {host.runs}, which has ended\n{self._fleet.event_log()}"
            )

    def _slices_are_of_the_type_of_their_job(self) -> None:
        for job_id in self._fleet.programs:
            wanted = self._fleet.job(job_id).spec
            for attempt in self._fleet.store.attempts(job_id):
                used = [self._fleet.store.slice(slice_id) for slice_id in attempt.slices]
                types = [each.accelerator for each in used if each is not None]
                assert all(each == wanted.accelerator for each in types), (
                    f"{attempt.id} of a {wanted.accelerator} job has {types}\n"
                    f"{self._fleet.event_log()}"
                )

    def _jobs_get_idle_slices_only_as_their_pool_provides_them(self) -> None:
        """When they are assigned; a pool may be changed later."""
        for tpu_slice in self._fleet.store.slices():
            assigned_at = tpu_slice.assigned_at
            if assigned_at is None or assigned_at == self._assigned_at.get(tpu_slice.id):
                continue
            self._assigned_at[tpu_slice.id] = assigned_at
            pool = self._fleet.store.pool(tpu_slice.pool or "")
            if pool is None or assigned_at == tpu_slice.requested_at:
                continue  # requested for the job itself
            cloud = self._fleet.cloud
            wanted = cloud.slice_settings(pool.accelerator, pool.pod)
            assert pool.provides(tpu_slice), f"{tpu_slice}\n{self._fleet.event_log()}"
            assert cloud.created_with(tpu_slice.id) in (None, wanted) or not tpu_slice.settings, (
                f"{tpu_slice.id} has other settings than its pool\n{self._fleet.event_log()}"
            )

    def _nothing_is_paid_for_and_unused(self) -> None:
        if self._fleet.cloud.outage is not None:
            self._unneeded_since.clear()  # nothing can be deleted now
            return
        now = self._fleet.now()
        existing = self._fleet.existing()
        for slice_id in existing:
            recorded = self._fleet.store.slice(slice_id)
            assert recorded is not None, f"{slice_id} is in the cloud and not in the store"
            job = self._fleet.store.job(recorded.job_id) if recorded.job_id else None
            wanted = recorded.live and (
                (job is not None and not job.ended) or recorded.pool is not None
            )
            if wanted:
                self._unneeded_since.pop(slice_id, None)
                continue
            since = self._unneeded_since.setdefault(slice_id, now)
            assert now - since <= self.release_bound or not self._fleet.controllers, (
                f"{slice_id} has been unneeded since {since}\n{self._fleet.event_log()}"
            )
        for slice_id in set(self._unneeded_since) - set(existing):
            del self._unneeded_since[slice_id]

    def _only_own_failures_are_charged(self) -> None:
        for host in self._fleet.all_hosts():
            exit = host.workload.exit if host.workload else None
            if exit and not exit.stopped_by_agent and not exit.clean:
                self._failed_by_themselves.add(host.workload.assignment.attempt_id)
        for attempt in self._ended.values():
            budget = END_REASONS[attempt.end_reason].budget
            if budget in (RetryBudget.FAILURE, RetryBudget.SETUP, RetryBudget.MEMORY):
                assert attempt.id in self._failed_by_themselves, (
                    f"{attempt.id} is charged to {budget}, but nothing of it failed by itself"
                )

    def _work_is_finished_once(self) -> None:
        """A finished job is never run again. (A gang that is lost while it finishes, before that is
        reported, finishes again from its last checkpoint.)"""
        for job in self._fleet.programs:
            endings = self._fleet.attempts(job)
            assert "finished" not in endings[:-1], f"{job} ran on after it finished: {endings}"

    def _readers_change_nothing(self) -> None:
        store = self._fleet.store
        before = (store.last_event(), store.live(), len(store.inbox()))
        store.jobs(JobQuery())
        store.slices(live_only=False)
        store.events(EventQuery())
        store.count_jobs()
        for cloud in self._fleet.clouds:
            if cloud.outage is None:
                cloud.listing()
        assert (store.last_event(), store.live(), len(store.inbox())) == before

    def _every_state_has_a_reason_and_transitions_are_legal(self) -> None:
        store = self._fleet.store
        for job_id in self._fleet.programs:
            job = self._fleet.job(job_id)
            assert job.reason, f"{job.id} is {job.state} without a reason"
            if job.state in (JobState.FAILED, JobState.SUCCEEDED, JobState.CANCELLED):
                assert job.ended_at and job.end_reason
            self._check_transition(job.id, job.state)
            for attempt in store.attempts(job_id):
                self._check_transition(attempt.id, attempt.state)
                if not attempt.live:
                    assert attempt.message, f"{attempt.id} ended without a message"
        for tpu_slice in store.slices(live_only=False):
            assert tpu_slice.reason, f"{tpu_slice.id} is {tpu_slice.state} without a reason"
            if tpu_slice.state in (SliceState.RELEASING, SliceState.GONE):
                assert tpu_slice.loss, f"{tpu_slice.id} is {tpu_slice.state} without a loss reason"
            self._check_transition(tpu_slice.id, tpu_slice.state)

    def _check_transition(self, what: str, state: object) -> None:
        before = self._states.get(what, state)
        # One tick may take a job through several states: a gang starts and is lost at once.
        legal = can_reach if isinstance(before, JobState) else can_transition
        assert legal(before, state), f"{what}: {before} to {state}"
        self._states[what] = state
