"""The provider `tpu-vm` on an emulated cloud with a manual clock."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from msgspec import structs

from tests.providers.orders import order as order  # of all tests of providers
from tpufleet.clocks import ManualClock
from tpufleet.model.fleet.cloud_slices import CloudSlice
from tpufleet.providers.tpu_vm.provider import TpuVmProvider
from tpufleet.providers.tpu_vm.settings import TpuVmSettings
from tpufleet_testbed.cloud_tpu.capacity import CapacityLimit, CloudCapacity
from tpufleet_testbed.cloud_tpu.emulator import Emulator
from tpufleet_testbed.cloud_tpu.locations import IMMEDIATE

ZONE, OTHER_ZONE = "us-central1-a", "europe-west4-b"


class EmulatedTpus:
    """Long timeouts by default: the machine may stand still for minutes."""

    def __init__(
        self, folder: Path, *, deadline: float = 900.0, patience: float = 900.0, **emulator: Any
    ) -> None:
        self.clock = ManualClock()
        self.folder = folder / "tpu-vm"
        latencies = replace(IMMEDIATE, boot=timedelta(seconds=10), deletion=timedelta(seconds=2))
        self.emulator = Emulator(clock=self.clock, **{"latencies": latencies, **emulator})
        self.emulator.start()
        self._deadline, self._patience = deadline, patience
        self.settings = TpuVmSettings(
            project="my-project",
            zones=(ZONE, OTHER_ZONE),
            gang_patience=timedelta(0),
            endpoint=self.emulator.endpoint,
        )
        self.provider = self._open()

    def _open(self) -> TpuVmProvider:
        return TpuVmProvider(
            self.settings,
            fleet="test",
            folder=self.folder,
            clock=self.clock,
            deadline=self._deadline,
            min_wait=self._patience,
            monotonic=lambda: self.clock.now().timestamp(),
        )

    def reopen(self, **changes: Any) -> TpuVmProvider:
        """Restart the server, optionally with other settings."""
        self.provider.close()
        self.settings = structs.replace(self.settings, **changes)
        self.provider = self._open()
        return self.provider

    def limit(self, nodes: int, zone: str = ZONE) -> None:
        self.emulator.cloud.stock = CloudCapacity(nodes=(CapacityLimit(most=nodes, zone=zone),))

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(timedelta(seconds=seconds))

    def listed(self) -> dict[str, CloudSlice]:
        return {found.id: found for found in self.provider.listing()}

    def node(self, node_id: str, zone: str = ZONE) -> Any:
        """The emulator's own record."""
        with self.emulator.cloud.lock:
            self.emulator.cloud.run_due()
            name = f"projects/{self.settings.project}/locations/{zone}/nodes/{node_id}"
            return self.emulator.cloud.nodes.get(name)

    def queued(self, queued_id: str, zone: str = ZONE) -> Any:
        with self.emulator.cloud.lock:
            self.emulator.cloud.run_due()
            parent = f"projects/{self.settings.project}/locations/{zone}"
            return self.emulator.queue.records.get(f"{parent}/queuedResources/{queued_id}")

    def calls(self, *methods: str) -> list[str]:
        return [method for method, _ in self.emulator.service.calls if method in methods]

    def paid(self) -> list[tuple[str, float]]:
        with self.emulator.cloud.lock:
            now = self.emulator.cloud.run_due()
            return [
                (entry.node, ((entry.ended_at or now) - entry.began_at).total_seconds())
                for entry in self.emulator.cloud.ledger.entries
            ]

    def close(self) -> None:
        self.provider.close()
        self.emulator.close()
