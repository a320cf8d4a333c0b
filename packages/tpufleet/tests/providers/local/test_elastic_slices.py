"""An elastic job on simulated slices: a real server, agents and processes."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.polling import wait_until
from tests.providers.local.test_isolation import stop_all
from tests.server_process import Server
from tpufleet.client.fleet import new_job_id
from tpufleet.model.api_types import NewJob
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.values.records import replace

# Prints the examples of each step that this process computes.
PROGRAM = """
import sys, time
from tpufleet import runtime
here = runtime.context()
runtime.install_stop_handler()
newest = runtime.checkpoints.latest()
batch = runtime.global_batch(48, devices=4 * here.num_processes)
for step in range(newest.step + 1 if newest else 1, 10_000):
    time.sleep(0.1)
    numbers, weights = batch.split(range(48))
    mine = numbers[:, batch.own][weights[:, batch.own] > 0].tolist()
    print(f"step {step} at {time.time()} examples {mine}", flush=True)
    runtime.progress(step)
    if runtime.should_stop():
        sys.exit("stopped")
    if step % 5 == 0:
        runtime.checkpoints.save(step, lambda folder: (folder / "step").touch())
"""
LINE = re.compile(r"step (\d+) at ([0-9.]+) examples \[([^]]*)\]")
PATIENCE = 240.0  # seconds; on a busy machine


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "home")
    server.start()
    yield server
    stop_all(server)
    server.cleanup()


def test_a_lost_slice_costs_seconds_and_one_that_comes_back_is_used(server):
    client = server.client
    pool = client.put_pool(Pool(name="lab", provider="local", accelerator="v5litepod-4", largest=4))
    job = new_job_id()
    spec = {
        "name": "elastic", "command": [sys.executable, "-c", PROGRAM], "accelerator": "v5e-4",
        "slices": {"min": 2, "max": 4}, "pool": "lab", "grace": "5s",
    }  # fmt: skip
    client.submit([NewJob(id=job, spec=spec)])
    log = lambda: "".join(client.logs(job))

    def printed(attempt: int) -> list[tuple[str, ...]]:
        known = len(client.job(job).attempts) > attempt
        return LINE.findall("".join(client.logs(job, attempt=attempt))) if known else []

    def steps(attempt: int) -> dict[int, list[tuple[float, list[int]]]]:
        """What each process printed of each step: when, and which examples it computed."""
        found: dict[int, list[tuple[float, list[int]]]] = {}
        for step, at, examples in printed(attempt):
            mine = [int(each) for each in examples.split(",")]
            found.setdefault(int(step), []).append((float(at), mine))
        return found

    wait_until(lambda: len(steps(0)) > 12, PATIENCE, log)
    client.put_pool(replace(pool, largest=3))
    lost_at = time.time()
    client.inject_fault(client.job(job).attempts[0].slices[1], "preempt")
    wait_until(lambda: len(steps(1)) > 12, PATIENCE, log)
    assert len(client.job(job).attempts[1].slices) == 3
    assert "on 3 of 4 slices" in "\n".join(client.why(job).details)
    first = min(steps(1))
    print(f"lost 1 of 4 → next step: {min(at for at, _ in steps(1)[first]) - lost_at:.1f} s")
    assert (first - 1) % 5 == 0 and first - 1 >= max(steps(0)) - 10, "from the last checkpoint"

    client.put_pool(pool)
    wait_until(lambda: steps(2), PATIENCE, log)
    attempts = client.job(job).attempts
    assert [attempt.end_reason for attempt in attempts] == ["preempted", "resized", None]
    assert [len(attempt.slices) for attempt in attempts] == [4, 3, 4]
    assert max(steps(1)) - (min(steps(2)) - 1) < 100, "it was stopped at a checkpoint"
    for attempt, processes in ((0, 4), (1, 3)):
        for step in steps(attempt).values():
            computed = sorted(number for _, mine in step for number in mine)
            assert computed == list(range(48)) or len(step) < processes
    client.cancel(job)
