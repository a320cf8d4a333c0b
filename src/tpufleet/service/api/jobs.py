"""The routes of people about jobs, slices and pools. `table` says who may call which."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, Response, StreamingResponse

import tpufleet
from tpufleet.errors import BadInput, NotFound
from tpufleet.model.api_types import (
    Acknowledgement,
    CleanReport,
    CleanRequest,
    CurrentUser,
    EventPage,
    FaultRequest,
    JobDetail,
    JobExplanation,
    JobPage,
    JobRow,
    PoolPage,
    ResubmitRequest,
    SlicePage,
)
from tpufleet.model.encoding import from_builtins
from tpufleet.model.jobs import ENDED_STATES, Job, JobId, JobState, ParentRelation
from tpufleet.model.pools import Pool
from tpufleet.model.slices import SliceId
from tpufleet.service import (
    cleaning,
    commands,
    event_streams,
    explain,
    identifiers,
    log_streams,
    queries,
    submission,
)
from tpufleet.service.files.job_files import JobFiles
from tpufleet.service.routing import ApiCall, MediaType, TooLarge
from tpufleet.stores.base import EventQuery, JobQuery

MAX_JOBS_PER_PAGE = 20_000
MAX_EVENTS_PER_PAGE = 10_000


def get_me(call: ApiCall) -> CurrentUser:
    return CurrentUser(name=call.user.name, role=call.user.role, version=tpufleet.__version__)


def get_openapi(call: ApiCall) -> Response:
    return Response(call.components.openapi, media_type=MediaType.JSON.value)


# Jobs.


def submit_jobs(call: ApiCall) -> JobPage:
    jobs = submission.submit(call.context, call.components.storage, call.body)
    _news(call)
    return JobPage(jobs=tuple(queries.job_row(job, None, None) for job in jobs))


def list_jobs(call: ApiCall) -> JobPage:
    before = call.query_text("before")
    query = JobQuery(
        owner=call.query_text("owner"),
        states=_states(call.query_text("state")),
        pool=call.query_text("pool"),
        tag=call.query_text("tag"),
        name=call.query_text("name"),
        parent=_job_id(call.query_text("parent")),
        cleaned=call.query_text("cleaned") is not None,
        limit=call.query_int("limit", 100, least=1, most=MAX_JOBS_PER_PAGE),
        before=_job_id(before),
    )
    return queries.job_page(call.store, query, call.components.ended_job_rows)


def get_job(call: ApiCall) -> JobDetail:
    return queries.job_detail(call.store, _job(call), call.now)


def explain_job(call: ApiCall) -> JobExplanation:
    return explain.explain(call.store, _job(call), call.now)


def cancel_job(call: ApiCall) -> JobRow:
    job = _job(call)
    commands.cancel(call.context, job)
    _news(call)
    return queries.job_rows(call.store, [job])[0]


def resume_job(call: ApiCall) -> JobRow:
    return _again(call, ParentRelation.RESUME)


def rerun_job(call: ApiCall) -> JobRow:
    return _again(call, ParentRelation.RERUN)


def list_job_events(call: ApiCall) -> EventPage:
    return queries.event_page(call.store, _event_query(call, _job(call).id))


def list_events(call: ApiCall) -> EventPage:
    return queries.event_page(call.store, _event_query(call, None))


# Streams and logs.


async def stream_events(call: ApiCall) -> Response:
    told = call.request.headers.get("last-event-id") or call.query_text("after")
    ref = call.query_text("job")
    job = await run_in_threadpool(queries.find_job, call.store, ref) if ref else None
    after = event_streams.parse_last_event_id(told)
    hub = call.components.hub
    chunks = event_streams.stream_changes(
        hub, call.store, after, job.id if job is not None else None
    )
    return event_streams.EventStream(hub, chunks)


def get_job_logs(call: ApiCall) -> Response:
    text = log_streams.log_text(call.store, call.components.logs, _kept_job(call), _wish(call))
    return StreamingResponse(_in_threads(text), media_type=MediaType.TEXT.value)


async def stream_logs(call: ApiCall) -> Response:
    job = await run_in_threadpool(_kept_job, call)
    wish = _wish(call)
    wish.validate(job)
    follower = log_streams.LogFollower(
        call.store,
        call.components.logs,
        call.components.deps.clock,
        job.id,
        wish,
        log_streams.parse_position(
            call.request.headers.get("last-event-id") or call.query_text("from")
        ),
    )
    hub = call.components.hub
    return event_streams.EventStream(hub, log_streams.stream_lines(hub, follower))


def get_job_result(call: ApiCall) -> Response:
    path = call.components.results.require(_kept_job(call).id)
    return FileResponse(path, media_type=MediaType.BYTES.value)


def delete_job_files(call: ApiCall) -> Acknowledgement:
    job = _job(call)
    commands.require_files_deletable(call.context, job)
    call.components.results.delete(job.id)
    used = {other.snapshot for other in call.store.live().jobs}
    if job.snapshot is not None and job.snapshot not in used:
        call.components.storage.snapshots.delete(job.snapshot)
    return Acknowledgement()


def clean_jobs(call: ApiCall) -> CleanReport:
    deps = call.components.deps
    leftovers = JobFiles(
        state=deps.state, snapshots=call.components.storage.snapshots, archive=deps.archive
    )
    return cleaning.clean(call.context, leftovers, call.parse_body(CleanRequest))


# Slices and pools.


def list_slices(call: ApiCall) -> SlicePage:
    ref = call.query_text("job")
    slices = call.store.slices(
        live_only=call.query_text("all") is None,
        pool=call.query_text("pool"),
        job_id=queries.find_job(call.store, ref).id if ref else None,
    )
    return SlicePage(slices=tuple(queries.slice_rows(call.store, slices, call.now)))


def inject_fault(call: ApiCall) -> Acknowledgement:
    order = call.parse_body(FaultRequest)
    commands.request_fault(
        call.context, SliceId(call.path_param("id")), order, call.components.deps.faults
    )
    _news(call)
    return Acknowledgement()


def list_pools(call: ApiCall) -> PoolPage:
    return PoolPage(pools=tuple(call.store.pools()))


def get_pool(call: ApiCall) -> Pool:
    name = call.path_param("name")
    pool = call.store.pool(name)
    if pool is None:
        known = [each.name for each in call.store.pools()]
        raise NotFound(f"no pool is called {name!r}{identifiers.suggestion(name, known)}")
    return pool


def put_pool(call: ApiCall) -> Pool:
    name, told = call.path_param("name"), call.parse_body(dict[str, Any])
    if told.get("name", name) != name:
        raise BadInput(f"name: the body says {told['name']!r}, the address says {name!r}")
    pool = from_builtins({**told, "name": name}, Pool)
    pool = commands.put_pool(call.context, pool, call.components.deps.providers)
    _news(call)
    return pool


def delete_pool(call: ApiCall) -> Acknowledgement:
    commands.delete_pool(call.context, call.path_param("name"))
    _news(call)
    return Acknowledgement()


# Snapshots.


def head_snapshot(call: ApiCall) -> Response:
    found = call.components.storage.snapshots.has(call.path_param("digest"))
    return Response(status_code=200 if found else 404)


async def put_snapshot(call: ApiCall) -> Acknowledgement:
    snapshots = call.components.storage.snapshots
    told = call.request.headers.get("content-length", "0")
    if told.isdigit() and int(told[:20]) > snapshots.limit:
        raise TooLarge(snapshots.too_large_message())
    await snapshots.put(call.path_param("digest"), call.chunks())
    return Acknowledgement()


def _kept_job(call: ApiCall) -> Job:
    job = _job(call)
    cleaning.require_not_cleaned(call.store, job, "with all that it left")
    return job


def _job(call: ApiCall) -> Job:
    return queries.find_job(call.store, call.path_param("ref"))


def _again(call: ApiCall, kinship: ParentRelation) -> JobRow:
    job = submission.resubmit(
        call.context, call.components.storage, _job(call), call.parse_body(ResubmitRequest), kinship
    )
    _news(call)
    return queries.job_row(job, None, None)


def _news(call: ApiCall) -> None:
    """The controller has a message; the streams have an event."""
    call.components.deps.wake()
    call.components.hub.notify()


def _job_id(text: str | None) -> JobId | None:
    return identifiers.parse_job_id(text) if text is not None else None


def _states(text: str | None) -> frozenset[JobState]:
    groups = {"live": frozenset(JobState) - ENDED_STATES, "ended": ENDED_STATES}
    known = {state.value: frozenset({state}) for state in JobState} | groups
    found: frozenset[JobState] = frozenset()
    for word in (text or "").split(","):
        if word and word not in known:
            raise BadInput(
                f"state: none is called {word[:40]!r}{identifiers.suggestion(word, known)}"
            )
        found |= known.get(word, frozenset())
    return found


def _event_query(call: ApiCall, job_id: JobId | None) -> EventQuery:
    return EventQuery(
        after=call.query_int("after", 0),
        job_id=job_id,
        limit=call.query_int("limit", 500, least=1, most=MAX_EVENTS_PER_PAGE),
        newest=call.query_text("newest") is not None,
    )


def _wish(call: ApiCall) -> log_streams.LogSelection:
    return log_streams.LogSelection(
        host=call.query_text("host"),
        attempt=call.query_int("attempt", None, most=999_999),
        tail=call.query_int("tail", None, most=1_000_000_000),
    )


async def _in_threads(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """A file at a time from a worker thread: a slow disk holds up nobody else."""
    while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
        yield chunk
