"""What runs on the VMs of the emulated Compute Engine: nothing, or real agents."""

from __future__ import annotations

from collections.abc import Mapping

from tpufleet.model.fleet.slices import SliceId
from tpufleet.providers.base import Fault
from tpufleet_testbed.agent_processes import AgentProcesses
from tpufleet_testbed.cloud_tpu.metadata_server import MetadataServer
from tpufleet_testbed.compute_engine.records import Vm


class VmHosts:
    """This one has none, for tests of the API alone."""

    def boot(self, vm: Vm, values: Mapping[str, str]) -> None:
        """Publish the values of the metadata server, and run the startup script."""

    def publish(self, vm: Vm, path: str, value: str) -> None:
        """Change a value of the metadata server."""

    def kill(self, vm: Vm) -> None:
        """End its processes; the VM stays."""

    def stall(self, vm: Vm) -> None: ...

    def end(self, vm: Vm) -> None: ...

    def guest_attributes(self, vm: Vm, path: str) -> dict[tuple[str, str], str]:
        """What the VM wrote below the path, by namespace and key."""
        return {}


class VmAgents(VmHosts):
    """Each VM is one host of the local provider."""

    def __init__(self, processes: AgentProcesses, metadata_server: MetadataServer) -> None:
        self._processes, self._metadata = processes, metadata_server

    def boot(self, vm: Vm, values: Mapping[str, str]) -> None:
        self._metadata.put(vm.key, dict(values))
        self._processes.run(SliceId(vm.key), vm.machine.host_type, vm.zone, vm.metadata)

    def publish(self, vm: Vm, path: str, value: str) -> None:
        self._metadata.set_value(vm.key, path, value)

    def kill(self, vm: Vm) -> None:
        self._processes.inject(SliceId(vm.key), Fault.KILL_HOST, 0)

    def stall(self, vm: Vm) -> None:
        self._processes.inject(SliceId(vm.key), Fault.STALL_HOST, 0)

    def end(self, vm: Vm) -> None:
        self._processes.end(SliceId(vm.key), vm.zone)
        self._metadata.remove(vm.key)

    def guest_attributes(self, vm: Vm, path: str) -> dict[tuple[str, str], str]:
        return self._metadata.guest_attributes(vm.key, 0, path)
