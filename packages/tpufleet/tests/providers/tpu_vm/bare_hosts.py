"""Hosts of emulated nodes that are machines of their own: Ubuntu 22.04, with the startup script and
the bundle that the metadata of their node names."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from tests.providers.tpu_vm.ubuntu_host import CERTIFICATES, UbuntuHost
from tpufleet.model.fleet.slices import SliceId
from tpufleet_testbed.cloud_tpu.agent_hosts import AgentHosts, slice_id_of
from tpufleet_testbed.cloud_tpu.emulator import Emulator
from tpufleet_testbed.cloud_tpu.nodes import NodeRecord

# There are no chips in this machine.
ENVIRON = {"JAX_PLATFORMS": "cpu", "SSL_CERT_FILE": CERTIFICATES}


class BareHosts(AgentHosts):
    """One machine per node. It downloads from the folder of `bundle` or from `storage`, and has the
    `shared` folder, like a disk of all machines."""

    def __init__(
        self,
        folder: Path,
        emulator: Emulator,
        *,
        bundle: Path | None = None,
        storage: str = "",
        shared: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder, emulator.metadata)
        self._folder, self._bundle, self._storage = folder, bundle, storage
        self._shared, self._environ = shared, environ or {}
        self._machines: dict[SliceId, UbuntuHost] = {}
        self._threads: list[threading.Thread] = []
        emulator.cloud.hosts = self

    def run_startup_script(self, node: NodeRecord) -> None:
        name = slice_id_of(node)
        machine = self._machines[name] = UbuntuHost(
            self._folder / name, self._bundle, "", metadata=self._metadata, name=name,
            chips=node.accelerator.chips_per_host, shared=self._shared,
            environ={**ENVIRON, **self._environ}, exposed=True,
        )  # fmt: skip
        storage = {"TPUFLEET_STORAGE_URL": self._storage} if self._storage else {}
        self._start(lambda: machine.startup(node.template.metadata["startup-script"], **storage))

    def terminate(self, node: NodeRecord) -> None:
        machine = self._machines.pop(slice_id_of(node), None)
        if machine is not None:
            self._start(machine.close)

    def logs(self) -> str:
        return "".join(machine.agent_log() for machine in list(self._machines.values()))

    def start(self) -> None:
        """Nothing before a node is made."""

    def close(self) -> None:
        for name in list(self._machines):
            self._start(self._machines.pop(name).close)
        for thread in self._threads:
            thread.join(900)

    def _start(self, call) -> None:
        thread = threading.Thread(target=call)
        self._threads.append(thread)
        thread.start()
