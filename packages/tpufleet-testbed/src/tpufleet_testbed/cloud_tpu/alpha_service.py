"""The part of google.cloud.tpu.v2alpha1 that v2 lacks: maintenance of nodes."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import grpc
from google.cloud.tpu_v2.types import cloud_tpu
from google.cloud.tpu_v2alpha1.types import cloud_tpu as alpha

from tpufleet_testbed import servers
from tpufleet_testbed.cloud_tpu.grpc_service import Handler, TpuService
from tpufleet_testbed.cloud_tpu.nodes import MaintenanceWindow, NodeRecord

TPU_ALPHA = "google.cloud.tpu.v2alpha1.Tpu"


class AlphaService:
    def __init__(self, service: TpuService) -> None:
        self._service = service

    def handler(self) -> grpc.GenericRpcHandler:
        methods: dict[str, tuple[Any, Handler]] = {
            "GetNode": (alpha.GetNodeRequest, self._get_node),
            "ListNodes": (alpha.ListNodesRequest, self._list_nodes),
            "PerformMaintenance": (alpha.PerformMaintenanceRequest, self._perform_maintenance),
        }
        return servers.grpc_service(
            TPU_ALPHA,
            {
                name: (request, self._service.wrap(f"v2alpha1.{name}", handler))
                for name, (request, handler) in methods.items()
            },
        )

    def _get_node(self, request: Any, now: datetime) -> Any:
        return _node(self._service.find_node(request.name))

    def _list_nodes(self, request: Any, now: datetime) -> Any:
        page, next_page = self._service.page_of_nodes(request)
        return alpha.ListNodesResponse(
            nodes=[_node(record) for record in page], next_page_token=next_page
        )

    def _perform_maintenance(self, request: Any, now: datetime) -> Any:
        return self._service.perform_maintenance(
            request.name, now, lambda record: alpha.Node.pb(_node(record))
        )


def _node(record: NodeRecord) -> alpha.Node:
    """The messages of both versions share their field numbers, except where alpha has more."""
    node = alpha.Node.deserialize(cloud_tpu.Node.serialize(record.to_api()))
    if record.maintenance is not None:
        node.upcoming_maintenance = _maintenance(record.maintenance, record.can_start_maintenance)
    return node


def _maintenance(window: MaintenanceWindow, by_hand: bool) -> alpha.UpcomingMaintenance:
    kinds = alpha.UpcomingMaintenance.MaintenanceType
    statuses = alpha.UpcomingMaintenance.MaintenanceStatus
    return alpha.UpcomingMaintenance(
        type_=kinds.SCHEDULED if window.scheduled else kinds.UNSCHEDULED,
        can_reschedule=by_hand and not window.ongoing,
        window_start_time=_rfc3339(window.start),
        window_end_time=_rfc3339(window.end),
        latest_window_start_time=_rfc3339(window.latest_start),
        maintenance_status=statuses.ONGOING if window.ongoing else statuses.PENDING,
    )


def _rfc3339(moment: datetime) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"
