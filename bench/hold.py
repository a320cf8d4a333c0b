"""One server with 10,000 running jobs: its memory, CPU and response times.

Every job runs on its own slice, whose host sends heartbeats at the interval that the server sets;
the controller lists the cloud and checks for silent hosts and hangs, as always.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import fleets
import servers
from reporting import Measure, report, run_benchmark
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import Unreachable
from tpufleet.stores.open_store import open_store

AGENT_LOAD = Path(__file__).with_name("agent_load.py")


def prepare(url: str, jobs: int) -> None:
    now = fleets.now()
    rows = fleets.Rows()
    fleets.running(rows, jobs, "v5litepod-8", now)
    with contextlib.closing(open_store(url)) as store:
        fleets.put(rows, store, now)


def load(server: servers.Server, seconds: float, spread: float) -> subprocess.Popen[str]:
    command = [sys.executable, str(AGENT_LOAD), str(server.home), server.url]
    command += ["--seconds", str(seconds), "--spread", str(spread)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def watch(
    server: servers.Server,
    client: FleetClient,
    agents: subprocess.Popen[str],
    seconds: float,
    spread: float,
) -> dict[str, float]:
    """Once a second, until the agents are done."""
    time.sleep(spread + 0.25 * min(spread, 20.0))
    memory, pages = [server.memory_mb], []
    began, used = time.monotonic(), server.cpu_seconds
    while agents.poll() is None and time.monotonic() - began < 0.9 * seconds:
        asked = time.perf_counter()
        with contextlib.suppress(Unreachable):  # too slow an answer counts with all its seconds
            client.jobs()
        pages.append((time.perf_counter() - asked) * 1000)
        memory.append(server.memory_mb)
        time.sleep(1.0)
    cores = (server.cpu_seconds - used) / (time.monotonic() - began)
    return {"memory": max(memory), "cores": cores, "page": sorted(pages)[len(pages) // 2]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--spread",
        type=float,
        default=20.0,
        help="seconds over which the agents connect; longer than their heartbeat interval",
    )
    options = parser.parse_args()
    with servers.state_folder() as home:
        prepare(f"sqlite:///{home / 'fleet.db'}", options.jobs)
        with (
            servers.fake_cloud_server(home) as server,
            FleetClient(server.url, server.token) as client,
        ):
            agents = load(server, options.seconds, options.spread)
            try:
                seen = watch(server, client, agents, options.seconds, options.spread)
                heartbeats = json.loads(agents.communicate(timeout=120)[0].splitlines()[-1])
            finally:
                agents.kill()
            running = sum(1 for job in client.jobs(limit=20_000).jobs if job.state == "running")
            log = (home / "bench.log").read_text()
    assert running == options.jobs, f"{running} of {options.jobs} jobs still run\n{log[-2000:]}"
    assert not heartbeats["errors"], heartbeats
    report(
        "hold",
        [
            Measure(
                name="running jobs held",
                ours=running,
                unit="jobs",
                goal=10_000,
                more_is_better=True,
                anchor=2000,
                peer="SkyPilot, at most",
            ),
            Measure(name="memory of the server", ours=seen["memory"], unit="MB", goal=500),
            Measure(name="CPU of the server", ours=seen["cores"], unit="cores", goal=2),
            Measure(
                name="heartbeats received",
                ours=heartbeats["heartbeats"] / options.seconds,
                unit="heartbeats/s",
            ),
            Measure(name="heartbeat interval", ours=heartbeats["interval_s"], unit="s"),
            Measure(name="heartbeat latency, median", ours=heartbeats["median_ms"], unit="ms"),
            Measure(name="heartbeat latency, p99", ours=heartbeats["p99_ms"], unit="ms"),
            Measure(name="heartbeat latency, longest", ours=heartbeats["longest_ms"], unit="ms"),
            Measure(name="one page of jobs meanwhile, median", ours=seen["page"], unit="ms"),
        ],
        seconds=options.seconds,
    )


if __name__ == "__main__":
    run_benchmark(main)
