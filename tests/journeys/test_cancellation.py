"""A job can be cancelled in every state, and nothing of it is left."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.journeys.simulated_hosts import Program
from tpufleet.errors import Conflict
from tpufleet.model.jobs import JobState


def queued(world):
    world.cloud.stock[("zone-a", "v5litepod-16")] = 0
    job = world.submit()
    world.run(5)
    assert world.job(job).state in (JobState.QUEUED, JobState.WAITING)
    return job


def waiting(world):
    world.cloud.boot = timedelta(minutes=2)
    job = world.submit()
    world.until_state(job, JobState.WAITING)
    return job


def starting(world):
    job = world.submit(Program(setup=timedelta(seconds=30)))
    world.until_state(job, JobState.STARTING)
    return job


def running(world):
    job = world.submit()
    world.until_state(job, JobState.RUNNING)
    return job


def recovering(world):
    job = running(world)
    world.cloud.boot = timedelta(minutes=2)
    world.preempt(job)
    world.until_state(job, JobState.RECOVERING)
    world.run(3)
    return job


def stopping_on_notice(world):
    job = world.submit(Program(stops_after=timedelta(seconds=20)))
    world.until_state(job, JobState.RUNNING)
    world.give_notice(job)
    world.run(3)
    return job


@pytest.mark.parametrize(
    "reach", [queued, waiting, starting, running, recovering, stopping_on_notice]
)
def test_a_job_can_be_cancelled_when_it_is(world, reach):
    job = reach(world)
    world.cancel(job)
    world.settle(job)
    assert world.job(job).state is JobState.CANCELLED
    assert world.job(job).reason == "cancelled by ann"
    assert world.cloud.existing() == []
    assert job not in world.disk.done


def test_cancelling_before_the_first_tick_asks_for_nothing(world):
    job = world.submit()
    world.cancel(job)
    world.settle(job)
    assert world.attempts(job) == []
    assert world.cloud.requested == []


def test_a_job_that_finished_first_stays_succeeded(world):
    job = world.submit()
    world.settle(job)
    with pytest.raises(Conflict, match="already succeeded"):
        world.cancel(job)


def test_a_cancel_that_comes_too_late_does_not_undo_a_success(world):
    job = world.submit(Program(steps=20))
    world.until_state(job, JobState.RUNNING)
    world.run(19)
    world.cancel(job)
    world.settle(job)
    finished = job in world.disk.done
    assert world.job(job).state is (JobState.SUCCEEDED if finished else JobState.CANCELLED)
