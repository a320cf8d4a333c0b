"""An elastic job runs on as many slices as there are."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.journeys.simulated_fleet import SimulatedFleet
from tests.journeys.simulated_hosts import Program
from tpufleet.model.job.jobs import JobState
from tpufleet.policy.recovery import elasticity
from tpufleet.providers.base import Fault

KIND = "v5litepod-8"  # one host
STOCK = ("zone-a", KIND)
LONG = Program(steps=2000)


def submit(fleet: SimulatedFleet, program: Program = LONG, least=2, most=4, **fields):
    slices = {"min": least, "max": most}
    return fleet.submit(program, accelerator=KIND, slices=slices, **fields)


def sizes(fleet: SimulatedFleet, job) -> list[int]:
    return [len(attempt.slices) for attempt in fleet.store.attempts(job)]


def lose_slice(fleet: SimulatedFleet, job, which: int = 1) -> None:
    """For good: the cloud has no other."""
    fleet.cloud.stock[STOCK] = len(fleet.gang(job)) - 1
    fleet.preempt(job, which)


def test_a_job_that_loses_a_slice_continues_on_the_others_within_seconds(fleet):
    job = submit(fleet, Program(steps=200))
    fleet.until_state(job, JobState.RUNNING)
    fleet.run(45)
    kept = [item.id for item in fleet.gang(job)]
    lose_slice(fleet, job)
    fleet.until(lambda: fleet.running_attempt(job) == 1, limit=10)
    slices = fleet.attempt(job).slices
    assert slices == (kept[0], kept[3], kept[2]), "in place, and as many as can keep their position"
    assert fleet.attempt(job).start_step == 40
    assert "3 of 4" in fleet.job(job).reason
    assert {host.workload.assignment.num_slices for host in fleet.all_hosts()} == {3}
    fleet.settle(job)
    assert fleet.attempts(job) == ["preempted", "finished"]


def test_it_grows_back_at_a_checkpoint_when_a_slice_is_there_again(fleet):
    job = submit(fleet, Program(steps=600, checkpoint_every=50, checkpoint_on_stop=False))
    fleet.until_state(job, JobState.RUNNING)
    fleet.run(60)
    lose_slice(fleet, job)
    fleet.until(lambda: fleet.running_attempt(job) == 1)
    fleet.run(80)
    fleet.cloud.stock.clear()
    fleet.until(lambda: fleet.running_attempt(job) == 2)
    assert fleet.attempts(job) == ["preempted", "resized", "running"]
    assert sizes(fleet, job) == [4, 3, 4]
    resized = fleet.store.attempts(job)[1]
    assert resized.last_step - resized.checkpoint_step <= 5, "only just after a checkpoint"
    fleet.settle(job)
    assert fleet.job(job).state is JobState.SUCCEEDED


def test_a_replacement_that_is_there_in_time_is_used_at_once(fleet):
    job = submit(fleet, Program(steps=200, stops_after=fleet.cloud.boot))
    fleet.until_state(job, JobState.RUNNING)
    fleet.run(30)
    fleet.send_notice(job)
    fleet.settle(job)
    assert sizes(fleet, job) == [4, 4]


def test_it_starts_with_the_fewest_when_there_are_no_more(fleet):
    fleet.cloud.stock[STOCK] = 3
    job = submit(fleet, Program(steps=200))
    fleet.until_state(job, JobState.RUNNING, limit=60)
    assert sizes(fleet, job) == [3]
    fleet.settle(job)


def test_it_waits_a_minute_for_slices_that_are_on_their_way(fleet):
    fleet.cloud.stock[STOCK] = 2
    fleet.cloud.boot *= 4
    job = submit(fleet)
    fleet.until(lambda: len(fleet.cloud.existing()) == 2)
    fleet.cloud.stock.clear()
    fleet.until_state(job, JobState.RUNNING)
    assert sizes(fleet, job) == [4]


def test_it_does_not_wait_longer_for_slices_that_do_not_come(fleet):
    fleet.cloud.stock[STOCK] = 2
    fleet.cloud.boot *= 4
    job = submit(fleet)
    fleet.until(lambda: len(fleet.cloud.existing()) == 2)
    fleet.cloud.boot *= 5
    fleet.cloud.stock.clear()
    fleet.until(lambda: len(fleet.gang(job)) == 4)
    fleet.until_state(job, JobState.RUNNING, limit=115)
    assert sizes(fleet, job) == [2]
    fleet.until(lambda: sizes(fleet, job) == [2, 4])


def test_below_the_fewest_it_waits(fleet):
    job = submit(fleet, least=3)
    fleet.until_state(job, JobState.RUNNING)
    fleet.run(20)
    lose_slice(fleet, job)
    fleet.until(lambda: fleet.running_attempt(job) == 1)
    lose_slice(fleet, job)
    fleet.run(120)
    assert fleet.job(job).state is JobState.RECOVERING
    fleet.cloud.stock.clear()
    fleet.until(lambda: fleet.running_attempt(job) == 2)
    assert sizes(fleet, job)[:2] == [4, 3]


def test_it_grows_rarely_when_slices_come_and_go(fleet):
    job = submit(fleet, Program(steps=10_000))
    fleet.until_state(job, JobState.RUNNING)
    lost, began = 0, fleet.now()
    while fleet.now() - began < elasticity.RESTARTS_WITHIN:
        if len(fleet.gang(job)) == 4 and len(fleet.attempt(job).slices) == 4:
            fleet.run(20)
            fleet.preempt(job, which=3)
            lost += 1
        fleet.run(10)
    grown = fleet.attempts(job).count("resized")
    assert grown <= 6, "each waits twice as long as the one before"
    assert lost <= grown + 1


def test_it_does_not_grow_where_no_checkpoint_is_seen(fleet):
    job = submit(fleet, Program(steps=300, checkpoint_every=1000, checkpoint_on_stop=False))
    fleet.until_state(job, JobState.RUNNING)
    lose_slice(fleet, job)
    fleet.until(lambda: fleet.running_attempt(job) == 1)
    fleet.cloud.stock.clear()
    fleet.settle(job)
    assert fleet.attempts(job) == ["preempted", "finished"]


def test_other_jobs_of_a_pool_come_before_more_slices_of_a_running_one(fleet):
    fleet.put_pool(name="lab", accelerator=KIND, largest=3)
    elastic = submit(fleet, Program(steps=400), pool="lab", least=1, most=3)
    fleet.until_state(elastic, JobState.RUNNING)
    fleet.run(20)
    fleet.preempt(elastic, which=2)
    other = fleet.submit(Program(steps=100), accelerator=KIND, pool="lab")
    fleet.until_state(other, JobState.RUNNING, limit=60)
    assert len(fleet.attempt(elastic).slices) == 2
    fleet.settle(elastic, other)
    assert sizes(fleet, elastic)[-1] == 3, "and it gets the slice when that one is done"


def test_a_quota_limits_it_to_fewer_slices(make_fleet):
    fleet = make_fleet(slices_per_user=3)
    job = submit(fleet, Program(steps=100))
    fleet.settle(job)
    assert sizes(fleet, job) == [3]


def test_a_job_of_higher_priority_gets_all_of_its_slices(fleet):
    fleet.put_pool(name="lab", accelerator=KIND, largest=3, supersede=True)
    elastic = submit(fleet, Program(steps=300), pool="lab", least=1, most=3)
    fleet.until_state(elastic, JobState.RUNNING)
    urgent = fleet.submit(
        Program(steps=30), accelerator=KIND, slices=3, pool="lab", priority=5, owner="bob"
    )
    fleet.until_state(urgent, JobState.RUNNING, limit=120)
    fleet.settle(elastic, urgent)
    assert fleet.attempts(elastic) == ["superseded", "finished"]


def test_an_ended_job_gives_back_the_slices_that_it_did_not_use_yet(fleet):
    job = submit(fleet)
    fleet.until_state(job, JobState.RUNNING)
    fleet.preempt(job, 1)
    fleet.until(lambda: fleet.running_attempt(job) == 1)
    fleet.until(lambda: len(fleet.gang(job)) == 4)
    fleet.cancel(job)
    fleet.settle(job)
    assert fleet.cloud.existing() == []


def test_a_controller_that_is_replaced_while_a_job_waits_to_grow_goes_on(fleet):
    job = submit(fleet, Program(steps=600, checkpoint_every=100))
    fleet.until_state(job, JobState.RUNNING)
    fleet.preempt(job, 1)
    fleet.until(lambda: fleet.attempt(job).grows_after is not None)
    fleet.restart_controller()
    fleet.until(lambda: fleet.running_attempt(job) == 2)
    assert sizes(fleet, job) == [4, 3, 4]
    fleet.settle(job)


@pytest.mark.parametrize("seed", range(12))
def test_a_storm_of_losses_never_costs_work_beyond_the_last_checkpoint(make_fleet, seed):
    storm(make_fleet(), seed)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(100, 200))
def test_a_hundred_storms(make_fleet, seed):
    storm(make_fleet(), seed)


def storm(fleet: SimulatedFleet, seed: int) -> None:
    dice = random.Random(seed)
    fleet.cloud.boot *= dice.choice((0.3, 1, 8))
    program = Program(
        steps=dice.randint(300, 900),
        checkpoint_every=dice.choice((5, 20, 60)),
        checkpoint_on_stop=dice.random() < 0.5,
    )
    least = dice.randint(1, 3)
    job = submit(
        fleet, program, least=least, most=dice.randint(least + 1, 5), grace="15s",
        retries={"infrastructure": 500},
    )  # fmt: skip
    checkpoint = 0
    for _ in range(400):
        _hurt(fleet, dice, job)
        fleet.tick()
        newest = fleet.disk.steps.get(f"/checkpoints/{job}", 0)
        assert newest >= checkpoint, "a later attempt wrote an earlier step"
        checkpoint = newest
    fleet.cloud.stock.clear()
    fleet.settle(job, limit=7200)
    assert fleet.attempts(job)[-1] == "finished", fleet.event_log()
    assert len(fleet.disk.done[job]) == 1, "its last step was done once"
    for before, after in itertools.pairwise(fleet.store.attempts(job)):
        assert (after.start_step or 0) >= (before.checkpoint_step or 0)
        lost = (before.last_step or 0) - (before.checkpoint_step or 0)
        assert lost <= program.checkpoint_every + 1


def _hurt(fleet: SimulatedFleet, dice: random.Random, job) -> None:
    existing = set(fleet.cloud.existing())
    gang = [item for item in fleet.gang(job) if item.id in existing]
    roll = dice.random()
    if roll < 0.02 and gang:
        fleet.cloud.inject(dice.choice(gang).id, Fault.PREEMPT)
    elif roll < 0.03 and gang and gang[0].id in fleet.hosts:
        fleet.send_notice(job, 0, dice.choice((Fault.PREEMPT_NOTICE, Fault.MAINTENANCE)))
    elif roll < 0.035 and gang and gang[0].id in fleet.hosts:
        fleet.stall_host(job)
    elif roll < 0.05:
        fleet.cloud.stock[STOCK] = dice.randint(0, 5)
    elif roll < 0.06:
        fleet.cloud.stock.clear()
    elif roll < 0.065:
        fleet.restart_controller()
