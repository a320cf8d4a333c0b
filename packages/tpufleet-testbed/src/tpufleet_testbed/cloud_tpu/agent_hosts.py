"""Nodes of the emulated Cloud TPU API whose hosts run real agents."""

from __future__ import annotations

from pathlib import Path

from tpufleet.model.fleet.slices import SliceId
from tpufleet.providers.base import Fault
from tpufleet_testbed.agent_processes import AgentProcesses
from tpufleet_testbed.cloud_tpu import metadata_server
from tpufleet_testbed.cloud_tpu.host_backend import HostBackend
from tpufleet_testbed.cloud_tpu.metadata_server import MetadataServer
from tpufleet_testbed.cloud_tpu.nodes import NodeRecord

# Metadata path and value of each notice.
NOTICES = {
    "preempted": ("preempted", "TRUE"),
    "maintenance": ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"),
}


class AgentHosts(HostBackend):
    def __init__(self, root: Path, metadata_server: MetadataServer) -> None:
        self._metadata = metadata_server
        self.processes = AgentProcesses(root, metadata_server)

    def start(self) -> None:
        self.processes.start()

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
        self.processes.run(
            slice_id_of(node), node.accelerator.name, node.zone, node.template.metadata
        )

    def notify(self, node: NodeRecord) -> None:
        if node.notice in NOTICES:
            self._metadata.set_value(slice_id_of(node), *NOTICES[node.notice])

    def kill_host(self, node: NodeRecord, host: int) -> None:
        self.processes.inject(slice_id_of(node), Fault.KILL_HOST, host)

    def stall_host(self, node: NodeRecord, host: int) -> None:
        self.processes.inject(slice_id_of(node), Fault.STALL_HOST, host)

    def terminate(self, node: NodeRecord) -> None:
        name = slice_id_of(node)
        self.processes.end(name, node.zone)
        self._metadata.remove(name)

    def shut_down(self, node: NodeRecord) -> None:
        self.processes.shut_down(slice_id_of(node), lambda: self.terminate(node))

    def guest_attributes(
        self, node: NodeRecord, host: int, query_path: str
    ) -> dict[tuple[str, str], str]:
        return self._metadata.guest_attributes(slice_id_of(node), host, query_path)

    def close(self) -> None:
        self.processes.close()


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
