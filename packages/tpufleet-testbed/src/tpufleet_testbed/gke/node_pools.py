"""State of the emulated GKE API: node pools and long-running operations."""

from __future__ import annotations

import itertools
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import grpc
from google.cloud import container_v1 as api
from google.rpc import code_pb2, status_pb2

from tpufleet.clocks import Clock
from tpufleet_testbed.gke import api_errors, capacity, output_fields, validation
from tpufleet_testbed.servers import ApiError

OPERATION_RETENTION = timedelta(hours=12)  # of finished operations
_DOING = {
    "CREATE_NODE_POOL": "creating",
    "DELETE_NODE_POOL": "deleting",
    "AUTO_REPAIR_NODES": "repairing",
}
Code = grpc.StatusCode
Status: Any = api.NodePool.Status
Operation: Any = api.Operation
ConditionCode: Any = api.StatusCondition.Code
# https://cloud.google.com/kubernetes-engine/docs/reference/rest/v1/StatusCondition
_CANONICAL_CODES = {
    "GCE_STOCKOUT": code_pb2.RESOURCE_EXHAUSTED,
    "GCE_QUOTA_EXCEEDED": code_pb2.RESOURCE_EXHAUSTED,
}


class NodeBackend:
    """Creates and deletes the nodes of a pool. This one makes none."""

    def create_nodes(self, pool: api.NodePool, *, chips: bool = True) -> None: ...
    def register_chips(self, pool: api.NodePool) -> None: ...
    def drain_nodes(self, pool: str) -> None: ...
    def delete_nodes(self, pool: str) -> None: ...
    def relabel_nodes(self, pool: api.NodePool) -> None: ...


@dataclass(slots=True)
class _PendingOperation:
    """Runs `finish` at `due`."""

    record: Any
    pool: str
    due: datetime
    finish: Callable[[], None]


@dataclass(slots=True)
class GkeEmulator:
    """One cluster. `advance` runs everything that is due by the clock."""

    clock: Clock
    nodes: NodeBackend = field(default_factory=NodeBackend)
    creation_time: timedelta = timedelta(seconds=30)
    deletion_time: timedelta = timedelta(seconds=10)
    # From the creation of a flex-start pool until it has its nodes.
    flex_start_delay: timedelta = timedelta(0)
    cluster: str = ""  # its resource name; empty: any is found
    zones: tuple[str, ...] = ("us-central1-a",)  # of the cluster, for pools that name none
    release_channel: str = "REGULAR"  # the default of new clusters; empty: none
    policies: set[str] | None = None  # existing workload policies; None: any
    reservations: dict[str, int] | None = None  # nodes by name; None: any, without a limit
    not_offered: set[tuple[str, str]] = field(default_factory=set)  # (zone, machine type)
    # Nodes by (zone, machine type), or (zone, machine type, `spot`, `on-demand` or `reserved`)
    # for one kind of capacity; running pools use them up. Absent: unlimited.
    stock: dict[tuple[str, ...], int] = field(default_factory=dict)
    # Chips by (region, accelerator label), or (region, label, `spot` or `on-demand`); reservations
    # need none. Absent: unlimited.
    quotas: dict[tuple[str, ...], int] = field(default_factory=dict)
    max_operations: int | None = None  # at the same time
    # Limits of node auto-provisioning, by accelerator label; empty: it is off.
    auto_provisioning: dict[str, int] = field(default_factory=dict)
    # From the creation of nodes until their device plugin has registered the chips.
    device_plugin_delay: timedelta = timedelta(0)
    relabel_time: timedelta = timedelta(seconds=2)
    pools: dict[str, Any] = field(default_factory=dict)
    operations: dict[str, Any] = field(default_factory=dict)
    created: list[str] = field(default_factory=list)  # pool of every accepted request, in order
    # Times of the accepted requests, by pool.
    created_at: dict[str, datetime] = field(default_factory=dict)
    deleted_at: dict[str, datetime] = field(default_factory=dict)
    _pending: list[_PendingOperation] = field(default_factory=list)
    _ended: deque[tuple[datetime, str]] = field(default_factory=deque)  # operations, oldest first
    _numbers: itertools.count = field(default_factory=itertools.count)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def set_status(self, name: str, status: str, message: str = "", condition: str = "") -> None:
        with self._lock:
            pool = self.pools[name]
            pool.status, pool.status_message = Status[status], message
            pool.conditions = []
            if condition:
                canonical: Any = _CANONICAL_CODES.get(condition, code_pb2.UNKNOWN)
                one = api.StatusCondition(code=ConditionCode[condition], message=message)
                one.canonical_code = canonical
                pool.conditions = [one]
            output_fields.set_etag(pool)

    # The API

    def check_cluster(self, name: str) -> None:
        if self.cluster and name != self.cluster:
            raise ApiError(Code.NOT_FOUND, f"Not found: {name}.")

    def list_pools(self) -> api.ListNodePoolsResponse:
        with self._called("list"):
            return api.ListNodePoolsResponse(node_pools=list(self.pools.values()))

    def get_pool(self, name: str) -> Any:
        with self._called("get"):
            return self._pool(name)

    def get_cluster(self) -> api.Cluster:
        with self._called("cluster"):
            limits = [
                api.ResourceLimit(resource_type=kind, maximum=maximum)
                for kind, maximum in self.auto_provisioning.items()
            ]
            autoscaling = api.ClusterAutoscaling(
                enable_node_autoprovisioning=bool(limits), resource_limits=limits
            )
            return api.Cluster(autoscaling=autoscaling)

    def update(self, parent: str, name: str, labels: dict[str, str]) -> Any:
        """Only labels can be changed: GKE replaces all of them, on running nodes."""
        with self._called("update"):
            pool = self._pool(name)
            self._check_not_busy(parent, name)
            validation.validate_labels(labels)
            self._check_operations(parent)
            pool.status = Status.RECONCILING
            record = self._operation(Operation.Type.UPGRADE_NODES, parent, name)

            def finish() -> None:
                pool.config.labels = labels
                pool.status = Status.RUNNING
                self.nodes.relabel_nodes(pool)
                self._done(record)

            self._later(record, name, self.relabel_time, finish)
            return record

    def list_operations(self) -> api.ListOperationsResponse:
        with self._called("operations"):
            return api.ListOperationsResponse(operations=list(self.operations.values()))

    def get_operation(self, name: str) -> Any:
        with self._called("operation"):
            if name not in self.operations:
                raise ApiError(Code.NOT_FOUND, f"Not found: operation {name}")
            return self.operations[name]

    def create(self, parent: str, pool: Any) -> Any:
        with self._called("create"):
            if pool.name in self.pools:
                raise ApiError(
                    Code.ALREADY_EXISTS, f"Already exists: {parent}/nodePools/{pool.name}"
                )
            output_fields.fill_pool(pool, parent, self.zones)
            validation.validate(pool, self.not_offered)
            upgrades = "management" not in pool or pool.management.auto_upgrade
            if self.release_channel and not upgrades:
                raise api_errors.invalid_argument("release-channel", channel=self.release_channel)
            policy = pool.placement_policy.policy_name
            if policy and self.policies is not None and policy not in self.policies:
                raise api_errors.invalid_argument("no-policy", policy=policy)
            self._check_quota(parent, pool)
            self._check_operations(parent)
            pool.status = Status.PROVISIONING
            self.pools[pool.name] = pool
            self.created.append(pool.name)
            self.created_at[pool.name] = self.clock.now()
            record = self._operation(Operation.Type.CREATE_NODE_POOL, parent, pool.name)
            finish = lambda: self._finish_creation(record, pool)
            self._later(record, pool.name, self.creation_time, finish)
            return record

    def delete(self, parent: str, name: str) -> Any:
        with self._called("delete"):
            pool = self._pool(name)
            self._check_not_busy(parent, name)
            self._check_operations(parent)
            # A flex-start pool may still wait for its nodes.
            self._pending = [pending for pending in self._pending if pending.pool != name]
            pool.status = Status.STOPPING
            self.deleted_at[name] = self.clock.now()
            record = self._operation(Operation.Type.DELETE_NODE_POOL, parent, name)
            # https://cloud.google.com/sdk/gcloud/reference/container/node-pools/delete
            self.nodes.drain_nodes(name)
            finish = lambda: self._finish_deletion(record, pool)
            self._later(record, name, self.deletion_time, finish)
            return record

    def advance(self) -> None:
        """Finish every operation that is due."""
        with self._lock:
            now = self.clock.now()
            due = [pending for pending in self._pending if pending.due <= now]
            self._pending = [pending for pending in self._pending if pending.due > now]
            for pending in due:
                pending.finish()
            while self._ended and self._ended[0][0] + OPERATION_RETENTION < now:
                del self.operations[self._ended.popleft()[1]]

    @contextmanager
    def _called(self, method: str) -> Iterator[None]:
        """One API call: holds the lock, and runs what is due."""
        with self._lock:
            self.advance()
            yield

    def _later(self, record: Any, pool: str, delay: timedelta, finish: Callable[[], None]) -> None:
        due = self.clock.now() + delay
        self._pending.append(_PendingOperation(record, pool, due, finish))

    def _pool(self, name: str) -> Any:
        if name not in self.pools:
            raise ApiError(Code.NOT_FOUND, f"Not found: nodePools/{name}")
        return self.pools[name]

    def _operation(self, kind: Any, parent: str, pool: str) -> Any:
        name = f"operation-{next(self._numbers)}"
        started = self.clock.now().isoformat()
        record = output_fields.new_operation(name, kind, parent, pool, started)
        self.operations[name] = record
        return record

    def _cluster_of(self, name: str) -> str:
        """From the link of an operation on this pool."""
        for record in self.operations.values():
            parent, _, pool = record.target_link.partition("/nodePools/")
            if pool == name:
                return str(parent.partition("/v1/")[2])
        return "projects/p/locations/l/clusters/c"

    def _check_quota(self, parent: str, pool: Any) -> None:
        project = parent.split("/")[1]
        message = capacity.exceeded_quota(project, pool, list(self.pools.values()), self.quotas)
        if message:
            raise ApiError(Code.PERMISSION_DENIED, message)

    def _check_not_busy(self, parent: str, name: str) -> None:
        running = next(
            (one.record for one in self._pending
             if one.pool == name and one.record.status is Operation.Status.RUNNING), None,
        )  # fmt: skip
        if running is not None:
            doing = _DOING.get(running.operation_type.name, "upgrading")
            cluster = parent.rpartition("/")[2]
            message = api_errors.text("busy", operation=running.name, doing=doing, cluster=cluster)
            raise ApiError(Code.FAILED_PRECONDITION, message)

    def _check_operations(self, parent: str) -> None:
        running = {id(one.record) for one in self._pending
                   if one.record.status is Operation.Status.RUNNING}  # fmt: skip
        if self.max_operations is not None and len(running) >= self.max_operations:
            cluster = parent.rpartition("/")[2]
            message = api_errors.text(
                "too-many-operations", cluster=cluster, limit=self.max_operations
            )
            raise ApiError(Code.RESOURCE_EXHAUSTED, message)

    def _finish_creation(self, record: Any, pool: Any) -> None:
        pools = list(self.pools.values())
        free = capacity.free_nodes(pool, pools, self.stock)
        unsupported = validation.unsupported_placement(pool) or validation.unsupported_disk(pool)
        reservation = capacity.exceeded_reservation(pool, pools, self.reservations)
        if unsupported:
            self._fail(record, pool, code_pb2.INVALID_ARGUMENT, unsupported)
        elif reservation:
            self._fail(record, pool, code_pb2.RESOURCE_EXHAUSTED, reservation)
        elif pool.queued_provisioning.enabled:  # a ProvisioningRequest brings its nodes
            pool.status = Status.RUNNING
            self._done(record)
        elif pool.config.flex_start:
            pool.status = Status.RUNNING
            self._done(record)
            appear = lambda: self._add_nodes(record, pool)
            self._later(record, pool.name, self.flex_start_delay, appear)
        elif free is not None and free < validation.node_count(pool):
            _, project, _, _, _, cluster = self._cluster_of(pool.name).split("/")
            started = datetime.fromisoformat(record.start_time)
            message = api_errors.text(
                "stockout", project=project, zone=pool.locations[0], cluster=cluster,
                pool=pool.name, nodes=validation.node_count(pool),
                seconds=(self.clock.now() - started).total_seconds(),
            )  # fmt: skip
            self._fail(record, pool, code_pb2.RESOURCE_EXHAUSTED, message, condition="GCE_STOCKOUT")
        else:
            pool.status = Status.RUNNING
            self._done(record)
            self._add_nodes(record, pool)

    def _add_nodes(self, record: Any, pool: Any) -> None:
        """`record` is of the operation that made them, and done."""
        late = self.device_plugin_delay > timedelta(0)
        self.nodes.create_nodes(pool, chips=not late)
        if late:
            register = lambda: self.nodes.register_chips(pool)
            self._later(record, pool.name, self.device_plugin_delay, register)
        if pool.config.max_run_duration:
            expire = lambda: self.nodes.delete_nodes(pool.name)
            self._later(record, pool.name, pool.config.max_run_duration, expire)

    def _fail(self, record: Any, pool: Any, code: int, message: str, condition: str = "") -> None:
        record.error = status_pb2.Status(code=code, message=message)
        record.status_message = message
        self._done(record)
        self.set_status(pool.name, "ERROR", message, condition)

    def _finish_deletion(self, record: Any, pool: Any) -> None:
        self.nodes.delete_nodes(pool.name)
        self.pools.pop(pool.name, None)
        self._done(record)

    def _done(self, record: Any) -> None:
        now = self.clock.now()
        record.status, record.end_time = Operation.Status.DONE, now.isoformat()
        self._ended.append((now, record.name))


def parse_pool_name(resource: str) -> tuple[str, str]:
    """Cluster and pool of `projects/.../clusters/.../nodePools/...`."""
    match = re.fullmatch(r"(projects/[^/]+/locations/[^/]+/clusters/[^/]+)/nodePools/(.+)",
                         resource)  # fmt: skip
    if match is None:
        raise api_errors.invalid_argument("resource-name", name=resource)
    return match[1], match[2]
