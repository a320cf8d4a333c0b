"""About the server and the caller: its status, the current user, and the OpenAPI document."""

from __future__ import annotations

from starlette.responses import Response

import tpufleet
from tpufleet.model.api_types import CurrentUser
from tpufleet.model.fleet.server_status import ServerStatus
from tpufleet.model.people.users import Role
from tpufleet.service.operations import server_status
from tpufleet.service.operations.metrics import ServerMetrics
from tpufleet.service.operations.server_status import AboutServer
from tpufleet.service.transport.openapi import OpenApiDocument
from tpufleet.service.transport.routing import ApiCall, MediaType, Router

router = Router()


@router.get("/me", Role.VIEWER)
def get_me(call: ApiCall) -> CurrentUser:
    """Current user."""
    return CurrentUser(
        name=call.user.name,
        role=call.user.role,
        version=tpufleet.__version__,
        token_id=call.user.token_id,
        scope=call.user.scope,
    )


@router.get("/status", Role.VIEWER)
def get_status(call: ApiCall, server: AboutServer) -> ServerStatus:
    """Status of the server and its providers."""
    recent = server.recent_errors
    return server_status.status(
        call.store,
        call.now,
        server,
        # They may name hosts, files and users of the database.
        errors=recent.list(call.now) if recent is not None and call.user.is_admin else (),
    )


@router.get("/metrics", Role.VIEWER, response=str, media_type=MediaType.METRICS)
def get_metrics(call: ApiCall, metrics: ServerMetrics) -> Response:
    """Metrics in the text format of Prometheus."""
    return Response(metrics.text(), media_type=MediaType.METRICS.value)


@router.get("/openapi.json", Role.VIEWER, response=dict)
def get_openapi(call: ApiCall, document: OpenApiDocument) -> Response:
    """This document."""
    return Response(document.content, media_type=MediaType.JSON.value)
