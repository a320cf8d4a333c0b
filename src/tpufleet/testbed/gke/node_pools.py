"""The state behind the emulated API: node pools and operations that take their time."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol

from google.cloud import container_v1 as api
from google.rpc import code_pb2, status_pb2

from tpufleet.clocks import Clock
from tpufleet.errors import BadInput
from tpufleet.testbed.gke import validation

STAYS_FOR = timedelta(hours=12)  # finished operations stay listed
Status, Operation = api.NodePool.Status, api.Operation


class NodeBackend(Protocol):
    """What a pool's nodes really are."""

    def appear(self, pool: api.NodePool) -> None: ...
    def vanish(self, pool: str) -> None: ...


class NoNodes:
    def appear(self, pool: api.NodePool) -> None:
        return

    def vanish(self, pool: str) -> None:
        return


class GkeApiError(Exception):
    """The call is answered with this status."""

    def __init__(self, code: str, words: str) -> None:
        super().__init__(words)
        self.code, self.message = code, words


@dataclass(slots=True)
class _Running:
    """An operation under way."""

    record: Any
    pool: str
    due: datetime
    finish: Callable[[], None]


@dataclass(slots=True)
class GkeEmulator:
    """One cluster. Everything is done by the clock, in `advance`."""

    clock: Clock
    machines: NodeBackend = field(default_factory=NoNodes)
    creation: timedelta = timedelta(seconds=30)
    deletion: timedelta = timedelta(seconds=10)
    # Until it has the nodes that a pool with flex-start waits for.
    flexible: timedelta = timedelta(0)
    policies: set[str] | None = None  # workload policies that there are. None: any
    # Nodes that a zone still has, by (zone, machine type). Absent: plenty.
    stock: dict[tuple[str, str], int] = field(default_factory=dict)
    pools: dict[str, Any] = field(default_factory=dict)
    operations: dict[str, Any] = field(default_factory=dict)
    created: list[str] = field(default_factory=list)  # every accepted request, in order
    deleted_at: dict[str, datetime] = field(default_factory=dict)  # when that was asked for
    calls: list[str] = field(default_factory=list)
    _refusals: list[tuple[str, GkeApiError]] = field(default_factory=list)
    _failures: list[tuple[int, str]] = field(default_factory=list)
    _under_way: list[_Running] = field(default_factory=list)
    _numbers: itertools.count = field(default_factory=itertools.count)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    # What a drill may ask for.

    def refuse_next(self, verb: str, code: str, words: str, times: int = 1) -> None:
        """The next calls of `create`, `delete`, `list` or `operations` get this status."""
        self._refusals += [(verb, GkeApiError(code, words))] * times

    def fail_next_creation(self, code: int, words: str) -> None:
        """Accepted, and then the operation fails: the pool stays behind in ERROR."""
        self._failures.append((code, words))

    def set_status(self, name: str, status: str, words: str = "", condition: str = "") -> None:
        with self._lock:
            pool = self.pools[name]
            pool.status, pool.status_message = Status[status], words
            pool.conditions = (
                [api.StatusCondition(code=api.StatusCondition.Code[condition], message=words)]
                if condition else []
            )  # fmt: skip

    # The API.

    def list_pools(self) -> api.ListNodePoolsResponse:
        with self._called("list"):
            return api.ListNodePoolsResponse(node_pools=list(self.pools.values()))

    def get_pool(self, name: str) -> Any:
        with self._called("get"):
            return self._pool(name)

    def list_operations(self) -> api.ListOperationsResponse:
        with self._called("operations"):
            return api.ListOperationsResponse(operations=list(self.operations.values()))

    def get_operation(self, name: str) -> Any:
        with self._called("operation"):
            if name not in self.operations:
                raise GkeApiError("NOT_FOUND", f"Not found: operation {name}")
            return self.operations[name]

    def create(self, parent: str, pool: Any) -> Any:
        with self._called("create"):
            if pool.name in self.pools:
                raise GkeApiError(
                    "ALREADY_EXISTS", f"Already exists: {parent}/nodePools/{pool.name}"
                )
            try:
                validation.validate(pool)
            except BadInput as error:
                raise GkeApiError("INVALID_ARGUMENT", str(error)) from error
            policy = pool.placement_policy.policy_name
            if policy and self.policies is not None and policy not in self.policies:
                raise GkeApiError("INVALID_ARGUMENT", f"resource policy {policy!r} was not found")
            pool.status = Status.PROVISIONING
            self.pools[pool.name] = pool
            self.created.append(pool.name)
            record = self._operation(Operation.Type.CREATE_NODE_POOL, parent, pool.name)
            due = self.clock.now() + self.creation
            finish = lambda: self._finish_creation(record, pool)
            self._under_way.append(_Running(record, pool.name, due, finish))
            return record

    def delete(self, parent: str, name: str) -> Any:
        with self._called("delete"):
            pool = self._pool(name)
            if pool.status is Status.STOPPING:
                raise GkeApiError("FAILED_PRECONDITION", f"node pool {name} is being deleted")
            self._under_way = [one for one in self._under_way if one.pool != name]
            pool.status = Status.STOPPING
            self.deleted_at[name] = self.clock.now()
            record = self._operation(Operation.Type.DELETE_NODE_POOL, parent, name)
            due = self.clock.now() + self.deletion
            finish = lambda: self._finish_deletion(record, name)
            self._under_way.append(_Running(record, name, due, finish))
            return record

    def advance(self) -> None:
        """Finish every operation that is due."""
        with self._lock:
            now = self.clock.now()
            due = [one for one in self._under_way if one.due <= now]
            self._under_way = [one for one in self._under_way if one.due > now]
            for one in due:
                one.finish()
            old = [name for name, record in self.operations.items() if self._is_old(record, now)]
            for name in old:
                del self.operations[name]

    def _called(self, verb: str) -> _Call:
        return _Call(self, verb)

    def _pool(self, name: str) -> Any:
        if name not in self.pools:
            raise GkeApiError("NOT_FOUND", f"Not found: nodePools/{name}")
        return self.pools[name]

    def _operation(self, kind: Any, parent: str, pool: str) -> Any:
        name = f"operation-{next(self._numbers)}"
        link = f"https://container.googleapis.com/v1/{parent}/nodePools/{pool}"
        record = api.Operation(
            name=name,
            operation_type=kind,
            status=Operation.Status.RUNNING,
            target_link=link,
            start_time=_written(self.clock.now()),
        )
        self.operations[name] = record
        return record

    def _finish_creation(self, record: Any, pool: Any) -> None:
        left = self.stock.get((pool.locations[0] if pool.locations else "",
                               pool.config.machine_type))  # fmt: skip
        if self._failures:
            self._fail(record, pool, *self._failures.pop(0))
        elif pool.config.flex_start:
            pool.status = Status.RUNNING
            self._done(record)
            due, appear = self.clock.now() + self.flexible, lambda: self.machines.appear(pool)
            self._under_way.append(_Running(record, pool.name, due, appear))
        elif left is not None and left < validation.node_count(pool):
            self._fail(
                record, pool, code_pb2.RESOURCE_EXHAUSTED,
                f"GCE_STOCKOUT: the zone {pool.locations[0]} does not have enough resources "
                f"for {validation.node_count(pool)} × {pool.config.machine_type}",
                condition="GCE_STOCKOUT",
            )  # fmt: skip
        else:
            pool.status = Status.RUNNING
            self._done(record)
            self.machines.appear(pool)

    def _fail(self, record: Any, pool: Any, code: int, words: str, condition: str = "") -> None:
        record.error = status_pb2.Status(code=code, message=words)
        record.status_message = words
        self._done(record)
        self.set_status(pool.name, "ERROR", words, condition)

    def _finish_deletion(self, record: Any, name: str) -> None:
        self.machines.vanish(name)
        self.pools.pop(name, None)
        self._done(record)

    def _done(self, record: Any) -> None:
        record.status, record.end_time = Operation.Status.DONE, _written(self.clock.now())

    def _is_old(self, record: Any, now: datetime) -> bool:
        ended = record.end_time
        return bool(ended) and datetime.fromisoformat(ended) + STAYS_FOR < now


class _Call:
    """Under the lock, with time up to date, and refused where a drill says so."""

    def __init__(self, gke: GkeEmulator, verb: str) -> None:
        self._gke, self._verb = gke, verb

    def __enter__(self) -> None:
        self._gke._lock.acquire()
        try:
            self._gke.calls.append(self._verb)
            self._gke.advance()
            for index, (verb, refused) in enumerate(self._gke._refusals):
                if verb == self._verb:
                    del self._gke._refusals[index]
                    raise refused
        except BaseException:
            self._gke._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._gke._lock.release()


def _written(moment: datetime) -> str:
    return moment.isoformat()


def parse_pool_name(resource: str) -> tuple[str, str]:
    """The cluster and the pool of `projects/…/clusters/…/nodePools/…`."""
    match = re.fullmatch(r"(projects/[^/]+/locations/[^/]+/clusters/[^/]+)/nodePools/(.+)",
                         resource)  # fmt: skip
    if match is None:
        raise GkeApiError("INVALID_ARGUMENT", f"{resource!r} names no node pool")
    return match[1], match[2]
