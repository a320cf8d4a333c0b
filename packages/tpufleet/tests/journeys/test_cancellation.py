"""A job can be cancelled in every state, and nothing of it is left."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.journeys.simulated_hosts import Program
from tpufleet.errors import Conflict
from tpufleet.model.job.jobs import JobState


def queued(fleet):
    fleet.cloud.stock[("zone-a", "v5litepod-16")] = 0
    job = fleet.submit()
    fleet.run(5)
    assert fleet.job(job).state in (JobState.QUEUED, JobState.WAITING)
    return job


def waiting(fleet):
    fleet.cloud.boot = timedelta(minutes=2)
    job = fleet.submit()
    fleet.until_state(job, JobState.WAITING)
    return job


def starting(fleet):
    job = fleet.submit(Program(setup=timedelta(seconds=30)))
    fleet.until_state(job, JobState.STARTING)
    return job


def running(fleet):
    job = fleet.submit()
    fleet.until_state(job, JobState.RUNNING)
    return job


def recovering(fleet):
    job = running(fleet)
    fleet.cloud.boot = timedelta(minutes=2)
    fleet.preempt(job)
    fleet.until_state(job, JobState.RECOVERING)
    fleet.run(3)
    return job


def stopping_on_notice(fleet):
    job = fleet.submit(Program(stops_after=timedelta(seconds=20)))
    fleet.until_state(job, JobState.RUNNING)
    fleet.send_notice(job)
    fleet.run(3)
    return job


@pytest.mark.parametrize(
    "reach", [queued, waiting, starting, running, recovering, stopping_on_notice]
)
def test_a_job_can_be_cancelled_when_it_is(fleet, reach):
    job = reach(fleet)
    fleet.cancel(job)
    fleet.settle(job)
    assert fleet.job(job).state is JobState.CANCELLED
    assert fleet.job(job).reason == "cancelled by ann"
    assert fleet.cloud.existing() == []
    assert job not in fleet.disk.done


def test_cancelling_before_the_first_tick_requests_nothing(fleet):
    job = fleet.submit()
    fleet.cancel(job)
    fleet.settle(job)
    assert fleet.attempts(job) == []
    assert fleet.cloud.requested == []


def test_a_job_that_finished_first_stays_succeeded(fleet):
    job = fleet.submit()
    fleet.settle(job)
    with pytest.raises(Conflict, match="already succeeded"):
        fleet.cancel(job)


def test_a_cancel_that_comes_too_late_does_not_undo_a_success(fleet):
    job = fleet.submit(Program(steps=20))
    fleet.until_state(job, JobState.RUNNING)
    fleet.run(19)
    fleet.cancel(job)
    fleet.settle(job)
    finished = job in fleet.disk.done
    assert fleet.job(job).state is (JobState.SUCCEEDED if finished else JobState.CANCELLED)
