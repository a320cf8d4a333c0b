"""A cloud in a journey whose provider is the real one."""

from __future__ import annotations

from collections.abc import Callable, Collection

from tpufleet.model.fleet.cloud_slices import ExpectedSlice, SliceListing
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.pod_settings import PodSettings
from tpufleet.providers.base import Fault, Order
from tpufleet.providers.tpu_vm.provider import TpuVmProvider
from tpufleet_testbed.cloud_tpu.emulator import Emulator


class WrappedProvider:
    """Passes the calls of the controller on to `provider`, which may be replaced."""

    provider: TpuVmProvider
    emulator: Emulator

    def slice_settings(self, accelerator: str, pod: PodSettings) -> str:
        return self.provider.slice_settings(accelerator, pod)

    def request(self, order: Order) -> None:
        self.provider.request(order)

    def release(self, slice_id: SliceId, zone: str) -> None:
        self.provider.release(slice_id, zone)

    def listing(self, expected: Collection[ExpectedSlice] = ()) -> SliceListing:
        return self.provider.listing(expected)

    def inject(self, slice_id: SliceId, fault: Fault, host_index: int | None = None) -> None:
        self.provider.inject(slice_id, fault, host_index)

    def on_change(self, wake: Callable[[], None]) -> None:
        self.provider.on_change(wake)

    def advance(self) -> None:
        with self.emulator.cloud.lock:
            self.emulator.cloud.run_due()

    def close(self) -> None:
        self.provider.close()
        self.emulator.close()
