"""Real agents on emulated hosts: each is a process of the local provider, which reads its identity
from the metadata server, as on a VM of Google's."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import psutil

from tpufleet.clocks import wait_until
from tpufleet.errors import FleetError
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity
from tpufleet.providers.base import Fault, Order
from tpufleet.providers.local import processes
from tpufleet.providers.local.provider import LocalProvider
from tpufleet_testbed.cloud_tpu import host_agent
from tpufleet_testbed.cloud_tpu.metadata_server import MetadataServer

log = logging.getLogger(__name__)

STOP_SECONDS = 30.0
# From the signal to shut down to the end of the power: for Spot VMs at most 30 s, for others longer
# (cloud.google.com/compute/docs/instances/stop-start-instance#shutdown-period).
SHUTDOWN_SECONDS = 30.0
MARKER = "tpufleet-slices"  # metadata that our startup script needs; any other does nothing here


class AgentProcesses:
    """Under names that are unique in the emulated cloud."""

    def __init__(self, root: Path, metadata_server: MetadataServer) -> None:
        agent = (
            sys.executable, "-m", host_agent.__name__, metadata_server.url,
            processes.MARKER_VARIABLE,
        )  # fmt: skip
        self._local = LocalProvider(root, agent=agent)
        self._root = root
        self._shutdowns: dict[SliceId, threading.Timer] = {}

    def start(self) -> None:
        self._local.start()

    def run(self, name: SliceId, accelerator: str, zone: str, metadata: Mapping[str, str]) -> None:
        """As many agents as the type has hosts, if the startup script is that of tpufleet."""
        if MARKER not in metadata:
            return
        self._end_earlier(name, zone)
        self._local.request(
            Order(
                id=name, slices=(name,), accelerator=accelerator, zone=zone,
                capacity=Capacity.SPOT, tokens={name: "in the metadata"},
                server_url=metadata.get("tpufleet-server", "http://127.0.0.1:1"),
                fleet="emulator",
            )
        )  # fmt: skip

    def shut_down(self, name: SliceId, power_off: Callable[[], None]) -> None:
        """systemd sends SIGTERM to the agents; what is left is killed when the power goes."""
        prefix = processes.slice_marker(self._root, name)
        marked = [process for process, _ in processes.find_marked(lambda m: m.startswith(prefix))]
        with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile
            agents = [each for each in marked if each.parent() not in marked]
            for agent in agents:
                agent.terminate()
        self._shutdowns[name] = timer = threading.Timer(SHUTDOWN_SECONDS, power_off)
        timer.daemon = True
        timer.start()

    def end(self, name: SliceId, zone: str) -> None:
        if timer := self._shutdowns.pop(name, None):
            timer.cancel()
        self._local.release(name, zone)

    def inject(self, name: SliceId, fault: Fault, host: int) -> None:
        try:
            self._local.inject(name, fault, host)
        except FleetError as error:
            log.warning("cannot inject %s into %s: %s", fault, name, error)

    def close(self) -> None:
        for timer in self._shutdowns.values():
            timer.cancel()
        self._local.release_all(timedelta(seconds=30))
        self._local.close()

    def _end_earlier(self, name: SliceId, zone: str) -> None:
        """Agents of an earlier run of the script."""
        self.end(name, zone)
        ended = lambda: all(each.id != name for each in self._local.listing())
        if not wait_until(ended, STOP_SECONDS, 0.05):
            raise FleetError(f"the agents of {name} do not stop")
