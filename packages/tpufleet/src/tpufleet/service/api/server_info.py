"""About the server and the caller: its status, the current user, and the OpenAPI document."""

from __future__ import annotations

from starlette.responses import Response

import tpufleet
from tpufleet.model.api_types import CurrentUser
from tpufleet.model.fleet.server_status import ServerStatus
from tpufleet.model.people.users import Role
from tpufleet.service.operations import server_status
from tpufleet.service.transport.routing import ApiCall, MediaType, Router

router = Router()


@router.route("GET", "/me", role=Role.VIEWER, summary="Current user", response=CurrentUser)
def get_me(call: ApiCall) -> CurrentUser:
    return CurrentUser(
        name=call.user.name,
        role=call.user.role,
        version=tpufleet.__version__,
        token_id=call.user.token_id,
        scope=call.user.scope,
        pool=call.user.pool,
    )


@router.route(
    "GET",
    "/status",
    role=Role.VIEWER,
    summary="Status of the control plane and its providers",
    response=ServerStatus,
)
def get_status(call: ApiCall) -> ServerStatus:
    deps, recent = call.components.deps, call.components.deps.recent_errors
    return server_status.status(
        call.store,
        call.now,
        started_at=deps.started_at,
        server=deps.server_name,
        local_jobs=deps.local_jobs,
        # They may name hosts, files and users of the database.
        errors=recent.list(call.now) if recent is not None and call.user.is_admin else (),
    )


@router.route(
    "GET",
    "/metrics",
    role=Role.VIEWER,
    summary="Metrics in the text format of Prometheus",
    response=str,
    media_type=MediaType.METRICS,
)
def get_metrics(call: ApiCall) -> Response:
    return Response(call.components.metrics.text(), media_type=MediaType.METRICS.value)


@router.route("GET", "/openapi.json", role=Role.VIEWER, summary="This document", response=dict)
def get_openapi(call: ApiCall) -> Response:
    return Response(call.components.openapi(), media_type=MediaType.JSON.value)
