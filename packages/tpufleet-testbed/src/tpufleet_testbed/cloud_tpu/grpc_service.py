"""The Cloud TPU API v2, its operations and locations over gRPC, for Google's own clients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

import grpc
from google.cloud.location import locations_pb2
from google.cloud.tpu_v2.types import cloud_tpu
from google.cloud.tpu_v2alpha1.types import cloud_tpu as alpha
from google.longrunning import operations_pb2
from google.protobuf import empty_pb2

from tpufleet_testbed import servers
from tpufleet_testbed.cloud_tpu import api_errors, catalog
from tpufleet_testbed.cloud_tpu.api_errors import invalid_argument
from tpufleet_testbed.cloud_tpu.cloud import Cloud
from tpufleet_testbed.cloud_tpu.nodes import NodeRecord
from tpufleet_testbed.cloud_tpu.queued_resources import QueuedRecord, QueuedResources

TPU = "google.cloud.tpu.v2.Tpu"
ALPHA = "google.cloud.tpu.v2alpha1.Tpu"  # what v2 lacks: maintenance, reservations
OPERATIONS = "google.longrunning.Operations"
LOCATIONS = "google.cloud.location.Locations"
SERVICE_IDENTITY = f"service-{api_errors.PROJECT_NUMBER}@cloud-tpu.iam.gserviceaccount.com"
# A call with the fault `hang` fails when the emulator closes, or after this.
HANG_SECONDS = 60.0
# Listings with a field for unreachable zones.
_PARTIAL = {
    "ListNodes": cloud_tpu.ListNodesResponse,
    "ListQueuedResources": cloud_tpu.ListQueuedResourcesResponse,
}
# Faults of listings that succeed.
_INCONSISTENT = ("omitted", "stale")

Handler = Callable[[Any, datetime], Any]


class TpuService:
    """Each method takes a request and the present time, with the lock held."""

    def __init__(
        self,
        cloud: Cloud,
        queue: QueuedResources,
        is_enabled: Callable[[], bool] = lambda: True,
    ) -> None:
        self._is_enabled = is_enabled  # the API, in the project
        self._cloud = cloud
        self._queue = queue
        self._closing = threading.Event()
        self.calls: list[tuple[str, str]] = []  # method and zone of every call, in order
        # The last consistent answer by method, parent and page.
        self._listings: dict[tuple[str, str, str], Any] = {}

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        cloud, queue, types = self._cloud, self._queue, cloud_tpu

        def started(call: Callable[[Any, datetime], str]) -> Handler:
            """A method that returns an operation, of which `call` gives the name."""
            return lambda request, now: cloud.operations.get(call(request, now))

        def nodes(request: Any) -> list[NodeRecord]:
            return self._inside(cloud.nodes.values(), request)

        methods: dict[str, tuple[Any, Handler]] = {
            "CreateNode": (types.CreateNodeRequest, started(
                lambda r, now: cloud.create(r.parent, r.node_id, r.node, now))),
            "DeleteNode": (types.DeleteNodeRequest, started(
                lambda r, now: cloud.delete(r.name, now))),
            "GetNode": (types.GetNodeRequest, lambda r, now: cloud.node(r.name).to_api()),
            "ListNodes": (types.ListNodesRequest, _listing(
                types.ListNodesResponse, "nodes", nodes, NodeRecord.to_api)),
            "StopNode": (types.StopNodeRequest, started(lambda r, now: cloud.stop(r.name, now))),
            "StartNode": (types.StartNodeRequest, started(
                lambda r, now: cloud.start_stopped(r.name, now))),
            "UpdateNode": (types.UpdateNodeRequest, started(
                lambda r, now: cloud.update(r.node, r.update_mask.paths, now))),
            "GetGuestAttributes": (types.GetGuestAttributesRequest, self._get_guest),
            "CreateQueuedResource": (types.CreateQueuedResourceRequest, started(
                lambda r, now: queue.create(
                    r.parent, r.queued_resource_id, r.queued_resource, now, r.request_id))),
            "DeleteQueuedResource": (types.DeleteQueuedResourceRequest, started(
                lambda r, now: queue.delete(r.name, r.force, now))),
            "GetQueuedResource": (types.GetQueuedResourceRequest,
                lambda r, now: queue.get(r.name).to_api()),
            "ListQueuedResources": (types.ListQueuedResourcesRequest, _listing(
                types.ListQueuedResourcesResponse, "queued_resources",
                lambda r: self._inside(queue.records.values(), r), QueuedRecord.to_api)),
            "ResetQueuedResource": (types.ResetQueuedResourceRequest, started(
                lambda r, now: queue.reset(r.name, now))),
            "GenerateServiceIdentity": (types.GenerateServiceIdentityRequest,
                lambda r, now: cloud.zone_of(r.parent) and types.GenerateServiceIdentityResponse(
                    identity=types.ServiceIdentity(email=SERVICE_IDENTITY))),
            "ListAcceleratorTypes": (types.ListAcceleratorTypesRequest, _listing(
                types.ListAcceleratorTypesResponse, "accelerator_types",
                lambda r: cloud.zone_of(r.parent) and catalog.accelerator_types(r.parent))),
            "GetAcceleratorType": (types.GetAcceleratorTypeRequest,
                lambda r, now: catalog.find_by_name(r.name, catalog.accelerator_types(
                    r.name.partition("/acceleratorTypes/")[0]))),
            "ListRuntimeVersions": (types.ListRuntimeVersionsRequest, _listing(
                types.ListRuntimeVersionsResponse, "runtime_versions",
                lambda r: catalog.runtime_versions(r.parent))),
            "GetRuntimeVersion": (types.GetRuntimeVersionRequest,
                lambda r, now: catalog.find_by_name(r.name, catalog.runtime_versions(
                    r.name.partition("/runtimeVersions/")[0]))),
        }  # fmt: skip
        operations: dict[str, tuple[Any, Handler]] = {
            "GetOperation": (operations_pb2.GetOperationRequest,
                lambda r, now: cloud.operations.get(r.name)),
            "ListOperations": (operations_pb2.ListOperationsRequest, _listing(
                operations_pb2.ListOperationsResponse, "operations",
                lambda r: cloud.operations.list_under(r.name))),
            "DeleteOperation": (operations_pb2.DeleteOperationRequest,
                lambda r, now: cloud.operations.delete(r.name)),
            # Accepted, and without effect, which the reference allows.
            "CancelOperation": (operations_pb2.CancelOperationRequest,
                lambda r, now: cloud.operations.get(r.name) and empty_pb2.Empty()),
        }  # fmt: skip
        locations: dict[str, tuple[Any, Handler]] = {
            "ListLocations": (locations_pb2.ListLocationsRequest, _listing(
                locations_pb2.ListLocationsResponse, "locations",
                lambda r: [_location(f"{r.name}/locations/{zone}") for zone in cloud.zones])),
            "GetLocation": (locations_pb2.GetLocationRequest,
                lambda r, now: cloud.zone_of(r.name) and _location(r.name)),
        }  # fmt: skip
        maintenance: dict[str, tuple[Any, Handler]] = {
            "v2alpha1.GetNode": (alpha.GetNodeRequest,
                lambda r, now: cloud.node(r.name).to_alpha()),
            "v2alpha1.ListNodes": (alpha.ListNodesRequest, _listing(
                alpha.ListNodesResponse, "nodes", nodes, NodeRecord.to_alpha)),
            "v2alpha1.PerformMaintenance": (alpha.PerformMaintenanceRequest,
                self._perform_maintenance),
            "v2alpha1.PerformMaintenanceQueuedResource": (
                alpha.PerformMaintenanceQueuedResourceRequest, self._perform_queued_maintenance),
            "v2alpha1.ListReservations": (alpha.ListReservationsRequest, _listing(
                alpha.ListReservationsResponse, "reservations",
                lambda r: self._inside(cloud.reservations(r.parent), r))),
            "v2alpha1.SimulateMaintenanceEvent": (alpha.SimulateMaintenanceEventRequest,
                self._simulate_maintenance),
        }  # fmt: skip
        services = {OPERATIONS: operations, LOCATIONS: locations, TPU: methods, ALPHA: maintenance}
        return [
            servers.grpc_service(
                service,
                {
                    name.rpartition(".")[2]: (kind, self._wrap(name, handle))
                    for name, (kind, handle) in table.items()
                },
            )
            for service, table in services.items()
        ]

    def close(self) -> None:
        self._closing.set()

    def _wrap(self, method: str, handler: Handler) -> servers.Call:
        def handle(request: Any) -> Any:
            target = _target(request)
            zone = _zone(target)
            with self._cloud.lock:
                now = self._cloud.run_due()
                self.calls.append((method, zone))
                age = now - self._cloud.started_at
                fault = self._cloud.call_faults.match(method, zone, age)
            inconsistent = fault.error if fault and fault.error in _INCONSISTENT else ""
            if inconsistent:
                fault = None
            if not self._is_enabled():
                raise api_errors.api_error("disabled")
            if fault is not None and fault.error == "unreachable" and method in _PARTIAL:
                return _PARTIAL[method](unreachable=[target])
            if fault is not None and fault.error == "hang":
                self._closing.wait(HANG_SECONDS)
                raise api_errors.api_error("deadline")
            if fault is not None and not fault.late:
                raise api_errors.api_error(fault.error, zone=zone, target=target, method=method)
            with self._cloud.lock:
                if fault is not None:
                    return self._fail_operation(fault.error, target, zone, now)
                if method in _PARTIAL:
                    return self._list(method, handler, request, now, inconsistent)
                return handler(request, now)

        return handle

    def _list(
        self, method: str, handler: Handler, request: Any, now: datetime, inconsistent: str
    ) -> Any:
        key = (method, request.parent, request.page_token)
        if inconsistent == "omitted":
            return _PARTIAL[method]()
        if inconsistent == "stale" and key in self._listings:
            return self._listings[key]
        self._listings[key] = answer = handler(request, now)
        return answer

    def _fail_operation(self, error: str, target: str, zone: str, now: datetime) -> Any:
        name = self._cloud.operations.begin(target, "create", now)
        self._cloud.operations.fail(name, api_errors.api_error(error, zone=zone, target=target))
        return self._cloud.operations.get(name)

    def _inside(self, records: Iterable[Any], request: Any) -> list[Any]:
        """The records of a location, or of all for `-`."""
        self._cloud.zone_of(request.parent)
        parent = request.parent
        prefix = parent.removesuffix("-") if parent.endswith("/-") else f"{parent}/"
        return [record for record in records if record.name.startswith(prefix)]

    def _perform_maintenance(self, request: Any, now: datetime) -> Any:
        return self._done(self._cloud.perform_maintenance(request.name, now), request.name)

    def _simulate_maintenance(self, request: Any, now: datetime) -> Any:
        operation = self._cloud.simulate_maintenance(request.name, request.worker_ids, now)
        return self._done(operation, request.name)

    def _done(self, operation: str, node: str) -> Any:
        result = alpha.Node.pb(self._cloud.node(node).to_alpha())
        self._cloud.operations.succeed(operation, result)
        return self._cloud.operations.get(operation)

    def _perform_queued_maintenance(self, request: Any, now: datetime) -> Any:
        """Of some nodes of a queued resource, named in full or by their ids."""
        queued, parent = self._queue.get(request.name), request.name.rsplit("/", 2)[0]
        for each in request.node_names:
            name = each if "/" in each else f"{parent}/nodes/{each}"
            if self._cloud.node(name).queued_resource != request.name:
                raise invalid_argument(f'The node "{each}" is not part of {request.name}.')
            self._done(self._cloud.perform_maintenance(name, now), name)
        operation = self._cloud.operations.begin(request.name, "performMaintenance", now)
        shown = alpha.QueuedResource.deserialize(
            cloud_tpu.QueuedResource.serialize(queued.to_api())
        )
        self._cloud.operations.succeed(operation, alpha.QueuedResource.pb(shown))
        return self._cloud.operations.get(operation)

    def _get_guest(self, request: cloud_tpu.GetGuestAttributesRequest, now: datetime) -> Any:
        """What the workers wrote to their metadata servers: `namespace/` gives every key of it,
        `namespace/key` one. No worker named: all of them."""
        node, path = self._cloud.node(request.name), request.query_path
        every = range(node.accelerator.hosts)
        for worker in request.worker_ids:
            if not worker.isdecimal() or int(worker) not in every:
                raise invalid_argument(f'The worker "{worker}" was not found.')
        answers = []
        for index in map(int, request.worker_ids or every):
            found = self._cloud.hosts.guest_attributes(node, index, path)
            entries = [
                cloud_tpu.GuestAttributesEntry(namespace=namespace, key=key, value=value)
                for (namespace, key), value in sorted(found.items())
            ]
            if entries:
                value = cloud_tpu.GuestAttributesValue(items=entries)
                answers.append(cloud_tpu.GuestAttributes(query_path=path, query_value=value))
        if not answers:
            raise invalid_argument(f'The "GuestAttributes" value "{path}" was not found.')
        return cloud_tpu.GetGuestAttributesResponse(guest_attributes=answers)


def _listing(
    response: Any, field: str, items: Callable[[Any], Sequence[Any]], shown: Any = lambda item: item
) -> Handler:
    """A method that answers with one page of the items, each as `shown` gives it."""

    def handle(request: Any, now: datetime) -> Any:
        page, next_page = catalog.paginate(items(request), request)
        return response(**{field: [shown(item) for item in page]}, next_page_token=next_page)

    return handle


def _target(request: Any) -> str:
    """Name of the location or resource that a request refers to."""
    if isinstance(request, cloud_tpu.UpdateNodeRequest):
        return request.node.name
    return getattr(request, "parent", "") or request.name


def _zone(name: str) -> str:
    parts = name.split("/")
    return parts[3] if len(parts) > 3 else ""


def _location(name: str) -> locations_pb2.Location:
    zone = name.rpartition("/")[2]
    return locations_pb2.Location(name=name, location_id=zone, display_name=zone)
