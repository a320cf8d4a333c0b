"""Pools: list, show, create, update, delete."""

from __future__ import annotations

from typing import Any

from tpufleet.errors import BadInput
from tpufleet.model.api_types import Acknowledgement, PoolPage
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.people.audit import AuditAction
from tpufleet.model.people.users import Role
from tpufleet.model.values.bounds import check_bounds
from tpufleet.model.values.encoding import from_builtins
from tpufleet.service.fleet import pool_commands
from tpufleet.service.jobs.submission import JobStorage
from tpufleet.service.lookups import require_pool
from tpufleet.service.people.audit import AuditSubject
from tpufleet.service.transport.routing import ApiCall, Router

router = Router()


@router.route("GET", "/pools", role=Role.VIEWER, response=PoolPage)
def list_pools(call: ApiCall) -> PoolPage:
    """List pools."""
    return PoolPage(pools=tuple(call.store.pools()))


@router.route("GET", "/pools/{name}", role=Role.VIEWER, response=Pool)
def get_pool(call: ApiCall) -> Pool:
    """Show one pool."""
    return require_pool(call.store, call.path_param("name"))


@router.route(
    "PUT",
    "/pools/{name}",
    role=Role.ADMIN,
    body=Pool,
    response=Pool,
    audit=lambda call: AuditSubject(action=AuditAction.PUT_POOL, target=call.path_param("name")),
)
def put_pool(call: ApiCall, storage: JobStorage) -> Pool:
    """Create or update a pool."""
    name, document = call.path_param("name"), call.parse_body(dict[str, Any])
    if document.get("name", name) != name:
        raise BadInput(f"name: the body says {document['name']!r}, the path says {name!r}")
    pool = check_bounds(from_builtins({**document, "name": name}, Pool))
    pool = pool_commands.put_pool(call.context, pool, storage.providers)
    call.notify()
    return pool


@router.route(
    "DELETE",
    "/pools/{name}",
    role=Role.ADMIN,
    response=Acknowledgement,
    audit=lambda call: AuditSubject(action=AuditAction.DELETE_POOL, target=call.path_param("name")),
)
def delete_pool(call: ApiCall) -> Acknowledgement:
    """Delete a pool that no job uses; its reservations end."""
    pool_commands.delete_pool(call.context, call.path_param("name"))
    call.notify()
    return Acknowledgement()
