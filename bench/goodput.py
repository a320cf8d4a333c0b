"""Goodput as the server reports it, beside Google's ml-goodput-measurement on the same faulted run.

Both see the same JAX processes on simulated slices: the server what agents report, the library the
moments that the program itself writes down, and so does a stopwatch. The library notices an
interruption only when a step is made again: after a notice, when all steps are saved, it counts the
interruption as a long step, and the stopwatch is the reference. `pip install
ml-goodput-measurement` first.

With --minutes, one job suffers faults of all kinds at random for so long, and the server's figure
is beside that of the stopwatch; this needs no library.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import recovery_step
import servers
from recovery_step import Trace, inject, running_job, until
from reporting import Measure, report, run_benchmark
from tpufleet.client.fleet import FleetClient, new_job, new_job_id
from tpufleet.model.api_types import JobDetail
from tpufleet.model.job.job_file import parse_job
from tpufleet.policy.accounting import goodput

NOTICED = "preempted with notice"
STORM = [kind for kind in recovery_step.KINDS if kind not in recovery_step.SLICES]
STORM_GOAL = 90.0
KINDS = ("process crash", NOTICED, "preempted without notice")
FAULTS_AT = (33, 72, 118)  # steps; a checkpoint is written every 10


class Entries:
    """In place of Cloud Logging."""

    def __init__(self, payloads: list[dict[str, Any]]) -> None:
        self._payloads = payloads

    def read_cloud_logging_entries(self, **_: object) -> tuple[list[dict[str, Any]], None]:
        return self._payloads, None


def of_library(trace: Trace) -> float:
    """From what process 0 wrote down. The job ends with its last step."""
    from ml_goodput_measurement.src import goodput as library

    notes = sorted(trace.notes(0))
    names = {"started": "job_start_time", "imported": "tpu_init_start_time",
             "joined": "tpu_init_end_time"}  # fmt: skip
    ends = {"saving": "start", "saved": "end"}
    payloads: list[dict[str, Any]] = [
        {names[what]: at} for at, what, _, _ in notes if what in names
    ]
    payloads += [
        {"step_start_time": at, "step_count": step}
        for at, what, step, _ in notes
        if what == "begin"
    ]
    payloads += [
        {f"custom_badput_event_{ends[what]}_time": at, "custom_badput_event_type": "save"}
        for at, what, _, _ in notes
        if what in ends
    ]
    payloads.sort(key=lambda each: max(each[name] for name in each if name.endswith("_time")))
    payloads.append({"job_end_time": max(at for at, what, _, _ in notes if what == "step")})
    with tempfile.TemporaryDirectory() as cache:
        calculator = library.GoodputCalculator("run", "log", Entries(payloads), cache_dir=cache)
        return float(calculator.get_job_goodput()[0])


def of_stopwatch(trace: Trace) -> float:
    """The time of each step when it was made last, until the next one of its attempt begins."""
    notes = sorted(trace.notes(0))
    took: dict[int, float] = {}
    steps = [note for note in notes if note[1] in ("begin", "step", "saving", "saved")]
    begin = saving = 0.0
    current = saved = 0.0
    for at, what, step, attempt in steps:
        if what == "begin":
            if took and current == attempt:
                took[step - 1] = at - begin - saved
            begin, current, saved = at, attempt, 0.0
        elif what == "step":
            took[step] = at - begin
        elif what == "saving":
            saving = at
        else:
            saved = at - saving
    started = min(at for at, what, _, _ in notes if what == "started")
    return (
        100 * sum(took.values()) / (max(at for at, what, _, _ in notes if what == "step") - started)
    )


def of_server(job: JobDetail, trace: Trace) -> float:
    """In the same time: from the start of the first process to the last step."""
    notes = trace.notes(0)
    begin = datetime.fromtimestamp(min(at for at, what, _, _ in notes if what == "started"), UTC)
    end = datetime.fromtimestamp(max(at for at, what, _, _ in notes if what == "step"), UTC)
    useful = timedelta(0)
    for number, attempt in enumerate(job.attempts):
        after = job.attempts[number + 1] if number + 1 < len(job.attempts) else None
        for span in goodput.spans(attempt, end, after=after):
            held = max(min(span.end, end) - max(span.begin, begin), timedelta(0))
            useful += held * (1 - sum(span.badput.values()))
    return 100 * (useful / (end - begin))


def run(client: FleetClient, kind: str, folder: Path, accelerator: str, steps: int) -> JobDetail:
    folder.mkdir()
    document = {
        "command": [sys.executable, str(recovery_step.PROGRAM)],
        "accelerator": accelerator,
        "crash_loop": 1000,
        "retries": {"failure": 1000},
        "env": {
            "TRACE": str(folder), "STEP_SECONDS": "0.3", "SAVE_EVERY": "10", "STEPS": str(steps),
        },
    }  # fmt: skip
    job = client.submit([new_job(document, parse_job(document), new_job_id(), None)])[0].id
    trace = Trace(folder)
    for number, fault_at in enumerate(step for step in FAULTS_AT if step < steps):

        def reached(fault_at: int = fault_at, number: int = number) -> bool | None:
            made = [step for _, step, attempt in trace.steps() if attempt == number]
            return True if max(made, default=0) >= fault_at else None

        until(f"step {fault_at}", reached)
        inject(client, job, kind, trace)
    until("the end of the job", lambda: client.job(job).row.ended_at)
    return client.job(job)


def storm(options: argparse.Namespace) -> None:
    """A fault hits only a job that has made a new step since the last one."""
    dice, counts = random.Random(options.seed), Counter[str]()
    with (
        servers.state_folder() as home,
        servers.plain_server(home / "state") as server,
        FleetClient(server.url, server.token) as client,
    ):
        folder = home / "trace"
        with running_job(client, "steps", "", folder, options.accelerator, 20) as (job, trace):

            def advances() -> bool | None:
                attempts = client.job(job).attempts
                startup = attempts[-1].startup if attempts and attempts[-1].live else None
                return True if startup is not None and startup.advanced_at else None

            until("the first step", advances)
            ends = time.monotonic() + 60 * options.minutes
            while (pause := dice.expovariate(1 / options.every)) < ends - time.monotonic():
                time.sleep(pause)
                until("a new step", advances)
                kind = dice.choice(STORM)
                inject(client, job, kind, trace)
                counts[kind] += 1
                print(f"{time.strftime('%H:%M:%S')} {kind}", flush=True)
            until("a new step", advances)
            time.sleep(max(0.0, ends - time.monotonic()))
        detail = client.job(job)
        ours, stopwatch = of_server(detail, trace), of_stopwatch(trace)
    name = f"{counts.total()} faults in {options.minutes:g} minutes"
    goodput_of_storm = Measure(
        name=name, ours=ours, unit="%", goal=STORM_GOAL, more_is_better=True,
        anchor=stopwatch, peer="a stopwatch",
    )  # fmt: skip
    report("goodput_storm", [goodput_of_storm], faults=counts, seed=options.seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, action="append", help="default: all of them")
    parser.add_argument("--rounds", type=int, default=4, help="runs of each kind of fault")
    parser.add_argument("--steps", type=int, default=150, help="of each run, with 3 faults")
    parser.add_argument("--accelerator", default="v5e-8", help="type of the slice")
    parser.add_argument("--minutes", type=float, help="faults at random for so long, instead")
    parser.add_argument("--every", type=float, default=120.0, help="mean seconds between them")
    parser.add_argument("--seed", type=int, default=1, help="of these faults")
    options = parser.parse_args()
    if options.minutes is not None:
        storm(options)
        return
    measures, differences = [], []
    with (
        servers.state_folder() as home,
        servers.plain_server(home / "state") as server,
        FleetClient(server.url, server.token) as client,
    ):
        for kind in options.kind or KINDS:
            pairs = []
            for number in range(options.rounds):
                folder = home / f"{kind}-{number}".replace(" ", "-")
                job = run(client, kind, folder, options.accelerator, options.steps)
                trace = Trace(folder)
                row = (of_server(job, trace), of_stopwatch(trace), of_library(trace))
                pairs.append(row)
                print(f"{kind}: server {row[0]:.1f} %, stopwatch {row[1]:.1f} %, ", end="")
                print(f"library {row[2]:.1f} %", flush=True)
                differences.append(abs(row[0] - row[1 if kind == NOTICED else 2]))
            ours, stopwatch, theirs = (statistics.mean(each) for each in zip(*pairs, strict=True))
            peer = "a stopwatch" if kind == NOTICED else "ml-goodput-measurement"
            anchor = stopwatch if kind == NOTICED else theirs
            measures.append(Measure(name=kind, ours=ours, unit="%", anchor=anchor, peer=peer))
    worst = Measure(name="largest difference", ours=max(differences), unit="points", goal=2.0)
    report("goodput", [worst, *measures], rounds=options.rounds)


if __name__ == "__main__":
    run_benchmark(main)
