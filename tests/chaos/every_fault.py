"""Every fault at random, for as long as you like.

python -m tests.chaos.every_fault --minutes 60 --seed 1

Runs rounds, alternately on Postgres with two servers over HTTPS and on SQLite with one. After each,
nothing that was acknowledged may be lost, nothing may have been done twice, and nothing may be
left. Prints how often each fault was injected, and fails when many found nothing to hit. A run of
half an hour or more begins with what takes long.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.chaos.burst import Burst
from tests.chaos.chaos_run import MISSED, ChaosJob, ChaosRun
from tests.chaos.faults import ALL_FAULTS
from tests.chaos.machine import open_machine
from tests.chaos.machine_faults import (
    MACHINE_FAULTS,
    database_dies,
    network_is_partitioned_beyond_the_lease_of_agents,
)
from tests.chaos.own_postgres import OwnPostgres

EVERY_FAULT = (*ALL_FAULTS, *MACHINE_FAULTS)
LONG_FAULTS = [network_is_partitioned_beyond_the_lease_of_agents]
ROUNDS_PER_LONG_FAULT = 20
LONG_RUN = 30.0  # minutes
MOST_MISSED = 0.1  # of all faults
ENDED_WITHIN = 400.0  # seconds from the last fault: silence, backoffs, and a busy machine


def run_round(
    seed: int,
    folder: Path,
    postgres: OwnPostgres | None,
    faults: Sequence[Callable[[ChaosRun], str]],
    counts: Counter[str],
    *,
    burst: int = 20,
    steps: int = 60,
    longest_pause: float = float("inf"),
) -> None:
    """The faults, in this order, while jobs run. Adds what was done to the counts."""
    with open_machine(folder, postgres=postgres) as (machine, store):
        run = ChaosRun(seed, folder, store, machine.servers, machine)
        run.counts = counts
        run.longest_pause = longest_pause
        run.patience = ENDED_WITHIN
        small = Burst(run, burst)
        works = [
            ChaosJob(id=f"steps-{seed}", steps=steps),
            ChaosJob(id=f"bomb-{seed}", steps=steps, fork_bomb=True, delay=0.5),
            ChaosJob(id=f"units-{seed}", accelerator="v4-16", units=steps, step_seconds=0.5),
        ]
        # While it runs, every fault has a host to hit.
        lasting = ChaosJob(id=f"lasting-{seed}", steps=100_000, cancelled=True)
        run.submit(*works, lasting)
        for fault in faults:
            run.pause(0.2, 4.0)
            run.inject(fault)
        machine.clock.set("servers", 0)
        machine.clock.set("hosts", 0)
        run.cancel(lasting)
        small.finish(ENDED_WITHIN)
        run.finish(ENDED_WITHIN)
        counts["(acknowledged jobs)"] += len(works) + 1 + len(small.acknowledged)
        counts["(jobs with a fork bomb)"] += 1


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--faults", type=int, default=8, help="per round")
    parser.add_argument("--store", choices=("postgres", "sqlite"), help="default: both in turn")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what it started
    totals: Counter[str] = Counter()
    failed = 0
    postgres = OwnPostgres() if options.store != "sqlite" else None
    deadline = time.monotonic() + 60 * options.minutes
    seed = options.seed
    try:
        while time.monotonic() < deadline:
            with_postgres = options.store == "postgres" or (not options.store and seed % 2 == 0)
            chosen = choose(seed, options.faults, with_postgres)
            chosen += long_faults(options.minutes, seed - options.seed)
            failed += not _try_round(seed, postgres if with_postgres else None, chosen, totals)
            seed += 1
    finally:
        if postgres is not None:
            postgres.cleanup()
    print(f"{seed - options.seed} rounds, {failed} failed")
    failed += missed_too_often(totals)
    print(f"{totals[MISSED]} of {blows(totals)} faults found nothing to hit")
    for name, count in sorted(totals.items()):
        print(f"{count:6d}  {name}")
    return 1 if failed else 0


def choose(seed: int, count: int, with_postgres: bool) -> list[Callable[[ChaosRun], str]]:
    """Faults that this store can have."""
    possible = [each for each in EVERY_FAULT if with_postgres or each is not database_dies]
    return random.Random(seed).choices(possible, k=count)


def long_faults(minutes: float, rounds: int) -> Sequence[Callable[[ChaosRun], str]]:
    """What comes last in the next round, after so many."""
    return LONG_FAULTS if minutes >= LONG_RUN and rounds % ROUNDS_PER_LONG_FAULT == 0 else ()


def blows(counts: Counter[str]) -> int:
    return counts[MISSED] + sum(counts[each.__name__] for each in (*EVERY_FAULT, *LONG_FAULTS))


def missed_too_often(counts: Counter[str]) -> bool:
    return counts[MISSED] > MOST_MISSED * blows(counts)


def _try_round(
    seed: int,
    postgres: OwnPostgres | None,
    chosen: Sequence[Callable[[ChaosRun], str]],
    totals: Counter[str],
) -> bool:
    names = ", ".join(fault.__name__ for fault in chosen)
    store = "sqlite" if postgres is None else "postgres"
    print(f"{time.strftime('%H:%M:%S')} seed {seed} on {store}: {names}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as folder:
        try:
            run_round(seed, Path(folder), postgres, chosen, totals)
        except Exception:
            traceback.print_exc(file=sys.stdout)
            return False
    print(f"    in order after {time.monotonic() - began:.0f} s", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
