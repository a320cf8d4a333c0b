"""Everything at once, from a seed: faults, restarts, outages, stockouts. All jobs finish once."""

from __future__ import annotations

import contextlib
import random
from datetime import timedelta

import pytest

from tests import postgres
from tests.journeys.simulated_fleet import SimulatedFleet
from tests.journeys.simulated_hosts import Program, failure
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import JobState
from tpufleet.providers.base import Fault
from tpufleet.stores.open_store import open_store

TYPES = ("v5litepod-4", "v5litepod-8", "v5litepod-16")


def storm(fleet: SimulatedFleet, seed: int, jobs: int, seconds: int) -> None:
    dice = random.Random(seed)
    fleet.cloud.boot = timedelta(seconds=dice.choice((3, 10, 25)))
    fleet.cloud.deletion = timedelta(seconds=dice.choice((0, 3, 9)))
    fleet.put_pool(name="lab", accelerator="v5litepod-8", largest=3, smallest=1, supersede=True)
    submitted = [_submit(fleet, dice) for _ in range(jobs)]
    for _ in range(seconds):
        _hurt(fleet, dice, submitted)
        fleet.tick()
    fleet.reachable = True
    fleet.unreachable_hosts.clear()
    fleet.cloud.stock.clear()
    fleet.settle(*submitted, limit=7200)
    for job in submitted:
        stored = fleet.job(job)
        assert stored.state is JobState.SUCCEEDED, f"{job}: {stored.reason}\n{fleet.event_log()}"
        assert fleet.attempts(job).count("finished") == 1


def _submit(fleet: SimulatedFleet, dice: random.Random):
    flaky = dice.random() < 0.3

    def fails(attempt, rank, step):
        if flaky and attempt % 2 == 0 and rank == 0 and step == 17 + 10 * attempt:
            return failure(fleet.now(), evidence=EndReason.CONNECTION_LOST)
        return None

    program = Program(
        steps=dice.randint(20, 120),
        checkpoint_every=dice.choice((5, 10)),
        setup=timedelta(seconds=dice.randint(0, 5)),
        stops_after=timedelta(seconds=dice.randint(0, 8)),
        fails=fails,
    )
    common = {
        "grace": "15s",
        "crash_loop": 50,
        "priority": dice.randint(0, 2),
        "retries": {"infrastructure": 500},
        "owner": dice.choice(("ann", "bob")),
    }
    if dice.random() < 0.4:
        return fleet.submit(
            program, accelerator="v5e-8", pool="lab", slices=dice.choice((1, 1, 2)), **common
        )
    return fleet.submit(
        program, accelerator=dice.choice(TYPES), slices=dice.choice((1, 1, 2)), **common
    )


def _hurt(fleet: SimulatedFleet, dice: random.Random, jobs) -> None:
    job = dice.choice(jobs)
    existing = set(fleet.cloud.existing())
    gang = [item for item in fleet.gang(job) if item.id in existing]
    roll = dice.random()
    if roll < 0.02 and gang:
        fleet.cloud.inject(dice.choice(gang).id, Fault.PREEMPT)
    elif roll < 0.035 and gang and gang[0].id in fleet.hosts:
        fleet.send_notice(job, 0, dice.choice((Fault.PREEMPT_NOTICE, Fault.MAINTENANCE)))
    elif roll < 0.045 and fleet.hosts:
        dice.choice(fleet.all_hosts()).stalled = True
    elif roll < 0.055 and gang:
        fleet.cloud.vanish(dice.choice(gang).id)
    elif roll < 0.065 and gang and gang[0].id in fleet.hosts:
        fleet.restart_agent(job, 0)
    elif roll < 0.075:
        fleet.restart_controller()
        fleet.clock.advance(timedelta(seconds=16))
    elif roll < 0.08:
        fleet.reachable = not fleet.reachable
    elif roll < 0.10:
        fleet.cloud.stock[("zone-a", dice.choice(TYPES))] = dice.randint(0, 3)
    elif roll < 0.11:
        fleet.cloud.stock.clear()


@pytest.mark.parametrize("seed", range(6))
def test_all_jobs_finish_once_despite_random_faults(fleet, seed):
    storm(fleet, seed, jobs=6, seconds=300)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_all_jobs_finish_once_despite_random_faults_on_a_database(make_fleet, tmp_path, kind):
    url = f"sqlite:///{tmp_path}/fleet.db" if kind == "sqlite" else postgres.fresh_url()
    with contextlib.closing(open_store(url)) as store:
        storm(make_fleet(store), seed=41, jobs=4, seconds=120)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(100, 300))
def test_all_jobs_finish_once_for_many_seeds(fleet, seed):
    storm(fleet, seed, jobs=12, seconds=900)
