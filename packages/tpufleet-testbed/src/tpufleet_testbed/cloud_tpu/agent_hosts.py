"""Real agents on emulated nodes: each host is a process of the local provider, which reads its
identity from a metadata server, as on a TPU VM."""

from __future__ import annotations

import logging
import sys
import time
from datetime import timedelta
from pathlib import Path

from tpufleet.errors import FleetError
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity
from tpufleet.providers.base import Fault, Order
from tpufleet.providers.local import processes
from tpufleet.providers.local.provider import LocalProvider
from tpufleet_testbed.cloud_tpu import host_agent, metadata_server
from tpufleet_testbed.cloud_tpu.host_backend import HostBackend
from tpufleet_testbed.cloud_tpu.metadata_server import MetadataServer
from tpufleet_testbed.cloud_tpu.nodes import NodeRecord

log = logging.getLogger(__name__)

STOP_SECONDS = 30.0
# Metadata path and value of each notice.
NOTICES = {
    "preempted": ("preempted", "TRUE"),
    "maintenance": ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"),
}


class AgentHosts(HostBackend):
    def __init__(self, root: Path, metadata_server: MetadataServer) -> None:
        self._metadata = metadata_server
        agent = (
            sys.executable,
            "-m",
            host_agent.__name__,
            metadata_server.url,
            processes.MARKER_VARIABLE,
        )
        self._local = LocalProvider(root, agent=agent)

    def start(self) -> None:
        self._local.start()

    def boot(self, node: NodeRecord) -> None:
        self.update_metadata(node)
        self.run_startup_script(node)

    def update_metadata(self, node: NodeRecord) -> None:
        name = slice_id_of(node)
        attributes = dict(node.template.metadata)
        self._metadata.put(
            name,
            metadata_server.instance_values(
                {
                    **attributes,
                    "accelerator-type": node.accelerator.name,
                    "tpu-env": _tpu_env(node),
                },
                name=node.id,
                zone=f"projects/1/zones/{node.zone}",
            ),
        )

    def run_startup_script(self, node: NodeRecord) -> None:
        """That of tpufleet starts the agent; any other does nothing here."""
        if "tpufleet-slices" not in node.template.metadata:
            return
        name = slice_id_of(node)
        self._end_agents(name, node.zone)
        self._local.request(
            Order(
                id=name,
                slices=(name,),
                accelerator=node.accelerator.name,
                zone=node.zone,
                capacity=Capacity.SPOT,
                tokens={name: "in the metadata"},
                server_url=node.template.metadata.get("tpufleet-server", "http://127.0.0.1:1"),
                fleet="emulator",
            )
        )

    def _end_agents(self, name: SliceId, zone: str) -> None:
        """Of an earlier run of the script."""
        deadline = time.monotonic() + STOP_SECONDS
        self._local.release(name, zone)
        while any(each.id == name for each in self._local.listing()):
            if time.monotonic() > deadline:
                raise FleetError(f"the agents of {name} do not stop")
            time.sleep(0.05)

    def notify(self, node: NodeRecord) -> None:
        if node.notice in NOTICES:
            self._metadata.set_value(slice_id_of(node), *NOTICES[node.notice])

    def kill_host(self, node: NodeRecord, host: int) -> None:
        self._inject(node, Fault.KILL_HOST, host)

    def stall_host(self, node: NodeRecord, host: int) -> None:
        self._inject(node, Fault.STALL_HOST, host)

    def terminate(self, node: NodeRecord) -> None:
        name = slice_id_of(node)
        self._local.release(name, node.zone)
        self._metadata.remove(name)

    def guest_attributes(
        self, node: NodeRecord, host: int, query_path: str
    ) -> dict[tuple[str, str], str]:
        return self._metadata.guest_attributes(slice_id_of(node), host, query_path)

    def close(self) -> None:
        self._local.release_all(timedelta(seconds=30))
        self._local.close()

    def _inject(self, node: NodeRecord, fault: Fault, host: int) -> None:
        try:
            self._local.inject(slice_id_of(node), fault, host)
        except FleetError as error:
            log.warning("cannot inject %s into %s: %s", fault, node.id, error)


def _tpu_env(node: NodeRecord) -> str:
    """The lines that are read here, by JAX (jax/_src/clusters/cloud_tpu_cluster.py) or by us."""
    values = {
        "ACCELERATOR_TYPE": node.accelerator.name,
        "NODE_ID": node.id,
        "ZONE": node.zone,
    }
    if node.num_slices > 1:
        values["MEGASCALE_NUM_SLICES"] = str(node.num_slices)
        values["MEGASCALE_SLICE_ID"] = str(node.slice_index)
    return "".join(f"{name}: '{value}'\n" for name, value in values.items())


def slice_id_of(node: NodeRecord) -> SliceId:
    """Unique, unlike node names, which are reused when a node is created again."""
    return SliceId(f"{node.id}-{node.number}")
