"""Two real JAX processes: they join, agree, stop at the same step, and resume together."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tpufleet.errors import BadInput
from tpufleet.runtime import distributed
from tpufleet.runtime.checkpoints import FolderCheckpoints

pytest.importorskip("jax")

TRAIN = textwrap.dedent("""
    import time
    from tpufleet import runtime
    here = runtime.initialize()
    import jax
    print("devices", jax.device_count(), jax.local_device_count(), flush=True)
    print("agreed", runtime.agree(here.process_id == 1), runtime.agree(False), flush=True)
    found = runtime.checkpoints.latest()
    step = int((found.part(here.process_id) / "step").read_text()) if found else 0
    print("from", step, flush=True)
    while True:
        step += 1
        time.sleep(0.01)
        if runtime.should_stop_together():
            runtime.checkpoints.save(step, lambda f: (f / "step").write_text(str(step)))
            print("stopped at", step, flush=True)
            break
""")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def gang(folder: Path, attempt: int) -> list[subprocess.Popen[str]]:
    address = f"127.0.0.1:{free_port()}"
    environ = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "TPUFLEET_COORDINATOR_ADDRESS": address,
        "TPUFLEET_NUM_PROCESSES": "2",
        "TPUFLEET_CHECKPOINT_DIR": str(folder),
        "TPUFLEET_ATTEMPT": str(attempt),
    }
    return [
        subprocess.Popen(
            [sys.executable, "-c", TRAIN],
            env=environ | {"TPUFLEET_PROCESS_ID": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]


def finished(processes: list[subprocess.Popen[str]]) -> list[list[str]]:
    told = []
    for process in processes:
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        told.append([line for line in output.splitlines() if ours(line)])
    return told


def ours(line: str) -> bool:
    # Gloo writes to the same pipe, in pieces.
    return bool(line.strip()) and not line.startswith("[Gloo]") and "peer ranks" not in line


def opening(process: subprocess.Popen[str]) -> list[str]:
    lines = (line.strip() for line in iter(process.stdout.readline, "") if ours(line))
    return list(itertools.islice(lines, 3))


def test_two_processes_join_agree_and_leave_after_the_same_step_when_one_is_told_to(tmp_path):
    processes = gang(tmp_path, attempt=0)
    try:
        told = [opening(process) for process in processes]
        assert told == [["devices 4 2", "agreed True False", "from 0"]] * 2
        processes[1].send_signal(signal.SIGTERM)
        first, second = finished(processes)
    finally:
        for process in processes:
            process.kill()
    assert first == second
    step = int(first[-1].split()[-1])
    found = FolderCheckpoints(tmp_path).latest()
    assert (found.step, found.processes) == (step, 2)
    assert [(found.part(index) / "step").read_text() for index in range(2)] == [str(step)] * 2


def test_a_gang_without_an_address_to_meet_is_refused_in_words(monkeypatch):
    monkeypatch.setenv("TPUFLEET_NUM_PROCESSES", "2")
    monkeypatch.delenv("TPUFLEET_COORDINATOR_ADDRESS", raising=False)
    with pytest.raises(BadInput, match="TPUFLEET_COORDINATOR_ADDRESS"):
        distributed.initialize()
