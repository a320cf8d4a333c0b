"""TPU VMs on a manual clock: the real provider `tpu-vm` with the emulated Cloud TPU API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from tests.journeys.wrapped_provider import WrappedProvider
from tpufleet.clocks import ManualClock
from tpufleet.model.fleet.cloud_slices import CloudState
from tpufleet.model.fleet.slices import SliceId
from tpufleet.providers.tpu_vm.provider import TpuVmProvider
from tpufleet.providers.tpu_vm.settings import TpuVmSettings
from tpufleet_testbed.cloud_tpu.capacity import CapacityLimit, CloudCapacity
from tpufleet_testbed.cloud_tpu.emulator import Emulator
from tpufleet_testbed.cloud_tpu.fault_plan import NO_FAULTS, CloudFaultPlan
from tpufleet_testbed.cloud_tpu.locations import IMMEDIATE


class TpuVmCloud(WrappedProvider):
    name = "tpu-vm"
    exposes_tokens = True
    outage = None  # always reachable

    def __init__(
        self, clock: ManualClock, zones: Sequence[str], plan: CloudFaultPlan = NO_FAULTS,
        **settings: Any,
    ) -> None:  # fmt: skip
        self.zones = tuple(zones)
        latencies = replace(IMMEDIATE, boot=timedelta(seconds=10), deletion=timedelta(seconds=2))
        self.emulator = Emulator(clock=clock, latencies=latencies, plan=plan)
        self.emulator.start()
        self.provider = TpuVmProvider(
            TpuVmSettings(
                project="my-project", zones=self.zones, endpoint=self.emulator.endpoint, **settings
            ),
            fleet="test",
            clock=clock,
            deadline=900.0,
            min_wait=900.0,
            monotonic=lambda: clock.now().timestamp(),
        )

    def sell_out(self) -> None:
        self.emulator.cloud.stock = CloudCapacity(nodes=(CapacityLimit(most=0),))

    def existing(self) -> list[SliceId]:
        with self.emulator.cloud.lock:
            return [SliceId(name.rpartition("/")[2]) for name in self.emulator.cloud.nodes]

    def is_up(self, slice_id: SliceId) -> bool:
        return any(one.id == slice_id and one.state is CloudState.UP for one in self.listing())
