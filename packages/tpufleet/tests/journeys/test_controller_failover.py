"""Controllers that die at any step, two at once, and hosts that cannot reach any."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from tests.journeys.faulty_store import FaultyStore
from tests.journeys.simulated_fleet import SECOND
from tests.journeys.simulated_hosts import Program
from tests.polling import wait_until
from tpufleet.controller.loop import LEASE, LEASE_TTL, LONGEST_TICK
from tpufleet.errors import Fenced
from tpufleet.model.job.jobs import JobState

STEPS = ("observe", "plan", "commit", "act", "after")


def tick_and_die(fleet, step):
    """One tick that is cut off after this step; the next controller starts over."""
    controller = fleet.controllers[0]
    fleet.clock.advance(SECOND)
    fleet.run_hosts()
    fleet.heartbeat()
    if controller.hold_lease():
        observation = controller.observe()
        if step != "observe":
            change = controller.plan(observation)
            if step != "plan":
                controller.commit(change)
                if step != "commit":
                    controller.act()
    fleet.restart_controller()
    fleet.clock.advance(timedelta(seconds=16))  # the dead one's lease runs out
    fleet.run_hosts()
    fleet.heartbeat()
    fleet.invariants.check()


@pytest.mark.parametrize("step", STEPS)
def test_a_controller_that_dies_after_every_tick_at_this_step_loses_nothing(fleet, step):
    job = fleet.submit(Program(steps=30))
    for round in range(200):
        if fleet.job(job).ended:
            break
        tick_and_die(fleet, step)
        fleet.tick()  # the successor lives for one tick, then dies in its second
        if round == 6:
            gang = fleet.gang(job)
            if gang:
                fleet.preempt(job)
    fleet.settle(job)
    assert fleet.job(job).state is JobState.SUCCEEDED
    assert fleet.attempts(job)[-1] == "finished"
    assert len(fleet.disk.done[job]) == 1


@pytest.mark.parametrize("url, warned", [("http://127.0.0.1", False), ("http://other", True)])
def test_a_server_that_joins_with_another_url_warns_once(fleet, caplog, url, warned):
    fleet.run(3)
    fleet.server_url = url
    fleet.controllers.append(fleet.new_controller("two"))
    fleet.run(60)
    warnings = [record.getMessage() for record in caplog.records if "public_url" in record.msg]
    assert len(warnings) == warned
    assert all("this one's to http://other" in w for w in warnings)


def test_a_server_that_succeeds_another_does_not_compare_its_url(fleet, caplog):
    fleet.run(3)
    fleet.server_url = "http://other"
    fleet.restart_controller()  # the lease of the dead one has not run out yet
    fleet.run(60)
    assert not [record for record in caplog.records if "public_url" in record.msg]


def test_two_controllers_and_exactly_one_acts(fleet):
    fleet.controllers.append(fleet.new_controller("two"))
    jobs = [fleet.submit() for _ in range(4)]
    for _ in range(200):
        fleet.clock.advance(SECOND)
        fleet.run_hosts()
        fleet.heartbeat()
        acted = [controller.tick() for controller in fleet.controllers]
        assert acted.count(True) <= 1
        fleet.invariants.check()
    assert all(fleet.job(job).state is JobState.SUCCEEDED for job in jobs)


@pytest.mark.parametrize("successor_leads", [True, False])
def test_a_leader_that_was_suspended_logs_that_it_lost_the_lease(fleet, caplog, successor_leads):
    first, second = fleet.controllers[0], fleet.new_controller("two")
    assert first.tick()
    fleet.clock.advance(timedelta(seconds=20))
    assert second.tick()
    if not successor_leads:
        fleet.clock.advance(timedelta(seconds=20))
    assert first.hold_lease() is not successor_leads
    lost = [each for each in caplog.records if "lost the lease" in each.getMessage()]
    assert len(lost) == 1


def test_a_controller_with_an_expired_lease_cannot_write(fleet):
    job = fleet.submit(Program(steps=100))
    fleet.until_state(job, JobState.RUNNING)
    sleeper = fleet.controllers[0]
    sleeper.hold_lease()
    observation = sleeper.observe()
    fleet.preempt(job)
    fleet.clock.advance(timedelta(seconds=20))
    fleet.controllers = [fleet.new_controller("two")]
    fleet.run(10)
    fleet.cancel(job)
    with pytest.raises(Fenced):
        change = sleeper.plan(sleeper.observe() if not observation.messages else observation)
        sleeper.commit(change or _anything(fleet, job))
    fleet.settle(job)
    assert fleet.job(job).state is JobState.CANCELLED


def _anything(fleet, job):
    from tpufleet.stores.base import ChangeSet

    return ChangeSet(jobs=[fleet.job(job)])


def test_workloads_continue_without_a_controller(fleet):
    job = fleet.submit(Program(steps=200))
    fleet.until_state(job, JobState.RUNNING)
    gone, fleet.controllers = fleet.controllers, []
    fleet.run(120)
    fleet.controllers = [fleet.new_controller("two")]
    fleet.settle(job)
    assert fleet.attempts(job) == ["finished"], "no host was declared lost"
    assert gone


def test_disconnected_hosts_keep_working_for_a_while(fleet):
    """The whole server is unreachable."""
    job = fleet.submit(Program(steps=200))
    fleet.until_state(job, JobState.RUNNING)
    fleet.reachable = False
    fleet.controllers = []
    fleet.run(300)
    fleet.reachable = True
    fleet.controllers = [fleet.new_controller("two")]
    fleet.settle(job)
    assert fleet.attempts(job) == ["finished"]


def test_a_disconnected_host_never_runs_beside_its_successor(fleet):
    job = fleet.submit(Program(steps=300))
    fleet.until_state(job, JobState.RUNNING)
    fleet.run(60)
    cut_off = fleet.all_hosts()[1]
    fleet.unreachable_hosts.add(cut_off.id)
    fleet.settle(job)
    assert fleet.attempts(job) == ["host_lost", "finished"]


def test_a_host_whose_lease_is_lost_stops_its_workload(fleet):
    job = fleet.submit(Program(steps=10_000, ignores_stop=True), grace="5s")
    fleet.until_state(job, JobState.RUNNING)
    fleet.reachable = False
    fleet.controllers = []
    fleet.run(615)
    assert [host.runs for host in fleet.all_hosts()] == [None] * 4
    fleet.reachable = True
    fleet.controllers = [fleet.new_controller("two")]
    fleet.cancel(job)
    fleet.settle(job)


def test_a_slice_requested_twice_by_a_crashed_controller_is_one_slice(fleet):
    job = fleet.submit()
    for _ in range(3):
        tick_and_die(fleet, "act")
    assert len(fleet.cloud.existing()) <= 1
    fleet.settle(job)
    assert fleet.attempts(job) == ["finished"]


def test_a_tick_that_takes_longer_than_the_lease_keeps_it_and_one_that_hangs_does_not(fleet):
    """As when a leader loads a large fleet, or the database hangs. Its threads run for real."""
    real, loading, go_on = fleet.store, threading.Event(), threading.Event()
    store = FaultyStore(real)

    def slow(name: str, number: int) -> None:
        if name == "live":
            loading.set()
            go_on.wait(900)

    store.fails = slow
    fleet.store = store
    controller = fleet.new_controller("one")
    fleet.store = real
    controller.start()
    try:
        assert loading.wait(900)
        for _ in range(2):  # more than the lease in all
            fleet.clock.advance(LEASE_TTL - SECOND)
            renewed = store.calls.count("acquire_lease") + 1
            wait_until(lambda count=renewed: store.calls.count("acquire_lease") > count, 60)
            now = fleet.clock.now()
            assert fleet.store.acquire_lease(LEASE, "two", LEASE_TTL, now + SECOND) is None
        fleet.clock.advance(LONGEST_TICK + SECOND)
        taken = fleet.store.acquire_lease(LEASE, "two", LEASE_TTL, fleet.clock.now())
        assert taken is not None and taken.holder == "two"
        before = store.calls.count("acquire_lease")
        go_on.set()
        wait_until(lambda: store.calls.count("acquire_lease") > before, 60)
        assert fleet.store.acquire_lease(LEASE, "two", LEASE_TTL, fleet.clock.now()) == taken
    finally:
        go_on.set()
        controller.stop()
