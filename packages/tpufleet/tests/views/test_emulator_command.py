"""`tpu emulator` as a process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from tests.docs import markdown
from tests.testbed.cloud_tpu.clients import PARENT, client_of, node
from tests.views.cli_runner import Tpu
from tpufleet.errors import BadInput
from tpufleet_testbed.cloud_tpu import api_errors, fault_plan
from tpufleet_testbed.cloud_tpu.emulator import Emulator


def test_the_emulator_prints_its_endpoint_serves_calls_and_stops_on_sigterm(tmp_path: Path):
    plan = tmp_path / "plan.yaml"
    plan.write_text("calls: [{error: quota, method: CreateNode, calls: [2]}]\n")
    child = subprocess.Popen(
        [sys.executable, "-m", "tpufleet", "emulator", "--no-agents", "--listen", "127.0.0.1:0",
         "--plan", str(plan)],
        env={**os.environ, "HOME": str(tmp_path), "TPUFLEET_HOME": str(tmp_path / "state")},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        endpoint = child.stdout.readline().split()[4]
        client = client_of(endpoint)
        client.create_node(parent=PARENT, node_id="a", node=node(), timeout=900)
        with pytest.raises(Exception, match="Quota limit"):
            client.create_node(parent=PARENT, node_id="b", node=node(), timeout=900)
        listed = client.list_nodes(parent=PARENT)
        assert [item.name.rpartition("/")[2] for item in listed] == ["a"]
    finally:
        child.send_signal(signal.SIGTERM)
        printed, _ = child.communicate(timeout=900)
    assert child.returncode == 0
    assert "chip hours" in printed


def test_the_plan_in_the_documentation_is_valid():
    page = (markdown.ROOT / "docs/tpu-vms.md").read_text()
    [plan] = [block.text for block in markdown.blocks("yaml") if "storms:" in block.text]
    read = fault_plan.parse(plan)
    assert read.storms and read.closings and read.calls and read.stock and read.quota
    assert all(f"`{name}`" in page for name in (*api_errors.ERROR_KINDS, "hang"))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("storm: []", "storm"),
        ("storms: [{every: 0s, share: 0.5}]", "every"),
        ("storms: [{every: 5m, share: 50}]", "share"),
        ("calls: [{error: quota, probability: 2}]", "probability"),
        ("calls: [{error: gremlins}]", "gremlins"),
        ("stock: [{zone: us-central1-a}]", "most"),
        ("- no mapping", "mapping"),
        ("seed: [", "plan.yaml"),
    ],
)
def test_an_invalid_plan_is_rejected(tmp_path, plan, message):
    (tmp_path / "plan.yaml").write_text(plan)
    answer = Tpu(HOME=str(tmp_path), TPUFLEET_HOME=str(tmp_path))(
        "emulator", "--plan", str(tmp_path / "plan.yaml")
    )
    assert answer.exit_code == 2 and message in answer.stderr and "plan.yaml" in answer.stderr


def test_a_port_in_use_is_reported(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        answer = Tpu(HOME=str(tmp_path), TPUFLEET_HOME=str(tmp_path))(
            "emulator", "--no-agents", "--listen", address
        )
    assert answer.exit_code == 2 and address in answer.stderr, answer.output


def test_the_next_port_is_left_to_a_connection_that_uses_it():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.bind(("127.0.0.1", 0))  # it does not listen
        client.connect(server.getsockname())
        port = client.getsockname()[1] - 1
        with (
            contextlib.suppress(BadInput),  # the port itself is in use too
            Emulator(address=f"127.0.0.1:{port}") as emulator,
        ):
            assert urlsplit(emulator.project.url).port != port + 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--listen", "nowhere"), "--listen"),
        (("--plan", "/no/such/file"), "/no/such/file"),
    ],
)
def test_invalid_options_are_rejected(tmp_path, args, message):
    answer = Tpu(HOME=str(tmp_path), TPUFLEET_HOME=str(tmp_path))("emulator", *args)
    assert answer.exit_code == 2 and message in answer.stderr
