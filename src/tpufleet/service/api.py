"""The routes of people about jobs, slices and pools. `table` says who may call which."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, Response, StreamingResponse

import tpufleet
from tpufleet.errors import BadInput, NotFound
from tpufleet.model.encoding import from_plain
from tpufleet.model.jobs import ENDED, Job, JobId, JobState, Kinship
from tpufleet.model.pools import Pool
from tpufleet.model.slices import SliceId
from tpufleet.model.views import (
    Again,
    CleanOrder,
    CleanReport,
    Done,
    EventPage,
    FaultOrder,
    JobDetail,
    JobPage,
    JobRow,
    Me,
    PoolPage,
    SlicePage,
    Why,
)
from tpufleet.service import cleaning, commands, log_streams, names, queries, streams, submits, why
from tpufleet.service.leftovers import Leftovers
from tpufleet.service.routes import Call, Kind, TooLarge
from tpufleet.stores.base import EventQuery, JobQuery

MOST_JOBS_A_PAGE = 20_000
MOST_EVENTS_A_PAGE = 10_000


def me(call: Call) -> Me:
    return Me(name=call.user.name, role=call.user.role, version=tpufleet.__version__)


def openapi(call: Call) -> Response:
    return Response(call.parts.openapi, media_type=Kind.JSON.value)


# Jobs.


def submit(call: Call) -> JobPage:
    jobs = submits.submit(call.act, call.parts.shelves, call.body)
    _news(call)
    return JobPage(jobs=tuple(queries.job_row(job, None, None) for job in jobs))


def list_jobs(call: Call) -> JobPage:
    before = call.text("before")
    query = JobQuery(
        owner=call.text("owner"),
        states=_states(call.text("state")),
        pool=call.text("pool"),
        tag=call.text("tag"),
        name=call.text("name"),
        parent=_job_id(call.text("parent")),
        cleaned=call.text("cleaned") is not None,
        limit=call.number("limit", 100, least=1, most=MOST_JOBS_A_PAGE),
        before=_job_id(before),
    )
    return queries.page(call.store, query, call.parts.ended_rows)


def show_job(call: Call) -> JobDetail:
    return queries.detail(call.store, _job(call), call.now)


def why_job(call: Call) -> Why:
    return why.why(call.store, _job(call), call.now)


def cancel_job(call: Call) -> JobRow:
    job = _job(call)
    commands.cancel(call.act, job)
    _news(call)
    return queries.job_rows(call.store, [job])[0]


def resume_job(call: Call) -> JobRow:
    return _again(call, Kinship.RESUME)


def rerun_job(call: Call) -> JobRow:
    return _again(call, Kinship.RERUN)


def job_events(call: Call) -> EventPage:
    return queries.events(call.store, _event_query(call, _job(call).id))


def list_events(call: Call) -> EventPage:
    return queries.events(call.store, _event_query(call, None))


# Streams and logs.


async def stream(call: Call) -> Response:
    told = call.request.headers.get("last-event-id") or call.text("after")
    ref = call.text("job")
    job = await run_in_threadpool(queries.find_job, call.store, ref) if ref else None
    after = streams.last_event_id(told)
    hub = call.parts.hub
    chunks = streams.changes(hub, call.store, after, job.id if job is not None else None)
    return streams.EventStream(hub, chunks)


def job_logs(call: Call) -> Response:
    text = log_streams.text(call.store, call.parts.logs, _kept_job(call), _wish(call))
    return StreamingResponse(_in_threads(text), media_type=Kind.TEXT.value)


async def stream_logs(call: Call) -> Response:
    job = await run_in_threadpool(_kept_job, call)
    wish = _wish(call)
    wish.must_fit(job)
    follower = log_streams.Follower(
        call.store,
        call.parts.logs,
        call.parts.deps.clock,
        job.id,
        wish,
        log_streams.place_of(call.request.headers.get("last-event-id") or call.text("from")),
    )
    hub = call.parts.hub
    return streams.EventStream(hub, log_streams.lines(hub, follower))


def job_result(call: Call) -> Response:
    path = call.parts.results.must_have(_kept_job(call).id)
    return FileResponse(path, media_type=Kind.BYTES.value)


def drop_files(call: Call) -> Done:
    job = _job(call)
    commands.may_drop_files(call.act, job)
    call.parts.results.drop(job.id)
    used = {other.snapshot for other in call.store.live().jobs}
    if job.snapshot is not None and job.snapshot not in used:
        call.parts.shelves.snapshots.drop(job.snapshot)
    return Done()


def clean_jobs(call: Call) -> CleanReport:
    deps = call.parts.deps
    leftovers = Leftovers(
        state=deps.state, snapshots=call.parts.shelves.snapshots, archive=deps.archive
    )
    return cleaning.clean(call.act, leftovers, call.json(CleanOrder))


# Slices and pools.


def list_slices(call: Call) -> SlicePage:
    ref = call.text("job")
    slices = call.store.slices(
        live_only=call.text("all") is None,
        pool=call.text("pool"),
        job_id=queries.find_job(call.store, ref).id if ref else None,
    )
    return SlicePage(slices=tuple(queries.slice_rows(call.store, slices, call.now)))


def fault_slice(call: Call) -> Done:
    order = call.json(FaultOrder)
    commands.order_fault(call.act, SliceId(call.path("id")), order, call.parts.deps.faults)
    _news(call)
    return Done()


def list_pools(call: Call) -> PoolPage:
    return PoolPage(pools=tuple(call.store.pools()))


def show_pool(call: Call) -> Pool:
    name = call.path("name")
    pool = call.store.pool(name)
    if pool is None:
        known = [each.name for each in call.store.pools()]
        raise NotFound(f"no pool is called {name!r}{names.nearest(name, known)}")
    return pool


def put_pool(call: Call) -> Pool:
    name, told = call.path("name"), call.json(dict[str, Any])
    if told.get("name", name) != name:
        raise BadInput(f"name: the body says {told['name']!r}, the address says {name!r}")
    pool = from_plain({**told, "name": name}, Pool)
    pool = commands.put_pool(call.act, pool, call.parts.deps.providers)
    _news(call)
    return pool


def drop_pool(call: Call) -> Done:
    commands.drop_pool(call.act, call.path("name"))
    _news(call)
    return Done()


# Snapshots.


def has_snapshot(call: Call) -> Response:
    found = call.parts.shelves.snapshots.has(call.path("digest"))
    return Response(status_code=200 if found else 404)


async def put_snapshot(call: Call) -> Done:
    snapshots = call.parts.shelves.snapshots
    told = call.request.headers.get("content-length", "0")
    if told.isdigit() and int(told[:20]) > snapshots.limit:
        raise TooLarge(snapshots.too_large())
    await snapshots.put(call.path("digest"), call.chunks())
    return Done()


def _kept_job(call: Call) -> Job:
    job = _job(call)
    cleaning.refuse_cleaned(call.store, job, "with all that it left")
    return job


def _job(call: Call) -> Job:
    return queries.find_job(call.store, call.path("ref"))


def _again(call: Call, kinship: Kinship) -> JobRow:
    job = submits.again(call.act, call.parts.shelves, _job(call), call.json(Again), kinship)
    _news(call)
    return queries.job_row(job, None, None)


def _news(call: Call) -> None:
    """The controller has a message; the streams have an event."""
    call.parts.deps.wake()
    call.parts.hub.ring()


def _job_id(text: str | None) -> JobId | None:
    return names.job_id(text) if text is not None else None


def _states(text: str | None) -> frozenset[JobState]:
    groups = {"live": frozenset(JobState) - ENDED, "ended": ENDED}
    known = {state.value: frozenset({state}) for state in JobState} | groups
    found: frozenset[JobState] = frozenset()
    for word in (text or "").split(","):
        if word and word not in known:
            raise BadInput(f"state: none is called {word[:40]!r}{names.nearest(word, known)}")
        found |= known.get(word, frozenset())
    return found


def _event_query(call: Call, job_id: JobId | None) -> EventQuery:
    return EventQuery(
        after=call.number("after", 0),
        job_id=job_id,
        limit=call.number("limit", 500, least=1, most=MOST_EVENTS_A_PAGE),
        newest=call.text("newest") is not None,
    )


def _wish(call: Call) -> log_streams.Wish:
    return log_streams.Wish(
        host=call.text("host"),
        attempt=call.number("attempt", None, most=999_999),
        tail=call.number("tail", None, most=1_000_000_000),
    )


async def _in_threads(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """A file at a time from a worker thread: a slow disk holds up nobody else."""
    while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
        yield chunk
