"""A run that is interrupted or asked to stop ends soon, whatever it is doing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.activations.test_workers import make, settings  # noqa: F401
from tpufleet_activations.daemon_threads import DaemonThreads
from tpufleet_activations.pipeline import extraction

# `tpu extract run` with programs that take some seconds to compile, as long as a lease.
SLOW_COMPILER = """
import sys, time
from tpufleet import __main__
from tpufleet_activations.model import engines

compile_step = engines.Engine._compile
def slow(self, *key):
    print("compiling", file=sys.stderr, flush=True)
    time.sleep(float(sys.argv[-1]))
    return compile_step(self, *key)
engines.Engine._compile = slow
sys.argv = ["tpu", "extract", "run", sys.argv[1], "--quiet", "--lease", sys.argv[2]]
__main__.main()
"""


def test_an_interrupted_run_does_not_wait_for_programs_that_compile(make):  # noqa: F811
    folder = make("slow", unit_samples=12)
    with run_slowly(folder.path, 60) as process:
        wait_for(process, "compiling")
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=50)
    assert process.returncode == 130 and "interrupted; committed units are kept" in errors
    assert "Traceback" not in errors and time.monotonic() - began < 30


def test_a_run_that_is_asked_to_stop_says_that_it_is_incomplete(make):  # noqa: F811
    folder = make("asked", unit_samples=12)
    with run_slowly(folder.path, 2) as process:
        wait_for(process, "compiling")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 143, errors
    assert f"`tpu extract run {folder.path}`" in errors
    assert extraction.run(folder, settings()).complete


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_stopped_at_its_start_prints_json(make, number, status):  # noqa: F811
    folder = make("early", unit_samples=12)
    command = [sys.executable, "-m", "tpufleet", "extract", "run", str(folder.path), "--json"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        wait_for(process, "loading")  # before JAX is imported
        process.send_signal(number)
        output, errors = process.communicate(timeout=120)
    assert process.returncode == status and "Traceback" not in errors, errors
    assert f"`tpu extract run {folder.path}`" in errors
    summary = json.loads(output)
    assert summary["stopped"] is True and summary["samples"] < summary["total"]


def run_slowly(folder: Path, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SLOW_COMPILER, str(folder), str(seconds)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"the run has ended with {process.wait()}")


# JAX has a function of this name that Python calls, and whose exceptions it ignores.
COLLECTED = """
import gc, signal, time
from tpufleet_activations.cli.interrupts import delivered_interrupts

signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
sent = []
def _xla_gc_callback(phase, info):
    if not sent:
        sent.append(phase)
        signal.raise_signal(signal.SIGINT)
gc.callbacks.append(_xla_gc_callback)
try:
    with delivered_interrupts():
        gc.collect()
        print("goes on", flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", sent, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def test_an_interrupt_during_garbage_collection_is_not_lost():
    done = subprocess.run(
        [sys.executable, "-c", COLLECTED], capture_output=True, text=True, timeout=50, check=True
    )
    assert done.stdout == "goes on\ninterrupted ['start'] True\n" and not done.stderr


def test_results_and_errors_come_from_daemon_threads():
    with DaemonThreads(2, "worker") as threads:
        assert threads.map(lambda number: number**2, range(100)) == [n**2 for n in range(100)]
        failed = threads.submit(lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            failed.result(timeout=60)
        both = threading.Barrier(2)
        assert sorted(threads.map(lambda _: both.wait(60), range(2))) == [0, 1]
    deadline = time.monotonic() + 60
    while any(thread.name == "worker" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "threads end when there is no more work"
        time.sleep(0.01)
