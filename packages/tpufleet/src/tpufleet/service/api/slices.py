"""Slices: list them, inject faults, run commands on their hosts."""

from __future__ import annotations

import shlex
from datetime import timedelta

from starlette.responses import Response, StreamingResponse

from tpufleet.errors import BadInput, Forbidden, NotFound
from tpufleet.model.api_types import (
    Acknowledgement,
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
from tpufleet.model.fleet.slices import SIMULATED_PROVIDERS, SliceId, SliceState
from tpufleet.model.people.audit import AuditAction
from tpufleet.model.people.users import Role
from tpufleet.model.tpu import topology
from tpufleet.service.fleet import adopted_nodes
from tpufleet.service.jobs import commands, queries
from tpufleet.service.people.audit import AuditSubject
from tpufleet.service.transport.routing import ApiCall, MediaType, Param, Router

MAX_ARGUMENTS = 1000

router = Router()


def _audit_host_command(call: ApiCall) -> AuditSubject:
    request = call.parse_body(HostCommandRequest)
    hosts = "all hosts" if request.host is None else f"host {request.host}"
    command = shlex.join(request.command) or request.kind.value
    return AuditSubject(
        action=AuditAction.EXEC, target=call.path_param("id"), detail=f"{hosts}: {command}"
    )


@router.route(
    "GET",
    "/slices",
    role=Role.VIEWER,
    summary="List slices",
    response=SlicePage,
    params=(
        Param("pool", "pool name"),
        Param("job", "job that holds them"),
        Param("id", "only this slice, also if it is gone"),
        Param("all", "any value: include slices that are gone"),
    ),
)
def list_slices(call: ApiCall) -> SlicePage:
    ref, slice_id = call.query_text("job"), call.query_text("id")
    if slice_id is not None:
        found = call.store.slice(SliceId(slice_id))
        known = [] if found is None else [found]
        return SlicePage(slices=tuple(queries.slice_rows(call.store, known, call.now)))
    slices = call.store.slices(
        live_only=call.query_text("all") is None,
        pool=call.query_text("pool"),
        job_id=call.find_job(ref).id if ref else None,
    )
    return SlicePage(slices=tuple(queries.slice_rows(call.store, slices, call.now)))


@router.route(
    "POST",
    "/slices",
    role=Role.ADMIN,  # it changes a machine with the credentials of the server
    summary="Adopt a node that a person made, as a slice of a pool",
    body=AdoptRequest,
    response=AdoptedNode,
    audit=lambda call: AuditSubject(
        action=AuditAction.ADOPT_NODE,
        target=call.parse_body(AdoptRequest).node,
        detail=f"pool {call.parse_body(AdoptRequest).pool}",
    ),
)
def adopt_node(call: ApiCall) -> AdoptedNode:
    slice_id = adopted_nodes.adopt(call.context, call.parse_body(AdoptRequest))
    call.notify()
    return AdoptedNode(slice_id=slice_id)


@router.route(
    "DELETE",
    "/slices/{id}",
    role=Role.ADMIN,
    summary="Give an adopted node back: its agent stops, and it is not deleted",
    response=Acknowledgement,
    audit=lambda call: AuditSubject(
        action=AuditAction.UNREGISTER_NODE, target=call.path_param("id")
    ),
)
def unregister_node(call: ApiCall) -> Acknowledgement:
    adopted_nodes.unregister(call.context, call.path_param("id"))
    call.notify()
    return Acknowledgement()


@router.route(
    "POST",
    "/slices/{id}/fault",
    role=Role.MEMBER,  # and the owner of the job on it, or an admin
    summary="Inject a fault into a slice",
    body=FaultRequest,
    response=Acknowledgement,
    audit=lambda call: AuditSubject(
        action=AuditAction.INJECT_FAULT,
        target=call.path_param("id"),
        detail=call.parse_body(FaultRequest).fault,
    ),
)
def inject_fault(call: ApiCall) -> Acknowledgement:
    commands.request_fault(
        call.context,
        SliceId(call.path_param("id")),
        call.parse_body(FaultRequest),
        call.components.deps.faults,
    )
    call.notify()
    return Acknowledgement()


@router.route(
    "POST",
    "/slices/{id}/errands",
    role=Role.MEMBER,  # and the owner of the job on it, or an admin
    summary="Run a command or a diagnosis on hosts of a slice, through their agents",
    body=HostCommandRequest,
    response=Acknowledgement,
    audit=_audit_host_command,
)
def send_host_command(call: ApiCall) -> Acknowledgement:
    request, slice_id = call.parse_body(HostCommandRequest), SliceId(call.path_param("id"))
    if not 1 <= len(request.id) <= 64 or not request.id.isalnum():
        raise BadInput("id: must be 1 to 64 letters and digits")
    if request.kind is HostCommandKind.COMMAND and not request.command:
        raise BadInput("command: missing; give the command to run")
    if not timedelta(0) < request.timeout <= MAX_TIMEOUT:
        raise BadInput("timeout: must be more than 0 s and at most 1h; run longer work in a job")
    profile = request.kind is HostCommandKind.PROFILE
    if profile and not timedelta(0) < request.duration <= MAX_PROFILE:
        raise BadInput("duration: of a profile must be more than 0 s and at most 1m")
    if len(request.command) > MAX_ARGUMENTS:
        raise BadInput(f"command: has more than {MAX_ARGUMENTS} arguments")
    tpu_slice = call.store.slice(slice_id)
    if tpu_slice is None or tpu_slice.state is SliceState.GONE:
        raise NotFound(f"no slice named {slice_id!r}; list slices with `tpu inventory slices`")
    job_id = commands.require_slice_access(call.context, tpu_slice)
    simulated = tpu_slice.provider in SIMULATED_PROVIDERS
    if simulated and request.kind is HostCommandKind.COMMAND and not call.user.is_admin:
        # Agents of simulated slices run as the server's user, outside the isolation of jobs.
        raise Forbidden("commands on a simulated slice run as the server: requires the admin role")
    count = topology.find(tpu_slice.accelerator).hosts
    if request.host is not None and not 0 <= request.host < count:
        raise BadInput(f"host: slice {slice_id} has hosts 0 to {count - 1}, not {request.host}")
    indexes = range(count) if request.host is None else (request.host,)
    hosts = tuple(host_id(slice_id, index) for index in indexes)
    call.components.host_commands.send(request, slice_id, hosts, call.now, job_id)
    return Acknowledgement()


@router.route(
    "GET",
    "/slices/{id}/errands/{errand}",
    role=Role.MEMBER,  # and the owner of the job on the slice, or an admin
    summary="Get the results of a host command",
    response=HostCommandReport,
)
def get_host_command(call: ApiCall) -> HostCommandReport:
    slice_id = SliceId(call.path_param("id"))
    tpu_slice = call.store.slice(slice_id)
    if tpu_slice is None:
        raise NotFound(f"no slice named {slice_id!r}; list slices with `tpu inventory slices`")
    commands.require_slice_access(call.context, tpu_slice)
    return call.components.host_commands.report(
        call.path_param("errand"), call.path_param("id"), call.now
    )


@router.route(
    "GET",
    "/slices/{id}/errands/{errand}/file",
    role=Role.MEMBER,  # and the owner of the job on the slice, or an admin
    summary="Download the file that a host sent with the result of a host command",
    params=(Param("host", "index of the host in the slice", number=True),),
    response=bytes,
    media_type=MediaType.BYTES,
)
def get_host_command_file(call: ApiCall) -> Response:
    slice_id = SliceId(call.path_param("id"))
    tpu_slice = call.store.slice(slice_id)
    if tpu_slice is None:
        raise NotFound(f"no slice named {slice_id!r}; list slices with `tpu inventory slices`")
    commands.require_slice_access(call.context, tpu_slice)
    host = host_id(slice_id, call.query_int("host", 0) or 0)
    parts = call.components.host_commands.read_file(call.path_param("errand"), slice_id, host)
    return StreamingResponse(parts, media_type=MediaType.BYTES.value)
