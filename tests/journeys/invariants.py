"""The rules that never break, held against the store, the cloud and the hosts after every tick."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from tpufleet.model.attempts import Attempt, AttemptId
from tpufleet.model.end_reasons import END_REASONS, Budget
from tpufleet.model.jobs import JobState
from tpufleet.model.lifecycle import JOB_TRANSITIONS, can_transition
from tpufleet.model.slices import SliceId, SliceState
from tpufleet.stores.base import EventQuery, JobQuery

if TYPE_CHECKING:
    from tests.journeys.simulated_fleet import SimulatedFleet

# A slice that nobody needs is gone from the cloud within this.
RELEASE_BOUND = timedelta(seconds=60)


class Invariants:
    def __init__(self, world: SimulatedFleet) -> None:
        self._world = world
        self._ended: dict[AttemptId, Attempt] = {}
        self._states: dict[str, object] = {}
        self._unwanted_since: dict[SliceId, datetime] = {}
        self._failed_by_themselves: set[AttemptId] = set()

    def check(self) -> None:
        self._one_live_attempt_and_ended_ones_never_change()
        self._no_workload_without_a_live_attempt()
        self._nothing_is_paid_for_and_unused()
        self._only_own_failures_are_charged()
        self._work_is_finished_once()
        self._readers_change_nothing()
        self._every_state_has_a_reason_and_moves_are_legal()

    def _one_live_attempt_and_ended_ones_never_change(self) -> None:
        for job in self._world.programs:
            attempts = self._world.store.attempts(job)
            live = [attempt for attempt in attempts if attempt.live]
            assert len(live) <= 1, f"{job} has {len(live)} live attempts"
            assert [attempt.number for attempt in attempts] == list(range(len(attempts)))
            if self._world.job(job).ended:
                assert not live, f"{job} has ended and {live[0].id} lives"
            for attempt in attempts:
                if not attempt.live:
                    assert self._ended.setdefault(attempt.id, attempt) == attempt

    def _no_workload_without_a_live_attempt(self) -> None:
        for host in self._world.all_hosts():
            if host.runs is None:
                continue
            attempt = self._world.store.attempt(host.runs)
            assert attempt is not None and attempt.live, (
                f"{host.id} runs {host.runs}, which has ended\n{self._world.story()}"
            )

    def _nothing_is_paid_for_and_unused(self) -> None:
        now = self._world.now()
        existing = self._world.cloud.existing()
        for slice_id in existing:
            recorded = self._world.store.slice(slice_id)
            assert recorded is not None, f"{slice_id} is in the cloud and not in the store"
            job = self._world.store.job(recorded.job_id) if recorded.job_id else None
            wanted = recorded.live and (
                (job is not None and not job.ended) or recorded.pool is not None
            )
            if wanted:
                self._unwanted_since.pop(slice_id, None)
                continue
            since = self._unwanted_since.setdefault(slice_id, now)
            assert now - since <= RELEASE_BOUND or not self._world.controllers, (
                f"{slice_id} has been unwanted since {since}\n{self._world.story()}"
            )
        for slice_id in set(self._unwanted_since) - set(existing):
            del self._unwanted_since[slice_id]

    def _only_own_failures_are_charged(self) -> None:
        for host in self._world.all_hosts():
            exit = host.workload.exit if host.workload else None
            if exit and not exit.stopped_by_agent and not exit.clean:
                self._failed_by_themselves.add(host.workload.assignment.attempt_id)
        for attempt in self._ended.values():
            budget = END_REASONS[attempt.end_reason].budget
            if budget in (Budget.FAILURE, Budget.SETUP, Budget.MEMORY):
                assert attempt.id in self._failed_by_themselves, (
                    f"{attempt.id} is charged to {budget}, and nothing of it failed by itself"
                )

    def _work_is_finished_once(self) -> None:
        """A job that finished is never run again. (A gang that is lost while it finishes, before
        anybody heard of it, finishes again from its last checkpoint.)"""
        for job in self._world.programs:
            endings = self._world.attempts(job)
            assert "finished" not in endings[:-1], f"{job} ran on after it finished: {endings}"

    def _readers_change_nothing(self) -> None:
        store = self._world.store
        before = (store.last_event(), store.live(), len(store.inbox()))
        store.jobs(JobQuery())
        store.slices(live_only=False)
        store.events(EventQuery())
        store.count_jobs()
        self._world.cloud.listing()
        assert (store.last_event(), store.live(), len(store.inbox())) == before

    def _every_state_has_a_reason_and_moves_are_legal(self) -> None:
        store = self._world.store
        for job_id in self._world.programs:
            job = self._world.job(job_id)
            assert job.reason, f"{job.id} is {job.state} without a reason"
            if job.state in (JobState.FAILED, JobState.SUCCEEDED, JobState.CANCELLED):
                assert job.ended_at and job.end_reason
            self._moved(job.id, job.state)
            for attempt in store.attempts(job_id):
                self._moved(attempt.id, attempt.state)
                if not attempt.live:
                    assert attempt.message, f"{attempt.id} ended without a word"
        for tpu_slice in store.slices(live_only=False):
            assert tpu_slice.reason, f"{tpu_slice.id} is {tpu_slice.state} without a reason"
            if tpu_slice.state in (SliceState.RELEASING, SliceState.GONE):
                assert tpu_slice.loss, f"{tpu_slice.id} is {tpu_slice.state}, but why?"
            self._moved(tpu_slice.id, tpu_slice.state)

    def _moved(self, what: str, state: object) -> None:
        before = self._states.get(what, state)
        # One tick may make several moves: a gang starts, and is lost before the tick is over.
        legal = _reachable(before) if isinstance(before, JobState) else {before}
        assert any(can_transition(via, state) for via in legal), f"{what}: {before} to {state}"
        self._states[what] = state


def _reachable(state: JobState) -> set[JobState]:
    """Every state that a job may come to from this one."""
    reached, new = {state}, {state}
    while new:
        new = {after for before in new for after in JOB_TRANSITIONS[before]} - reached
        reached |= new
    return reached
