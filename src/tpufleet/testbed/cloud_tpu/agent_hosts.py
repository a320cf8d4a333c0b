"""Real agents on emulated nodes: each host is a process of the local provider, told what it is by
a metadata server of its own, as on a real machine."""

from __future__ import annotations

import logging
import sys
from datetime import timedelta
from pathlib import Path

from tpufleet.errors import FleetError
from tpufleet.model.jobs import Capacity
from tpufleet.model.slices import SliceId
from tpufleet.providers.base import Fault, Order
from tpufleet.providers.local import processes
from tpufleet.providers.local.provider import LocalProvider
from tpufleet.testbed.cloud_tpu import metadata_server
from tpufleet.testbed.cloud_tpu.metadata_server import MetadataServer
from tpufleet.testbed.cloud_tpu.nodes import NodeRecord

log = logging.getLogger(__name__)

# Which value of the metadata server changes, and to what.
NOTICES = {
    "preempted": ("preempted", "TRUE"),
    "maintenance": ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"),
}


class AgentHosts:
    def __init__(self, root: Path, served: MetadataServer) -> None:
        self._metadata = served
        agent = (
            sys.executable,
            "-m",
            "tpufleet.testbed.cloud_tpu.host_agent",
            served.url,
            processes.MARKER_VARIABLE,
        )
        self._local = LocalProvider(root, agent=agent)

    def start(self) -> None:
        self._local.start()

    def boot(self, node: NodeRecord) -> None:
        name = machine_name(node)
        attributes = dict(node.template.metadata)
        self._metadata.put(
            name,
            metadata_server.instance_values(
                {
                    **attributes,
                    "accelerator-type": node.accelerator.name,
                    "tpu-env": f"NODE_ID: '{node.id}'\nZONE: '{node.zone}'\n",
                },
                name=node.id,
                zone=f"projects/1/zones/{node.zone}",
            ),
        )
        self._local.request(
            Order(
                id=name,
                slices=(name,),
                accelerator=node.accelerator.name,
                zone=node.zone,
                capacity=Capacity.SPOT,
                tokens={name: "in the metadata"},
                server_url=attributes.get("tpufleet-server", "http://127.0.0.1:1"),
                fleet="emulator",
            )
        )

    def tell(self, node: NodeRecord) -> None:
        if node.notice in NOTICES:
            self._metadata.change(machine_name(node), *NOTICES[node.notice])

    def kill_host(self, node: NodeRecord, host: int) -> None:
        self._hurt(node, Fault.KILL_HOST, host)

    def stall_host(self, node: NodeRecord, host: int) -> None:
        self._hurt(node, Fault.STALL_HOST, host)

    def end(self, node: NodeRecord) -> None:
        name = machine_name(node)
        self._local.release(name, node.zone)
        self._metadata.drop(name)

    def close(self) -> None:
        self._local.release_all(timedelta(seconds=30))
        self._local.close()

    def _hurt(self, node: NodeRecord, fault: Fault, host: int) -> None:
        try:
            self._local.inject(machine_name(node), fault, host)
        except FleetError as error:
            log.warning("%s of %s did not happen: %s", fault, node.id, error)


def machine_name(node: NodeRecord) -> SliceId:
    """Node names come back when a node is created again; machines are told apart."""
    return SliceId(f"{node.id}-{node.number}")
