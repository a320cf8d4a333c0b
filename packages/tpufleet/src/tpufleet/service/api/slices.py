"""Slices: list them, adopt nodes, inject faults, run commands on their hosts; and the inventory."""

from __future__ import annotations

import shlex

from starlette.responses import Response, StreamingResponse

from tpufleet.errors import must_be
from tpufleet.model.api_types import (
    AdoptedNode,
    AdoptRequest,
    FaultRequest,
    SlicePage,
)
from tpufleet.model.fleet.host_commands import (
    MAX_PROFILE,
    MAX_TIMEOUT,
    HostCommandKind,
    HostCommandReport,
    HostCommandRequest,
)
from tpufleet.model.fleet.hosts import host_id
from tpufleet.model.fleet.inventory import Inventory, InventoryChange, InventoryNote
from tpufleet.model.fleet.slices import SIMULATED_PROVIDERS, SliceId
from tpufleet.model.identifiers import SECOND, check_range
from tpufleet.model.people.audit import AuditAction
from tpufleet.model.people.users import Role
from tpufleet.model.tpu import type_lookup
from tpufleet.service.fleet import adopted_nodes, inventory
from tpufleet.service.hosts.host_commands import HostCommandQueue
from tpufleet.service.jobs import commands, queries
from tpufleet.service.lookups import require_host_index, require_slice
from tpufleet.service.people.audit import AuditSubject
from tpufleet.service.transport.routing import ApiCall, Faults, MediaType, Param, Router

MAX_ARGUMENTS = 1000

router = Router()


def _describe_command(call: ApiCall) -> str:
    request = call.parse_body(HostCommandRequest)
    hosts = "all hosts" if request.host is None else f"host {request.host}"
    return f"{hosts}: {shlex.join(request.command) or request.kind.value}"


@router.get(
    "/slices",
    Role.VIEWER,
    params=(
        Param("pool", "pool name"),
        Param("job", "job that holds them"),
        Param("id", "only this slice, also if it is gone"),
        Param("all", "any value: include slices that are gone"),
    ),
)
def list_slices(call: ApiCall) -> SlicePage:
    """List slices."""
    ref, slice_id = call.query_text("job"), call.query_text("id")
    if slice_id is not None:
        slices = list(call.store.find_slices([SliceId(slice_id)]).values())
    else:
        slices = call.store.slices(
            live_only=call.query_text("all") is None,
            pool=call.query_text("pool"),
            job_id=call.find_job(ref).id if ref else None,
        )
    return SlicePage(slices=tuple(queries.slice_rows(call.store, slices, call.now)))


@router.post(
    "/slices",
    Role.ADMIN,  # it changes a machine with the credentials of the server
    audit=lambda call: AuditSubject(
        action=AuditAction.ADOPT_NODE,
        target=call.parse_body(AdoptRequest).node,
        detail=f"pool {call.parse_body(AdoptRequest).pool}",
    ),
)
def adopt_node(call: ApiCall, body: AdoptRequest) -> AdoptedNode:
    """Adopt a TPU VM that was created by hand, as a slice of a pool."""
    return AdoptedNode(slice_id=adopted_nodes.adopt(call.context, body))


@router.delete("/slices/{id}", Role.ADMIN, audit=AuditAction.UNREGISTER_NODE)
def unregister_node(call: ApiCall) -> None:
    """Give an adopted TPU VM back: its agent stops, and it is not deleted."""
    adopted_nodes.unregister(call.context, call.path_param("id"))


@router.post(
    "/slices/{id}/fault",
    Role.MEMBER,  # and the owner of the job on it, or an admin
    audit=AuditAction.INJECT_FAULT,
    detail=lambda call: call.parse_body(FaultRequest).fault,
)
def inject_fault(call: ApiCall, faults: Faults, body: FaultRequest) -> None:
    """Inject a fault into a slice."""
    commands.request_fault(call.context, SliceId(call.path_param("id")), body, faults)


@router.post(
    "/slices/{id}/commands",
    Role.MEMBER,  # and the owner of the job on it, or an admin
    audit=AuditAction.EXEC,
    detail=_describe_command,
)
def send_host_command(
    call: ApiCall, host_commands: HostCommandQueue, body: HostCommandRequest
) -> None:
    """Run a command or a diagnosis on hosts of a slice, through their agents."""
    slice_id = SliceId(call.path_param("id"))
    if not 1 <= len(body.id) <= 64 or not body.id.isalnum():
        raise must_be("1 to 64 letters and digits", body.id, "id")
    words = 1 if body.kind is HostCommandKind.COMMAND else 0
    check_range("command: number of words", len(body.command), words, MAX_ARGUMENTS)
    check_range("timeout", body.timeout, SECOND, MAX_TIMEOUT)
    if body.kind is HostCommandKind.PROFILE:
        check_range("duration", body.duration, SECOND / 10, MAX_PROFILE)
    tpu_slice = require_slice(call.store, slice_id, live=True)
    job_id = commands.require_slice_access(call.context, tpu_slice)
    if tpu_slice.provider in SIMULATED_PROVIDERS and body.kind is HostCommandKind.COMMAND:
        # Agents of simulated slices run as the server's user, outside the isolation of jobs.
        call.user.require_admin("a command on a simulated slice, which runs as the server,")
    require_host_index(tpu_slice, body.host)
    count = type_lookup.find(tpu_slice.accelerator).hosts
    indexes = range(count) if body.host is None else (body.host,)
    hosts = tuple(host_id(slice_id, index) for index in indexes)
    host_commands.send(body, slice_id, hosts, call.now, job_id)


@router.get("/slices/{id}/commands/{command}", Role.MEMBER)  # and the owner of the job on the slice
def get_host_command(call: ApiCall, host_commands: HostCommandQueue) -> HostCommandReport:
    """Get the results of a host command."""
    slice_id = SliceId(call.path_param("id"))
    commands.require_slice_access(call.context, require_slice(call.store, slice_id))
    return host_commands.report(call.path_param("command"), call.path_param("id"), call.now)


@router.get(
    "/slices/{id}/commands/{command}/file",
    Role.MEMBER,  # and the owner of the job on the slice, or an admin
    params=(Param("host", "index of the host in the slice", number=True),),
    response=bytes,
    media_type=MediaType.BYTES,
)
def get_host_command_file(call: ApiCall, host_commands: HostCommandQueue) -> Response:
    """Download the file that a host sent with the result of a host command."""
    slice_id = SliceId(call.path_param("id"))
    commands.require_slice_access(call.context, require_slice(call.store, slice_id))
    host = host_id(slice_id, call.query_int("host", 0) or 0)
    parts = host_commands.read_file(call.path_param("command"), slice_id, host)
    return StreamingResponse(parts, media_type=MediaType.BYTES.value)


@router.get("/inventory", Role.VIEWER)
def get_inventory(call: ApiCall) -> Inventory:
    """Slices and room in pools, with state, owner, job and notes; chips by type and zone."""
    return inventory.inventory(call.store, call.now)


@router.patch("/inventory/{name}", Role.MEMBER)
def annotate_inventory(call: ApiCall, body: InventoryChange) -> InventoryNote:
    """Change alias, note or belongs-to of a slice or a pool."""
    return inventory.annotate(call.context, call.path_param("name"), body)
