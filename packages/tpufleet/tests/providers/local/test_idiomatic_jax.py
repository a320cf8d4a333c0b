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
