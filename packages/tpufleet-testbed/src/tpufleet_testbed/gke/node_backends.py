"""What makes the nodes of an emulated node pool."""

from __future__ import annotations

from typing import Protocol

from google.cloud import container_v1 as api


class NodeBackend(Protocol):
    """Creates and deletes the nodes of a pool."""

    def create_nodes(self, pool: api.NodePool, *, chips: bool = True) -> None: ...
    def register_chips(self, pool: api.NodePool) -> None: ...
    def drain_nodes(self, pool: str) -> None: ...
    def delete_nodes(self, pool: str) -> None: ...
    def relabel_nodes(self, pool: api.NodePool) -> None: ...


class NoNodes:
    def create_nodes(self, pool: api.NodePool, *, chips: bool = True) -> None:
        return

    def register_chips(self, pool: api.NodePool) -> None:
        return

    def drain_nodes(self, pool: str) -> None:
        return

    def delete_nodes(self, pool: str) -> None:
        return

    def relabel_nodes(self, pool: api.NodePool) -> None:
        return
