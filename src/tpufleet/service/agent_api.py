"""The routes of agents. Each proves that it belongs to the slice it speaks for."""

from __future__ import annotations

from dataclasses import replace

from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, Response

from tpufleet.errors import BadInput, Conflict, Forbidden, NotFound, Unauthorized
from tpufleet.model.attempts import Attempt, AttemptId
from tpufleet.model.encoding import to_json
from tpufleet.model.errands import ErrandResult
from tpufleet.model.hosts import HostId
from tpufleet.model.slices import SliceId, SliceState
from tpufleet.model.views import Done, LogSize
from tpufleet.model.wire import Beat, BeatReply, Entered, Entry
from tpufleet.service import auth, beats, names, results
from tpufleet.service.logs import Gap
from tpufleet.service.routes import SLICE, Call, Kind, Param, Route

LARGEST_CHUNK = 4 * 1024 * 1024
LEAST_NONCE, MOST_NONCE = 16, 128


async def beat(call: Call) -> BeatReply:
    """Runs in the event loop on purpose: it is the commonest call, and reads single rows only."""
    try:
        told = call.json(Beat)
    except BadInput as error:
        # Who sent it is in the body, so a body that cannot be read has no sender.
        raise Unauthorized(f"the token cannot be checked: {error}") from error
    slice_id = _proved_slice(call, told.host_id)
    reply = await call.parts.beats.take(told, slice_id, call.now)
    errands = call.parts.errands.waiting_for(told.host_id)
    return replace(reply, errands=errands) if errands else reply


def enter(call: Call) -> Entered:
    """The token of the slice, for the first agent of a host that asks. Whoever reads the word that
    the agent came with gets nothing for it afterwards."""
    try:
        told = call.json(Entry)
        slice_id = SliceId(names.host_parts(told.host_id)[0])
    except BadInput as error:
        raise Unauthorized(f"the token cannot be checked: {error}") from error
    secret = call.parts.deps.secret
    if not auth.is_entry_token(call.token, secret, slice_id):
        raise Unauthorized(f"this is not the word of slice {slice_id}")
    tpu_slice = call.store.slice(slice_id)
    if tpu_slice is None or tpu_slice.state is SliceState.GONE:
        raise Unauthorized(f"there is no slice {slice_id}")
    beats.must_exist(told.host_id, tpu_slice)
    if not LEAST_NONCE <= len(told.nonce) <= MOST_NONCE:
        raise BadInput(f"nonce: {LEAST_NONCE} to {MOST_NONCE} characters are needed")
    digest = auth.hash_of(told.nonce)
    if call.store.enter(told.host_id, digest) != digest:
        raise Forbidden(f"another agent speaks for host {told.host_id} already")
    return Entered(token=auth.slice_token(secret, slice_id))


def answer_errand(call: Call) -> Done:
    try:
        result = call.json(ErrandResult)
    except BadInput as error:
        raise Unauthorized(f"the token cannot be checked: {error}") from error
    _proved_slice(call, result.host_id)
    call.parts.errands.answer(call.path("errand"), result, call.now)
    return Done()


async def append_log(call: Call) -> object:
    host = HostId(call.text("host") or "")
    slice_id = _proved_slice(call, host)
    await call.read_body()
    return await run_in_threadpool(_append_log, call, host, slice_id)


def _append_log(call: Call, host: HostId, slice_id: SliceId) -> object:
    attempt_id = _attempt(call, slice_id).id
    offset = call.number("offset", None)
    if offset is None:
        raise BadInput("offset: missing; say where in the log these bytes begin")
    try:
        return LogSize(size=call.parts.logs.append(attempt_id, host, offset, call.body))
    except Gap as gap:
        words = {"kind": "Conflict", "message": str(gap)}
        content = to_json({"size": gap.size, "error": words})
        return Response(content, status_code=409, media_type="application/json")


async def put_result(call: Call) -> Done:
    slice_id = _proved_slice(call, HostId(call.text("host") or ""))
    await call.read_body()
    return await run_in_threadpool(_put_result, call, slice_id)


def _put_result(call: Call, slice_id: SliceId) -> Done:
    attempt = _attempt(call, slice_id)
    if not attempt.live:
        raise Conflict(f"attempt {attempt.id} has ended; its job may have another result by now")
    return Done(done=call.parts.results.put(attempt.job_id, call.body))


def _attempt(call: Call, slice_id: SliceId) -> Attempt:
    """The one that is named, once it is known to run on this slice."""
    attempt_id = AttemptId(call.text("attempt") or "")
    names.attempt_parts(attempt_id)
    attempt = call.store.attempt(attempt_id)
    if attempt is None:
        raise NotFound(f"no attempt has the id {attempt_id!r}")
    if slice_id not in attempt.slices:
        raise Forbidden(f"attempt {attempt_id} does not run on slice {slice_id}")
    return attempt


async def fetch_snapshot(call: Call) -> Response:
    path = await run_in_threadpool(_snapshot, call)
    return FileResponse(path, media_type=Kind.ARCHIVE.value)


def _snapshot(call: Call) -> str:
    """Only the code of the job that the slice is held for."""
    digest = call.path("digest")
    for tpu_slice in call.store.slices():
        if auth.is_slice_token(call.token, call.parts.deps.secret, tpu_slice.id):
            job = call.store.job(tpu_slice.job_id) if tpu_slice.job_id else None
            if job is None or job.snapshot != digest:
                raise Forbidden(f"slice {tpu_slice.id} is not held for a job with this snapshot")
            return str(call.parts.shelves.snapshots.must_have(digest))
    raise Unauthorized("this is not the token of a slice that we hold")


def _proved_slice(call: Call, host: HostId) -> SliceId:
    """The slice that the host names, once the token has proved it."""
    try:
        slice_id = SliceId(names.host_parts(host)[0])
    except BadInput as error:
        raise Unauthorized(f"the token cannot be checked: {error}") from error
    if not auth.is_slice_token(call.token, call.parts.deps.secret, slice_id):
        raise Unauthorized(f"this is not the token of slice {slice_id}")
    return slice_id


AGENT_ROUTES = (
    Route(
        verb="POST",
        path="/agent/enter",
        role=SLICE,
        summary="The token of the slice, told once to each host",
        handler=enter,
        body=Entry,
        answer=Entered,
    ),
    Route(
        verb="POST",
        path="/agent/beat",
        role=SLICE,
        summary="A heartbeat in, the assignment out",
        handler=beat,
        body=Beat,
        answer=BeatReply,
    ),
    Route(
        verb="POST",
        path="/agent/logs",
        role=SLICE,
        summary="Append to the log of a host; 409 tells the size when bytes are missing",
        handler=append_log,
        params=(
            Param("attempt", "attempt id"),
            Param("host", "host id"),
            Param("offset", "where these bytes begin", number=True),
        ),
        body=bytes,
        answer=LogSize,
        limit=LARGEST_CHUNK,
        stream_body=True,
    ),
    Route(
        verb="POST",
        path="/agent/errands/{errand}",
        role=SLICE,
        summary="What came of an errand on a host",
        handler=answer_errand,
        body=ErrandResult,
        answer=Done,
        limit=LARGEST_CHUNK,
    ),
    Route(
        verb="POST",
        path="/agent/results",
        role=SLICE,
        summary="The result of a job; `done` is false when it has one already",
        handler=put_result,
        params=(Param("attempt", "attempt id"), Param("host", "host id")),
        body=bytes,
        answer=Done,
        limit=results.LARGEST,
        stream_body=True,
    ),
    Route(
        verb="GET",
        path="/agent/snapshots/{digest}",
        role=SLICE,
        summary="The code of the job that the slice is held for",
        handler=fetch_snapshot,
        kind=Kind.ARCHIVE,
    ),
)
