"""The disk of a server is full: nothing is acknowledged, the user is told why, nothing is lost."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.chaos.small_disk import SmallDisk
from tests.polling import wait_until
from tests.server_process import Server
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import Unreachable
from tpufleet.model.api_types import NewJob
from tpufleet.model.job.jobs import JobId

SPEC = {"name": "one", "command": ["true"], "accelerator": "v5litepod-1"}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path / "disk")
    if not disk.mounted:
        pytest.skip("only root can mount a disk")
    yield disk
    disk.cleanup()


@pytest.fixture
def server(disk: SmallDisk) -> Iterator[Server]:
    server = Server(disk.folder / "home")
    server.start()
    yield server
    server.cleanup()


def readiness(server: Server) -> tuple[int, str]:
    answer = httpx.get(f"{server.url}/readyz", timeout=900, trust_env=False)
    return answer.status_code, answer.text


def test_a_full_disk_refuses_work_with_the_reason_and_recovers(server, disk):
    content = bytes(300_000)
    digest = hashlib.sha256(content).hexdigest()
    token = (server.home / "token").read_text().strip()
    disk.fill([server.pid])
    with FleetClient(server.url, token, reconnect_timeout=0.0) as client:
        requests = {
            "job": lambda: client.submit([NewJob(id=JobId("one"), spec=SPEC)]),
            "code": lambda: client.put_snapshot(digest, content),
        }
        for name, request in requests.items():
            with pytest.raises(Unreachable, match="disk is full") as refused:
                request()
            assert "next: free space" in str(refused.value), name
        assert client.jobs().jobs == ()  # reading works
        full = "next: free space on"
        wait_until(lambda: full in readiness(server)[1], describe=server.log_tail)
        errors = [entry.message for entry in client.status().errors]
        assert any("full" in error or "No space" in error for error in errors), errors
        disk.free([server.pid])
        wait_until(lambda: readiness(server) == (200, "ok\n"), describe=server.log_tail)
        client.submit([NewJob(id=JobId("one"), spec=SPEC)])
        wait_until(lambda: client.job("one").job.ended, describe=server.log_tail)
