"""Interface between the emulated cloud and whatever runs on its nodes."""

from __future__ import annotations

from tpufleet_testbed.cloud_tpu.nodes import NodeRecord


class HostBackend:
    """Runs the hosts of nodes. This one has none, for tests of the API alone."""

    def boot(self, node: NodeRecord) -> None: ...
    def update_metadata(self, node: NodeRecord) -> None:
        """Publish the node's new metadata to its hosts, which go on."""

    def run_startup_script(self, node: NodeRecord) -> None:
        """Run the startup script again, as a user does on a host."""

    def notify(self, node: NodeRecord) -> None:
        """Publish the node's notice to its hosts."""

    def kill_host(self, node: NodeRecord, host: int) -> None: ...
    def stall_host(self, node: NodeRecord, host: int) -> None: ...
    def terminate(self, node: NodeRecord) -> None: ...
    def shut_down(self, node: NodeRecord) -> None:
        """A user deletes or stops it: the guests have time to shut down."""
        self.terminate(node)

    def guest_attributes(
        self, node: NodeRecord, host: int, query_path: str
    ) -> dict[tuple[str, str], str]:
        """What the host wrote below the path, by namespace and key."""
        return {}
