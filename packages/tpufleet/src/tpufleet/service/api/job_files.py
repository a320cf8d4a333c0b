"""What jobs leave behind: logs, results, files; and archiving and purging jobs that have ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

from starlette.responses import FileResponse, Response, StreamingResponse

from tpufleet.errors import BadInput
from tpufleet.model.api_types import (
    Acknowledgement,
    ArchiveRequest,
    EndedJobSelection,
    JobPage,
    NewLink,
    PurgeReport,
    PurgeRequest,
    SignedLink,
    UnarchiveRequest,
)
from tpufleet.model.job.jobs import Job
from tpufleet.model.people.audit import AuditAction
from tpufleet.model.people.users import Role
from tpufleet.service.api.jobs import find_job
from tpufleet.service.files.job_files import JobFiles
from tpufleet.service.files.logs import LogFiles
from tpufleet.service.files.results import ResultFiles
from tpufleet.service.files.snapshots import SnapshotFiles
from tpufleet.service.jobs import commands, log_streams
from tpufleet.service.operations import retention
from tpufleet.service.people.audit import AuditSubject
from tpufleet.service.transport import event_streams, signed_links
from tpufleet.service.transport.event_streams import EventHub
from tpufleet.service.transport.routing import (
    API_PREFIX,
    ApiCall,
    MediaType,
    Param,
    Router,
    ServerSecret,
)

_LOG_PARAMS = (
    Param("host", "rank of the host in the gang; default: all hosts", number=True),
    Param("attempt", "attempt number; default: the newest", number=True),
    Param("tail", "only the last lines of each host", number=True),
)
_LINKED_RESOURCES = ("logs", "result")
# Jobs write these files: a browser that opens a link must not take them for a page.
_NO_SNIFFING = {"X-Content-Type-Options": "nosniff"}
# More are counted, and longer ones cut: entries of the audit log are kept forever.
_AUDITED_JOBS, _AUDITED_NAME = 5, 64

router = Router()


@router.route(
    "GET",
    "/jobs/{ref}/logs",
    role=Role.VIEWER,
    response=str,
    params=_LOG_PARAMS,
    media_type=MediaType.TEXT,
)
def get_job_logs(call: ApiCall, logs: LogFiles) -> Response:
    """Read the logs of a job, each line prefixed with the rank of its host."""
    text = log_streams.log_text(call.store, logs, _job_with_files(call), _selection(call))
    return StreamingResponse(
        _read_in_threads(text), media_type=MediaType.TEXT.value, headers=_NO_SNIFFING
    )


@router.route(
    "GET",
    "/jobs/{ref}/logs/stream",
    role=Role.VIEWER,
    response=str,
    params=(*_LOG_PARAMS, Param("from", "instead of the header Last-Event-ID")),
    media_type=MediaType.EVENTS,
)
async def stream_logs(call: ApiCall, logs: LogFiles, hub: EventHub) -> Response:
    """Stream log lines until the job has ended; resumes from Last-Event-ID."""
    job = await call.run_in_thread(_job_with_files, call)
    selection = _selection(call)
    selection.validate(job)
    follower = log_streams.LogFollower(
        call.store,
        logs,
        call.clock,
        job.id,
        selection,
        log_streams.parse_position(
            call.request.headers.get("last-event-id") or call.query_text("from")
        ),
    )
    lines = log_streams.stream_lines(hub, follower)
    return event_streams.EventStream(hub, lines, call.check_caller, call.user.limits_key)


@router.route(
    "GET", "/jobs/{ref}/result", role=Role.VIEWER, response=bytes, media_type=MediaType.BYTES
)
def get_job_result(call: ApiCall, results: ResultFiles) -> Response:
    """Download the file `result` that a job wrote to its run folder."""
    path = results.require(_job_with_files(call).id)
    return FileResponse(path, media_type=MediaType.BYTES.value, headers=_NO_SNIFFING)


@router.route(
    "POST",
    "/jobs/{ref}/links",
    role=Role.MEMBER,
    body=NewLink,
    response=SignedLink,
    audit=lambda call: AuditSubject(
        action=AuditAction.CREATE_LINK,
        target=call.path_param("ref"),
        detail=call.parse_body(NewLink).resource[:40],
    ),
)
def create_link(call: ApiCall, secret: ServerSecret) -> SignedLink:
    """Create a link to the logs or the result of a job that works without a token."""
    job, new = find_job(call), call.parse_body(NewLink)
    call.user.require_job_owner(job)
    if new.resource not in _LINKED_RESOURCES:
        raise BadInput(f"resource: must be logs or result, not {new.resource[:40]!r}")
    signed_links.check_lifetime(new.expires_in)
    expires_at = (call.now + new.expires_in).replace(microsecond=0)
    path = f"{API_PREFIX}/jobs/{job.id}/{new.resource}"
    return SignedLink(
        path=signed_links.sign(path, call.user, expires_at, secret), expires_at=expires_at
    )


@router.route(
    "DELETE",
    "/jobs/{ref}/files",
    role=Role.MEMBER,
    response=Acknowledgement,
    foreign_action=AuditAction.DELETE_JOB_FILES,
)
def delete_job_files(
    call: ApiCall, results: ResultFiles, snapshots: SnapshotFiles
) -> Acknowledgement:
    """Delete the result of an ended job, and its code unless another job needs it."""
    job = find_job(call)
    commands.require_files_deletable(call.context, job)
    results.delete(job.id)
    if job.snapshot is not None and not retention.code_is_needed(call.store, job):
        snapshots.delete(job.snapshot)
    return Acknowledgement()


@router.route(
    "POST",
    "/archive",
    role=Role.MEMBER,
    body=ArchiveRequest,
    response=JobPage,
    foreign_action=AuditAction.ARCHIVE_JOBS,
    foreign_target=lambda call: _selected_jobs(call.parse_body(ArchiveRequest)),
)
def archive_jobs(call: ApiCall) -> JobPage:
    """Archive jobs that have ended: listings leave them out, nothing is deleted."""
    return retention.archive(call.context, call.parse_body(ArchiveRequest))


@router.route(
    "POST",
    "/unarchive",
    role=Role.MEMBER,
    body=UnarchiveRequest,
    response=JobPage,
    foreign_action=AuditAction.UNARCHIVE_JOBS,
    foreign_target=lambda call: _selected_jobs(call.parse_body(UnarchiveRequest)),
)
def unarchive_jobs(call: ApiCall) -> JobPage:
    """List archived jobs again."""
    return retention.unarchive(call.context, call.parse_body(UnarchiveRequest))


@router.route(
    "POST",
    "/purge",
    role=Role.MEMBER,
    body=PurgeRequest,
    response=PurgeReport,
    foreign_action=AuditAction.PURGE_JOBS,
    foreign_target=lambda call: _selected_jobs(call.parse_body(PurgeRequest)),
)
def purge_jobs(call: ApiCall, files: JobFiles) -> PurgeReport:
    """Delete the files of jobs that have ended; checkpoints only if requested."""
    request = call.parse_body(PurgeRequest)
    retention.require_selection(request)
    return retention.purge(call.context, files, request)


def _selected_jobs(request: EndedJobSelection | UnarchiveRequest) -> str:
    """For the audit log, as the request names them."""
    if not request.jobs:
        everyone = isinstance(request, EndedJobSelection) and request.all_owners
        return "jobs of all users" if everyone else "own jobs"
    named = ", ".join(ref[:_AUDITED_NAME] for ref in request.jobs[:_AUDITED_JOBS])
    more = len(request.jobs) - _AUDITED_JOBS
    return f"{named} and {more} more" if more > 0 else named


def _job_with_files(call: ApiCall) -> Job:
    job = find_job(call)
    retention.require_files(call.store, job, "so there is nothing to read")
    return job


def _selection(call: ApiCall) -> log_streams.LogSelection:
    return log_streams.LogSelection(
        host=call.query_text("host"),
        attempt=call.query_int("attempt", None, most=999_999),
        tail=call.query_int("tail", None, most=1_000_000_000),
    )


async def _read_in_threads(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Each chunk in a worker thread, so that a slow disk does not block the event loop."""
    while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
        yield chunk
