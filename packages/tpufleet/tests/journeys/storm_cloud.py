"""TPU VMs in one process on a manual clock: the real provider `tpu-vm`, Google's client and the
emulated cloud, with the durations of the real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from tests.journeys.wrapped_provider import WrappedProvider
from tpufleet.clocks import ManualClock
from tpufleet.model.fleet.slices import SliceId
from tpufleet.providers.tpu_vm.provider import TpuVmProvider
from tpufleet.providers.tpu_vm.settings import TpuVmSettings
from tpufleet_testbed.cloud_tpu.capacity import CloudCapacity
from tpufleet_testbed.cloud_tpu.emulator import Emulator
from tpufleet_testbed.cloud_tpu.fault_plan import CloudFaultPlan
from tpufleet_testbed.cloud_tpu.host_backend import HostBackend
from tpufleet_testbed.cloud_tpu.nodes import NodeRecord, State


class NoticedHosts(HostBackend):
    """Remembers which nodes got a notice."""

    def __init__(self) -> None:
        self.noticed: set[SliceId] = set()

    def notify(self, node: NodeRecord) -> None:
        self.noticed.add(SliceId(node.id))


class StormyTpuVmCloud(WrappedProvider):
    name = TpuVmProvider.name
    exposes_tokens = True
    # Calls fail by the plan: only the controller, which expects that, lists slices.
    outage = "as planned"

    def __init__(
        self, clock: ManualClock, folder: Path, zones: Sequence[str], plan: CloudFaultPlan
    ) -> None:
        self.clock, self.zones = clock, tuple(zones)
        self.emulator = Emulator(
            clock=clock, zones=zones, plan=plan, stock=CloudCapacity(nodes=plan.stock)
        )
        self.hosts = self.emulator.cloud.hosts = NoticedHosts()
        self.emulator.start()
        self._folder = folder / "tpu-vm"
        self._wake: Callable[[], None] = lambda: None
        self.provider = self._open()

    def _open(self) -> TpuVmProvider:
        settings = TpuVmSettings(
            project="my-project", zones=self.zones, endpoint=self.emulator.endpoint
        )
        return TpuVmProvider(
            settings, fleet="test", folder=self._folder, clock=self.clock, deadline=900.0,
            min_wait=900.0, monotonic=lambda: self.clock.now().timestamp(),
        )  # fmt: skip

    def restart(self) -> None:
        """As when the process of the server is killed: only the files are left."""
        self.provider.close()
        self.provider = self._open()

    def existing(self) -> list[SliceId]:
        """Nodes that are, or will be, paid for."""
        return [
            SliceId(node.id)
            for node in self.emulator.cloud.nodes.values()
            if node.state in (State.CREATING, State.READY)
        ]

    def is_up(self, slice_id: SliceId) -> bool:
        return any(
            node.id == slice_id and node.state is State.READY
            for node in self.emulator.cloud.nodes.values()
        )

    def listed(self) -> int:
        """Nodes of any state, also those that are being deleted."""
        return len(self.emulator.cloud.nodes)

    def paid(self) -> timedelta:
        """Over all nodes; every node has as many chips."""
        now = self.clock.now()
        entries = self.emulator.cloud.ledger.entries
        spans = [(entry.ended_at or now) - entry.began_at for entry in entries]
        return sum(spans, timedelta(0))
