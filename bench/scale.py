"""A large fleet in one run: heartbeats, a long history, submissions, a dead host, a failover.

Real servers and databases: SQLite, one server on Postgres, and three, with 10,000 hosts for each
server. Agents send the heartbeats of all hosts; meanwhile jobs are submitted, listed and searched.
Then one host falls silent, and at last the acting server is killed.
Only the cloud is in memory, and it has no capacity left, so that submitted jobs wait. Where there
are four cores or more, servers and database have two to themselves, and the load has the others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import databases
import fleets
import servers
from reporting import Measure, report, run_benchmark
from tpufleet.client.fleet import FleetClient, new_job_id
from tpufleet.errors import FleetError
from tpufleet.model.api_types import NewJob
from tpufleet.model.job import job_file
from tpufleet.policy.recovery import liveness
from tpufleet.stores.open_store import open_store

AGENT_LOAD = Path(__file__).with_name("agent_load.py")
HOSTS_PER_JOB = 8
ACCELERATOR = "v5litepod-32"
SETUPS = {"sqlite": 1, "postgres-1": 1, "postgres-3": 3}  # servers
SEARCHES = {
    "the default page": {},
    "one user": {"owner": fleets.OWNERS[3]},
    "state:failed": {"query": "state:failed"},
    "text of one job": {"query": "train-c0000-0777"},
    "text of none": {"query": "no-such-text"},
    "owner, state and type": {"query": f"owner:{fleets.OWNERS[3]} state:succeeded type:v4-64"},
    "a tag": {"query": "tag:sweep-7"},
    "a metric": {"query": "step>990 state:failed"},
    "the oldest page": {"before": "ended-c0000-0500"},
}


@dataclass
class Figures:
    """Of one setup."""

    submits: list[float] = field(default_factory=list)  # ms
    searches: dict[str, list[float]] = field(default_factory=dict)  # ms
    memory: float = 0.0  # MB of the largest server
    cores: float = 0.0  # of servers and database together
    heartbeats: list[float] = field(default_factory=list)  # ms
    per_second: float = 0.0
    interval: float = 0.0
    reconnects: int = 0
    errors: list[str] = field(default_factory=list)
    load_cores: float = 0.0
    noticed: float = 0.0  # seconds until the job of a dead host no longer runs
    failover: float = 0.0  # seconds until a job that was submitted after the kill is handled
    lost: int = 0
    submitted: list[str] = field(default_factory=list)
    machine_load: float = 0.0


@contextlib.contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """What is started here runs on these cores only; none: on all."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def prepare(url: str, jobs: int, ended: int) -> None:
    now = fleets.now()
    rows = fleets.Rows()
    fleets.running(rows, jobs, ACCELERATOR, now)
    with contextlib.closing(open_store(url)) as store:
        fleets.put(rows, store, now)
    if ended:
        databases.add_ended_jobs(url, ended)


@contextlib.contextmanager
def started(count: int, url: str | None, folder: Path) -> Iterator[list[servers.Server]]:
    """Several servers share the secret and the store; each has a state folder."""
    secret = secrets.token_hex(32)
    with contextlib.ExitStack() as stack:
        running = []
        for number in range(count):
            home = folder if url is None else folder / f"server-{number}"
            home.mkdir(mode=0o700, exist_ok=True)
            (home / "secret").touch(mode=0o600)
            (home / "secret").write_text(secret + "\n")
            server = servers.fake_cloud_server(home, stock=0, store=url)
            running.append(stack.enter_context(server))
        yield running


@contextlib.contextmanager
def load(
    running: list[servers.Server], url: str | None, options: argparse.Namespace, spread: float
) -> Iterator[list[subprocess.Popen[str]]]:
    urls = ",".join(server.url for server in running)
    command = [sys.executable, str(AGENT_LOAD), str(running[0].home), urls, "--times", "--goes-on"]
    command += ["--seconds", str(options.seconds), "--spread", str(spread)]
    command += [] if url is None else ["--store", url]
    parts = options.load_processes
    agents = [
        subprocess.Popen(
            [*command, "--part", str(part), "--parts", str(parts)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for part in range(parts)
    ]
    try:
        for each in agents:
            assert each.stdout is not None and each.stdout.readline().strip() == "ready"
        yield agents
    finally:
        for each in agents:
            each.kill()
            each.communicate()


def submit_one(client: FleetClient, figures: Figures, number: int) -> str:
    job = NewJob(id=new_job_id(), spec=job_file.to_document(fleets.spec(number, ACCELERATOR)))
    began = time.perf_counter()
    try:
        client.submit([job])
        figures.submitted.append(job.id)
    except FleetError as error:  # not acknowledged; it counts with all its seconds
        figures.errors.append(str(error))
    figures.submits.append((time.perf_counter() - began) * 1000)
    return job.id


def use(server: servers.Server, figures: Figures, until: Callable[[], bool], pause: float) -> None:
    """Submit, list and search, one call after another, as people and scripts do."""
    with FleetClient(server.url, server.token) as client:
        number = 0
        submit_one(client, figures, 0)
        figures.submits.clear()
        while not until():
            number += 1
            submit_one(client, figures, number)
            name, options = list(SEARCHES.items())[number % len(SEARCHES)]
            began = time.perf_counter()
            try:
                client.jobs(**options)
            except FleetError as error:
                if "before" not in options:  # which names a job of a longer history
                    figures.errors.append(str(error))
            took = (time.perf_counter() - began) * 1000
            figures.searches.setdefault(name, []).append(took)
            time.sleep(pause)


def fail_over(running: list[servers.Server], url: str | None, figures: Figures) -> None:
    """Kill the server that acts. SQLite: start it again; else the others take over, or its
    successor does."""
    leader = next(
        each for each in running if "took over as" in (each.home / "bench.log").read_text()
    )
    with contextlib.ExitStack() as stack:
        began = time.monotonic()
        leader.process.kill()
        others = [each for each in running if each is not leader]
        if not others:
            leader.process.wait()
            (leader.home / "server.json").unlink(missing_ok=True)
            others = [
                stack.enter_context(servers.fake_cloud_server(leader.home, stock=0, store=url))
            ]
        client = stack.enter_context(FleetClient(others[0].url, others[0].token))
        job_id = submit_one(client, Figures(), 1)
        figures.submitted.append(job_id)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with contextlib.suppress(FleetError):
                if client.job(job_id).job.reason != "submitted":
                    break
            time.sleep(0.05)
        figures.failover = time.monotonic() - began


def seconds_until_noticed(server: servers.Server, job_id: str) -> float:
    """Since now, when a host of this job died."""
    began = time.monotonic()
    with FleetClient(server.url, server.token) as client:
        while time.monotonic() - began < 300:
            with contextlib.suppress(FleetError):
                if client.job(job_id).job.state != "running":
                    break
            time.sleep(0.2)
    return time.monotonic() - began


def measure(setup: str, options: argparse.Namespace, folder: Path) -> Figures:
    figures = Figures()
    count = SETUPS[setup]
    hosts = options.hosts * count
    jobs = hosts // HOSTS_PER_JOB
    # Also of three servers: each counts the others once they have announced themselves.
    spread = max(options.spread, 1.1 * liveness.heartbeat_interval(hosts).total_seconds())
    if count > 1 and not options.without_loss:
        # Until then the controller allows for hosts that have not learned of the other servers.
        learned = liveness.lost_after(hosts).total_seconds()
        seconds = max(options.seconds, learned - spread + 10)
        options = argparse.Namespace(**{**vars(options), "seconds": seconds})
    with contextlib.ExitStack() as stack:
        url, database = None, None
        if setup != "sqlite":
            url, database = stack.enter_context(databases.postgres())
        print(f"{setup}: preparing {hosts:,} hosts and {options.ended:,} ended jobs", flush=True)
        prepare(url or f"sqlite:///{folder / 'fleet.db'}", jobs, options.ended)
        if database is not None:
            databases.pin(database, options.cores)
        with on_cores(options.cores):
            running = stack.enter_context(started(count, url, folder))
        print(f"{setup}: {count} server(s); agents connect within {spread:.0f} s", flush=True)
        agents = stack.enter_context(load(running, url, options, spread))
        time.sleep(spread)
        loads = [psutil.Process(each.pid) for each in agents]
        before = _cpu(running, database), sum(_process_cpu(each) for each in loads)
        began = time.monotonic()
        done = threading.Event()
        user = threading.Thread(
            target=use, args=(running[-1], figures, done.is_set, options.pause), daemon=True
        )
        user.start()
        while time.monotonic() - began < 0.95 * options.seconds:
            figures.memory = max(figures.memory, *(each.memory_mb for each in running))
            time.sleep(1.0)
        done.set()
        user.join(60)
        passed = time.monotonic() - began
        figures.cores = (_cpu(running, database) - before[0]) / passed
        figures.load_cores = (sum(_process_cpu(each) for each in loads) - before[1]) / passed
        figures.machine_load = os.getloadavg()[0]
        silenced = ""
        for each in agents:
            assert each.stdout is not None
            result = json.loads(each.stdout.readline())
            figures.heartbeats += result["times_ms"]
            figures.interval = max(figures.interval, result["interval_s"])
            figures.reconnects += result["reconnects"]
            figures.errors += result["first_errors"]
            silenced = silenced or result["silenced"]
        figures.per_second = len(figures.heartbeats) / options.seconds
        if not options.without_loss:
            figures.noticed = seconds_until_noticed(running[-1], silenced.rpartition(".")[0])
        with on_cores(options.cores):
            fail_over(running, url, figures)
        with contextlib.closing(open_store(url or f"sqlite:///{folder / 'fleet.db'}")) as store:
            known = {job.id: job for job in store.live().jobs}
            still = sum(job.state == "running" for job in known.values())
            figures.lost = jobs - still - (not options.without_loss)  # the job of the dead host
            figures.lost += sum(job_id not in known for job_id in figures.submitted)
    return figures


def _process_cpu(process: psutil.Process) -> float:
    used = process.cpu_times()
    return used.user + used.system


def _cpu(running: list[servers.Server], database: psutil.Process | None) -> float:
    return sum(each.cpu_seconds for each in running) + (
        databases.cpu_seconds(database) if database is not None else 0.0
    )


def percentile(values: list[float], percent: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))] if values else 0.0


def measures(setup: str, figures: Figures, options: argparse.Namespace) -> list[Measure]:
    hosts = options.hosts * SETUPS[setup]
    heartbeats = figures.heartbeats
    rows = [
        Measure(
            name=f"{hosts:,} hosts: heartbeat p99",
            ours=percentile(heartbeats, 99),
            unit="ms",
            goal=100,
        ),
        Measure(name="heartbeat p50", ours=percentile(heartbeats, 50), unit="ms"),
        Measure(name="a dead host is noticed", ours=figures.noticed, unit="s", goal=60),
        Measure(name="heartbeats", ours=figures.per_second, unit="heartbeats/s"),
        Measure(name="heartbeat interval", ours=figures.interval, unit="s"),
        Measure(name="heartbeats on a new connection", ours=figures.reconnects, unit=""),
        Measure(name="failed calls", ours=len(figures.errors), unit="", goal=0),
        Measure(name="memory of the largest server", ours=figures.memory, unit="MB", goal=1000),
        Measure(name="CPU of servers and database", ours=figures.cores, unit="cores", goal=2),
        Measure(name="submit p99", ours=percentile(figures.submits, 99), unit="ms", goal=20),
        Measure(name="submit p50", ours=percentile(figures.submits, 50), unit="ms"),
        *(
            Measure(
                name=f"{options.ended:,} ended jobs: {name}",
                ours=statistics.median(took),
                unit="ms",
                goal=100,
            )
            for name, took in figures.searches.items()
        ),
        Measure(name="failover", ours=figures.failover, unit="s", goal=10),
        Measure(name="jobs lost", ours=figures.lost, unit="", goal=0),
        Measure(name="CPU of the load, not counted", ours=figures.load_cores, unit="cores"),
        Measure(name="load average of the machine", ours=figures.machine_load, unit=""),
    ]
    return [Measure(**{**vars(row), "name": f"{setup}: {row.name}"}) for row in rows]


def core_numbers(text: str) -> set[int]:
    return {int(number) for number in text.split(",")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--hosts", type=int, default=10_000, help="of each server; 8 of them run a job"
    )
    parser.add_argument("--ended", type=int, default=1_000_000, help="ended jobs in the store")
    parser.add_argument("--seconds", type=float, default=60.0, help="of measuring each setup")
    parser.add_argument(
        "--spread",
        type=float,
        default=20.0,
        help="seconds over which the agents connect, at least; by default their interval",
    )
    parser.add_argument("--pause", type=float, default=0.1, help="between two calls of a user")
    parser.add_argument("--setups", default=",".join(SETUPS), help="default: %(default)s")
    parser.add_argument(
        "--without-loss", action="store_true", help="do not wait until a dead host is noticed"
    )
    parser.add_argument("--load-processes", type=int, default=4)
    parser.add_argument(
        "--cores", type=core_numbers, help="of servers and database: 0,1; default: see above"
    )
    parser.add_argument("--load-cores", type=core_numbers, help="of the load; default: all others")
    options = parser.parse_args()
    every = os.sched_getaffinity(0)
    if options.cores is None:
        options.cores = set(sorted(every)[:2]) if len(every) >= 4 else set()
    os.sched_setaffinity(0, options.load_cores or every - options.cores)
    rows: list[Measure] = []
    for setup in options.setups.split(","):
        assert setup in SETUPS, f"unknown setup {setup!r}; known: {', '.join(SETUPS)}"
        with servers.state_folder() as folder:
            rows += measures(setup, measure(setup, options, folder), options)
    report("scale", rows, seconds=options.seconds, hosts=options.hosts, ended=options.ended)


if __name__ == "__main__":
    run_benchmark(main)
