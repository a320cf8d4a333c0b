"""Compute Engine in one process on a manual clock: the real provider `compute` with the emulated
cloud, and a server that can be killed between a write and its answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tests.journeys.wrapped_provider import WrappedProvider
from tpufleet.clocks import ManualClock
from tpufleet.model.fleet.slices import SliceId
from tpufleet.providers.compute.naming import SLICE
from tpufleet.providers.compute.provider import ComputeProvider
from tpufleet.providers.compute.settings import ComputeSettings
from tpufleet.providers.tpu_vm.google_rest import Answer, GoogleRest
from tpufleet_testbed.cloud_tpu.emulator import Emulator
from tpufleet_testbed.cloud_tpu.fault_plan import CloudFaultPlan
from tpufleet_testbed.compute_engine.fault_plan import ComputeFaultPlan
from tpufleet_testbed.compute_engine.records import Vm
from tpufleet_testbed.compute_engine.vm_hosts import VmHosts


class Killed(BaseException):
    """The process of the server ends here: nothing of it runs on."""


class MortalRest(GoogleRest):
    """Counts answers, and ends the server at a write: before it is sent, or before its answer is
    read."""

    def __init__(self, root: str, answers: Counter[int]) -> None:
        super().__init__(root)
        self.answers = answers
        self.dies: str | None = None  # "before" or "after" the next write

    def _call(self, method: str, api: str, path: str, query: dict[str, Any], body: Any) -> Answer:
        creates = method == "POST" and "requestId" in query
        dies = self.dies if creates or method == "DELETE" else None
        if dies is not None:
            self.dies = None
        if dies == "before":
            raise Killed
        answer = super()._call(method, api, path, query, body)
        self.answers[answer.status] += 1
        if dies == "after":
            raise Killed
        return answer


class NoticedVms(VmHosts):
    """Remembers which slices got a notice of preemption."""

    def __init__(self) -> None:
        self.noticed: set[SliceId] = set()

    def publish(self, vm: Vm, path: str, value: str) -> None:
        if path == "preempted":
            self.noticed.add(slice_of(vm))


class ComputeCloud(WrappedProvider):
    name = ComputeProvider.name
    exposes_tokens = True

    def __init__(
        self,
        clock: ManualClock,
        folder: Path,
        zones: Sequence[str],
        plan: ComputeFaultPlan,
        *,
        outage: str | None = None,
        **settings: Any,
    ) -> None:
        """`outage`: calls fail by the plan, so only the controller, which expects that, lists."""
        self.clock, self.zones, self.outage = clock, tuple(zones), outage
        self.emulator = Emulator(clock=clock, plan=CloudFaultPlan(compute=plan))
        self.engine = self.emulator.engine
        self.hosts = self.engine.hosts = NoticedVms()
        self.emulator.start()
        self.answers: Counter[int] = Counter()  # by HTTP status
        self._folder = folder / "compute"
        self._settings = replace(
            ComputeSettings(
                project="my-project", zones=self.zones, endpoint=self.emulator.project.url
            ),
            **settings,
        )
        self.restart()

    def restart(self) -> None:
        """As when the process of the server is killed: only the files are left."""
        if hasattr(self, "provider"):
            self.provider.close()
        self.rest = MortalRest(self._settings.endpoint, self.answers)
        self.provider = ComputeProvider(
            self._settings, fleet="test", folder=self._folder, clock=self.clock, rest=self.rest,
            min_wait=900.0, monotonic=lambda: self.clock.now().timestamp(),
        )  # fmt: skip

    def advance(self) -> None:
        with self.engine.lock:
            self.engine.run_due()

    def existing(self) -> list[SliceId]:
        """Slices with VMs that are, or will be, paid for."""
        return list(dict.fromkeys(slice_of(vm) for vm in self._vms() if vm.has_machine))

    def is_up(self, slice_id: SliceId) -> bool:
        vms = [vm for vm in self._vms() if slice_of(vm) == slice_id]
        size = vms[0].group.target_size if vms and vms[0].group is not None else 1
        return len(vms) == size and all(vm.status == "RUNNING" for vm in vms)

    def stop(self, slice_id: SliceId, reason: str) -> None:
        """`preempted`, or `expired`: its run time is over."""
        with self.engine.lock:
            for vm in self._vms():
                if slice_of(vm) == slice_id:
                    self.engine.stop(vm, self.clock.now(), reason)

    def left(self) -> list[str]:
        """Everything that exists in the project."""
        stored = [f"{kind}/{name}" for _, kind, name in self.emulator.project.tpus.stored]
        groups = [f"groups/{name}" for _, name in self.engine.groups]
        return [*stored, *groups, *(f"vms/{vm.name}" for vm in self._vms())]

    def _vms(self) -> list[Vm]:
        return list(self.engine.vms.values())


def slice_of(vm: Vm) -> SliceId:
    return SliceId(vm.properties["labels"][SLICE])


def minutes(count: float) -> timedelta:
    return timedelta(minutes=count)
