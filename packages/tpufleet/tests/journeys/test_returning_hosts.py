"""A host of a slice that is hard to replace falls silent: it gets the time to reboot."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.journeys.simulated_hosts import Program
from tpufleet.model.fleet.slices import LossReason, SliceState
from tpufleet.model.job.jobs import JobState
from tpufleet.policy.recovery.liveness import RETURN_LIMIT
from tpufleet.service.jobs.explain import explain
from tpufleet.stores.base import EventQuery


@pytest.fixture(params=["on-demand", "reserved"])
def running(fleet, request):
    """A running job."""
    job = fleet.submit(Program(steps=300), capacity=request.param, grace="10s")
    fleet.until_state(job, JobState.RUNNING)
    fleet.run(15)
    return job


@pytest.fixture
def silent(fleet, running):
    """Two hosts of its slice are silent, and the slice waits for them."""
    for index in (1, 2):
        fleet.stall_host(running, index)
    fleet.until(lambda: fleet.gang(running)[0].silent_since is not None)
    return running


def slices_used(fleet, job):
    return [attempt.slices for attempt in fleet.store.attempts(job)]


@pytest.mark.parametrize("rebooted", [[1, 2], [2, 1]])
def test_a_host_that_reboots_for_minutes_keeps_its_slice(fleet, silent, rebooted):
    assert "it has 10 min to come back" in fleet.gang(silent)[0].reason
    fleet.run(120)
    fleet.restart_agent(silent, rebooted[0])
    fleet.run(30)
    assert fleet.gang(silent)[0].state is SliceState.BOOTING, "one is still silent"
    fleet.restart_agent(silent, rebooted[1])
    fleet.until(lambda: fleet.running_attempt(silent) == 1, 30)
    fleet.settle(silent)
    assert fleet.attempts(silent) == ["host_lost", "finished"] and fleet.failures(silent) == 0
    first, second = slices_used(fleet, silent)
    assert first == second and len(fleet.cloud.requested) == 1


def test_a_host_that_is_back_is_not_silent_because_the_time_of_its_report_is_stored_late(
    fleet, silent
):
    fleet.times_of_reports_are_late = True
    for index in (1, 2):
        fleet.restart_agent(silent, index)
    fleet.until(lambda: fleet.gang(silent)[0].state is SliceState.READY, 30)
    fleet.run(5)
    assert fleet.gang(silent)[0].state is SliceState.READY
    fleet.times_of_reports_are_late = False
    fleet.settle(silent)
    assert fleet.attempts(silent) == ["host_lost", "finished"]


def test_why_says_that_the_job_waits_for_a_host_and_how_long(fleet, silent):
    details = " / ".join(explain(fleet.store, fleet.job(silent), fleet.now()).details)
    assert "10 min to come back" in details
    fleet.cancel(silent)


def test_hosts_without_a_network_for_minutes_keep_their_slice(fleet, running):
    slice_id = fleet.gang(running)[0].id
    fleet.unreachable_hosts = {f"{slice_id}/{index}" for index in range(4)}
    fleet.run(240)
    fleet.unreachable_hosts.clear()
    fleet.settle(running)
    assert slices_used(fleet, running) == [(slice_id,)] * 2


def test_a_host_that_does_not_come_back_costs_the_slice(fleet, silent):
    began = fleet.now()
    old = fleet.gang(silent)[0]
    fleet.until(lambda: len(fleet.cloud.requested) == 2)
    assert RETURN_LIMIT <= fleet.now() - began < RETURN_LIMIT + timedelta(seconds=10)
    fleet.settle(silent)
    assert fleet.store.slice(old.id).loss is LossReason.HOST_LOST
    assert not fleet.store.refusals()


def test_machines_that_the_provider_no_longer_has_are_not_waited_for(fleet, silent):
    fleet.cloud.vanish(fleet.gang(silent)[0].id)
    fleet.until(lambda: len(fleet.cloud.requested) == 2, 60)
    fleet.settle(silent)
    assert fleet.attempts(silent) == ["host_lost", "finished"]


def test_a_cancelled_job_does_not_wait_for_hosts_to_come_back(fleet, silent):
    fleet.cancel(silent)
    fleet.until(lambda: fleet.job(silent).ended, 60)
    assert fleet.job(silent).state is JobState.CANCELLED
    fleet.settle(silent)


def test_a_restarted_controller_goes_on_waiting(fleet, silent):
    fleet.run(60)
    fleet.restart_controller()
    for index in (1, 2):
        fleet.restart_agent(silent, index)
    fleet.settle(silent)
    first, second = slices_used(fleet, silent)
    assert first == second


def test_a_host_that_reports_and_does_not_stop_is_not_waited_for(fleet):
    job = fleet.submit(Program(steps=900), capacity="on-demand", grace="10s")
    fleet.until_state(job, JobState.RUNNING)
    [stuck] = [host for host in fleet.all_hosts() if host.index == 1]
    stuck.run_second = lambda *args: None  # its process cannot be killed
    fleet.cancel(job)
    fleet.until(lambda: fleet.job(job).ended, 300)


def test_a_spot_slice_is_replaced_at_once(fleet):
    job = fleet.submit(Program(steps=300), capacity="spot")
    fleet.until_state(job, JobState.RUNNING)
    fleet.stall_host(job, 1)
    fleet.until(lambda: len(fleet.cloud.requested) == 2, 90)
    messages = [each.message for each in fleet.store.events(EventQuery(job_id=job, limit=1000))]
    assert not any("to come back" in message for message in messages)
