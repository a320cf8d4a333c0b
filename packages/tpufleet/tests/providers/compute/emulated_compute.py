"""The provider `compute` on an emulated cloud with a manual clock."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from msgspec import structs

from tpufleet.clocks import ManualClock
from tpufleet.model.fleet.cloud_slices import CloudSlice
from tpufleet.providers.compute.provider import ComputeProvider
from tpufleet.providers.compute.settings import ComputeSettings
from tpufleet_testbed.cloud_tpu.emulator import Emulator
from tpufleet_testbed.cloud_tpu.fault_plan import CloudFaultPlan
from tpufleet_testbed.compute_engine.fault_plan import IMMEDIATE, ComputeFaultPlan, StockLimit

ZONE, OTHER_ZONE = "us-central1-a", "us-east5-a"


class EmulatedCompute:
    """Long timeouts by default: the machine may stand still for minutes."""

    def __init__(self, folder: Path, *, patience: float = 900.0, **plan: Any) -> None:
        self.clock = ManualClock()
        self.folder = folder / "compute"
        latencies = replace(
            IMMEDIATE,
            boot=timedelta(seconds=10),
            deletion=timedelta(seconds=2),
            notice_period=timedelta(seconds=30),
        )
        compute = ComputeFaultPlan(**{"latencies": latencies, **plan})
        self.emulator = Emulator(clock=self.clock, plan=CloudFaultPlan(compute=compute))
        self.emulator.start()
        self.engine = self.emulator.engine
        self._patience = patience
        self.settings = ComputeSettings(
            project="my-project", zones=(ZONE, OTHER_ZONE), endpoint=self.emulator.project.url
        )
        self.provider = self._open()

    def _open(self) -> ComputeProvider:
        return ComputeProvider(
            self.settings,
            fleet="test",
            folder=self.folder,
            clock=self.clock,
            min_wait=self._patience,
            monotonic=lambda: self.clock.now().timestamp(),
        )

    def reopen(self, **changes: Any) -> ComputeProvider:
        """Restart the server, optionally with other settings."""
        self.provider.close()
        self.settings = structs.replace(self.settings, **changes)
        self.provider = self._open()
        return self.provider

    def limit(self, vms: int, zone: str = ZONE) -> None:
        with self.engine.lock:
            self.engine.stock = (StockLimit(most=vms, zone=zone),)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(timedelta(seconds=seconds))

    def listed(self) -> dict[str, CloudSlice]:
        return {found.id: found for found in self.provider.listing()}

    def calls(self, *methods: str) -> list[str]:
        return [method for method, _ in self.emulator.project.tpus.calls if method in methods]

    def left(self) -> list[str]:
        """Everything that exists in the project."""
        with self.engine.lock:
            self.engine.run_due()
            stored = [f"{kind}/{name}" for _, kind, name in self.emulator.project.tpus.stored]
            groups = [f"groups/{name}" for _, name in self.engine.groups]
            return [*stored, *groups, *(f"vms/{name}" for _, name in self.engine.vms)]

    def close(self) -> None:
        self.provider.close()
        self.emulator.close()
