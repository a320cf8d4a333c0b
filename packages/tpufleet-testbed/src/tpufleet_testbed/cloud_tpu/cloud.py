"""State of the emulated cloud: zones, nodes, and their changes over time. No wire protocol here.
Callers hold `lock`."""

from __future__ import annotations

import itertools
import re
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from google.cloud.tpu_v2.types import cloud_tpu
from google.cloud.tpu_v2alpha1.types import cloud_tpu as alpha

from tpufleet.clocks import Clock
from tpufleet_testbed.cloud_tpu import api_errors, node_validation, nodes
from tpufleet_testbed.cloud_tpu.api_errors import Code, bad_request, invalid_argument
from tpufleet_testbed.cloud_tpu.billing import BillingEntry, BillingLedger
from tpufleet_testbed.cloud_tpu.capacity import UNLIMITED, CloudCapacity
from tpufleet_testbed.cloud_tpu.fault_plan import NO_FAULTS, CallFaults, CloudFaultPlan
from tpufleet_testbed.cloud_tpu.host_backend import HostBackend
from tpufleet_testbed.cloud_tpu.locations import ZONES, Latencies
from tpufleet_testbed.cloud_tpu.nodes import (
    Health,
    NodeRecord,
    NodeState,
    State,
    unresponsive,
)
from tpufleet_testbed.cloud_tpu.operations import Operations
from tpufleet_testbed.servers import ApiError
from tpufleet_testbed.timeline import Timeline

# Spot VMs have no such limit: cloud.google.com/tpu/docs/preemptible
PREEMPTIBLE_LIFETIME = timedelta(hours=24)


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
        timeline = Timeline(clock)
        self.run_due, self.schedule = timeline.run_due, timeline.schedule
        self.zones = tuple(zones)
        self.stock = stock
        self.latencies = latencies or plan.latencies
        self.hosts = hosts or HostBackend()
        self.operations = Operations(clock.now)
        self.ledger = BillingLedger()
        self.call_faults = CallFaults(plan)
        self.lock = threading.RLock()
        self.missing: Container[str] = ()  # last parts of names of networks that do not exist
        self.started_at = clock.now()
        self.nodes: dict[str, NodeRecord] = {}
        self.node_left: list[Callable[[NodeRecord, datetime], None]] = []  # callbacks
        self.node_ready: list[Callable[[NodeRecord, datetime], None]] = []
        self.stock_freed: list[Callable[[datetime], None]] = []
        # Nodes that use quota without being in `nodes`.
        self.quota_holders: list[Callable[[], Iterable[NodeRecord]]] = []
        self._numbers = itertools.count(1)
        self._draws: Counter[tuple[str, str]] = Counter()
        self._plan = plan

    def _unless_changed(
        self, record: NodeRecord, at: datetime, action: Callable[[datetime], None]
    ) -> None:
        """Schedule, unless the node is started, stopped or ended before."""
        generation = record.generation
        self.schedule(
            at, lambda moment: action(moment) if record.generation == generation else None
        )

    # Nodes
    def create(self, parent: str, node_id: str, template: cloud_tpu.Node, now: datetime) -> str:
        """Returns the name of the operation."""
        record = self.validate_node(parent, node_id, template, nodes.capacity_of(template), now)
        over = self.over_quota([record])
        if over is not None:
            self.ledger.denied += 1
            raise over
        operation = self.operations.begin(record.name, "create", now)
        record.creation = operation
        short = self.shortage([record], now)
        self.nodes[record.name] = record
        if short is None:
            self.start(record, now, operation)
        else:
            self.ledger.denied += 1
            self.schedule(
                now + self.latency("stockout", record.name),
                lambda at: self._fail_creation(record, operation, short),
            )
            self.run_due()
        return operation

    def over_quota(self, wanted: Iterable[NodeRecord]) -> ApiError | None:
        held = {node.name: node for holders in self.quota_holders for node in holders()}
        return self.stock.over_quota(wanted, (held | self.nodes).values())

    def latency(self, kind: str, key: str) -> timedelta:
        """How long one operation takes. The project in `key` is left out, and a name that is used
        again takes another time."""
        self._draws[kind, key] += 1
        return self.latencies.draw(kind, self._plan.seed, f"{key}/{self._draws[kind, key]}")

    def validate_node(
        self,
        parent: str,
        node_id: str,
        template: cloud_tpu.Node,
        capacity: str,
        now: datetime,
        id_pattern: re.Pattern[str] = node_validation.NODE_ID,
    ) -> NodeRecord:
        zone = self.zone_of(parent)
        accelerator = node_validation.validate(node_id, template, zone, id_pattern)
        name = f"{parent}/nodes/{node_id}"
        if name in self.nodes:
            raise api_errors.api_error("exists", target=name)
        self.check_writable_disks(name, template)
        self._check_networks(template)
        blocks = {node.template.cidr_block for node in self.nodes.values()}
        if template.cidr_block and template.cidr_block in blocks:
            raise invalid_argument(f"The CIDR block {template.cidr_block} is in use.")
        return NodeRecord(
            name=name,
            zone=zone,
            capacity=capacity,
            accelerator=accelerator,
            template=template,
            number=next(self._numbers),
            created_at=now,
        )

    def _check_networks(self, template: cloud_tpu.Node) -> None:
        for config in (template.network_config, *template.network_configs):
            for kind, name in (("network", config.network), ("subnetwork", config.subnetwork)):
                if name.rpartition("/")[2] in self.missing:
                    raise bad_request(f'The {kind} "{name}" was not found.')

    def check_writable_disks(self, name: str, template: cloud_tpu.Node) -> None:
        """Only one node at a time can attach a disk in read-write mode."""
        wanted = {
            disk.source_disk: node_validation.is_writable(disk) for disk in template.data_disks
        }
        for node in self.nodes.values():
            for disk in node.template.data_disks if node.name != name else ():
                shared = wanted.get(disk.source_disk)
                if shared is not None and (shared or node_validation.is_writable(disk)):
                    raise invalid_argument(
                        f'The disk "{disk.source_disk}" is already attached to {node.id}.'
                    )

    def shortage(self, wanted: Sequence[NodeRecord], now: datetime) -> ApiError | None:
        zone = wanted[0].zone
        if self._plan.zone_closed(zone, now - self.started_at):
            return api_errors.api_error("stockout", zone=zone)
        held = (node for node in self.nodes.values() if node.holds_stock)
        return self.stock.shortage(wanted, held)

    def reservations(self, parent: str) -> list[alpha.Reservation]:
        """Of the project that `parent` names, in all zones."""
        project = "/".join(parent.split("/")[:2])
        held = [node for node in self.nodes.values() if node.holds_stock]
        return [
            each for zone in self.zones for each in self.stock.reservations(project, zone, held)
        ]

    def start(self, record: NodeRecord, now: datetime, operation: str | None) -> None:
        """Boot the hosts of a node that has its capacity."""
        self.nodes[record.name] = record
        record.generation += 1

        def ready(at: datetime) -> None:
            if self.nodes.get(record.name) is record:
                self._become_ready(record, at)
                if operation is not None:
                    self.operations.succeed(operation, cloud_tpu.Node.pb(record.to_api()))

        self._unless_changed(record, now + self.latency("boot", record.id), ready)

    def delete(self, name: str, now: datetime, end_reason: str = "deleted") -> str:
        record = self.node(name)
        operation = self.operations.begin(name, "delete", now)
        if record.creation:
            cancelled = ApiError(Code.CANCELLED, f"{name} was deleted while it was created.")
            self.operations.fail(record.creation, cancelled)
        if record.state is not State.DELETING:
            self._release_hosts(record, State.DELETING, now, end_reason, self.hosts.shut_down)
        self.schedule(
            now + self.latency("deletion", record.id),
            lambda at: self._finish_deletion(record, operation, at),
        )
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
        if record.queued_resource:
            # The guide of queued resources names their deletion alone
            # (cloud.google.com/tpu/docs/queued-resources); no page has the text of the refusal.
            raise ApiError(
                Code.FAILED_PRECONDITION,
                "Cloud TPU received a bad request. Stop is not supported for nodes of a queued "
                "resource.",
            )
        if record.state is not State.READY:
            raise api_errors.api_error("conflict", target=name)
        operation = self.operations.begin(name, "stop", now)
        self._release_hosts(record, State.STOPPING, now, "stopped", self.hosts.shut_down)

        def stopped(at: datetime) -> None:
            record.state = State.STOPPED
            self.operations.succeed(operation, cloud_tpu.Node.pb(record.to_api()))
            self.notify_stock_freed(at)

        self._unless_changed(record, now + self.latency("stop", record.id), stopped)
        self.run_due()
        return operation

    def update(self, request: cloud_tpu.Node, paths: Sequence[str], now: datetime) -> str:
        record = self.node(request.name)
        if record.state not in (State.READY, State.STOPPED):
            raise bad_request(f"update is not supported while in state {record.state.name}")
        if not paths:
            raise invalid_argument("The update mask is empty.")
        template = nodes.updated(record.template, request, paths)
        node_validation.check_editable(template)
        node_validation.check_disks(template.data_disks, record.accelerator, record.zone)
        self.check_writable_disks(record.name, template)
        operation = self.operations.begin(record.name, "update", now)

        def applied(at: datetime) -> None:
            record.template = template
            if record.state is State.READY:
                self.hosts.update_metadata(record)
            self.operations.succeed(operation, cloud_tpu.Node.pb(record.to_api()))

        self.schedule(now + self.latency("update", record.id), applied)
        self.run_due()
        return operation

    def start_stopped(self, name: str, now: datetime) -> str:
        record = self.node(name)
        if record.state is not State.STOPPED:
            raise api_errors.api_error("conflict", target=name)
        operation = self.operations.begin(name, "start", now)
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
        due = now + self.latency("notice_period", record.id)
        self._unless_changed(record, due, lambda at: self.reclaim(record, at))

    def perform_maintenance(self, name: str, now: datetime) -> str:
        """Start announced maintenance before its window. The caller ends the operation."""
        record = self.node(name)
        window = record.maintenance
        if window is None or window.ongoing or not record.can_start_maintenance:
            raise ApiError(
                Code.FAILED_PRECONDITION,
                f"Cloud TPU received a bad request. No maintenance of {name} can be started.",
            )
        operation = self.operations.begin(name, "performMaintenance", now)
        record.maintenance = replace(window, ongoing=True)
        self.send_notice(record, "maintenance", now)
        return operation

    def simulate_maintenance(self, name: str, workers: Sequence[str], now: datetime) -> str:
        """An event on the first of these workers, or else worker 0. All hosts get the notice."""
        record = self.node(name)
        worker = next(iter(workers), "0")
        if not worker.isdecimal() or int(worker) >= record.accelerator.hosts:
            raise invalid_argument(f'The worker "{worker}" was not found.')
        if record.state is not State.READY:
            raise api_errors.api_error("conflict", target=name)
        operation = self.operations.begin(name, "simulateMaintenanceEvent", now)
        self.send_notice(record, "maintenance", now)
        return operation

    def kill_host(self, record: NodeRecord, host: int) -> None:
        record.dead_hosts.setdefault(host, self.clock.now())
        record.health, record.health_description = Health.TIMEOUT, unresponsive(host)
        self.hosts.kill_host(record, host)

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
            raise api_errors.api_error("location", zone=parts[3])
        return parts[3]

    def _become_ready(self, record: NodeRecord, at: datetime) -> None:
        record.state, record.health = State.READY, Health.HEALTHY
        self.ledger.begin(
            record.name,
            BillingEntry(
                node=record.id,
                zone=record.zone,
                chips=record.accelerator.chips,
                labels=dict(record.template.labels),
                began_at=at,
            ),
        )
        if record.template.scheduling_config.preemptible:
            end = lambda moment: self.reclaim(record, moment, State.TERMINATED)
            self._unless_changed(record, at + PREEMPTIBLE_LIFETIME, end)
        self.hosts.boot(record)
        for callback in self.node_ready:
            callback(record, at)

    def _release_hosts(
        self,
        record: NodeRecord,
        state: NodeState,
        at: datetime,
        end_reason: str,
        end: Callable[[NodeRecord], None] | None = None,
    ) -> None:
        record.state = state
        record.generation += 1
        self.ledger.end(record.name, at, end_reason)
        (end or self.hosts.terminate)(record)
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
