"""The agent in a pod learns from its seat which slice it serves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.agent.planes import wait_until
from tpufleet.agent import pods


def seat(tmp_path):
    (tmp_path / "seats").mkdir()
    return {
        "TPUFLEET_SEATS": str(tmp_path / "seats"),
        "TPUFLEET_SEAT": "1",
        "TPUFLEET_WORK": str(tmp_path / "work"),
    }


def test_a_seat_that_is_taken_says_which_slice_and_hands_over_its_token(tmp_path):
    environ, seen = seat(tmp_path), {}
    (tmp_path / "seats" / "1").write_text(json.dumps({"slice": "s-9", "token": "hush"}))
    assert pods.run(environ, lambda given: seen.update(given) or 7) == 7
    assert seen["TPUFLEET_SLICE"] == "s-9"
    file = tmp_path / "work" / "slice-token"
    assert (seen["TPUFLEET_TOKEN_FILE"], file.read_text()) == (str(file), "hush")
    assert file.stat().st_mode & 0o777 == 0o600
    assert "hush" not in seen.values()


def test_a_free_seat_is_waited_for_and_then_taken(tmp_path):
    environ = seat(tmp_path)
    entry = json.dumps({"slice": "s-9", "token": "hush"})
    later = threading.Timer(0.2, (tmp_path / "seats" / "1").write_text, [entry])
    later.start()
    assert pods.run(environ, lambda given: 5, wait_seconds=10) == 5


@pytest.mark.skipif(sys.platform != "linux", reason="pods are Linux's")
def test_a_pod_that_waits_for_its_seat_leaves_at_once_when_it_is_told_to(tmp_path):
    argv = [sys.executable, "-m", "tpufleet.agent.pods"]
    with subprocess.Popen(argv, env={**os.environ, **seat(tmp_path)}) as waiting:
        handles = lambda: "SIGTERM" in _handled(waiting.pid)
        wait_until(handles, what="the handler of the pod")
        waiting.send_signal(signal.SIGTERM)
        assert waiting.wait(10) == 128 + signal.SIGTERM


def _handled(pid: int) -> set[str]:
    """Signals that a process has handlers for."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt"):
            bits = int(line.split()[1], 16)
            return {one.name for one in signal.Signals if bits >> (one - 1) & 1}
    return set()


def test_a_seat_that_nobody_takes_is_left_without_complaint(tmp_path):
    assert pods.run(seat(tmp_path), lambda given: 5, wait_seconds=0.05) == 0


def test_a_seat_that_cannot_be_read_is_a_fault_that_trying_again_does_not_heal(tmp_path):
    environ = seat(tmp_path)
    (tmp_path / "seats" / "1").write_text("{}")
    assert pods.run(environ, lambda given: 5) == 2
