"""The demo workload as processes: killed or stopped, it resumes to the same result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.polling import wait_until
from tests.ports import free_port

pytest.importorskip("jax")

SETTINGS = ("steps=24", "checkpoint_every=4")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gang:
    processes: list[subprocess.Popen[bytes]]
    run_dirs: list[Path]

    def step(self) -> int:
        try:
            return json.loads((self.run_dirs[0] / "progress.json").read_text()).get("step", 0)
        except FileNotFoundError:
            return 0

    def logs(self) -> str:
        return "\n".join((folder / "log").read_text() for folder in self.run_dirs)

    def wait_for_step(self, step: int) -> None:
        self._wait_until(lambda: self.step() >= step)

    def wait_for_exit(self) -> list[int]:
        self._wait_until(lambda: all(process.poll() is not None for process in self.processes))
        return [process.returncode for process in self.processes]

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, timeout=120, describe=self.logs, interval=0.01)


class GangRunner:
    """Starts gangs of two processes on one checkpoint folder, and kills them at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, attempt: int, step_seconds: float = 0.0) -> Gang:
        run_dirs = [self._folder / f"{name}-{attempt}-{index}" for index in range(2)]
        address = f"127.0.0.1:{free_port()}"
        settings = (*SETTINGS, f"step_seconds={step_seconds}")
        processes = []
        for index, run_dir in enumerate(run_dirs):
            run_dir.mkdir()
            environment = {
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": "2",
                "TPUFLEET_COORDINATOR_ADDRESS": address,
                "TPUFLEET_PROCESS_ID": str(index),
                "TPUFLEET_NUM_PROCESSES": "2",
                "TPUFLEET_JOB_ID": name,
                "TPUFLEET_ATTEMPT": str(attempt),
                "TPUFLEET_CHECKPOINT_DIR": str(self.checkpoints(name)),
                "TPUFLEET_RUN_DIR": str(run_dir),
            }
            with (run_dir / "log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tpufleet.demo.train", *settings],
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        self._started += processes
        return Gang(processes=processes, run_dirs=run_dirs)

    def checkpoints(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        return folder

    def result(self, name: str) -> dict:
        return json.loads((self.checkpoints(name) / "result.json").read_text())

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


@pytest.fixture
def runner(tmp_path: Path):
    runner = GangRunner(tmp_path)
    yield runner
    runner.close()


@pytest.mark.slow
def test_a_killed_and_stopped_run_ends_like_an_uninterrupted_one(runner):
    uninterrupted = runner.start("uninterrupted", 0)
    assert uninterrupted.wait_for_exit() == [0, 0], uninterrupted.logs()

    killed = runner.start("interrupted", 0, step_seconds=0.5)
    killed.wait_for_step(6)
    for process in killed.processes:
        process.kill()
    assert killed.wait_for_exit() == [-9, -9]

    stopped = runner.start("interrupted", 1, step_seconds=0.5)
    stopped.wait_for_step(9)
    stopped.processes[1].terminate()  # one host receives SIGTERM; all exit after the same step
    assert stopped.wait_for_exit() == [1, 1], stopped.logs()
    assert "hosts, step 0\n" not in stopped.logs()
    assert stopped.logs().count(f"asked to stop; saved step {stopped.step()} of 24") == 2

    resumed = runner.start("interrupted", 2)
    assert resumed.wait_for_exit() == [0, 0], resumed.logs()
    assert f"hosts, step {stopped.step()}\n" in resumed.logs()

    first, second = runner.result("uninterrupted"), runner.result("interrupted")
    assert (first.pop("attempts"), second.pop("attempts")) == ([0], [0, 1, 2])
    assert first == second
    assert float.fromhex(first["loss"]) < 0.5


@pytest.mark.slow
def test_a_resumed_run_that_was_complete_writes_the_same_result(runner):
    assert runner.start("job", 0).wait_for_exit() == [0, 0]
    written = runner.result("job")
    (runner.checkpoints("job") / "result.json").unlink()
    again = runner.start("job", 1)
    assert again.wait_for_exit() == [0, 0], again.logs()
    assert runner.result("job") == {**written, "attempts": [0, 1]}
