"""The Cloud TPU API v2, its operations and locations over gRPC, for Google's own clients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import grpc
from google.cloud.location import locations_pb2
from google.cloud.tpu_v2.types import cloud_tpu
from google.longrunning import operations_pb2
from google.protobuf import any_pb2, empty_pb2
from google.rpc import error_details_pb2, status_pb2

from tpufleet_testbed import servers
from tpufleet_testbed.cloud_tpu import api_errors, catalog, guest_attributes
from tpufleet_testbed.cloud_tpu.api_errors import ApiError
from tpufleet_testbed.cloud_tpu.cloud import Cloud
from tpufleet_testbed.cloud_tpu.nodes import NodeRecord
from tpufleet_testbed.cloud_tpu.queued_resources import QueuedResources

TPU = "google.cloud.tpu.v2.Tpu"
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

        methods: dict[str, tuple[Any, Handler]] = {
            "CreateNode": (types.CreateNodeRequest, started(
                lambda r, now: cloud.create(r.parent, r.node_id, r.node, now))),
            "DeleteNode": (types.DeleteNodeRequest, started(
                lambda r, now: cloud.delete(r.name, now))),
            "GetNode": (types.GetNodeRequest, lambda r, now: cloud.node(r.name).to_api()),
            "ListNodes": (types.ListNodesRequest, self._list_nodes),
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
            "ListQueuedResources": (types.ListQueuedResourcesRequest, self._list_queued),
            "ResetQueuedResource": (types.ResetQueuedResourceRequest, started(
                lambda r, now: queue.reset(r.name, now))),
            "GenerateServiceIdentity": (types.GenerateServiceIdentityRequest,
                lambda r, now: cloud.zone_of(r.parent) and types.GenerateServiceIdentityResponse(
                    identity=types.ServiceIdentity(email=SERVICE_IDENTITY))),
            "ListAcceleratorTypes": (types.ListAcceleratorTypesRequest, self._list_types),
            "GetAcceleratorType": (types.GetAcceleratorTypeRequest,
                lambda r, now: catalog.find_by_name(r.name, catalog.accelerator_types(
                    r.name.partition("/acceleratorTypes/")[0]))),
            "ListRuntimeVersions": (types.ListRuntimeVersionsRequest, self._list_runtimes),
            "GetRuntimeVersion": (types.GetRuntimeVersionRequest,
                lambda r, now: catalog.find_by_name(r.name, catalog.runtime_versions(
                    r.name.partition("/runtimeVersions/")[0]))),
        }  # fmt: skip
        operations: dict[str, tuple[Any, Handler]] = {
            "GetOperation": (operations_pb2.GetOperationRequest,
                lambda r, now: cloud.operations.get(r.name)),
            "ListOperations": (operations_pb2.ListOperationsRequest, self._list_operations),
            "DeleteOperation": (operations_pb2.DeleteOperationRequest,
                lambda r, now: cloud.operations.delete(r.name)),
            # Accepted, and without effect, which the reference allows.
            "CancelOperation": (operations_pb2.CancelOperationRequest,
                lambda r, now: cloud.operations.get(r.name) and empty_pb2.Empty()),
        }  # fmt: skip
        locations: dict[str, tuple[Any, Handler]] = {
            "ListLocations": (locations_pb2.ListLocationsRequest, self._list_locations),
            "GetLocation": (locations_pb2.GetLocationRequest,
                lambda r, now: cloud.zone_of(r.name) and _location(r.name)),
        }  # fmt: skip
        services = {OPERATIONS: operations, LOCATIONS: locations, TPU: methods}
        return [
            servers.grpc_service(
                service,
                {name: (kind, self.wrap(name, handle)) for name, (kind, handle) in table.items()},
            )
            for service, table in services.items()
        ]

    def close(self) -> None:
        self._closing.set()

    def wrap(self, method: str, handler: Handler) -> Callable[[Any, grpc.ServicerContext], Any]:
        def handle(request: Any, context: grpc.ServicerContext) -> Any:
            target = _target(request)
            zone = _zone(target)
            try:
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
            except ApiError as error:
                _abort(context, error)

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

    def _list_nodes(self, request: cloud_tpu.ListNodesRequest, now: datetime) -> Any:
        page, next_page = self.page_of_nodes(request)
        return cloud_tpu.ListNodesResponse(
            nodes=[node.to_api() for node in page], next_page_token=next_page
        )

    def page_of_nodes(self, request: Any) -> tuple[Sequence[NodeRecord], str]:
        self._cloud.zone_of(request.parent)
        nodes = [node for node in self._cloud.nodes.values() if _inside(node.name, request.parent)]
        return catalog.paginate(nodes, request)

    def perform_maintenance(
        self, name: str, now: datetime, response: Callable[[NodeRecord], Any]
    ) -> Any:
        operation = self._cloud.perform_maintenance(name, now)
        self._cloud.operations.succeed(operation, response(self.find_node(name)))
        return self._cloud.operations.get(operation)

    def find_node(self, name: str) -> NodeRecord:
        return self._cloud.node(name)

    def _get_guest(self, request: cloud_tpu.GetGuestAttributesRequest, now: datetime) -> Any:
        return cloud_tpu.GetGuestAttributesResponse(
            guest_attributes=guest_attributes.query(
                self._cloud.node(request.name),
                self._cloud.hosts,
                request.query_path,
                request.worker_ids,
            )
        )

    def _list_queued(self, request: cloud_tpu.ListQueuedResourcesRequest, now: datetime) -> Any:
        self._cloud.zone_of(request.parent)
        items = [
            item for item in self._queue.records.values() if _inside(item.name, request.parent)
        ]
        page, next_page = catalog.paginate(items, request)
        return cloud_tpu.ListQueuedResourcesResponse(
            queued_resources=[item.to_api() for item in page], next_page_token=next_page
        )

    def _list_types(self, request: cloud_tpu.ListAcceleratorTypesRequest, now: datetime) -> Any:
        self._cloud.zone_of(request.parent)
        page, next_page = catalog.paginate(catalog.accelerator_types(request.parent), request)
        return cloud_tpu.ListAcceleratorTypesResponse(
            accelerator_types=page, next_page_token=next_page
        )

    def _list_locations(self, request: locations_pb2.ListLocationsRequest, _: datetime) -> Any:
        found = [_location(f"{request.name}/locations/{zone}") for zone in self._cloud.zones]
        page, next_page = catalog.paginate(found, request)
        return locations_pb2.ListLocationsResponse(locations=page, next_page_token=next_page)

    def _list_runtimes(self, request: cloud_tpu.ListRuntimeVersionsRequest, now: datetime) -> Any:
        page, next_page = catalog.paginate(catalog.runtime_versions(request.parent), request)
        return cloud_tpu.ListRuntimeVersionsResponse(
            runtime_versions=page, next_page_token=next_page
        )

    def _list_operations(self, request: operations_pb2.ListOperationsRequest, _: datetime) -> Any:
        page, next_page = catalog.paginate(self._cloud.operations.list_under(request.name), request)
        return operations_pb2.ListOperationsResponse(operations=page, next_page_token=next_page)


def _abort(context: grpc.ServicerContext, error: ApiError) -> None:
    status = status_pb2.Status(code=error.number, message=error.message)
    if error.reason:
        packed = any_pb2.Any()
        packed.Pack(
            error_details_pb2.ErrorInfo(
                reason=error.reason, domain=error.domain, metadata=error.metadata
            )
        )
        status.details.append(packed)
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(error.code, error.message)


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


def _inside(name: str, parent: str) -> bool:
    return name.startswith(parent.removesuffix("-") if parent.endswith("/-") else f"{parent}/")
