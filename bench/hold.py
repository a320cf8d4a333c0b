"""Holding 10,000 running jobs with one server: its memory, its CPU, and how quickly it answers.

Every job runs on a slice of its own and its host beats at the interval that the server asks for;
the controller lists the cloud, looks for silence and for hangs, as it always does.
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
import serving
from reports import Measure, tell
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import Unreachable
from tpufleet.stores.open_store import open_store

SPREAD = 20.0  # seconds over which the agents connect: longer than the interval of their beats
BEATS = Path(__file__).with_name("beating.py")


def prepare(url: str, jobs: int) -> None:
    now = fleets.now()
    rows = fleets.Rows()
    fleets.running(rows, jobs, "v5litepod-8", now)
    with contextlib.closing(open_store(url)) as store:
        fleets.put(rows, store, now)


def load(server: serving.Server, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, str(BEATS), str(server.home), server.url]
    command += ["--seconds", str(seconds), "--spread", str(SPREAD)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def watch(
    server: serving.Server, client: FleetClient, agents: subprocess.Popen[str], seconds: float
) -> dict[str, float]:
    """Once a second, until the agents are done."""
    time.sleep(SPREAD + 5)
    memory, pages = [server.memory_mb], []
    began, used = time.monotonic(), server.cpu_seconds
    while agents.poll() is None and time.monotonic() - began < seconds - 6:
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
    asked = parser.parse_args()
    with serving.state_folder() as home:
        prepare(f"sqlite:///{home / 'fleet.db'}", asked.jobs)
        with (
            serving.fake_cloud_server(home) as server,
            FleetClient(server.url, server.token) as client,
        ):
            agents = load(server, asked.seconds)
            try:
                seen = watch(server, client, agents, asked.seconds)
                beats = json.loads(agents.communicate(timeout=120)[0])
            finally:
                agents.kill()
            running = sum(1 for job in client.jobs(limit=20_000).jobs if job.state == "running")
            log = (home / "bench.log").read_text()
    assert running == asked.jobs, f"{running} of {asked.jobs} jobs still run\n{log[-2000:]}"
    assert not beats["errors"], beats
    tell(
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
            Measure(name="beats taken", ours=beats["beats"] / asked.seconds, unit="beats/s"),
            Measure(name="interval the server asks for", ours=beats["interval_s"], unit="s"),
            Measure(name="a beat, median", ours=beats["median_ms"], unit="ms"),
            Measure(name="a beat, p99", ours=beats["p99_ms"], unit="ms"),
            Measure(name="a beat, longest", ours=beats["longest_ms"], unit="ms"),
            Measure(name="a page of jobs meanwhile, median", ours=seen["page"], unit="ms"),
        ],
        seconds=asked.seconds,
    )


if __name__ == "__main__":
    main()
