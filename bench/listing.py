"""Listing 12,500 jobs, end to end over HTTP: the default page, and one page with all of them."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

import httpx

import fleets
import servers
from reporting import Measure, report, run_benchmark
from tpufleet.client.fleet import FleetClient
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.attempts import Attempt, AttemptState, attempt_id
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import Job, JobState
from tpufleet.stores.base import ChangeSet
from tpufleet.stores.open_store import open_store

RUNNING, WAITING, ENDED = 500, 4_000, 8_000  # at scale 1
PEER = "SkyPilot"


def prepare(url: str, scale: float) -> int:
    """A fleet after some weeks: most jobs have ended. Returns the number of jobs."""
    now = fleets.now()
    running, waiting_count, ended_count = (round(n * scale) for n in (RUNNING, WAITING, ENDED))
    rows = fleets.Rows()
    fleets.running(rows, running, "v5litepod-16", now)
    waiting = [fleets.waiting_job(number, "v5litepod-16", now) for number in range(waiting_count)]
    ended = [
        replace(
            fleets.waiting_job(waiting_count + number, "v5litepod-8", now),
            state=JobState.SUCCEEDED,
            reason="finished",
            ended_at=now,
            end_reason=EndReason.FINISHED,
        )
        for number in range(ended_count)
    ]
    rows.attempts.extend(_ended_attempt(job, now) for job in ended)
    with contextlib.closing(open_store(url)) as store:
        fleets.put(rows, store, now)
        for start in range(0, len(waiting) + len(ended), 1000):
            store.commit(ChangeSet(new_jobs=(waiting + ended)[start : start + 1000]))
    return running + waiting_count + ended_count


def _ended_attempt(job: Job, now: datetime) -> Attempt:
    return Attempt(
        id=attempt_id(job.id, 0),
        job_id=job.id,
        number=0,
        slices=(SliceId(f"tpf-{job.id}"),),
        created_at=job.submitted_at,
        state=AttemptState.ENDED,
        running_at=job.submitted_at,
        ended_at=now,
        end_reason=EndReason.FINISHED,
        message="finished",
    )


def milliseconds(work: Callable[[], object], rounds: int = 15) -> tuple[float, float]:
    """The first time, and the median of those after it."""
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        took.append((time.perf_counter() - began) * 1000)
    return took[0], statistics.median(took[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="1: 12,500 jobs")
    options = parser.parse_args()
    with servers.state_folder() as home:
        count = prepare(f"sqlite:///{home / 'fleet.db'}", options.scale)
        with (
            servers.fake_cloud_server(home, stock=0) as server,
            FleetClient(server.url, server.token) as client,
            httpx.Client(
                base_url=server.url, headers={"Authorization": f"Bearer {server.token}"}
            ) as http,
        ):
            settle(client)
            assert len(client.jobs(limit=20_000).jobs) == count
            _, page = milliseconds(client.jobs)
            _, full = milliseconds(lambda: client.jobs(limit=20_000))
            _, raw = milliseconds(lambda: http.get("/api/v1/jobs?limit=20000"))
            size = len(http.get("/api/v1/jobs?limit=20000").content)
    report(
        "list",
        [
            Measure(
                name=f"one page with all {count:,} jobs",
                ours=full,
                unit="ms",
                goal=100,
                anchor=18_000,
                peer=PEER,
            ),
            Measure(
                name="the default page of 100",
                ours=page,
                unit="ms",
                goal=100,
                anchor=18_000,
                peer=PEER,
            ),
            Measure(name="all of them, not decoded by the client", ours=raw, unit="ms"),
            Measure(name="size of that page", ours=size / 1e6, unit="MB"),
        ],
    )


def settle(client: FleetClient) -> None:
    """Until the controller has looked at every waiting job."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        rows = client.jobs(state="queued,waiting", limit=20_000).jobs
        if not any(row.reason == "submitted" for row in rows):
            time.sleep(3)
            return
        time.sleep(0.5)


if __name__ == "__main__":
    run_benchmark(main)
