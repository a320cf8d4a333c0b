"""Routes for agents. Each request must prove that it comes from the slice that it names."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import msgspec
from starlette.responses import FileResponse, Response

from tpufleet.errors import BadInput, Conflict, Forbidden, Unauthorized, not_found
from tpufleet.model import identifiers
from tpufleet.model.api_types import Acknowledgement, LogSize
from tpufleet.model.fleet.agent_protocol import (
    PROTOCOL,
    Heartbeat,
    HeartbeatReply,
    SliceTokenReply,
    SliceTokenRequest,
)
from tpufleet.model.fleet.host_commands import FILE_CHUNK_BYTES, HostCommandResult
from tpufleet.model.fleet.hosts import HostId
from tpufleet.model.fleet.slices import SliceId, SliceState
from tpufleet.model.job.attempts import Attempt, AttemptId
from tpufleet.model.values.encoding import from_json, to_json
from tpufleet.service.files.logs import LogFiles, LogGap
from tpufleet.service.files.results import MAX_RESULT_BYTES, ResultFiles
from tpufleet.service.files.snapshots import SnapshotFiles
from tpufleet.service.hosts.heartbeats import Heartbeats, check_host_exists
from tpufleet.service.hosts.host_commands import HostCommandQueue
from tpufleet.service.lookups import require_slice
from tpufleet.service.transport import auth
from tpufleet.service.transport.routing import (
    SLICE_TOKEN,
    ApiCall,
    MediaType,
    Param,
    Router,
    ServerSecret,
)

MAX_CHUNK_BYTES = 4 * 1024 * 1024
OFFSET = "position of the first byte in the file"
LATE_OUTPUT = timedelta(minutes=10)  # after the end of an attempt: of a host that was cut off
NONCE_LENGTHS = (16, 128)

T = TypeVar("T")
router = Router()


def _verify_host(call: ApiCall, secret: ServerSecret) -> None:
    """The query names the host, so that no body of a stranger is read."""
    _authenticated_slice(call, _host(call), secret)


def _host(call: ApiCall) -> HostId:
    return HostId(call.query_text("host") or "")


@router.post("/agent/register", SLICE_TOKEN, body=SliceTokenRequest)
def register_host(call: ApiCall, secret: ServerSecret) -> SliceTokenReply:
    """Exchange the bootstrap token for the slice token, once for each host.

    The first agent of a host gets the slice token. A bootstrap token that is read later, such as
    from instance metadata, is worth nothing."""
    request = _signed_body(call, SliceTokenRequest)
    slice_id = _slice_of(request.host_id)
    valid = auth.equal(auth.bootstrap_token(secret, slice_id), call.token)
    tpu_slice = call.store.slice(slice_id) if valid else None
    if tpu_slice is None or tpu_slice.state is SliceState.GONE:
        raise _invalid_token(slice_id)
    check_host_exists(request.host_id, tpu_slice)
    identifiers.check_range("nonce: length", len(request.nonce), *NONCE_LENGTHS)
    digest = auth.token_hash(request.nonce)
    if call.store.register_agent(request.host_id, digest) != digest:
        raise Forbidden(f"host {request.host_id} is already bound to another agent")
    return SliceTokenReply(token=auth.slice_token(secret, slice_id))


@router.post("/agent/heartbeat", SLICE_TOKEN, body=Heartbeat)
async def heartbeat(
    call: ApiCall, heartbeats: Heartbeats, commands: HostCommandQueue, secret: ServerSecret
) -> HeartbeatReply:
    """Report the state of a host and get its assignment.

    In the event loop, because it is the most frequent call; `Heartbeats` reads the store in a
    worker thread, for many calls at a time."""
    try:
        report = from_json(call.body, Heartbeat)
    except BadInput as error:
        sender = _signed_body(call, _Sender)
        _authenticated_slice(call, sender.host_id, secret)
        heartbeats.record_unreadable(sender.host_id, call.now)
        raise BadInput(
            f"unreadable heartbeat of {sender.host_id} (agent protocol {sender.protocol}, server "
            f"protocol {PROTOCOL}): {error}; upgrade the older of the two"
        ) from error
    slice_id = _authenticated_slice(call, report.host_id, secret)
    reply = await heartbeats.receive(report, slice_id, call.now)
    pending = commands.pending_for(report.host_id)
    return replace(reply, host_commands=pending) if pending else reply


@router.post(
    "/agent/logs",
    SLICE_TOKEN,
    params=(
        Param("attempt", "attempt id"),
        Param("host", "host id"),
        Param("offset", OFFSET, number=True),
    ),
    body=bytes,
    response=LogSize,
    limit=MAX_CHUNK_BYTES,
    verify=_verify_host,
)
def append_log(call: ApiCall, logs: LogFiles) -> object:
    """Append to the log of a host; 409 gives the size when bytes are missing."""
    attempt, host = _attempt(call), _host(call)
    _require_open_log(call, attempt)
    offset = call.query_int("offset", None)
    if offset is None:
        raise BadInput(f"offset: missing; give the {OFFSET}")
    try:
        return LogSize(size=logs.append(attempt.id, host, offset, call.body))
    except LogGap as gap:
        error = {"kind": "Conflict", "message": str(gap)}
        content = to_json({"size": gap.size, "error": error})
        return Response(content, status_code=409, media_type=MediaType.JSON.value)


@router.post(
    "/agent/commands/{command}", SLICE_TOKEN, body=HostCommandResult, limit=MAX_CHUNK_BYTES
)
def put_host_command_result(
    call: ApiCall, commands: HostCommandQueue, secret: ServerSecret
) -> None:
    """Report the result of a host command."""
    result = _signed_body(call, HostCommandResult)
    _authenticated_slice(call, result.host_id, secret)
    commands.record_result(call.path_param("command"), result, call.now)


@router.post(
    "/agent/commands/{command}/file",
    SLICE_TOKEN,
    params=(
        Param("host", "host id"),
        Param("offset", OFFSET, number=True),
    ),
    body=bytes,
    limit=FILE_CHUNK_BYTES,
    verify=_verify_host,
)
def put_host_command_file(call: ApiCall, commands: HostCommandQueue) -> None:
    """Upload a part of the file that belongs to the result of a host command."""
    command, offset = call.path_param("command"), call.query_int("offset", 0)
    commands.append_file(command, _host(call), offset, call.body, call.now)


@router.post(
    "/agent/results",
    SLICE_TOKEN,
    params=(Param("attempt", "attempt id"), Param("host", "host id")),
    body=bytes,
    limit=MAX_RESULT_BYTES,
    verify=_verify_host,
)
def put_result(call: ApiCall, results: ResultFiles) -> Acknowledgement:
    """Upload the result of a job; `done` is false when it already has one."""
    attempt = _attempt(call)
    if not attempt.live:
        raise Conflict(_too_late(attempt))
    return Acknowledgement(done=results.put(attempt.job_id, call.body))


@router.get("/agent/snapshots/{digest}", SLICE_TOKEN, media_type=MediaType.ARCHIVE)
def fetch_snapshot(call: ApiCall, snapshots: SnapshotFiles, secret: ServerSecret) -> Response:
    """Download the code of the job that holds the slice."""
    digest = call.path_param("digest")
    for tpu_slice in call.store.slices():
        if auth.is_slice_token(call.token, secret, tpu_slice.id):
            job = call.store.job(tpu_slice.job_id) if tpu_slice.job_id else None
            if job is None or job.snapshot != digest:
                raise Forbidden(f"slice {tpu_slice.id} is not held by a job with this snapshot")
            path = snapshots.require(digest)
            return FileResponse(path, media_type=MediaType.ARCHIVE.value)
    raise Unauthorized("not the token of a live slice")


def _attempt(call: ApiCall) -> Attempt:
    """The attempt that the query names, which must run on the host that it names."""
    host, slice_id = _host(call), _slice_of(_host(call))
    attempt_id = AttemptId(call.query_text("attempt") or "")
    identifiers.parse_attempt_id(attempt_id)
    attempt = call.store.attempt(attempt_id)
    if attempt is None:
        raise not_found("attempt", attempt_id, "jobs")
    if slice_id not in attempt.slices:
        raise Forbidden(f"attempt {attempt_id} does not run on slice {slice_id}")
    check_host_exists(host, require_slice(call.store, slice_id))
    return attempt


def _require_open_log(call: ApiCall, attempt: Attempt) -> None:
    """Hosts report an exit when they have uploaded the output, so little arrives after an attempt
    has ended, and nothing once the slice serves another job: the log is that of an earlier user."""
    if attempt.live:
        return
    holder = require_slice(call.store, _slice_of(_host(call))).job_id
    late = attempt.ended_at is not None and call.now - attempt.ended_at > LATE_OUTPUT
    if late or holder not in (None, attempt.job_id):
        raise Forbidden(_too_late(attempt))


def _too_late(attempt: Attempt) -> str:
    return f"attempt {attempt.id} has ended; nothing more of it is accepted"


class _Sender(msgspec.Struct):
    """The part of a heartbeat that every protocol has."""

    host_id: HostId
    protocol: int


def _signed_body(call: ApiCall, kind: type[T]) -> T:
    """A body that names its sender. Without a valid one the token cannot be verified."""
    try:
        return call.parse_body(kind)
    except BadInput as error:
        raise Unauthorized(f"cannot verify the token: {error}") from error


def _authenticated_slice(call: ApiCall, host: HostId, secret: ServerSecret) -> SliceId:
    """The slice of this host, once the token has been verified for it."""
    slice_id = _slice_of(host)
    if not auth.is_slice_token(call.token, secret, slice_id):
        raise _invalid_token(slice_id)
    return slice_id


def _invalid_token(slice_id: SliceId) -> Unauthorized:
    return Unauthorized(f"invalid token for slice {slice_id}, or the slice is gone")


def _slice_of(host: HostId) -> SliceId:
    try:
        return SliceId(identifiers.parse_host_id(host)[0])
    except BadInput as error:
        raise Unauthorized(f"cannot verify the token: {error}") from error
