"""Events: list them, or stream them as they happen."""

from __future__ import annotations

from dataclasses import replace

from starlette.responses import Response

from tpufleet.errors import BadInput
from tpufleet.model.api_types import EventPage
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import JobId
from tpufleet.model.people.users import Role, TokenScope
from tpufleet.service.jobs import queries
from tpufleet.service.transport import event_streams
from tpufleet.service.transport.event_streams import EventHub
from tpufleet.service.transport.routing import ApiCall, MediaType, Param, Router
from tpufleet.stores.base import EventQuery

MAX_EVENTS_PER_PAGE = 10_000
LIMIT = Param("limit", "maximum number of rows", number=True)
_AFTER = Param("after", "sequence number of the last known event", number=True)
PAGE_PARAMS = (_AFTER, LIMIT, Param("newest", "any value: the newest events, not the oldest"))

router = Router()


@router.get(
    "/events",
    Role.VIEWER,
    params=(
        *PAGE_PARAMS,
        Param("user", "only what this user caused"),
        *(Param(name, f"only of this {name}") for name in ("slice", "pool", "reservation")),
    ),
)
def list_events(call: ApiCall) -> EventPage:
    """List events, oldest first."""
    slice_id = call.query_text("slice")
    query = replace(
        event_query(call, None),
        slice_id=SliceId(slice_id) if slice_id is not None else None,
        pool=call.query_text("pool"),
        by=call.query_text("user"),
        reservation=call.query_text("reservation"),
    )
    return queries.event_page(call.store, query)


@router.get(
    "/stream",
    Role.VIEWER,
    response=str,
    params=(_AFTER, Param("job", "only events of this job")),
    media_type=MediaType.EVENTS,
)
async def stream_events(call: ApiCall, hub: EventHub) -> Response:
    """Stream events and changed jobs; resumes from Last-Event-ID."""
    last_id = call.request.headers.get("last-event-id") or call.query_text("after")
    ref = call.query_text("job")
    if ref is None and call.user.scope is TokenScope.SUBMIT:
        raise BadInput("job: required with a limited token")
    job = await call.run_in_thread(call.find_job, ref) if ref else None
    after = event_streams.parse_last_event_id(last_id)
    chunks = event_streams.stream_changes(
        hub, call.store, after, job.id if job is not None else None
    )
    return event_streams.EventStream(hub, chunks, call.check_caller, call.user.limits_key)


def event_query(call: ApiCall, job_id: JobId | None) -> EventQuery:
    return EventQuery(
        after=call.query_int("after", 0),
        job_id=job_id,
        limit=call.query_int("limit", 500, least=1, most=MAX_EVENTS_PER_PAGE),
        newest=call.query_text("newest") is not None,
    )
