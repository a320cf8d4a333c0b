"""The server's own absence is not the hosts' silence: frozen servers, stopped databases and
clocks that step, at the default settings."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import pytest

from tests.contract.fake_store import FakeStore
from tests.journeys.faulty_store import FaultyStore
from tests.journeys.simulated_fleet import SECOND
from tests.journeys.simulated_hosts import Program, failure
from tpufleet.errors import Unreachable
from tpufleet.model.job.jobs import JobState

MINUTE = timedelta(minutes=1)
LONGEST_BACKOFF = 11 * 60  # seconds


def run_jobs(fleet, count: int = 2, steps: int = 600, **fields) -> list:
    jobs = [fleet.submit(Program(steps=steps), **fields) for _ in range(count)]
    fleet.until(lambda: all(fleet.running(job) for job in jobs))
    return jobs


def freeze(fleet, seconds: int) -> None:
    """The server does nothing at all: no heartbeat is received, no tick runs. Hosts run on."""
    for _ in range(seconds):
        fleet.clock.advance(SECOND)
        fleet.run_hosts()
    for controller in fleet.controllers:
        controller.tick()  # before any host gets through


def restart(fleet) -> None:
    """A server with a database of its own: it keeps its name, and so its lease."""
    fleet.controllers = [fleet.new_controller("one")]


def first_endings(fleet, jobs) -> set[str]:
    return {fleet.attempts(job)[0] for job in jobs}


@pytest.mark.parametrize("seconds", [15, 60, 590])
def test_a_frozen_server_loses_no_host(fleet, seconds):
    jobs = run_jobs(fleet, steps=900)
    freeze(fleet, seconds)
    fleet.run(120)
    assert first_endings(fleet, jobs) == {"running"}


@pytest.mark.parametrize("seconds", [60])
def test_a_server_that_freezes_again_and_again_loses_no_host(fleet, seconds):
    jobs = run_jobs(fleet, steps=5000)
    for _ in range(5):
        freeze(fleet, seconds)
        fleet.run(12)
    fleet.run(60)
    assert first_endings(fleet, jobs) == {"running"}


@pytest.mark.parametrize("step", [-3600, -60, -20, 20, 60, 3600])
def test_a_clock_step_loses_no_host(fleet, step):
    jobs = run_jobs(fleet)
    fleet.clock.step(timedelta(seconds=step))
    fleet.run(120)
    assert first_endings(fleet, jobs) == {"running"}


@pytest.mark.parametrize("step", [-3600, -60, 60, 3600])
def test_a_time_limit_counts_elapsed_time_in_spite_of_clock_steps(fleet, step):
    jobs = run_jobs(fleet, steps=5000, timeout="10m")
    fleet.run(60)
    for sign in (1, 1, -1):
        fleet.clock.step(timedelta(seconds=sign * step))
        fleet.run(60)
    assert first_endings(fleet, jobs) == {"running"}
    fleet.run(5 * 60)
    assert first_endings(fleet, jobs) == {"running"}
    fleet.run(2 * 60)
    assert first_endings(fleet, jobs) == {"timeout"}


@pytest.mark.parametrize("step", [-3600, -60, 60, 3600])
def test_a_dead_host_is_found_in_spite_of_a_clock_step(fleet, step):
    dead, *others = run_jobs(fleet, count=3)
    fleet.stall_host(dead)
    fleet.run(5)
    fleet.clock.step(timedelta(seconds=step))
    fleet.run(130)
    assert fleet.attempts(dead)[0] == "host_lost"
    assert first_endings(fleet, others) == {"running"}


@pytest.mark.parametrize("restarted", [False, True], ids=["running", "while it is down"])
@pytest.mark.parametrize("step", [-86400, -3600, -60, 60, 86400])
def test_a_backoff_lasts_no_longer_in_spite_of_a_clock_step(fleet, step, restarted):
    """Stored moments are in the future, and a clock that is set back moves them further away."""
    fails = lambda attempt, process, step: failure(fleet.clock.now()) if attempt < 4 else None
    job = fleet.submit(Program(steps=30, fails=fails), retries={"failure": 10}, crash_loop=10)
    for _ in range(3):
        fleet.until(lambda: fleet.job(job).not_before is not None)
        fleet.clock.step(timedelta(seconds=step))
        if restarted:
            restart(fleet)
        attempts = len(fleet.attempts(job))
        fleet.until(lambda: len(fleet.attempts(job)) > attempts, limit=LONGEST_BACKOFF)  # noqa: B023
    fleet.settle(job)
    assert fleet.job(job).state is JobState.SUCCEEDED


@pytest.mark.parametrize("restarted", [False, True], ids=["running", "while it is down"])
@pytest.mark.parametrize("step", [-86400, -3600, 86400])
def test_capacity_is_requested_again_in_spite_of_a_clock_step(fleet, step, restarted):
    fleet.cloud.stock[("zone-a", "v5litepod-16")] = 0
    job = fleet.submit(Program(steps=100))
    fleet.until(lambda: bool(fleet.store.refusals()))
    fleet.clock.step(timedelta(seconds=step))
    if restarted:
        restart(fleet)
    fleet.cloud.stock.clear()
    fleet.until(lambda: fleet.running(job), limit=LONGEST_BACKOFF)


@pytest.mark.parametrize("seconds", [60, 300])
def test_a_stopped_database_loses_no_host(make_fleet, seconds):
    store = FakeStore()
    fleet = make_fleet(store)
    failing = FaultyStore(store)
    fleet.store = failing
    fleet.controllers = [fleet.new_controller("one")]
    fleet.store = store
    jobs = run_jobs(fleet)
    failing.fails = lambda name, number: "before"
    for _ in range(seconds):
        fleet.clock.advance(SECOND)
        fleet.run_hosts()
        with contextlib.suppress(Unreachable):
            fleet.controllers[0].tick()
    failing.fails = lambda name, number: None
    fleet.run(120)
    assert first_endings(fleet, jobs) == {"running"}


def test_a_server_whose_clock_is_wrong_keeps_its_hosts(fleet):
    """Several API servers write liveness, each with its own clock."""
    jobs = run_jobs(fleet, count=2)
    fleet.heartbeat_clock_error = timedelta(minutes=-5)
    fleet.run(120)
    assert first_endings(fleet, jobs) == {"running"}


def test_a_frozen_server_gives_stopping_hosts_their_time_again(fleet):
    job = fleet.submit(Program(steps=900, stops_after=timedelta(seconds=5)), grace="20s")
    fleet.until_state(job, JobState.RUNNING)
    fleet.cancel(job)
    fleet.tick()
    freeze(fleet, 120)
    fleet.settle(job)
    assert fleet.attempts(job) == ["cancelled"]
    assert "did not stop in time" not in fleet.event_log()


def test_a_frozen_server_does_not_call_a_program_hung(fleet):
    job = fleet.submit(Program(steps=900), hung_after="2m")
    fleet.until_state(job, JobState.RUNNING)
    fleet.run(20)
    freeze(fleet, 300)
    fleet.run(60)
    assert fleet.attempts(job) == ["running"]


def test_hosts_that_are_really_gone_are_still_lost_after_a_freeze(fleet):
    job = fleet.submit(Program(steps=100))
    fleet.until_state(job, JobState.RUNNING)
    fleet.stall_host(job)
    freeze(fleet, 60)
    fleet.settle(job)
    assert fleet.attempts(job) == ["host_lost", "finished"]


def test_a_partition_of_many_hosts_costs_a_fifth_of_the_fleet_in_a_minute(fleet):
    """Nothing tells a partition from dead hosts; the provider says that all slices are healthy."""
    jobs = run_jobs(fleet, count=20, accelerator="v5litepod-4")
    for host in fleet.all_hosts():
        fleet.unreachable_hosts.add(host.id)
    fleet.run(60)
    lost = [job for job in jobs if fleet.attempts(job)[0] != "running"]
    assert len(lost) == 4, "20 % of 20 hosts"
    fleet.unreachable_hosts.clear()
    fleet.run(180)
    assert sum(fleet.attempts(job)[0] == "host_lost" for job in jobs) == 4


def test_the_last_host_of_a_large_slice_costs_the_whole_slice(fleet):
    """A slice is lost as a whole, so all of its hosts count."""
    jobs = run_jobs(fleet, count=5, accelerator="v5litepod-16")
    for job in jobs:
        fleet.stall_host(job, index=3)
    fleet.run(60)
    assert sum(fleet.attempts(job)[0] != "running" for job in jobs) == 1
    fleet.run(300)
    assert first_endings(fleet, jobs) == {"host_lost"}


def test_the_provider_may_take_the_whole_fleet_at_once(fleet):
    jobs = run_jobs(fleet, count=10, accelerator="v5litepod-4")
    for job in jobs:
        fleet.preempt(job)
    fleet.run(30)
    assert first_endings(fleet, jobs) == {"preempted"}
