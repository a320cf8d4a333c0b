"""What a server spends on a request, as a multiple of the yardstick of the benchmarks: CPU time, so
that other programs on the machine hardly count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from bench import yardstick
from tests.polling import wait_until
from tests.server_process import Server
from tpufleet.client.fleet import FleetClient, new_job_id
from tpufleet.model.api_types import NewJob
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.job.jobs import JobState

JOBS = 400
POOL = Pool(name="full", provider="local", accelerator="v5litepod-1", largest=1)
SPEC = {"command": ["sleep", "3600"], "accelerator": "v5e-1", "pool": POOL.name}
# Yardsticks per thousand jobs: twice what was measured.
LIMITS = {"one at a time": 50.0, "in bulk": 2.5, "listed": 0.15}
MAX_IDLE_MIB = 60


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "home")
    server.start()
    yield server
    server.cleanup()


def jobs(count: int = JOBS) -> list[NewJob]:
    ids = [new_job_id() for _ in range(count)]
    return [NewJob(id=job, spec={**SPEC, "name": f"job-{job}"}) for job in ids]


def test_requests_cost_no_more_than_they_did(server):
    process = psutil.Process(server.pid)
    assert process.memory_info().rss < MAX_IDLE_MIB * 2**20
    server.client.put_pool(POOL)
    (first,) = server.client.submit(jobs(1))  # the others wait
    wait_until(lambda: server.client.job(first.id).job.state == JobState.RUNNING, 300)

    def submit_one_at_a_time(client: FleetClient) -> None:
        for job in jobs():
            client.submit([job])

    def list_all(client: FleetClient) -> None:
        for _ in range(40):
            client.jobs(limit=1000)

    requests: dict[str, tuple[int, Callable[[FleetClient], object]]] = {
        "one at a time": (JOBS, submit_one_at_a_time),
        "in bulk": (JOBS, lambda client: client.submit(jobs())),
        "listed": (40 * 2 * JOBS, list_all),
    }
    found = {}
    for name, (count, request) in requests.items():
        before = sum(process.cpu_times()[:2])
        request(server.client)

        seconds = sum(process.cpu_times()[:2]) - before
        found[name] = 1000 * seconds / yardstick.milliseconds() * 1000 / count
    assert {name: value for name, value in found.items() if value > LIMITS[name]} == {}, found
