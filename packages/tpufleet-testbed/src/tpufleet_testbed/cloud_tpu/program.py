"""Runs the Cloud TPU emulator as a program."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from tpufleet_testbed.cloud_tpu import capacity, fault_plan
from tpufleet_testbed.cloud_tpu.emulator import Emulator
from tpufleet_testbed.cloud_tpu.locations import ZONES, Latencies


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatorOptions:
    listen: str
    folder: Path | None  # working folder of agents; None: nodes run no agent
    zones: tuple[str, ...]  # empty: all of Google's
    plan: Path | None
    nodes: dict[str, int]  # maximum number of nodes by zone
    boot: timedelta | None = None  # None: as the plan says
    notice: timedelta | None = None
    speed: float = 1.0  # of all operations


def run_emulator(options: EmulatorOptions) -> int:
    """Run the Cloud TPU emulator until SIGTERM or SIGINT. Returns the exit status."""
    plan = fault_plan.load(options.plan) if options.plan else fault_plan.NO_FAULTS
    limits = [capacity.CapacityLimit(zone=zone, most=most) for zone, most in options.nodes.items()]
    emulator = Emulator(
        zones=options.zones or ZONES,
        stock=capacity.CloudCapacity(nodes=(*limits, *plan.stock), quota=plan.quota),
        latencies=_latencies(plan.latencies, options),
        plan=plan,
        agents_folder=options.folder,
        address=options.listen,
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


def _latencies(latencies: Latencies, options: EmulatorOptions) -> Latencies:
    chosen = {"boot": options.boot, "notice_period": options.notice}
    faster = latencies.divided_by(options.speed)
    return replace(faster, **{name: value for name, value in chosen.items() if value is not None})
