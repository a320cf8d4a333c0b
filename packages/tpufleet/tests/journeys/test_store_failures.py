"""The database fails at any call of any tick. The controller lives on, and nothing acknowledged is
forgotten."""

from __future__ import annotations

import contextlib
import logging
import random
from typing import cast

import pytest

from tests.contract.fake_store import FakeStore
from tests.journeys.faulty_store import FaultyStore
from tests.journeys.simulated_fleet import SECOND, SimulatedFleet
from tests.journeys.simulated_hosts import Program
from tests.polling import wait_until
from tests.service.harness import ServiceHarness
from tpufleet.errors import Unreachable
from tpufleet.model.job.jobs import JobState
from tpufleet.stores.base import Store


@pytest.fixture
def faulty(make_fleet) -> SimulatedFleet:
    """Only the controller's store fails: what the service accepts is acknowledged."""
    store = FakeStore()
    fleet = make_fleet(store)
    fleet.faulty_store = FaultyStore(store)
    fleet.store = fleet.faulty_store
    fleet.controllers = [fleet.new_controller("faulty")]
    fleet.store = store
    return fleet


def tick(fleet: SimulatedFleet) -> None:
    """As the controller's thread does: log the error and go on."""
    fleet.clock.advance(SECOND)
    fleet.run_hosts()
    fleet.heartbeat()
    fleet.faulty_store.calls.clear()
    with contextlib.suppress(Unreachable):
        fleet.controllers[0].tick()
    fleet.invariants.check()


def run_with_faults(fleet: SimulatedFleet, seconds: int = 400) -> None:
    for second in range(seconds):
        if second % 20 == 0 and second < 100:
            fleet.submit(Program(steps=10), accelerator="v5litepod-4")
        tick(fleet)
        if second > 100 and all(fleet.job(job).ended for job in fleet.programs):
            return
    raise AssertionError(f"not every job was handled:\n{fleet.event_log()}")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", range(12))
def test_a_failure_at_this_call_of_every_other_tick_strands_no_job(faulty, number, when):
    ticks = iter(range(100_000))
    failing = False

    def fails(name: str, call: int) -> str | None:
        nonlocal failing
        if call == 0:
            failing = next(ticks) % 2 == 1
        return when if failing and call == number else None

    faulty.faulty_store.fails = fails
    run_with_faults(faulty)
    assert {faulty.job(job).state for job in faulty.programs} == {JobState.SUCCEEDED}


@pytest.mark.parametrize("seed", range(10))
def test_failures_at_random_calls_strand_no_job(faulty, seed):
    chance = random.Random(seed)
    faulty.faulty_store.fails = lambda name, call: (
        chance.choice(["before", "after"]) if chance.random() < 0.1 else None
    )
    run_with_faults(faulty)
    assert {faulty.job(job).state for job in faulty.programs} == {JobState.SUCCEEDED}


@pytest.mark.parametrize("method", ["inbox", "job", "commit", "hosts", "delete_heartbeats", "live"])
def test_one_failure_of_each_method_strands_no_job(faulty, method):
    failed = []

    def fails(name: str, call: int) -> str | None:
        if name == method and not failed:
            failed.append(name)
            return "before"
        return None

    faulty.faulty_store.fails = fails
    run_with_faults(faulty)
    assert failed, f"no tick calls {method}"
    assert {faulty.job(job).state for job in faulty.programs} == {JobState.SUCCEEDED}


def test_what_was_observed_and_not_committed_is_observed_again(faulty):
    """An error between observing and committing, whatever it is."""
    job = faulty.submit(Program(steps=5))
    controller = faulty.controllers[0]
    controller.hold_lease()
    first = controller.observe()
    assert [message.job_id for message in first.messages] == [job]
    assert controller.observe().messages == first.messages


def test_no_loop_logs_an_unreachable_database_which_its_store_logs(fleet, tmp_path, caplog):
    """Each loop of the controller and of the service, for each of its attempts."""
    store = FaultyStore(fleet.store)
    fleet.store = store
    controller = fleet.new_controller("two")
    service = ServiceHarness(cast(Store, store), tmp_path)
    store.fails = lambda name, number: "before"
    caplog.clear()
    controller.start()
    service.start()
    try:
        for call in ("time", "last_event", "host_commands"):
            wait_until(lambda call=call: store.calls.count(call) > 1)
    finally:
        controller.stop()
        service.close()
    logged = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert logged == []
