"""State of the emulated cloud: zones, nodes, and their changes over time. No wire protocol here.

Future changes are events in one heap, ordered by time, so that a manual clock may jump and events
still happen in order. Callers hold `lock`.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from google.cloud.tpu_v2.types import cloud_tpu

from tpufleet.clocks import Clock
from tpufleet.testbed.cloud_tpu import api_errors, nodes
from tpufleet.testbed.cloud_tpu.api_errors import ApiError, Code
from tpufleet.testbed.cloud_tpu.billing import BillingEntry, BillingLedger, CapacityResponse
from tpufleet.testbed.cloud_tpu.capacity import UNLIMITED, CloudCapacity
from tpufleet.testbed.cloud_tpu.fault_plan import NO_FAULTS, CallFaults, CloudFaultPlan
from tpufleet.testbed.cloud_tpu.host_backend import HostBackend, NoHosts
from tpufleet.testbed.cloud_tpu.locations import ZONES, Latencies
from tpufleet.testbed.cloud_tpu.nodes import Health, NodeHealth, NodeRecord, NodeState, State
from tpufleet.testbed.cloud_tpu.operations import Operations


@dataclass(order=True, slots=True)
class _ScheduledEvent:
    at: datetime
    sequence: int
    action: Callable[[datetime], None] = field(compare=False)


class Cloud:
    def __init__(
        self,
        clock: Clock,
        *,
        zones: Sequence[str] = ZONES,
        stock: CloudCapacity = UNLIMITED,
        latencies: Latencies | None = None,
        plan: CloudFaultPlan = NO_FAULTS,
        hosts: HostBackend | None = None,
    ) -> None:
        self.clock = clock
        self.zones = tuple(zones)
        self.stock = stock
        self.latencies = latencies or Latencies()
        self.hosts = hosts or NoHosts()
        self.operations = Operations()
        self.ledger = BillingLedger()
        self.call_faults = CallFaults(plan)
        self.lock = threading.RLock()
        self.started_at = clock.now()
        self.nodes: dict[str, NodeRecord] = {}
        self.node_left: list[Callable[[NodeRecord, datetime], None]] = []  # callbacks
        self.node_ready: list[Callable[[NodeRecord, datetime], None]] = []
        self.stock_freed: list[Callable[[datetime], None]] = []
        self._numbers = itertools.count(1)
        self._events: list[_ScheduledEvent] = []
        self._plan = plan

    # Time
    def run_due(self) -> datetime:
        """Run all due events. Returns the present time."""
        now = self.clock.now()
        while self._events and self._events[0].at <= now:
            due = heapq.heappop(self._events)
            due.action(due.at)
        return now

    def next_due(self) -> datetime | None:
        return self._events[0].at if self._events else None

    def schedule(self, at: datetime, action: Callable[[datetime], None]) -> None:
        heapq.heappush(self._events, _ScheduledEvent(at, next(self._numbers), action))

    # Nodes
    def create(self, parent: str, node_id: str, template: cloud_tpu.Node, now: datetime) -> str:
        """Returns the name of the operation."""
        record = self.validate_node(parent, node_id, template, nodes.capacity_of(template), now)
        over = self.stock.over_quota([record], self.nodes.values())
        if over is not None:
            self._record_response(record, now, over)
            raise over
        operation = self.operations.begin(parent, record.name, "create", now)
        short = self.shortage([record], now)
        self._record_response(record, now, short)
        self.nodes[record.name] = record
        if short is None:
            self.start(record, now, operation)
        elif self.latencies.stockout:
            self.schedule(
                now + self.latencies.stockout,
                lambda at: self._fail_creation(record, operation, short),
            )
        else:
            self._fail_creation(record, operation, short)
        return operation

    def validate_node(
        self, parent: str, node_id: str, template: cloud_tpu.Node, capacity: str, now: datetime
    ) -> NodeRecord:
        zone = self.zone_of(parent)
        accelerator = nodes.validate(node_id, template, zone)
        name = f"{parent}/nodes/{node_id}"
        if name in self.nodes:
            raise api_errors.api_error("exists", target=name)
        return NodeRecord(
            name=name,
            zone=zone,
            capacity=capacity,
            accelerator=accelerator,
            template=template,
            number=next(self._numbers),
            created_at=now,
        )

    def shortage(self, wanted: Sequence[NodeRecord], now: datetime) -> ApiError | None:
        zone = wanted[0].zone
        if self._plan.zone_closed(zone, now - self.started_at):
            return api_errors.api_error("stockout", zone=zone)
        held = (node for node in self.nodes.values() if node.holds_stock)
        return self.stock.shortage(wanted, held)

    def start(self, record: NodeRecord, now: datetime, operation: str | None) -> None:
        """Boot the hosts of a node that has its capacity."""
        self.nodes[record.name] = record
        generation = record.generation = record.generation + 1

        def ready(at: datetime) -> None:
            if record.generation == generation and self.nodes.get(record.name) is record:
                self._become_ready(record, at)
                if operation is not None:
                    self.operations.succeed(operation, cloud_tpu.Node.pb(record.to_api()))

        self.schedule(now + self.latencies.boot, ready)

    def delete(self, name: str, now: datetime, end_reason: str = "deleted") -> str:
        record = self.node(name)
        parent = name.partition("/nodes/")[0]
        operation = self.operations.begin(parent, name, "delete", now)
        if record.state is not State.DELETING:
            self._release_hosts(record, State.DELETING, now, end_reason)
        self.schedule(
            now + self.latencies.deletion, lambda at: self._finish_deletion(record, operation, at)
        )
        if not self.latencies.deletion:
            self.run_due()
        return operation

    def node(self, name: str) -> NodeRecord:
        record = self.nodes.get(name)
        if record is None:
            raise api_errors.api_error("not-found", target=name)
        return record

    def stop(self, name: str, now: datetime) -> str:
        record = self.node(name)
        if record.accelerator.hosts > 1:
            # "This operation is only available with single TPU nodes" (reference of v2).
            raise ApiError(
                Code.FAILED_PRECONDITION,
                "Cloud TPU received a bad request. Stop is only available with single TPU nodes.",
            )
        if record.state is not State.READY:
            raise api_errors.api_error("conflict", target=name)
        operation = self.operations.begin(name.partition("/nodes/")[0], name, "stop", now)
        self._release_hosts(record, State.STOPPED, now, "stopped")
        self.operations.succeed(operation, cloud_tpu.Node.pb(record.to_api()))
        return operation

    def start_stopped(self, name: str, now: datetime) -> str:
        record = self.node(name)
        if record.state is not State.STOPPED:
            raise api_errors.api_error("conflict", target=name)
        operation = self.operations.begin(name.partition("/nodes/")[0], name, "start", now)
        record.state = State.STARTING
        self.start(record, now, operation)
        return operation

    # Faults
    def reclaim(
        self, record: NodeRecord, now: datetime, state: NodeState = State.PREEMPTED
    ) -> None:
        """Preempt or terminate: the hosts end; the node stays listed and counts against quota."""
        if record.holds_stock and record.state is not State.DELETING:
            self._release_hosts(record, state, now, state.name.lower())

    def send_notice(self, record: NodeRecord, kind: str, now: datetime) -> None:
        if record.state is not State.READY or record.notice:
            return
        record.notice = kind
        if kind == "maintenance":
            record.health = Health.UNHEALTHY_MAINTENANCE
            record.health_description = "a host maintenance event is scheduled"
        self.hosts.notify(record)
        generation = record.generation

        def preempt(at: datetime) -> None:
            if record.generation == generation:
                self.reclaim(record, at)

        self.schedule(now + self.latencies.notice_period, preempt)

    def kill_host(self, record: NodeRecord, host: int) -> None:
        record.dead_hosts.add(host)
        record.health, record.health_description = Health.TIMEOUT, f"worker {host} does not respond"
        self.hosts.kill_host(record, host)

    def force_state(
        self, record: NodeRecord, state: NodeState, health: NodeHealth | None, now: datetime
    ) -> None:
        """Set a state that the cloud would not reach by itself."""
        if state in (State.READY, State.CREATING):
            record.state = state
        elif state is not record.state:
            self._release_hosts(record, state, now, state.name.lower())
        if health is not None:
            record.health = health

    def vanish(self, record: NodeRecord, now: datetime) -> None:
        """Delete the node without an operation or a notice."""
        self._release_hosts(record, State.DELETING, now, "vanished")
        self._finish_deletion(record, None, now)

    def notify_stock_freed(self, at: datetime) -> None:
        """Stock may be available again."""
        for callback in self.stock_freed:
            callback(at)

    def zone_of(self, parent: str) -> str:
        parts = parent.split("/")
        if len(parts) != 4 or parts[0] != "projects" or parts[2] != "locations":
            raise ApiError(Code.INVALID_ARGUMENT, f"{parent!r} is not a valid location")
        if parts[3] not in self.zones and parts[3] != "-":
            raise ApiError(
                Code.PERMISSION_DENIED,
                f"Permission denied on '{parent}' (or it may not exist).",
            )
        return parts[3]

    def _become_ready(self, record: NodeRecord, at: datetime) -> None:
        record.state, record.health = State.READY, Health.HEALTHY
        self.ledger.begin(
            record.name,
            BillingEntry(
                node=record.id,
                zone=record.zone,
                accelerator=record.accelerator.name,
                capacity=record.capacity,
                chips=record.accelerator.chips,
                labels=dict(record.template.labels),
                began_at=at,
            ),
        )
        self.hosts.boot(record)
        for callback in self.node_ready:
            callback(record, at)

    def _release_hosts(
        self, record: NodeRecord, state: NodeState, at: datetime, end_reason: str
    ) -> None:
        record.state = state
        record.generation += 1
        self.ledger.end(record.name, at, end_reason)
        self.hosts.terminate(record)
        for callback in self.node_left:
            callback(record, at)
        if not record.holds_stock:
            self.notify_stock_freed(at)

    def _finish_deletion(self, record: NodeRecord, operation: str | None, at: datetime) -> None:
        if self.nodes.get(record.name) is record:
            del self.nodes[record.name]
        if operation is not None:
            self.operations.succeed(operation)
        self.notify_stock_freed(at)

    def _fail_creation(self, record: NodeRecord, operation: str, error: ApiError) -> None:
        self.nodes.pop(record.name, None)
        self.operations.fail(operation, error)

    def _record_response(self, record: NodeRecord, now: datetime, error: ApiError | None) -> None:
        self.ledger.responses.append(
            CapacityResponse(
                at=now,
                zone=record.zone,
                accelerator=record.accelerator.name,
                capacity=record.capacity,
                granted=error is None,
                message=error.message if error else "",
            )
        )
