"""The clocks of hosts are wrong and step; heartbeats arrive late and out of order."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.journeys.simulated_fleet import SECOND
from tests.journeys.simulated_hosts import Program
from tpufleet.model.inbox import InboxMessage, InboxMessageKind
from tpufleet.model.job.jobs import JobState
from tpufleet.stores.base import ChangeSet

STEPS = [-86_400, -3600, -5, 5, 3600, 86_400]


@pytest.mark.parametrize("seconds", STEPS)
def test_a_host_clock_that_steps_hides_nothing(fleet, seconds):
    job = fleet.submit(Program(steps=30))
    fleet.until_state(job, JobState.RUNNING)
    fleet.run(10)
    fleet.host_clock_error = timedelta(seconds=seconds)
    # The simulated agent measures its lease on this clock; a real one uses its uptime.
    for host in fleet.all_hosts():
        host.last_reply = fleet.host_now()
    fleet.until(lambda: fleet.job(job).ended, limit=40)
    assert fleet.attempts(job) == ["finished"]


@pytest.mark.parametrize("seconds", STEPS)
def test_a_program_on_a_host_with_a_wrong_clock_is_not_hung(fleet, seconds):
    fleet.host_clock_error = timedelta(seconds=seconds)
    job = fleet.submit(Program(steps=90), hung_after="1m")
    fleet.settle(job)
    assert fleet.attempts(job) == ["finished"]


def deliver(fleet, heartbeat) -> None:
    message = InboxMessage(kind=InboxMessageKind.HEARTBEAT, at=fleet.now(), heartbeat=heartbeat)
    fleet.store.commit(ChangeSet(messages=[message]))


def test_a_heartbeat_that_is_delivered_late_changes_nothing(fleet):
    job = fleet.submit(Program(steps=30))
    fleet.until_state(job, JobState.STARTING)
    host = fleet.all_hosts()[0]
    old = host.heartbeat(fleet.host_now(), fleet.disk)  # still idle, or in setup
    fleet.until_state(job, JobState.RUNNING)
    before = fleet.store.host(host.id)
    deliver(fleet, old)
    fleet.controllers[0].tick()
    assert fleet.store.host(host.id) == before
    fleet.restart_controller()
    fleet.clock.advance(16 * SECOND)
    deliver(fleet, old)
    fleet.controllers[0].tick()
    assert fleet.store.host(host.id) == before, "also after a takeover"


def test_a_late_heartbeat_of_an_agent_that_was_replaced_changes_nothing(fleet):
    job = fleet.submit(Program(steps=30))
    fleet.until_state(job, JobState.RUNNING)
    host = fleet.all_hosts()[0]
    old = host.heartbeat(fleet.host_now(), fleet.disk)
    fleet.restart_agent(job)
    fleet.until(lambda: len(fleet.attempts(job)) == 2 and fleet.running(job))
    before = fleet.store.host(host.id)
    assert before is not None and before.boot != old.boot
    deliver(fleet, old)
    fleet.controllers[0].tick()
    assert fleet.store.host(host.id) == before
    fleet.settle(job)
    assert len(fleet.attempts(job)) == 2
