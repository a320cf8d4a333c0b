"""Listing 12,500 jobs, end to end over HTTP: the default page, and one page with all of them."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

import httpx

import fleets
import serving
from reports import Measure, tell
from tpufleet.client.fleet import FleetClient
from tpufleet.model.attempts import Attempt, AttemptState, attempt_id
from tpufleet.model.end_reasons import EndReason
from tpufleet.model.jobs import Job, JobState
from tpufleet.model.slices import SliceId
from tpufleet.stores.base import ChangeSet
from tpufleet.stores.open_store import open_store

RUNNING, WAITING, ENDED = 500, 4_000, 8_000
JOBS = RUNNING + WAITING + ENDED
PEER = "SkyPilot"


def prepare(url: str) -> None:
    """What a fleet looks like after some weeks: most jobs have ended."""
    now = fleets.now()
    rows = fleets.Rows()
    fleets.running(rows, RUNNING, "v5litepod-16", now)
    waiting = [fleets.waiting_job(number, "v5litepod-16", now) for number in range(WAITING)]
    ended = [
        replace(
            fleets.waiting_job(WAITING + number, "v5litepod-8", now),
            state=JobState.SUCCEEDED,
            reason="finished",
            ended_at=now,
            end_reason=EndReason.FINISHED,
        )
        for number in range(ENDED)
    ]
    rows.attempts.extend(_ended_attempt(job, now) for job in ended)
    with contextlib.closing(open_store(url)) as store:
        fleets.put(rows, store, now)
        for start in range(0, len(waiting) + len(ended), 1000):
            store.commit(ChangeSet(new_jobs=(waiting + ended)[start : start + 1000]))


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
    with serving.state_folder() as home:
        prepare(f"sqlite:///{home / 'fleet.db'}")
        with (
            serving.fake_cloud_server(home, stock=0) as server,
            FleetClient(server.url, server.token) as client,
            httpx.Client(
                base_url=server.url, headers={"Authorization": f"Bearer {server.token}"}
            ) as http,
        ):
            _settle(client)
            assert len(client.jobs(limit=20_000).jobs) == JOBS
            _, page = milliseconds(client.jobs)
            _, full = milliseconds(lambda: client.jobs(limit=20_000))
            _, raw = milliseconds(lambda: http.get("/api/v1/jobs?limit=20000"))
            size = len(http.get("/api/v1/jobs?limit=20000").content)
    tell(
        "list",
        [
            Measure(
                name=f"one page with all {JOBS:,} jobs",
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


def _settle(client: FleetClient) -> None:
    """Until the controller has looked at every waiting job."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        rows = client.jobs(state="queued,waiting", limit=20_000).jobs
        if not any(row.reason == "submitted" for row in rows):
            time.sleep(3)
            return
        time.sleep(0.5)


if __name__ == "__main__":
    main()
