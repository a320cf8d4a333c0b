"""The emulated cloud: projects, zones, nodes and what time does to them. No wire here.

Everything that is to happen stands in one heap by its time, so that a virtual clock may jump and
still nothing happens out of order. Callers hold `lock`.
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
from tpufleet.testbed.cloud_tpu.fault_plan import NO_FAULTS, CallFaults, FaultPlan
from tpufleet.testbed.cloud_tpu.locations import ZONES, HostBackend, Latencies, NoHosts
from tpufleet.testbed.cloud_tpu.nodes import Health, NodeRecord, State
from tpufleet.testbed.cloud_tpu.operations import Operations
from tpufleet.testbed.cloud_tpu.scheduled_faults import ScheduledFaults


@dataclass(order=True, slots=True)
class _Due:
    at: datetime
    number: int
    happen: Callable[[datetime], None] = field(compare=False)


class Cloud:
    def __init__(
        self,
        clock: Clock,
        *,
        zones: Sequence[str] = ZONES,
        stock: CloudCapacity = UNLIMITED,
        pace: Latencies | None = None,
        plan: FaultPlan = NO_FAULTS,
        machines: HostBackend | None = None,
    ) -> None:
        self.clock = clock
        self.zones = tuple(zones)
        self.stock = stock
        self.pace = pace or Latencies()
        self.machines = machines or NoHosts()
        self.operations = Operations()
        self.ledger = BillingLedger()
        self.troubles = CallFaults(plan)
        self.lock = threading.RLock()
        self.began_at = clock.now()
        self.nodes: dict[str, NodeRecord] = {}
        self.node_left: list[Callable[[NodeRecord, datetime], None]] = []  # who wants to know
        self.node_ready: list[Callable[[NodeRecord, datetime], None]] = []
        self.stock_freed: list[Callable[[datetime], None]] = []
        self._numbers = itertools.count(1)
        self._due: list[_Due] = []
        self._weather = ScheduledFaults(self, plan)

    # Time.
    def settle(self) -> datetime:
        """Let everything happen that is due."""
        now = self.clock.now()
        while self._due and self._due[0].at <= now:
            due = heapq.heappop(self._due)
            due.happen(due.at)
        return now

    def next_due(self) -> datetime | None:
        return self._due[0].at if self._due else None

    def at(self, moment: datetime, happen: Callable[[datetime], None]) -> None:
        heapq.heappush(self._due, _Due(moment, next(self._numbers), happen))

    # Nodes.
    def create(self, parent: str, node_id: str, template: cloud_tpu.Node, now: datetime) -> str:
        """The name of the operation."""
        record = self.prepare(parent, node_id, template, nodes.capacity_of(template), now)
        over = self.stock.over_quota([record], self.nodes.values())
        if over is not None:
            self._note(record, now, over)
            raise over
        operation = self.operations.begin(parent, record.name, "create", now)
        short = self.shortage([record], now)
        self._note(record, now, short)
        self.nodes[record.name] = record
        if short is None:
            self.start(record, now, operation)
        elif self.pace.refusal:
            self.at(now + self.pace.refusal, lambda at: self._refuse(record, operation, short))
        else:
            self._refuse(record, operation, short)
        return operation

    def prepare(
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
        if self._weather.closed(zone, now):
            return api_errors.api_error("stockout", zone=zone)
        held = (node for node in self.nodes.values() if node.holds_stock)
        return self.stock.shortage(wanted, held)

    def start(self, record: NodeRecord, now: datetime, operation: str | None) -> None:
        """It has its machines; they boot."""
        self.nodes[record.name] = record
        fate = record.generation = record.generation + 1

        def ready(at: datetime) -> None:
            if record.generation == fate and self.nodes.get(record.name) is record:
                self._become_ready(record, at)
                if operation is not None:
                    self.operations.succeed(operation, cloud_tpu.Node.pb(record.to_api()))

        self.at(now + self.pace.boot, ready)

    def delete(self, name: str, now: datetime, by: str = "deleted") -> str:
        record = self.node(name)
        parent = name.partition("/nodes/")[0]
        operation = self.operations.begin(parent, name, "delete", now)
        if record.state is not State.DELETING:
            self._leave(record, State.DELETING, now, by)
        self.at(now + self.pace.deletion, lambda at: self._gone(record, operation, at))
        if not self.pace.deletion:
            self.settle()
        return operation

    def node(self, name: str) -> NodeRecord:
        found = self.nodes.get(name)
        if found is None:
            raise api_errors.api_error("not-found", target=name)
        return found

    def stop(self, name: str, now: datetime) -> str:
        record = self.node(name)
        if record.state is not State.READY:
            raise api_errors.api_error("conflict", target=name)
        operation = self.operations.begin(name.partition("/nodes/")[0], name, "stop", now)
        self._leave(record, State.STOPPED, now, "stopped")
        self.operations.succeed(operation, cloud_tpu.Node.pb(record.to_api()))
        return operation

    def restart(self, name: str, now: datetime) -> str:
        record = self.node(name)
        if record.state is not State.STOPPED:
            raise api_errors.api_error("conflict", target=name)
        operation = self.operations.begin(name.partition("/nodes/")[0], name, "start", now)
        record.state = State.STARTING
        self.start(record, now, operation)
        return operation

    # What befalls nodes.
    def take(self, record: NodeRecord, now: datetime, state: State = State.PREEMPTED) -> None:
        """Preempted or terminated: no machine is left, the name stays and counts against quota."""
        if record.holds_stock and record.state is not State.DELETING:
            self._leave(record, state, now, state.name.lower())

    def give_notice(self, record: NodeRecord, kind: str, now: datetime) -> None:
        if record.state is not State.READY or record.notice:
            return
        record.notice = kind
        if kind == "maintenance":
            record.health = Health.UNHEALTHY_MAINTENANCE
            record.health_description = "a host maintenance event is scheduled"
        self.machines.tell(record)
        fate = record.generation

        def take(at: datetime) -> None:
            if record.generation == fate:
                self.take(record, at)

        self.at(now + self.pace.notice, take)

    def kill_host(self, record: NodeRecord, host: int) -> None:
        record.dead_hosts.add(host)
        record.health, record.health_description = Health.TIMEOUT, f"worker {host} does not answer"
        self.machines.kill_host(record, host)

    def put(self, record: NodeRecord, state: State, health: Health | None, now: datetime) -> None:
        """Force a state, to see what comes of it."""
        if state in (State.READY, State.CREATING):
            record.state = state
        elif state is not record.state:
            self._leave(record, state, now, state.name.lower())
        if health is not None:
            record.health = health

    def vanish(self, record: NodeRecord, now: datetime) -> None:
        """Deleted by the cloud without a word."""
        self._leave(record, State.DELETING, now, "vanished")
        self._gone(record, None, now)

    def free(self, at: datetime) -> None:
        """There is stock again, perhaps."""
        for told in self.stock_freed:
            told(at)

    def zone_of(self, parent: str) -> str:
        parts = parent.split("/")
        if len(parts) != 4 or parts[0] != "projects" or parts[2] != "locations":
            raise ApiError(Code.INVALID_ARGUMENT, f"{parent!r} is no location")
        if parts[3] not in self.zones and parts[3] != "-":
            raise ApiError(
                Code.PERMISSION_DENIED,
                f"Permission denied on '{parent}' (or it may not exist).",
            )
        return parts[3]

    # Parts.
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
        self.machines.boot(record)
        for told in self.node_ready:
            told(record, at)

    def _leave(self, record: NodeRecord, state: State, at: datetime, by: str) -> None:
        record.state = state
        record.generation += 1
        self.ledger.end(record.name, at, by)
        self.machines.end(record)
        for told in self.node_left:
            told(record, at)
        if not record.holds_stock:
            self.free(at)

    def _gone(self, record: NodeRecord, operation: str | None, at: datetime) -> None:
        if self.nodes.get(record.name) is record:
            del self.nodes[record.name]
        if operation is not None:
            self.operations.succeed(operation)
        self.free(at)

    def _refuse(self, record: NodeRecord, operation: str, error: ApiError) -> None:
        self.nodes.pop(record.name, None)
        self.operations.fail(operation, error)

    def _note(self, record: NodeRecord, now: datetime, error: ApiError | None) -> None:
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
