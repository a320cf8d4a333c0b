"""Interface between the emulated cloud and whatever runs on its nodes."""

from __future__ import annotations

from typing import Protocol

from tpufleet.testbed.cloud_tpu.nodes import NodeRecord


class HostBackend(Protocol):
    """Runs the hosts of nodes."""

    def boot(self, node: NodeRecord) -> None: ...
    def notify(self, node: NodeRecord) -> None:
        """Publish the node's notice to its hosts."""
        ...

    def kill_host(self, node: NodeRecord, host: int) -> None: ...
    def stall_host(self, node: NodeRecord, host: int) -> None: ...
    def terminate(self, node: NodeRecord) -> None: ...
    def guest_attributes(
        self, node: NodeRecord, host: int, query_path: str
    ) -> dict[tuple[str, str], str]:
        """What the host wrote below the path, by namespace and key."""
        ...


class NoHosts:
    """Nodes without hosts, for tests of the API alone."""

    def boot(self, node: NodeRecord) -> None: ...
    def notify(self, node: NodeRecord) -> None: ...
    def kill_host(self, node: NodeRecord, host: int) -> None: ...
    def stall_host(self, node: NodeRecord, host: int) -> None: ...
    def terminate(self, node: NodeRecord) -> None: ...
    def guest_attributes(
        self, node: NodeRecord, host: int, query_path: str
    ) -> dict[tuple[str, str], str]:
        return {}
