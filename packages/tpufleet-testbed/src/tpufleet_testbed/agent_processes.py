"""Real agents on emulated hosts: each is a process of the local provider, which reads its identity
from the metadata server, as on a VM of Google's."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

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
MARKER = "tpufleet-slices"  # metadata that our startup script needs; any other does nothing here


class AgentProcesses:
    """Under names that are unique in the emulated cloud."""

    def __init__(self, root: Path, metadata_server: MetadataServer) -> None:
        agent = (
            sys.executable, "-m", host_agent.__name__, metadata_server.url,
            processes.MARKER_VARIABLE,
        )  # fmt: skip
        self._local = LocalProvider(root, agent=agent)

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

    def end(self, name: SliceId, zone: str) -> None:
        self._local.release(name, zone)

    def inject(self, name: SliceId, fault: Fault, host: int) -> None:
        try:
            self._local.inject(name, fault, host)
        except FleetError as error:
            log.warning("cannot inject %s into %s: %s", fault, name, error)

    def close(self) -> None:
        self._local.release_all(timedelta(seconds=30))
        self._local.close()

    def _end_earlier(self, name: SliceId, zone: str) -> None:
        """Agents of an earlier run of the script."""
        deadline = time.monotonic() + STOP_SECONDS
        self._local.release(name, zone)
        while any(each.id == name for each in self._local.listing()):
            if time.monotonic() > deadline:
                raise FleetError(f"the agents of {name} do not stop")
            time.sleep(0.05)
