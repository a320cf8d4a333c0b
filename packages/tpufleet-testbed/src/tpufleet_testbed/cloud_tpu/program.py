"""Runs the Cloud TPU emulator as a program."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from pathlib import Path

from tpufleet_testbed.cloud_tpu import capacity, fault_plan
from tpufleet_testbed.cloud_tpu.emulator import Emulator
from tpufleet_testbed.cloud_tpu.locations import ZONES


def run_emulator(
    listen: str,
    agents_folder: Path | None,  # None: nodes run no agent
    plan_file: Path | None,
    nodes: Mapping[str, int],  # maximum by zone
    speed: float,  # of all operations
) -> int:
    """Run the Cloud TPU emulator until SIGTERM or SIGINT. Returns the exit status."""
    plan = fault_plan.load(plan_file) if plan_file else fault_plan.NO_FAULTS
    limits = [capacity.CapacityLimit(zone=zone, most=most) for zone, most in nodes.items()]
    emulator = Emulator(
        zones=ZONES,
        stock=capacity.CloudCapacity(nodes=(*limits, *plan.stock), quota=plan.quota),
        latencies=plan.latencies.divided_by(speed),
        plan=plan,
        agents_folder=agents_folder,
        address=listen,
    )
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    with emulator:
        print(
            f"Cloud TPU API at {emulator.endpoint} (set tpu_vm.endpoint in the config file)",
            flush=True,
        )
        stopping.wait()
        print(emulator.billing_summary(), flush=True)
    return 0
