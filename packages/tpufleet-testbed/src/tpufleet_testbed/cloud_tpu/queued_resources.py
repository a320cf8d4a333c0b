"""Queued resources: requests that wait for capacity for all of their nodes, or none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from google.cloud.tpu_v2.types import cloud_tpu
from google.rpc import status_pb2

from tpufleet_testbed.cloud_tpu import api_errors
from tpufleet_testbed.cloud_tpu.api_errors import Code, invalid_argument
from tpufleet_testbed.cloud_tpu.cloud import Cloud
from tpufleet_testbed.cloud_tpu.node_validation import RESERVATION, RESOURCE_ID
from tpufleet_testbed.cloud_tpu.nodes import NodeRecord, State
from tpufleet_testbed.servers import ApiError

QueuedState: Any = cloud_tpu.QueuedResourceState.State
Initiator: Any = cloud_tpu.QueuedResourceState.StateInitiator
Data = cloud_tpu.QueuedResourceState
# "Further data for the … state"; that of FAILED has the error.
STATE_DATA: dict[Any, tuple[str, Any]] = {
    QueuedState.CREATING: ("creating_data", Data.CreatingData),
    QueuedState.ACCEPTED: ("accepted_data", Data.AcceptedData),
    QueuedState.PROVISIONING: ("provisioning_data", Data.ProvisioningData),
    QueuedState.ACTIVE: ("active_data", Data.ActiveData),
    QueuedState.DELETING: ("deleting_data", Data.DeletingData),
    QueuedState.SUSPENDING: ("suspending_data", Data.SuspendingData),
    QueuedState.SUSPENDED: ("suspended_data", Data.SuspendedData),
}
WAITING = (QueuedState.CREATING, QueuedState.ACCEPTED, QueuedState.WAITING_FOR_RESOURCES)


@dataclass(slots=True)
class QueuedRecord:
    name: str
    request: cloud_tpu.QueuedResource
    capacity: str
    wanted: tuple[NodeRecord, ...]
    created_at: datetime
    valid_from: datetime | None
    valid_until: datetime | None
    state: Any = QueuedState.ACCEPTED  # a member of QueuedState
    error: ApiError | None = None
    run_limit: timedelta | None = None  # of its nodes, which are deleted then
    ends_at: datetime | None = None  # with its reservation of calendar mode
    by_user: bool = False

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.wanted)

    def to_api(self) -> cloud_tpu.QueuedResource:
        resource = cloud_tpu.QueuedResource()
        resource._pb.CopyFrom(cloud_tpu.QueuedResource.pb(self.request))
        resource.name, resource.create_time = self.name, self.created_at
        resource.state.state = self.state
        if self.state in STATE_DATA:
            name, kind = STATE_DATA[self.state]
            setattr(resource.state, name, kind())
        if self.error is not None:
            resource.state.failed_data = cloud_tpu.QueuedResourceState.FailedData(
                error=status_pb2.Status(code=self.error.number, message=self.error.message)
            )
        if self.state in (QueuedState.SUSPENDING, QueuedState.SUSPENDED):
            resource.state.state_initiator = Initiator.USER if self.by_user else Initiator.SERVICE
        return resource


class QueuedResources:
    def __init__(self, cloud: Cloud, *, suspend_whole_gang: bool = True) -> None:
        self._cloud = cloud
        self._suspend_whole_gang = suspend_whole_gang  # a preempted node suspends the whole request
        self.records: dict[str, QueuedRecord] = {}
        self._by_request_id: dict[tuple[str, str], str] = {}  # operation by parent and request id
        cloud.node_ready.append(self._node_ready)
        cloud.node_left.append(self._node_left)
        cloud.stock_freed.append(self.retry_waiting)
        cloud.quota_holders.append(self._quota_holders)

    def create(
        self,
        parent: str,
        queued_id: str,
        request: cloud_tpu.QueuedResource,
        now: datetime,
        request_id: str = "",
        run_limit: timedelta | None = None,
        ends_at: datetime | None = None,
    ) -> str:
        self._cloud.zone_of(parent)
        if request_id and (parent, request_id) in self._by_request_id:
            return self._by_request_id[parent, request_id]
        queued_id = queued_id or f"queued-resource-{len(self._by_request_id) + len(self.records)}"
        name = f"{parent}/queuedResources/{queued_id}"
        if not RESOURCE_ID.fullmatch(queued_id):
            raise invalid_argument(f"The id {queued_id!r} is not valid.")
        if request.reservation_name and not RESERVATION.fullmatch(request.reservation_name):
            raise invalid_argument(
                f'The field "ReservationName" cannot be "{request.reservation_name}".'
            )
        if name in self.records:
            raise api_errors.api_error("exists", target=name)
        valid_from, valid_until = _validity(request, now)
        record = QueuedRecord(
            name=name,
            request=request,
            capacity=_capacity(request),
            wanted=(),
            created_at=now,
            valid_from=valid_from,
            valid_until=valid_until,
            run_limit=run_limit,
            ends_at=ends_at,
        )
        record.wanted = tuple(self._prepare(record, now))
        over = self._cloud.over_quota(record.wanted)
        if over is not None:
            raise over
        self.records[name] = record
        operation = self._cloud.operations.begin(name, "create", now)
        self._cloud.operations.succeed(operation, cloud_tpu.QueuedResource.pb(record.to_api()))
        if request_id:
            self._by_request_id[parent, request_id] = operation
        considered = now + self._cloud.latency("queueing", queued_id)
        self._cloud.schedule(
            max(considered, record.valid_from or considered),
            lambda at: self._try_provision(record, at),
        )
        if record.valid_until is not None:
            self._cloud.schedule(record.valid_until, lambda at: self._expire(record))
        self._cloud.run_due()
        return operation

    def get(self, name: str) -> QueuedRecord:
        record = self.records.get(name)
        if record is None:
            raise api_errors.api_error("not-found", target=name)
        return record

    def delete(self, name: str, force: bool, now: datetime) -> str:
        record = self.get(name)
        nodes = self._nodes(record)
        if record.state is QueuedState.PROVISIONING and not force:
            raise api_errors.api_error("conflict", target=name)
        if nodes and not force:
            raise api_errors.api_error("conflict", target=name)
        operation = self._cloud.operations.begin(name, "delete", now)
        record.state, record.by_user = QueuedState.DELETING, True
        for node in nodes:
            self._cloud.delete(node.name, now)
        wait = self._cloud.latency("deletion", name) if nodes else timedelta(0)
        self._cloud.schedule(now + wait, lambda at: self._finish_deletion(record, operation))
        self._cloud.run_due()
        return operation

    def reset(self, name: str, now: datetime) -> str:
        """Return a suspended request to the queue."""
        record = self.get(name)
        if record.state is not QueuedState.SUSPENDED:
            raise api_errors.api_error("conflict", target=name)
        operation = self._cloud.operations.begin(name, "reset", now)
        record.state, record.error = QueuedState.WAITING_FOR_RESOURCES, None
        self._cloud.operations.succeed(operation, cloud_tpu.QueuedResource.pb(record.to_api()))
        self._try_provision(record, now)
        return operation

    def retry_waiting(self, now: datetime) -> None:
        """Try waiting requests again, first come, first served."""
        for record in list(self.records.values()):
            if record.state is QueuedState.WAITING_FOR_RESOURCES:
                self._try_provision(record, now)

    def _try_provision(self, record: QueuedRecord, at: datetime) -> None:
        if self.records.get(record.name) is not record or record.state not in WAITING:
            return
        if record.valid_from is not None and at < record.valid_from:
            return
        wanted = self._prepare(record, at)
        if self._cloud.shortage(wanted, at) is not None:
            record.state = QueuedState.WAITING_FOR_RESOURCES
            return
        record.state = QueuedState.PROVISIONING
        for index, node in enumerate(wanted):
            node.queued_resource = record.name
            node.slice_index, node.num_slices = index, len(wanted)
            self._cloud.start(node, at, None)

    def _prepare(self, record: QueuedRecord, now: datetime) -> list[NodeRecord]:
        parent, _, queued_id = record.name.partition("/queuedResources/")
        wanted = []
        for spec in record.request.tpu.node_spec:
            if spec.parent != parent:
                raise invalid_argument(
                    f"The parent {spec.parent!r} of the node is not that of the queued resource."
                )
            template = cloud_tpu.Node()
            template._pb.CopyFrom(cloud_tpu.Node.pb(spec.node))
            if "spot" in record.request:
                template.scheduling_config.spot = True
            for node_id in _node_ids(spec, queued_id):
                wanted.append(
                    self._cloud.validate_node(
                        spec.parent, node_id, template, record.capacity, now, RESOURCE_ID
                    )
                )
        if not wanted:
            raise invalid_argument("The request names no node.")
        return wanted

    def _expire(self, record: QueuedRecord) -> None:
        if record.state in WAITING:
            record.state = QueuedState.FAILED
            record.error = ApiError(
                Code.DEADLINE_EXCEEDED,
                "The queued resource was not provisioned before its valid until time.",
            )

    def _node_ready(self, node: NodeRecord, at: datetime) -> None:
        record = self.records.get(node.queued_resource)
        if record is not None and record.state is QueuedState.PROVISIONING:
            ready = [member.state is State.READY for member in self._nodes(record)]
            if all(ready) and len(ready) == len(record.node_names):
                record.state = QueuedState.ACTIVE
                limits = [at + record.run_limit] if record.run_limit else []
                limits += [record.ends_at] if record.ends_at else []
                if limits:
                    self._cloud.schedule(min(limits), lambda later: self._end(record, later))

    def _node_left(self, node: NodeRecord, at: datetime) -> None:
        record = self.records.get(node.queued_resource)
        if record is not None and record.state in (QueuedState.ACTIVE, QueuedState.PROVISIONING):
            reclaimed = node.state in (State.PREEMPTED, State.TERMINATED)
            alive = [
                member
                for member in self._nodes(record)
                if member.holds_stock and member.state is not State.DELETING
            ]
            if reclaimed and self._suspend_whole_gang:
                record.state = QueuedState.SUSPENDING
                for sibling in alive:
                    self._cloud.delete(sibling.name, at, "suspended")
                done = at + self._cloud.latency("deletion", record.name)
                self._cloud.schedule(done, lambda later: self._suspended(record))
            elif not alive:
                record.state = QueuedState.SUSPENDED
                record.by_user = not reclaimed

    def _end(self, record: QueuedRecord, at: datetime) -> None:
        """The run duration of flex-start is over, or its reservation."""
        if self.records.get(record.name) is not record or record.state is not QueuedState.ACTIVE:
            return
        record.state = QueuedState.SUSPENDING
        for node in self._nodes(record):
            self._cloud.delete(node.name, at, "expired")
        done = at + self._cloud.latency("deletion", record.name)
        self._cloud.schedule(done, lambda later: self._suspended(record))

    def _suspended(self, record: QueuedRecord) -> None:
        if record.state is QueuedState.SUSPENDING:
            record.state = QueuedState.SUSPENDED
            for node in self._nodes(record):
                self._cloud.nodes.pop(node.name, None)

    def _nodes(self, record: QueuedRecord) -> list[NodeRecord]:
        nodes: Iterable[NodeRecord | None] = map(self._cloud.nodes.get, record.node_names)
        return [node for node in nodes if node is not None and node.queued_resource == record.name]

    def _quota_holders(self) -> list[NodeRecord]:
        """A queued resource uses quota until it is deleted, also while it waits, and when it is
        suspended or failed: https://github.com/marin-community/marin/issues/87."""
        return [node for record in self.records.values() for node in record.wanted]

    def _finish_deletion(self, record: QueuedRecord, operation: str) -> None:
        if self.records.get(record.name) is record:
            del self.records[record.name]
        self._cloud.operations.succeed(operation)


def _node_ids(spec: cloud_tpu.QueuedResource.Tpu.NodeSpec, queued_id: str) -> list[str]:
    if "multislice_params" not in spec:
        return [spec.node_id]
    params = spec.multislice_params
    if params.node_count < 2:
        raise invalid_argument(
            f"The field node_count cannot be {params.node_count}: it needs to be > 1."
        )
    prefix = params.node_id_prefix or queued_id
    return [f"{prefix}-{index}" for index in range(params.node_count)]


def _capacity(request: cloud_tpu.QueuedResource) -> str:
    if "spot" in request:
        return "spot"
    return "reserved" if "guaranteed" in request or request.reservation_name else "on-demand"


def _validity(
    request: cloud_tpu.QueuedResource, now: datetime
) -> tuple[datetime | None, datetime | None]:
    """When the nodes may be created at the earliest and at the latest."""
    policy = request.queueing_policy
    if "valid_until_duration" in policy:
        return None, now + policy.valid_until_duration
    if "valid_until_time" in policy:
        return None, policy.valid_until_time
    if "valid_after_duration" in policy:
        return now + policy.valid_after_duration, None
    if "valid_after_time" in policy:
        return policy.valid_after_time, None
    if "valid_interval" in policy:
        interval = policy.valid_interval
        return (
            interval.start_time.ToDatetime(now.tzinfo),
            interval.end_time.ToDatetime(now.tzinfo),
        )
    return None, None
