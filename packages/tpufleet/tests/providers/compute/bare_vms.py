"""VMs of the emulated Compute Engine that are machines of their own: Ubuntu 22.04 in its own
network, with the metadata of the emulator and the startup script of their template."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.providers.tpu_vm.bare_hosts import ENVIRON
from tests.providers.tpu_vm.host_network import PACKAGE_INDEX, Switch
from tests.providers.tpu_vm.ubuntu_host import UbuntuHost
from tpufleet_testbed.cloud_tpu.emulator import Emulator
from tpufleet_testbed.compute_engine.records import Vm
from tpufleet_testbed.compute_engine.vm_hosts import VmHosts


class BareVms(VmHosts):
    """They download from the folder of `bundle` or from `storage`, have the `shared` folder, and
    reach each other, the server and these services of the internet."""

    def __init__(
        self, folder: Path, emulator: Emulator, *, bundle: Path | None = None, storage: str = "",
        shared: Path | None = None, internet: Sequence[str] = PACKAGE_INDEX,
    ) -> None:  # fmt: skip
        self._folder, self._metadata = folder, emulator.metadata
        self._bundle, self._shared, self._internet = bundle, shared, internet
        self._storage = {"TPUFLEET_STORAGE_URL": storage} if storage else {}
        self._switch = Switch()
        self._machines: dict[str, UbuntuHost | None] = {}  # None: it is being made
        self._threads: list[threading.Thread] = []
        self._changing = threading.Lock()
        emulator.engine.hosts = self

    def boot(self, vm: Vm, values: Mapping[str, str]) -> None:
        self._metadata.put(vm.key, dict(values))
        self._machines[vm.key] = None
        self._start(lambda: self._boot(vm, values["attributes/startup-script"]))

    def _boot(self, vm: Vm, script: str) -> None:
        machine = UbuntuHost(
            self._folder / vm.key, self._bundle, "", metadata=self._metadata, name=vm.key,
            chips=vm.machine.chips, shared=self._shared, environ=ENVIRON,
            switch=self._switch, internet=self._internet,
        )  # fmt: skip
        with self._changing:
            deleted = vm.key not in self._machines
            if not deleted:
                self._machines[vm.key] = machine
        if deleted:
            machine.close()
        else:
            machine.startup(script, **self._storage)

    def publish(self, vm: Vm, path: str, value: str) -> None:
        self._metadata.set_value(vm.key, path, value)

    def end(self, vm: Vm) -> None:
        with self._changing:
            machine = self._machines.pop(vm.key, None)
        if machine is not None:
            self._start(machine.close)
        self._metadata.remove(vm.key)

    def guest_attributes(self, vm: Vm, path: str) -> dict[tuple[str, str], str]:
        return self._metadata.guest_attributes(vm.key, 0, path)

    def logs(self) -> str:
        return "".join(each.agent_log() for each in list(self._machines.values()) if each)

    def close(self) -> None:
        with self._changing:
            left, self._machines = list(self._machines.values()), {}
        for machine in filter(None, left):
            machine.close()
        for thread in self._threads:  # may start others
            thread.join(900)
        self._switch.close()

    def _start(self, call) -> None:
        thread = threading.Thread(target=call)
        self._threads.append(thread)
        thread.start()
