"""What jobs leave behind: logs, results, files; and archiving and purging jobs that have ended."""

from __future__ import annotations

from starlette.responses import FileResponse, Response, StreamingResponse

from tpufleet.errors import must_be
from tpufleet.model.api_types import (
    JobPage,
    JobSelection,
    NewLink,
    PurgeReport,
    PurgeRequest,
    SignedLink,
)
from tpufleet.model.identifiers import SECOND, check_range
from tpufleet.model.job.jobs import Job
from tpufleet.model.people.audit import AuditAction
from tpufleet.model.people.users import Role
from tpufleet.service.files.job_files import JobFiles
from tpufleet.service.files.logs import LogFiles
from tpufleet.service.files.results import ResultFiles
from tpufleet.service.jobs import log_streams
from tpufleet.service.operations import archiving
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


def _selected_jobs(call: ApiCall) -> str:
    """For the audit log, as the request names them."""
    refs = call.parse_body(JobSelection).jobs
    named = ", ".join(ref[:_AUDITED_NAME] for ref in refs[:_AUDITED_JOBS])
    more = len(refs) - _AUDITED_JOBS
    return f"{named} and {more} more" if more > 0 else named


@router.get(
    "/jobs/{ref}/logs", Role.VIEWER, response=str, params=_LOG_PARAMS, media_type=MediaType.TEXT
)
def get_job_logs(call: ApiCall, logs: LogFiles) -> Response:
    """Read the logs of a job, each line prefixed with the rank of its host."""
    text = log_streams.log_text(call.store, logs, _job_with_files(call), _selection(call))
    return StreamingResponse(text, media_type=MediaType.TEXT.value, headers=_NO_SNIFFING)


@router.get(
    "/jobs/{ref}/logs/stream",
    Role.VIEWER,
    response=str,
    params=(*_LOG_PARAMS, Param("from", "instead of the header Last-Event-ID")),
    media_type=MediaType.EVENTS,
)
async def stream_logs(call: ApiCall, logs: LogFiles, hub: EventHub) -> Response:
    """Stream log lines until the job has ended; resumes from Last-Event-ID."""
    job = await call.run_in_thread(_job_with_files, call)
    selection = _selection(call)
    selection.validate(job)
    position = log_streams.parse_position(
        call.request.headers.get("last-event-id") or call.query_text("from")
    )
    follower = log_streams.LogFollower(call.store, logs, call.clock, job.id, selection, position)
    lines = log_streams.stream_lines(hub, follower)
    return event_streams.EventStream(hub, lines, call.check_caller, call.user.limits_key)


@router.get("/jobs/{ref}/result", Role.VIEWER, response=bytes, media_type=MediaType.BYTES)
def get_job_result(call: ApiCall, results: ResultFiles) -> Response:
    """Download the file `result` that a job wrote to its run folder."""
    path = results.require(_job_with_files(call).id)
    return FileResponse(path, media_type=MediaType.BYTES.value, headers=_NO_SNIFFING)


@router.post(
    "/jobs/{ref}/links",
    Role.MEMBER,
    audit=AuditAction.CREATE_LINK,
    detail=lambda call: call.parse_body(NewLink).resource[:40],
)
def create_link(call: ApiCall, secret: ServerSecret, body: NewLink, job: Job) -> SignedLink:
    """Create a link to the logs or the result of a job that works without a token."""
    call.user.require_job_owner(job)
    if body.resource not in _LINKED_RESOURCES:
        raise must_be("logs or result", body.resource, "resource")
    check_range("expires_in", body.expires_in, SECOND, signed_links.MAX_LIFETIME)
    expires_at = (call.now + body.expires_in).replace(microsecond=0)
    path = f"{API_PREFIX}/jobs/{job.id}/{body.resource}"
    return SignedLink(
        path=signed_links.sign(path, call.user, expires_at, secret), expires_at=expires_at
    )


@router.post(
    "/archive", Role.MEMBER, foreign=AuditAction.ARCHIVE_JOBS, foreign_target=_selected_jobs
)
def archive_jobs(call: ApiCall, body: JobSelection) -> JobPage:
    """Archive jobs that have ended: listings leave them out, nothing is deleted."""
    return archiving.archive(call.context, body)


@router.post(
    "/unarchive", Role.MEMBER, foreign=AuditAction.UNARCHIVE_JOBS, foreign_target=_selected_jobs
)
def unarchive_jobs(call: ApiCall, body: JobSelection) -> JobPage:
    """List archived jobs again."""
    return archiving.unarchive(call.context, body)


@router.post("/purge", Role.MEMBER, foreign=AuditAction.PURGE_JOBS, foreign_target=_selected_jobs)
def purge_jobs(call: ApiCall, files: JobFiles, body: PurgeRequest) -> PurgeReport:
    """Delete the files of jobs that have ended; checkpoints only if requested."""
    return archiving.purge(call.context, files, body)


def _job_with_files(call: ApiCall) -> Job:
    job = call.path_job
    archiving.require_files(call.store, job, "so there is nothing to read")
    return job


def _selection(call: ApiCall) -> log_streams.LogSelection:
    return log_streams.LogSelection(
        host=call.query_text("host"),
        attempt=call.query_int("attempt", None, most=999_999),
        tail=call.query_int("tail", None, most=1_000_000_000),
    )
