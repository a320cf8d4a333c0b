"""From a fault to the next step beyond the last completed one, on simulated slices.

A real server with real agents runs real JAX processes. Each round waits until the job has made
steps, injects one fault, and waits for the step after the last one. Its parts are told apart by
what the server recorded and by what the processes wrote down.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import servers
from reporting import Measure, report, run_benchmark
from tpufleet.client.fleet import FleetClient, new_job, new_job_id
from tpufleet.model.api_types import JobDetail
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.job.job_file import parse_job
from tpufleet.model.tpu import type_lookup
from tpufleet.model.values.records import replace

T = TypeVar("T")
PROGRAM = Path(__file__).with_name("recovery_step_program.py")
EXAMPLES = Path(__file__).parents[1] / "examples"
PROGRAMS = {
    "steps": (),
    "flax": (str(EXAMPLES / "flax/train.py"),),
    "llama": (str(EXAMPLES / "llama/pretrain.py"),),
}
# Of examples: without end, and rows for the chips of two slices.
EXAMPLE_ARGUMENTS = ("steps=1000000", "every=10", "pause=0.2", "batch=32")
PATIENCE = 900.0
HUNG_AFTER = 30.0  # longer than the import of JAX in all processes at once
EXAMPLE_HUNG_AFTER = 180.0  # longer than compiling in all processes at once
BY_PROGRAM = {"process crash": "crash", "out of memory": "memory", "hang": "hang"}
ELASTIC = "one slice of four lost"
BY_PROVIDER = {
    "host killed": "kill-host",
    "preempted with notice": "preempt-notice",
    "preempted without notice": "preempt",
    "one slice of two lost": "preempt",
    ELASTIC: "preempt",
}
SLICES = {"one slice of two lost": 2, ELASTIC: {"min": 2, "max": 4}}
KINDS = (*BY_PROGRAM, *BY_PROVIDER)
# Its batch and its pipeline are those of one number of processes.
NOT_ELASTIC = {("flax", ELASTIC)}
# Seconds; of what is no longer than the fault that it follows.
GOALS = {
    "process crash": 3.0,
    "preempted with notice": 3.0,
    "preempted without notice": 4.0,
    "one slice of two lost": 5.0,
    ELASTIC: 10.0,
}
EXAMPLE_GOAL = 15.0
# Of nearly all faults: beyond what restoring and compiling cost, which are not ours.
WORST_GOALS = {("steps", "process crash"): 3.0}
OTHERS = ("total", "recorded", "compiled")
PARTS = ("detect", "stop", "slice", "start", "import", "join", "restore", "compile", "redo")


class Trace:
    """What the processes of the job wrote down: (moment, what, step, attempt)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def notes(self, process: int | None = None) -> list[tuple[float, str, int, int]]:
        names = "*.log" if process is None else f"{process}.log"
        lines = [line for path in self.folder.glob(names) for line in path.read_text().splitlines()]
        split = [line.split() for line in lines]
        return [(float(at), what, int(step), int(number)) for at, what, step, number in split]

    def steps(self) -> list[tuple[float, int, int]]:
        return [(at, step, number) for at, what, step, number in self.notes(0) if what == "step"]

    def fault(self) -> float | None:
        return max((at for at, what, _, _ in self.notes() if what == "fault"), default=None)


def until(what: str, condition: Callable[[], T | None]) -> T:
    deadline = time.monotonic() + PATIENCE
    while (result := condition()) is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not reached in {PATIENCE:g} s")
        time.sleep(0.02)
    return result


@contextlib.contextmanager
def running_job(
    client: FleetClient, program: str, kind: str, folder: Path, accelerator: str, grace: int
) -> Iterator[tuple[str, Trace]]:
    """An elastic one in a pool of its own, which has no other slice once it has lost one."""
    folder.mkdir()
    example = PROGRAMS[program]
    pool = {}
    if kind == ELASTIC:
        name = type_lookup.find(accelerator).name
        client.put_pool(Pool(name=folder.name, provider="local", accelerator=name, largest=4))
        pool = {"pool": folder.name}
    document = pool | {
        "command": [
            sys.executable,
            str(PROGRAM),
            *example,
            *(EXAMPLE_ARGUMENTS if example else ()),
        ],
        "accelerator": accelerator,
        "slices": SLICES.get(kind, 1),
        "grace": f"{grace}s",
        "hung_after": f"{EXAMPLE_HUNG_AFTER if example else HUNG_AFTER:g}s",
        "crash_loop": 1000,
        "retries": {"failure": 1000, "memory": 1000, "hang": 1000},
        "env": {"TRACE": str(folder), "STEP_SECONDS": "0.2", "SAVE_EVERY": "10"},
    }
    job = client.submit([new_job(document, parse_job(document), new_job_id(), None)])[0].id
    try:
        yield job, Trace(folder)
    finally:
        client.cancel(job)
        until("the end of the job", lambda: client.job(job).row.ended_at)
        if kind == ELASTIC:
            client.delete_pool(folder.name)


def inject(client: FleetClient, job: str, kind: str, trace: Trace) -> float:
    if kind in BY_PROGRAM:
        before = trace.fault()
        (trace.folder / "fault.new").write_text(BY_PROGRAM[kind])
        (trace.folder / "fault.new").replace(trace.folder / "fault")
        return until("the fault", lambda: at if (at := trace.fault()) != before else None)
    slices = client.job(job).attempts[-1].slices
    if kind == ELASTIC:
        client.put_pool(replace(client.pool(trace.folder.name), largest=3))
    at = time.time()
    host = 0 if kind == "host killed" else None
    client.inject_fault(slices[-1], BY_PROVIDER[kind], host)
    return at


def one_round(client: FleetClient, job: str, kind: str, trace: Trace) -> dict[str, float]:
    """Seconds, by part; `total` is from the fault to the next step."""
    number = client.job(job).attempts[-1].number

    def has_run() -> bool | None:
        """A few steps beyond a checkpoint, not always as many."""
        done = [step for _, step, attempt in trace.steps() if attempt == number]
        return True if len(done) >= 13 else None

    until("steps of the job", has_run)
    at = inject(client, job, kind, trace)

    def next_step() -> tuple[float, int] | None:
        steps = trace.steps()
        last = max(step for _, step, attempt in steps if attempt == number)
        later = [
            (when, attempt) for when, step, attempt in steps if attempt > number and step > last
        ]
        return min(later) if later else None

    ended, attempt = until(f"the step after {kind}", next_step)
    until(
        "the record of it",
        lambda: any(each.attempt == attempt for each in client.job(job).recoveries) or None,
    )
    return parts(client.job(job), trace, number, attempt, at, ended)


def parts(
    job: JobDetail, trace: Trace, before: int, after: int, fault: float, ended: float
) -> dict[str, float]:
    last, new = job.attempts[before], job.attempts[after]
    assert last.stopping_at and last.ended_at

    def when(what: str) -> float:
        """When the slowest process got there."""
        return max(at for at, name, _, attempt in trace.notes() if (name, attempt) == (what, after))

    recovery = next(each for each in job.recoveries if each.attempt == after)
    own = {"total": ended - fault, "recorded": recovery.seconds}
    if not any(what == "joined" for _, what, _, _ in trace.notes()):
        return recovery.parts | own  # an example: as the server says
    first = min(at for at, _, attempt in trace.steps() if attempt == after)
    moments = [
        fault,
        last.stopping_at.timestamp(),
        last.ended_at.timestamp(),
        new.created_at.timestamp(),
        *(when(what) for what in ("started", "imported", "joined", "restored")),
        first,
        ended,
    ]
    programs = max(
        count for _, what, count, attempt in trace.notes() if (what, attempt) == ("compiled", after)
    )
    taken = [later - earlier for earlier, later in itertools.pairwise(moments)]
    return dict(zip(PARTS, taken, strict=True)) | own | {"compiled": float(programs)}


def measure(
    cases: list[tuple[str, str]], rounds: int, accelerator: str | None, grace: int
) -> dict[tuple[str, str], list[dict]]:
    taken: dict[tuple[str, str], list[dict]] = {}
    with (
        servers.state_folder() as home,
        servers.plain_server(home / "state") as server,
        FleetClient(server.url, server.token) as client,
    ):
        for number, (program, kind) in enumerate(cases):
            kind_of_slice = accelerator or ("v5e-4" if kind == ELASTIC else "v5e-16")
            rows = []
            # An elastic job takes the lost slice back only later, so each round has one of its own.
            rounds_each = 1 if kind == ELASTIC else rounds
            for each in range(rounds // rounds_each):
                folder = home / f"trace-{number}-{each}"
                with running_job(client, program, kind, folder, kind_of_slice, grace) as running:
                    until("an attempt", lambda job=running[0]: client.job(job).attempts or None)
                    rows += [
                        one_round(client, running[0], kind, running[1]) for _ in range(rounds_each)
                    ]
            taken[program, kind] = rows
            print_parts(f"{program}, {kind}", rows)
    return taken


def goal_of(program: str, kind: str) -> float | None:
    """Of the median."""
    if program == "steps":
        return GOALS.get(kind)
    return EXAMPLE_GOAL + (EXAMPLE_HUNG_AFTER if kind == "hang" else 0.0)


def measures_of(program: str, kind: str, rounds: list[dict[str, float]]) -> list[Measure]:
    name = f"{program}, {kind}"
    median = statistics.median(each["total"] for each in rounds)
    measures = [Measure(name=f"{name}, median", ours=median, unit="s", goal=goal_of(program, kind))]
    own = [each["total"] - each.get("restore", 0) - each.get("compile", 0) for each in rounds]
    for what, seconds, goal in (
        ("p99", [each["total"] for each in rounds], None),
        ("p99 beyond restore and compile", own, WORST_GOALS.get((program, kind))),
    ):
        worst = sorted(seconds)[len(seconds) * 99 // 100]
        measures.append(Measure(name=f"{name}, {what}", ours=worst, unit="s", goal=goal))
    return measures


def print_parts(name: str, rounds: list[dict[str, float]]) -> None:
    parts = [part for part in dict.fromkeys(itertools.chain(*rounds)) if part not in OTHERS]
    medians = {part: statistics.median(each.get(part, 0.0) for each in rounds) for part in parts}
    line = ", ".join(f"{part} {seconds:.2f}" for part, seconds in medians.items())
    compiled = max((each["compiled"] for each in rounds if "compiled" in each), default=None)
    counted = "" if compiled is None else f"at most {compiled:g} programs compiled; "
    # How far the server's own figure, in `tpu why`, is from this stopwatch.
    errors = [abs(each["recorded"] - each["total"]) for each in rounds]
    print(
        f"{name}: {line}; {counted}`tpu why` is off by "
        f"{statistics.median(errors):.2f} s, at most {max(errors):.2f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--program",
        choices=PROGRAMS,
        action="append",
        help="default: steps, which does little else",
    )
    parser.add_argument("--kind", choices=KINDS, action="append", help="default: all of them")
    parser.add_argument("--rounds", type=int, default=10, help="faults of each kind")
    parser.add_argument(
        "--accelerator", help="type of each slice; default: v5e-16, or v5e-4 where there are four"
    )
    parser.add_argument("--grace", type=int, default=20, help="of the job, in seconds")
    options = parser.parse_args()
    cases = list(itertools.product(options.program or ["steps"], options.kind or KINDS))
    cases = [each for each in cases if each not in NOT_ELASTIC]
    if not cases:
        parser.error("flax cannot run on another number of slices")
    taken = measure(cases, options.rounds, options.accelerator, options.grace)
    measures = [
        measure for (program, kind), rounds in taken.items()
        for measure in measures_of(program, kind, rounds)
    ]  # fmt: skip
    told = {f"{program}, {kind}": rounds for (program, kind), rounds in taken.items()}
    report("recovery_step", measures, rounds=options.rounds, grace_s=options.grace, parts=told)


if __name__ == "__main__":
    run_benchmark(main)
