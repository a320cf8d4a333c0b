"""Two JAX processes: they join, agree, and stop at the same step."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from tests.ports import free_port
from tpufleet.errors import BadInput
from tpufleet.runtime import distributed
from tpufleet.runtime.checkpoints.folders import FolderCheckpoints

pytest.importorskip("jax")

TRAIN = textwrap.dedent("""
    import time
    from tpufleet import runtime
    here = runtime.initialize()
    import jax
    print("devices", jax.device_count(), jax.local_device_count(), flush=True)
    print("agreed", runtime.agree(here.process_id == 1), runtime.agree(False), flush=True)
    latest = runtime.checkpoints.latest()
    step = int((latest.part(here.process_id) / "step").read_text()) if latest else 0
    print("from", step, flush=True)
    while True:
        step += 1
        time.sleep(0.01)
        if runtime.should_stop_together():
            runtime.checkpoints.save(step, lambda f: (f / "step").write_text(str(step)))
            print("stopped at", step, flush=True)
            break
""")


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
    outputs = []
    for process in processes:
        output, errors = process.communicate(timeout=900)
        assert process.returncode == 0, errors
        outputs.append([line for line in output.splitlines() if is_own_line(line)])
    return outputs


def is_own_line(line: str) -> bool:
    # Gloo writes to the same pipe.
    return bool(line.strip()) and not line.startswith("[Gloo]") and "peer ranks" not in line


def header(process: subprocess.Popen[str]) -> list[str]:
    lines = (line.strip() for line in iter(process.stdout.readline, "") if is_own_line(line))
    return list(itertools.islice(lines, 3))


def test_two_processes_join_agree_and_stop_at_the_same_step(tmp_path):
    processes = gang(tmp_path, attempt=0)
    try:
        headers = [header(process) for process in processes]
        assert headers == [["devices 4 2", "agreed True False", "from 0"]] * 2
        processes[1].send_signal(signal.SIGTERM)
        first, second = finished(processes)
    finally:
        for process in processes:
            process.kill()
    assert first == second
    step = int(first[-1].split()[-1])
    latest = FolderCheckpoints(tmp_path).latest()
    assert (latest.step, latest.processes) == (step, 2)
    assert [(latest.part(index) / "step").read_text() for index in range(2)] == [str(step)] * 2


def test_a_process_connects_once_the_first_one_listens():
    """And not a second after an attempt that failed."""
    port = free_port()
    waiting = threading.Thread(
        target=distributed._wait_until_listening, args=(f"127.0.0.1:{port}",)
    )
    waiting.start()
    with socket.create_server(("127.0.0.1", port)) as listener:
        listener.settimeout(60)
        listener.accept()[0].close()
        waiting.join(60)
    assert not waiting.is_alive()


def test_a_gang_without_coordinator_address_is_rejected(monkeypatch):
    monkeypatch.setenv("TPUFLEET_NUM_PROCESSES", "2")
    monkeypatch.delenv("TPUFLEET_COORDINATOR_ADDRESS", raising=False)
    with pytest.raises(BadInput, match="TPUFLEET_COORDINATOR_ADDRESS"):
        distributed.initialize()
