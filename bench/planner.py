"""What one plan costs: 10,000 waiting jobs of which none fits, and 1,000 gangs on 125 slices.

It times the controller's own path, from the world in memory to the changes to be written. The
peer's figures are of its planner alone, from the design; ours include the needs and the supply.
"""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Callable
from datetime import datetime, timedelta

import fleets
from reports import Measure, tell
from tpufleet.controller.reconcile import ControllerSettings, Reconciler
from tpufleet.controller.working_set import WorkingSet
from tpufleet.model.jobs import Capacity, Job
from tpufleet.model.pools import CapacityRefusal, Pool
from tpufleet.policy import placement

# Pool, type, slices: 500 hosts, all taken.
POOLS = (
    ("research", "v5litepod-16", 60),
    ("sweeps", "v5litepod-8", 100),
    ("large", "v5p-16", 40),
    ("old", "v4-32", 20),
)
TYPES = ("v5litepod-4", "v5litepod-16", "v5litepod-64", "v5p-8", "v6e-8", "v4-8")
WAITING = 10_000
GANGS, GANG_SLICES, GANG_TYPE = 1_000, 125, "v5litepod-32"  # 8 hosts each


def fleet_without_room(now: datetime) -> WorkingSet:
    """500 hosts, all taken, no stock anywhere, and 10,000 jobs that wait."""
    rows = fleets.Rows()
    for pool, accelerator, count in POOLS:
        fleets.running(rows, count, accelerator, now, pool=pool)
    assert len(rows.hosts) == 500
    chance = random.Random(1)
    rows.jobs.extend(_waiting(number, chance, now) for number in range(WAITING))
    pools = [
        Pool(name=name, provider=fleets.PROVIDER, accelerator=accelerator, largest=count)
        for name, accelerator, count in POOLS
    ]
    return WorkingSet(rows.live(pools=pools, refusals=_out_of_stock(now)))


def _waiting(number: int, chance: random.Random, now: datetime) -> Job:
    """Three in five wait for a pool; the others would go anywhere, in an order of their own."""
    if number % 5 < 3:
        pool, accelerator, _ = POOLS[number % len(POOLS)]
        timeout = timedelta(hours=number % 48 + 1) if number % 3 else None
        return fleets.waiting_job(number, accelerator, now, pool=pool, timeout=timeout)
    zones = tuple(chance.sample(fleets.ZONES, chance.randint(1, 5)))
    kinds = (Capacity.SPOT,) if number % 2 else (Capacity.SPOT, Capacity.ON_DEMAND)
    return fleets.waiting_job(number, TYPES[number % len(TYPES)], now, zones=zones, capacity=kinds)


def _out_of_stock(now: datetime) -> list[CapacityRefusal]:
    return [
        CapacityRefusal(
            provider=fleets.PROVIDER,
            zone=zone,
            accelerator=accelerator,
            capacity=kind,
            message="no more capacity in the zone",
            refused_at=now,
            until=now + timedelta(minutes=10),
        )
        for zone, accelerator, kind in itertools.product(
            fleets.ZONES, TYPES, (Capacity.SPOT, Capacity.ON_DEMAND)
        )
    ]


def fleet_of_gangs(now: datetime) -> WorkingSet:
    """1,000 jobs, each of which needs a whole slice of 8 hosts; 125 such slices are free."""
    rows = fleets.Rows()
    rows.jobs.extend(
        fleets.waiting_job(number, GANG_TYPE, now, pool="gangs") for number in range(GANGS)
    )
    rows.slices.extend(
        fleets.free_slice(number, GANG_TYPE, now, "gangs") for number in range(GANG_SLICES)
    )
    pool = Pool(name="gangs", provider=fleets.PROVIDER, accelerator=GANG_TYPE, largest=GANG_SLICES)
    return WorkingSet(rows.live(pools=[pool]))


def reconciler(world: WorkingSet) -> Reconciler:
    names = itertools.count()
    settings = ControllerSettings(
        default_providers=(fleets.PROVIDER,), zones_by_provider={fleets.PROVIDER: fleets.ZONES}
    )
    return Reconciler(world, settings, lambda: f"order{next(names)}")


def milliseconds(work: Callable[[], object]) -> float:
    gc.collect()
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1000


def plan_without_room() -> dict[str, float]:
    """One run: the first look at new jobs, the first plan, and the next when nothing changed."""
    now = fleets.now()
    world = fleet_without_room(now)
    controller = reconciler(world)
    step = milliseconds(lambda: controller._step_dirty(now))
    decisions: list[placement.PlacementDecision] = []
    cold = milliseconds(lambda: decisions.extend(decide(controller, world, now)))
    assert len(decisions) == WAITING
    assert all(isinstance(decision, placement.Wait) for decision in decisions), "none fits"
    told = milliseconds(lambda: controller.run(now))
    assert len(world.take_change(()).jobs) == WAITING, "every job is told why it waits"
    world.placement_due = True
    again = milliseconds(lambda: controller.run(now))
    change = world.take_change(())
    assert not change.jobs and not change.slices, "nothing fits and nothing has changed"
    return {"step": step, "cold": cold, "told": told, "again": again}


def decide(
    controller: Reconciler, world: WorkingSet, now: datetime
) -> list[placement.PlacementDecision]:
    """The plan alone: needs, supply and a decision for each, carried out by nobody."""
    needs = world.needs()
    pools = {need.job.spec.pool for need in needs if need.job.spec.pool}
    return placement.place(needs, controller._supply(pools), world.refusals, now)


def plan_gangs() -> dict[str, float]:
    now = fleets.now()
    world = fleet_of_gangs(now)
    controller = reconciler(world)
    controller._step_dirty(now)  # the jobs have been looked at; now they are to be placed
    world.placement_due = True
    placed = milliseconds(lambda: controller.run(now))
    started = world.take_change(()).attempts
    assert len(started) == GANG_SLICES, f"{len(started)} gangs were started"
    return {"placed": placed}


def best(run: Callable[[], dict[str, float]], rounds: int) -> dict[str, float]:
    """Of each figure the smallest: other programs only ever add to CPU time."""
    results = [run() for _ in range(rounds)]
    return {name: min(result[name] for result in results) for name in results[0]}


def main() -> None:
    waiting = best(plan_without_room, 5)
    gangs = best(plan_gangs, 9)
    iris = "Iris"
    tell(
        "planner",
        [
            Measure(
                name="10,000 waiting, none fits: first plan",
                ours=waiting["cold"],
                unit="ms",
                goal=65,
                anchor=6500,
                peer=iris,
            ),
            Measure(
                name="the same, whole tick when nothing changed",
                ours=waiting["again"],
                unit="ms",
                goal=65,
                anchor=6500,
                peer=iris,
            ),
            Measure(
                name="1,000 gangs of 8 hosts on 125 slices, 125 started",
                ours=gangs["placed"],
                unit="ms",
                goal=20,
                anchor=2070,
                peer=iris,
            ),
            Measure(name="first look at 10,000 new jobs", ours=waiting["step"], unit="ms"),
            Measure(name="tell each of 10,000 why it waits", ours=waiting["told"], unit="ms"),
        ],
        hosts=500,
    )


if __name__ == "__main__":
    main()
