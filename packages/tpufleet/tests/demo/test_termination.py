"""A demo that is interrupted leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.polling import wait_until

pytest.importorskip("jax", reason="pip install 'tpufleet[demo]'")


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_an_interrupted_demo_leaves_no_process_and_no_folder(tmp_path, number):
    command = [sys.executable, "-m", "tpufleet", "demo"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "running" in line:
                break
        demo.send_signal(number)
        demo.communicate(timeout=900)
    assert demo.returncode != 0
    wait_until(lambda: not started_below(str(tmp_path)), describe=lambda: started_below(tmp_path))
    assert list(tmp_path.glob("tpufleet-demo-*")) == []


def started_below(folder: object) -> list[list[str]]:
    """Commands of the processes that work in this folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        if (process.info["environ"] or {}).get("TPUFLEET_HOME", "").startswith(f"{folder}/"):
            found.append(process.info["cmdline"])
    return found
