"""The routes of agents. Each proves that it belongs to the slice it speaks for."""

from __future__ import annotations

from dataclasses import replace

from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, Response

from tpufleet.errors import BadInput, Conflict, Forbidden, NotFound, Unauthorized
from tpufleet.model.agent_protocol import (
    Heartbeat,
    HeartbeatReply,
    SliceTokenReply,
    SliceTokenRequest,
)
from tpufleet.model.api_types import Acknowledgement, LogSize
from tpufleet.model.attempts import Attempt, AttemptId
from tpufleet.model.encoding import to_json
from tpufleet.model.host_commands import HostCommandResult
from tpufleet.model.hosts import HostId
from tpufleet.model.slices import SliceId, SliceState
from tpufleet.service import auth, heartbeats, identifiers
from tpufleet.service.files import results
from tpufleet.service.files.logs import LogGap
from tpufleet.service.routing import SLICE_TOKEN, ApiCall, MediaType, Param, Route

MAX_CHUNK_BYTES = 4 * 1024 * 1024
MIN_NONCE_LENGTH, MAX_NONCE_LENGTH = 16, 128


async def heartbeat(call: ApiCall) -> HeartbeatReply:
    """Runs in the event loop on purpose: it is the commonest call, and reads single rows only."""
    try:
        told = call.parse_body(Heartbeat)
    except BadInput as error:
        # Who sent it is in the body, so a body that cannot be read has no sender.
        raise Unauthorized(f"the token cannot be checked: {error}") from error
    slice_id = _proved_slice(call, told.host_id)
    reply = await call.components.heartbeats.receive(told, slice_id, call.now)
    errands = call.components.host_commands.pending_for(told.host_id)
    return replace(reply, errands=errands) if errands else reply


def exchange_bootstrap_token(call: ApiCall) -> SliceTokenReply:
    """The token of the slice, for the first agent of a host that asks. Whoever reads the word that
    the agent came with gets nothing for it afterwards."""
    try:
        told = call.parse_body(SliceTokenRequest)
        slice_id = SliceId(identifiers.parse_host_id(told.host_id)[0])
    except BadInput as error:
        raise Unauthorized(f"the token cannot be checked: {error}") from error
    secret = call.components.deps.secret
    if not auth.is_bootstrap_token(call.token, secret, slice_id):
        raise Unauthorized(f"this is not the word of slice {slice_id}")
    tpu_slice = call.store.slice(slice_id)
    if tpu_slice is None or tpu_slice.state is SliceState.GONE:
        raise Unauthorized(f"there is no slice {slice_id}")
    heartbeats.check_host_exists(told.host_id, tpu_slice)
    if not MIN_NONCE_LENGTH <= len(told.nonce) <= MAX_NONCE_LENGTH:
        raise BadInput(f"nonce: {MIN_NONCE_LENGTH} to {MAX_NONCE_LENGTH} characters are needed")
    digest = auth.token_hash(told.nonce)
    if call.store.bind_agent(told.host_id, digest) != digest:
        raise Forbidden(f"another agent speaks for host {told.host_id} already")
    return SliceTokenReply(token=auth.slice_token(secret, slice_id))


def put_host_command_result(call: ApiCall) -> Acknowledgement:
    try:
        result = call.parse_body(HostCommandResult)
    except BadInput as error:
        raise Unauthorized(f"the token cannot be checked: {error}") from error
    _proved_slice(call, result.host_id)
    call.components.host_commands.record_result(call.path_param("errand"), result, call.now)
    return Acknowledgement()


async def append_log(call: ApiCall) -> object:
    host = HostId(call.query_text("host") or "")
    slice_id = _proved_slice(call, host)
    await call.read_body()
    return await run_in_threadpool(_append_log, call, host, slice_id)


def _append_log(call: ApiCall, host: HostId, slice_id: SliceId) -> object:
    attempt_id = _attempt(call, slice_id).id
    offset = call.query_int("offset", None)
    if offset is None:
        raise BadInput("offset: missing; say where in the log these bytes begin")
    try:
        return LogSize(size=call.components.logs.append(attempt_id, host, offset, call.body))
    except LogGap as gap:
        words = {"kind": "Conflict", "message": str(gap)}
        content = to_json({"size": gap.size, "error": words})
        return Response(content, status_code=409, media_type="application/json")


async def put_result(call: ApiCall) -> Acknowledgement:
    slice_id = _proved_slice(call, HostId(call.query_text("host") or ""))
    await call.read_body()
    return await run_in_threadpool(_put_result, call, slice_id)


def _put_result(call: ApiCall, slice_id: SliceId) -> Acknowledgement:
    attempt = _attempt(call, slice_id)
    if not attempt.live:
        raise Conflict(f"attempt {attempt.id} has ended; its job may have another result by now")
    return Acknowledgement(done=call.components.results.put(attempt.job_id, call.body))


def _attempt(call: ApiCall, slice_id: SliceId) -> Attempt:
    """The one that is named, once it is known to run on this slice."""
    attempt_id = AttemptId(call.query_text("attempt") or "")
    identifiers.parse_attempt_id(attempt_id)
    attempt = call.store.attempt(attempt_id)
    if attempt is None:
        raise NotFound(f"no attempt has the id {attempt_id!r}")
    if slice_id not in attempt.slices:
        raise Forbidden(f"attempt {attempt_id} does not run on slice {slice_id}")
    return attempt


async def fetch_snapshot(call: ApiCall) -> Response:
    path = await run_in_threadpool(_snapshot, call)
    return FileResponse(path, media_type=MediaType.ARCHIVE.value)


def _snapshot(call: ApiCall) -> str:
    """Only the code of the job that the slice is held for."""
    digest = call.path_param("digest")
    for tpu_slice in call.store.slices():
        if auth.is_slice_token(call.token, call.components.deps.secret, tpu_slice.id):
            job = call.store.job(tpu_slice.job_id) if tpu_slice.job_id else None
            if job is None or job.snapshot != digest:
                raise Forbidden(f"slice {tpu_slice.id} is not held for a job with this snapshot")
            return str(call.components.storage.snapshots.require(digest))
    raise Unauthorized("this is not the token of a slice that we hold")


def _proved_slice(call: ApiCall, host: HostId) -> SliceId:
    """The slice that the host names, once the token has proved it."""
    try:
        slice_id = SliceId(identifiers.parse_host_id(host)[0])
    except BadInput as error:
        raise Unauthorized(f"the token cannot be checked: {error}") from error
    if not auth.is_slice_token(call.token, call.components.deps.secret, slice_id):
        raise Unauthorized(f"this is not the token of slice {slice_id}")
    return slice_id


AGENT_ROUTES = (
    Route(
        method="POST",
        path="/agent/enter",
        role=SLICE_TOKEN,
        summary="The token of the slice, told once to each host",
        handler=exchange_bootstrap_token,
        body=SliceTokenRequest,
        response=SliceTokenReply,
    ),
    Route(
        method="POST",
        path="/agent/beat",
        role=SLICE_TOKEN,
        summary="A heartbeat in, the assignment out",
        handler=heartbeat,
        body=Heartbeat,
        response=HeartbeatReply,
    ),
    Route(
        method="POST",
        path="/agent/logs",
        role=SLICE_TOKEN,
        summary="Append to the log of a host; 409 tells the size when bytes are missing",
        handler=append_log,
        params=(
            Param("attempt", "attempt id"),
            Param("host", "host id"),
            Param("offset", "where these bytes begin", number=True),
        ),
        body=bytes,
        response=LogSize,
        limit=MAX_CHUNK_BYTES,
        stream_body=True,
    ),
    Route(
        method="POST",
        path="/agent/errands/{errand}",
        role=SLICE_TOKEN,
        summary="What came of an errand on a host",
        handler=put_host_command_result,
        body=HostCommandResult,
        response=Acknowledgement,
        limit=MAX_CHUNK_BYTES,
    ),
    Route(
        method="POST",
        path="/agent/results",
        role=SLICE_TOKEN,
        summary="The result of a job; `done` is false when it has one already",
        handler=put_result,
        params=(Param("attempt", "attempt id"), Param("host", "host id")),
        body=bytes,
        response=Acknowledgement,
        limit=results.MAX_RESULT_BYTES,
        stream_body=True,
    ),
    Route(
        method="GET",
        path="/agent/snapshots/{digest}",
        role=SLICE_TOKEN,
        summary="The code of the job that the slice is held for",
        handler=fetch_snapshot,
        media_type=MediaType.ARCHIVE,
    ),
)
