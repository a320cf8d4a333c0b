"""Hosts of emulated nodes that are machines of their own: Ubuntu 22.04 in its own network, with the
startup script and the bundle that the metadata of their node names."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.providers.tpu_vm.host_network import PACKAGE_INDEX, Switch
from tests.providers.tpu_vm.ubuntu_host import CERTIFICATES, UbuntuHost
from tpufleet.model.fleet.slices import SliceId
from tpufleet_testbed.cloud_tpu.agent_hosts import AgentHosts, slice_id_of
from tpufleet_testbed.cloud_tpu.emulator import Emulator
from tpufleet_testbed.cloud_tpu.nodes import NodeRecord

# There are no chips in this machine.
ENVIRON = {"JAX_PLATFORMS": "cpu", "SSL_CERT_FILE": CERTIFICATES}


class BareHosts(AgentHosts):
    """One machine per host of a node. It downloads from the folder of `bundle` or from `storage`,
    and has the `shared` folder, like a disk of all machines. It reaches the other hosts, the server
    and these services of the internet."""

    def __init__(
        self,
        folder: Path,
        emulator: Emulator,
        *,
        bundle: Path | None = None,
        storage: str = "",
        shared: Path | None = None,
        environ: Mapping[str, str] | None = None,
        internet: Sequence[str] = PACKAGE_INDEX,
    ) -> None:
        super().__init__(folder, emulator.metadata)
        self._folder, self._bundle, self._storage = folder, bundle, storage
        self._shared, self._environ, self._internet = shared, environ or {}, internet
        self._switch = Switch()
        self._nodes: dict[SliceId, tuple[NodeRecord, list[UbuntuHost]]] = {}
        self._threads: list[threading.Thread] = []
        self._changing = threading.Lock()
        emulator.cloud.hosts = self

    def run_startup_script(self, node: NodeRecord) -> None:
        name = slice_id_of(node)
        self._nodes[name] = node, []
        self._start(lambda: self._boot(node, name))

    def _boot(self, node: NodeRecord, name: SliceId) -> None:
        """Beside the calls of the API, which do not wait for it."""
        for index in range(node.accelerator.hosts):
            machine = UbuntuHost(
                self._folder / name / str(index), self._bundle, "", metadata=self._metadata,
                name=name, index=index, chips=node.accelerator.chips_per_host, shared=self._shared,
                environ={**ENVIRON, **self._environ}, switch=self._switch,
                internet=self._internet,
            )  # fmt: skip
            with self._changing:
                deleted = name not in self._nodes
                if not deleted:
                    self._nodes[name][1].append(machine)
            if deleted:
                machine.close()
                return
            self._startup(node, machine)

    def ssh(self, node_id: str, command: str) -> subprocess.CompletedProcess[str]:
        """On all hosts of this node, one after the other: the first answer that is an error, or the
        last."""
        for machine in self.machines(node_id):
            storage = {"TPUFLEET_STORAGE_URL": self._storage} if self._storage else {}
            done = machine.with_services("bash", "-c", command, **storage)
            if done.returncode != 0:
                break
        return done

    def machines(self, node_id: str) -> list[UbuntuHost]:
        """Of the hosts of this node, in order."""
        [found] = [hosts for node, hosts in self._nodes.values() if node.id == node_id]
        return found

    def count(self, node_id: str) -> int:
        """Of its machines that exist already."""
        return sum(len(hosts) for node, hosts in list(self._nodes.values()) if node.id == node_id)

    def boot_again(self, machine: UbuntuHost) -> None:
        """One that was powered off."""
        [node] = [node for node, machines in self._nodes.values() if machine in machines]
        machine.power_on()
        self._startup(node, machine)

    def terminate(self, node: NodeRecord) -> None:
        with self._changing:
            _, machines = self._nodes.pop(slice_id_of(node), (node, []))
        for machine in machines:
            self._start(machine.close)
        self._metadata.remove(slice_id_of(node))

    def kill_host(self, node: NodeRecord, host: int) -> None:
        self._start(self.machines(node.id)[host].power_off)

    def stall_host(self, node: NodeRecord, host: int) -> None:
        self.machines(node.id)[host].signal_agent("STOP")

    def logs(self) -> str:
        machines = [each for _, hosts in list(self._nodes.values()) for each in hosts]
        return "".join(machine.agent_log() for machine in machines)

    def start(self) -> None:
        """Nothing before a node is made."""

    def close(self) -> None:
        for node, _ in list(self._nodes.values()):
            self.terminate(node)
        for thread in self._threads:  # may start others
            thread.join(900)
        self._switch.close()

    def _startup(self, node: NodeRecord, machine: UbuntuHost) -> None:
        if not node.template.metadata.get("startup-script"):
            return
        storage = {"TPUFLEET_STORAGE_URL": self._storage} if self._storage else {}
        self._start(lambda: machine.startup(node.template.metadata["startup-script"], **storage))

    def _start(self, call) -> None:
        thread = threading.Thread(target=call)
        self._threads.append(thread)
        thread.start()
