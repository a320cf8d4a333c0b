"""An emulated GKE that tests make fail, and whose nodes they have repaired."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import grpc
from google.cloud import container_v1 as api

from tpufleet_testbed.gke import api_errors
from tpufleet_testbed.gke.node_pools import GkeEmulator
from tpufleet_testbed.servers import ApiError

Operation: Any = api.Operation
Status: Any = api.NodePool.Status


@dataclass
class FaultyGke(GkeEmulator):
    upgrade_time: timedelta = timedelta(minutes=5)  # or repair
    calls: list[str] = field(default_factory=list)
    _call_errors: list[tuple[str, ApiError]] = field(default_factory=list)
    _creation_errors: list[tuple[int, str, str]] = field(default_factory=list)
    _deletion_errors: list[tuple[int, str]] = field(default_factory=list)
    _creation_times: list[timedelta] = field(default_factory=list)
    _missing_nodes: list[int] = field(default_factory=list)

    def fail_next_call(self, method: str, code: str, message: str, times: int = 1) -> None:
        """Fail the next calls of `create`, `delete`, `list` or `operations` with this status."""
        self._call_errors += [(method, ApiError(grpc.StatusCode[code], message))] * times

    def stop_failing(self) -> None:
        """Forget the failures that were asked for and have not happened."""
        self._call_errors.clear()
        self._creation_errors.clear()

    def fail_next_creation(self, code: int, message: str, condition: str = "") -> None:
        """Accept the next creation and fail its operation; the pool stays in state ERROR."""
        self._creation_errors.append((code, message, condition))

    def fail_next_deletion(self, code: int, message: str) -> None:
        """Accept the next deletion and fail its operation; the pool stays, in state ERROR."""
        self._deletion_errors.append((code, message))

    def slow_next_creation(self, duration: timedelta) -> None:
        """GKE tries for up to 35 minutes to get the instances of a pool."""
        self._creation_times.append(duration)

    def lose_nodes_of_next_creation(self, count: int) -> None:
        """So many nodes of the next pool never join the cluster; the pool is RUNNING_WITH_ERROR."""
        self._missing_nodes.append(count)

    def start_upgrade(self, name: str) -> Any:
        """As auto-upgrade does: the pool is RECONCILING and its nodes are replaced."""
        return self._replace_nodes(name, Operation.Type.UPGRADE_NODES, "upgrading node software")

    def start_repair(self, name: str) -> Any:
        """As auto-repair does when one node of a slice fails: all nodes of a multi-host slice are
        shut down, and new ones made. https://cloud.google.com/kubernetes-engine/docs/concepts/tpus
        """
        return self._replace_nodes(name, Operation.Type.AUTO_REPAIR_NODES, "repairing nodes")

    def _replace_nodes(self, name: str, kind: Any, message: str) -> Any:
        with self._lock:
            pool = self._pool(name)
            pool.status, pool.status_message = Status.RECONCILING, message
            record = self._operation(kind, self._cluster_of(name), name)
            self.nodes.delete_nodes(name)

            def finish() -> None:
                pool.status, pool.status_message = Status.RUNNING, ""
                self._done(record)
                self._add_nodes(record, pool)

            self._later(record, name, self.upgrade_time, finish)
            return record

    @property
    def next_due(self) -> datetime | None:
        return min((pending.due for pending in self._pending), default=None)

    # Where the emulator fails

    @contextmanager
    def _called(self, method: str) -> Iterator[None]:
        with super()._called(method):
            self.calls.append(method)
            for index, (failing, error) in enumerate(self._call_errors):
                if failing == method:
                    del self._call_errors[index]
                    raise error
            yield

    def create(self, parent: str, pool: Any) -> Any:
        with self._lock:
            record = super().create(parent, pool)
            if self._creation_times:
                self._pending[-1].due = self.clock.now() + self._creation_times.pop(0)
            return record

    def _finish_creation(self, record: Any, pool: Any) -> None:
        if self._creation_errors:
            self._fail(record, pool, *self._creation_errors.pop(0))
        else:
            super()._finish_creation(record, pool)

    def _add_nodes(self, record: Any, pool: Any) -> None:
        creation = record.operation_type is Operation.Type.CREATE_NODE_POOL
        if self._missing_nodes and creation and not pool.config.flex_start:
            name, nodes, pool = pool.name, pool.initial_node_count, api.NodePool(pool)
            pool.initial_node_count -= self._missing_nodes.pop(0)
            running = pool.initial_node_count
            message = api_errors.text("lost-nodes", nodes=nodes, running=running)
            self.set_status(name, "RUNNING_WITH_ERROR", message)
        super()._add_nodes(record, pool)

    def _finish_deletion(self, record: Any, pool: Any) -> None:
        if self._deletion_errors:
            self._fail(record, pool, *self._deletion_errors.pop(0))
        else:
            super()._finish_deletion(record, pool)
