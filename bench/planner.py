"""The cost of one plan: 10,000 waiting jobs of which none fits, and 1,000 gangs on 125 slices.

Times the controller's own path, from the working set in memory to the changes to be committed. The
peer's figures are of its planner alone; ours include collecting demand and supply. By default they
are earlier ones. Beside it, in one run, on the same jobs and hosts:

    uv venv --python 3.12 iris && uv pip install --python iris/bin/python marin-iris
    python bench/planner.py --iris iris/bin/python
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import subprocess
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import fleets
from reporting import Measure, report, run_benchmark
from tpufleet.controller.placement_inputs import ControllerSettings
from tpufleet.controller.reconcile import Reconciler
from tpufleet.controller.working_set import WorkingSet
from tpufleet.model.fleet.pools import CapacityRefusal, Pool
from tpufleet.model.job.jobs import Capacity, Job, JobState
from tpufleet.model.tpu import type_lookup
from tpufleet.policy.scheduling import placement
from tpufleet.stores.base import LiveState

# Pool, type, slices: 500 hosts, all taken.
POOLS = (
    ("research", "v5litepod-16", 60),
    ("sweeps", "v5litepod-8", 100),
    ("large", "v5p-16", 40),
    ("old", "v4-32", 20),
)
TYPES = ("v5litepod-4", "v5litepod-16", "v5litepod-64", "v5p-8", "v6e-8", "v4-8")
GANG_TYPE = "v5litepod-32"  # 8 hosts


def full_fleet(waiting: int, now: datetime) -> LiveState:
    """500 hosts, all in use, no capacity anywhere, and many waiting jobs."""
    rows = fleets.Rows()
    for pool, accelerator, count in POOLS:
        fleets.running(rows, count, accelerator, now, pool=pool)
    assert len(rows.hosts) == 500
    chance = random.Random(1)
    rows.jobs.extend(_waiting(number, chance, now) for number in range(waiting))
    pools = [
        Pool(name=name, provider=fleets.PROVIDER, accelerator=accelerator, largest=count)
        for name, accelerator, count in POOLS
    ]
    return rows.live(pools=pools, refusals=_out_of_stock(now))


def _waiting(number: int, chance: random.Random, now: datetime) -> Job:
    """Three in five wait for a pool; the others accept several zones, in different orders."""
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


def fleet_of_gangs(gangs: int, free: int, now: datetime) -> LiveState:
    """Jobs that each need a whole slice of 8 hosts; fewer such slices are free."""
    rows = fleets.Rows()
    rows.jobs.extend(
        fleets.waiting_job(number, GANG_TYPE, now, pool="gangs") for number in range(gangs)
    )
    rows.slices.extend(fleets.free_slice(number, GANG_TYPE, now, "gangs") for number in range(free))
    pool = Pool(name="gangs", provider=fleets.PROVIDER, accelerator=GANG_TYPE, largest=free)
    return rows.live(pools=[pool])


def reconciler(working_set: WorkingSet) -> Reconciler:
    names = itertools.count()
    settings = ControllerSettings(
        default_providers=(fleets.PROVIDER,), zones_by_provider={fleets.PROVIDER: fleets.ZONES}
    )
    return Reconciler(
        working_set, settings, lambda: f"group{next(names)}", server_url="http://127.0.0.1"
    )


def milliseconds(work: Callable[[], object]) -> float:
    gc.collect()
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1000


def plan_full_fleet(waiting: int) -> dict[str, float]:
    """One run: step new jobs, the first plan, and the next plan when nothing changed."""
    now = fleets.now()
    working_set = WorkingSet(full_fleet(waiting, now))
    planner = reconciler(working_set)
    step = milliseconds(lambda: planner.step_dirty_jobs(now))
    decisions: list[placement.PlacementDecision] = []
    cold = milliseconds(lambda: decisions.extend(planner.decide_placement(now)))
    assert len(decisions) == waiting
    assert all(isinstance(decision, placement.Wait) for decision in decisions), "none fits"
    applied = milliseconds(lambda: planner.run(now))
    assert len(working_set.take_change(()).jobs) == waiting, (
        "every job gets the reason why it waits"
    )
    working_set.placement_due = True
    again = milliseconds(lambda: planner.run(now))
    change = working_set.take_change(())
    assert not change.jobs and not change.slices, "nothing fits and nothing has changed"
    return {"step": step, "cold": cold, "applied": applied, "again": again}


def plan_gangs(gangs: int, free: int) -> dict[str, float]:
    now = fleets.now()
    working_set = WorkingSet(fleet_of_gangs(gangs, free, now))
    planner = reconciler(working_set)
    planner.step_dirty_jobs(now)  # only placement is timed
    working_set.placement_due = True
    placed = milliseconds(lambda: planner.run(now))
    started = working_set.take_change(()).attempts
    assert len(started) == free, f"{len(started)} gangs were started"
    return {"placed": placed}


def as_json(live: LiveState, placed: int) -> dict[str, Any]:
    """A fleet for another scheduler: its hosts and waiting jobs, and how many of them it starts."""
    jobs = [job for job in live.jobs if job.state is JobState.QUEUED]
    types = {each.accelerator: type_lookup.find(each.accelerator) for each in live.slices}
    types |= {job.spec.accelerator: type_lookup.find(job.spec.accelerator) for job in jobs}
    return {
        "placed": placed,
        "hosts": [
            {
                "slice": each.id,
                "index": index,
                "type": each.accelerator,
                "chips": types[each.accelerator].chips // types[each.accelerator].hosts,
                "zone": each.zone,
                "pool": each.pool,
                "free": each.job_id is None,
            }
            for each in live.slices
            for index in range(types[each.accelerator].hosts)
        ],
        "jobs": [
            {
                "id": job.id,
                "owner": job.owner,
                "type": job.spec.accelerator,
                "hosts": types[job.spec.accelerator].hosts,
                "chips": types[job.spec.accelerator].chips // types[job.spec.accelerator].hosts,
                "zones": list(job.spec.zones),
                "pool": job.spec.pool,
            }
            for job in jobs
        ],
    }


def measure_iris(python: Path, fleets: dict[str, Any], rounds: int) -> dict[str, dict[str, float]]:
    """CPU milliseconds of each part of its plan, by fleet."""
    script = Path(__file__).with_name("planner_iris.py")
    request = json.dumps({"fleets": fleets, "rounds": rounds})
    done = subprocess.run(
        [python, script], input=request, stdout=subprocess.PIPE, text=True, check=True
    )
    results = map(json.loads, done.stdout.splitlines())
    return {
        result["fleet"]: {part: result[part] for part in ("assignments", "demand")}
        for result in results
    }


def best(run: Callable[[], dict[str, float]], rounds: int) -> dict[str, float]:
    """The minimum of each figure: other programs only ever add CPU time."""
    results = [run() for _ in range(rounds)]
    return {name: min(result[name] for result in results) for name in results[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--waiting", type=int, default=10_000, help="waiting jobs")
    parser.add_argument("--gangs", type=int, default=1_000, help="jobs of one slice of 8 hosts")
    parser.add_argument("--free", type=int, default=125, help="free slices for the gangs")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions; the best one counts")
    parser.add_argument("--iris", type=Path, help="a Python with marin-iris, to run it beside ours")
    options = parser.parse_args()
    waiting = best(lambda: plan_full_fleet(options.waiting), options.rounds)
    gangs = best(lambda: plan_gangs(options.gangs, options.free), 2 * options.rounds - 1)
    iris, anchors = "Iris", {"waiting": 6500.0, "gangs": 2070.0}
    parts: dict[str, dict[str, float]] = {}
    if options.iris:
        iris, now = "Iris, in this run", fleets.now()
        peers = {
            "waiting": as_json(full_fleet(options.waiting, now), 0),
            "gangs": as_json(fleet_of_gangs(options.gangs, options.free, now), options.free),
        }
        # At least as many rounds as ours: the best of more is lower.
        parts = measure_iris(options.iris, peers, 2 * options.rounds - 1)
        anchors = {name: round(sum(each.values()), 1) for name, each in parts.items()}
    report(
        "planner",
        [
            Measure(
                name=f"{options.waiting:,} waiting, none fits: first plan",
                ours=waiting["cold"],
                unit="ms",
                goal=65,
                anchor=anchors["waiting"],
                peer=iris,
            ),
            Measure(
                name="the same, next tick when nothing changed",
                ours=waiting["again"],
                unit="ms",
                goal=65,
                anchor=anchors["waiting"],
                peer=iris,
            ),
            Measure(
                name=f"{options.gangs:,} gangs of 8 hosts on {options.free} slices",
                ours=gangs["placed"],
                unit="ms",
                goal=20,
                anchor=anchors["gangs"],
                peer=iris,
            ),
            Measure(name=f"step {options.waiting:,} new jobs", ours=waiting["step"], unit="ms"),
            Measure(name="record why each job waits", ours=waiting["applied"], unit="ms"),
        ],
        hosts=500,
        **({"iris": parts} if parts else {}),
    )


if __name__ == "__main__":
    run_benchmark(main)
