"""A program that knows JAX and nothing of tpufleet runs on a simulated slice of several hosts."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.polling import wait_until
from tests.providers.local.test_isolation import stop_all
from tests.server_process import Server
from tpufleet.client.fleet import new_job_id
from tpufleet.model.api_types import NewJob

# One write that begins on a line of its own: Gloo prints from its threads between Python's writes.
PROGRAM = """
import sys
import jax
jax.distributed.initialize()
from jax.experimental import multihost_utils
ranks = multihost_utils.process_allgather(jax.numpy.array([jax.process_index()]))
seen = f"gang {jax.process_count()} {jax.device_count()} {sorted(ranks.ravel().tolist())}"
sys.stderr.write(f"\\n{seen}\\n")
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "home")
    server.start()
    yield server
    stop_all(server)
    server.cleanup()


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")
def test_initialize_without_arguments_finds_the_gang(server):
    job = new_job_id()
    spec = {
        "name": "plain",
        "command": [sys.executable, "-c", PROGRAM],
        "accelerator": "v5e-16",
        "retries": {"failure": 0},
    }
    server.client.submit([NewJob(id=job, spec=spec)])
    log = lambda: "".join(server.client.logs(job))
    wait_until(lambda: server.client.job(job).job.state.value in ("succeeded", "failed"), 180, log)
    lines = sorted(line for line in log().splitlines() if "] gang" in line)
    assert lines == [f"[{host}] gang 4 16 [0, 1, 2, 3]" for host in range(4)], log()


PAIRS = """
import sys
import jax
from tpufleet import runtime
here = runtime.initialize()
from jax.experimental import multihost_utils
total = multihost_utils.process_allgather(jax.numpy.array([jax.process_index()])).sum()
runtime.progress(1, total=1)
local = f"{here.local_process_id}: {here.chips} chips, {jax.local_device_count()} devices"
sys.stderr.write(f"\\n{local} of {jax.device_count()}, sum {total}\\n")
"""


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")
@pytest.mark.parametrize("program", [PROGRAM, PAIRS], ids=["jax alone", "runtime"])
def test_two_processes_on_each_host_are_one_gang_and_share_its_chips(server, program):
    """As on TPU7x, one for each NUMA node."""
    job = new_job_id()
    spec = {
        "command": [sys.executable, "-c", program],
        "accelerator": "tpu7x-16",
        "processes_per_host": 2,
        "retries": {"failure": 0},
    }
    server.client.submit([NewJob(id=job, spec=spec)])
    log = lambda: "".join(server.client.logs(job))
    wait_until(lambda: server.client.job(job).job.state.value in ("succeeded", "failed"), 180, log)
    marks = ("] gang", "devices of 8")
    lines = sorted(line for line in log().splitlines() if any(mark in line for mark in marks))
    expected = {
        PROGRAM: [f"[{host}] gang 4 8 [0, 1, 2, 3]" for host in (0, 0, 1, 1)],
        PAIRS: [
            f"[{host}] {local}: 2 chips, 2 devices of 8, sum 6"
            for host in range(2) for local in range(2)
        ],
    }  # fmt: skip
    assert lines == expected[program], log()
    assert server.client.job(job).job.state.value == "succeeded"


def test_a_process_that_fails_ends_the_other_one_of_its_host(server):
    program = (
        "import os, sys, time;"
        "sys.exit(7) if os.environ['TPUFLEET_LOCAL_PROCESS_ID'] == '1' else time.sleep(600)"
    )
    job = new_job_id()
    spec = {
        "command": [sys.executable, "-c", program],
        "accelerator": "tpu7x-8",
        "processes_per_host": 2,
        "retries": {"failure": 0},
    }
    server.client.submit([NewJob(id=job, spec=spec)])
    ended = lambda: server.client.job(job).job.state.value in ("succeeded", "failed")
    wait_until(ended, 60, lambda: "".join(server.client.logs(job)))
    log = "".join(server.client.logs(job))
    assert "exit status 7" in log or "status 7" in log, log
    assert server.client.job(job).job.state.value == "failed"
