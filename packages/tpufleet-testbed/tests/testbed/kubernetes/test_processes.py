"""Processes of a control plane: recorded, stopped in reverse order, never mistaken for others."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from tpufleet_testbed.kubernetes import processes
from tpufleet_testbed.kubernetes.components import Component
from tpufleet_testbed.kubernetes.processes import ProcessRegistry


def test_processes_are_recorded_in_start_order_and_stopped(tmp_path):
    registry = ProcessRegistry(tmp_path)
    for name in ("one", "two"):
        registry.start(Component(name=name, argv=("sleep", "100")))
    reopened = ProcessRegistry(tmp_path)
    assert [record.name for record in reopened.all()] == ["one", "two"]
    running = [record.process for record in reopened.all()]
    reopened.stop()
    assert reopened.all() == [] and not any(process.is_running() for process in running)


def test_processes_are_stopped_after_the_clock_was_set(tmp_path, monkeypatch):
    registry = ProcessRegistry(tmp_path)
    registry.start(Component(name="one", argv=("sleep", "100")))
    (record,) = registry.all()
    create_time, boot_time = psutil.Process.create_time, psutil.boot_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: create_time(self) + 74)
    monkeypatch.setattr(psutil, "boot_time", lambda: boot_time() + 74)
    assert record.process is not None
    registry.stop()
    assert registry.all() == [] and record.process is None


# Starts a component and never reaps it.
PARENT = """
import sys, time
from pathlib import Path
from tpufleet_testbed.kubernetes.components import Component
from tpufleet_testbed.kubernetes.processes import ProcessRegistry
ProcessRegistry(Path(sys.argv[1])).start(Component(name="one", argv=("sleep", "100")))
print("started", flush=True)
time.sleep(100)
"""


def test_a_zombie_counts_as_ended(tmp_path):
    argv = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout.readline() == "started\n"
            registry = ProcessRegistry(tmp_path)
            (record,) = registry.all()
            registry.stop(grace=60)
            assert registry.all() == [] and record.process is None
        finally:
            parent.kill()


def test_a_component_that_exits_during_startup_is_reported_with_its_log(tmp_path):
    registry = ProcessRegistry(tmp_path)
    component = Component(
        name="bad", argv=("sh", "-c", "echo no licence"), ready_url="http://127.0.0.1:1/"
    )
    record = registry.start(component)
    with pytest.raises(processes.ComponentNotReady, match="no licence"):
        registry.wait_ready(component, record, None, timeout=900)
    registry.stop()
