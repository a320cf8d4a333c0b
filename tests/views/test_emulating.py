"""`tpu emulator` as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from tests.emulator.clients import PARENT, client_of, node
from tests.views.programs import Tpu


def test_the_emulator_says_where_it_is_answers_and_ends_when_told(tmp_path: Path):
    plan = tmp_path / "plan.yaml"
    plan.write_text("calls: [{error: quota, method: CreateNode, calls: [2]}]\n")
    child = subprocess.Popen(
        [sys.executable, "-m", "tpufleet", "emulator", "--no-agents", "--listen", "127.0.0.1:0",
         "--plan", str(plan), "--nodes", "us-central1-a=1"],
        env={**os.environ, "HOME": str(tmp_path), "TPUFLEET_HOME": str(tmp_path / "state")},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        endpoint = child.stdout.readline().split()[4]
        client = client_of(endpoint)
        client.create_node(parent=PARENT, node_id="a", node=node(), timeout=10)
        with pytest.raises(Exception, match="Quota limit"):
            client.create_node(parent=PARENT, node_id="b", node=node(), timeout=10)
        listed = client.list_nodes(parent=PARENT)
        assert [found.name.rpartition("/")[2] for found in listed] == ["a"]
    finally:
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--nodes", "here"), "ZONE=N"),
        (("--boot", "soon"), "--boot"),
        (("--plan", "/no/such/file"), "/no/such/file"),
    ],
)
def test_what_the_emulator_cannot_take_is_refused_in_words(tmp_path, args, words):
    answer = Tpu(HOME=str(tmp_path), TPUFLEET_HOME=str(tmp_path))("emulator", *args)
    assert answer.exit_code == 2 and words in answer.stderr
