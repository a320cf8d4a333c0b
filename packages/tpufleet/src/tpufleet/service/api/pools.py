"""Pools: list, show, create, update, delete."""

from __future__ import annotations

from typing import Any

from tpufleet.errors import BadInput
from tpufleet.model.api_types import PoolPage
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.people.audit import AuditAction
from tpufleet.model.people.users import Role
from tpufleet.model.values.bounds import check_bounds
from tpufleet.model.values.encoding import from_builtins
from tpufleet.service.fleet import pool_commands
from tpufleet.service.jobs.submission import JobStorage
from tpufleet.service.lookups import require_pool
from tpufleet.service.transport.routing import ApiCall, Router

router = Router()


@router.get("/pools", Role.VIEWER)
def list_pools(call: ApiCall) -> PoolPage:
    """List pools."""
    return PoolPage(pools=tuple(call.store.pools()))


@router.get("/pools/{name}", Role.VIEWER)
def get_pool(call: ApiCall) -> Pool:
    """Show one pool."""
    return require_pool(call.store, call.path_param("name"))


@router.put("/pools/{name}", Role.ADMIN, body=Pool, audit=AuditAction.PUT_POOL)
def put_pool(call: ApiCall, storage: JobStorage) -> Pool:
    """Create or update a pool."""
    name, document = call.path_param("name"), call.parse_body(dict[str, Any])
    if document.get("name", name) != name:
        raise BadInput(f"name: the body says {document['name']!r}, the path says {name!r}")
    pool = check_bounds(from_builtins({**document, "name": name}, Pool))
    return pool_commands.put_pool(call.context, pool, storage.providers)


@router.delete("/pools/{name}", Role.ADMIN, audit=AuditAction.DELETE_POOL)
def delete_pool(call: ApiCall) -> None:
    """Delete a pool that no job uses; its reservations end."""
    pool_commands.delete_pool(call.context, call.path_param("name"))
