"""State changes of jobs, which the tests make in place of the controller."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from tpufleet.model.events import Event, EventKind
from tpufleet.model.job.attempts import AttemptState
from tpufleet.model.job.jobs import JobId, JobState
from tpufleet.stores.base import ChangeSet


def cancelled(world, job_id) -> bool:
    return any(each.job_id == job_id and each.kind == "cancel" for each in world.store.inbox())


def record_event(world, job_id, message, state="running"):
    event = Event(
        at=world.clock.now(), kind=EventKind.JOB, state=state, message=message, job_id=job_id
    )
    world.store.commit(ChangeSet(events=[event]))


def start_job(world, job_id="job-1", **spec):
    """A job whose first attempt runs on one slice."""
    world.submit(job_id, **spec)
    world.add_slice("slice-1", job_id)
    attempt = world.add_attempt(job_id, 0, "slice-1")
    world.change_job(job_id, state=JobState.RUNNING, reason="all 4 hosts run")
    return attempt


def end_job(world, job_id, state, **more):
    """The job and its attempt end, and enough time passes for the last log lines."""
    for attempt in world.store.attempts(JobId(job_id)):
        ended = replace(attempt, state=AttemptState.ENDED, ended_at=world.clock.now())
        world.store.commit(ChangeSet(attempts=[ended]))
    world.end_job(job_id, state, **more)
    world.clock.advance(timedelta(seconds=5))
