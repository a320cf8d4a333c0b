"""An emulator on a manual clock, with Google's client connected to it."""

from __future__ import annotations

from datetime import timedelta

from tests.testbed.cloud_tpu.clients import PARENT, client_of
from tpufleet.clocks import ManualClock
from tpufleet.testbed.cloud_tpu.emulator import Emulator


class EmulatedCloud:
    def __init__(self, **settings: object) -> None:
        self.clock = ManualClock()
        self.emulator = Emulator(clock=self.clock, **settings)  # type: ignore[arg-type]
        self.emulator.start()
        self.client = client_of(self.emulator.endpoint)

    def advance(self, seconds: float) -> None:
        self.clock.advance(timedelta(seconds=seconds))

    def state(self, node_id: str) -> str:
        return self.client.get_node(name=f"{PARENT}/nodes/{node_id}", timeout=60).state.name

    def queue_state(self, queued_id: str) -> str:
        name = f"{PARENT}/queuedResources/{queued_id}"
        return self.client.get_queued_resource(name=name, timeout=60).state.state.name

    def billed(self) -> list[tuple[str, float]]:
        """Each billed node, and for how many seconds."""
        with self.emulator.cloud.lock:
            now = self.emulator.cloud.run_due()
            return [
                (entry.node, ((entry.ended_at or now) - entry.began_at).total_seconds())
                for entry in self.emulator.cloud.ledger.entries
            ]

    def close(self) -> None:
        self.emulator.close()
