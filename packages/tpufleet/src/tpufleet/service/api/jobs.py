"""Jobs: submit, list, search, show, explain, change, cancel, resume, rerun."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec

from tpufleet.errors import BadInput, Forbidden
from tpufleet.model.api_types import (
    Acknowledgement,
    Comparison,
    EventPage,
    JobChanges,
    JobDetail,
    JobExplanation,
    JobPage,
    JobRow,
    LocationRelease,
    MetricSeries,
    ResubmitRequest,
    SubmitRequest,
)
from tpufleet.model.fleet.slices import SIMULATED_PROVIDERS
from tpufleet.model.job.job_search import JobSearch, parse_search
from tpufleet.model.job.jobs import ENDED_STATES, Job, JobId, JobState, ParentRelation
from tpufleet.model.people.audit import AuditAction
from tpufleet.model.people.users import Role, TokenScope
from tpufleet.model.tpu import prices
from tpufleet.service.api import events
from tpufleet.service.files.snapshots import SnapshotFiles
from tpufleet.service.jobs import (
    checkpoint_owners,
    commands,
    comparison,
    explain,
    metric_series,
    queries,
    submission,
)
from tpufleet.service.jobs.queries import EndedJobRows
from tpufleet.service.jobs.submission import JobStorage
from tpufleet.service.transport import identifiers
from tpufleet.service.transport.routing import ApiCall, Param, PriceTable, Router
from tpufleet.stores.base import JobQuery

MAX_JOBS_PER_PAGE = 20_000
MAX_SUBMIT_BYTES = 64 * 1024 * 1024

router = Router()


@router.route(
    "POST",
    "/jobs",
    role=Role.MEMBER,
    body=SubmitRequest,
    response=JobPage,
    limit=MAX_SUBMIT_BYTES,
    foreign_action=AuditAction.SUBMIT_JOB,
)
def submit_jobs(call: ApiCall, storage: JobStorage) -> JobPage:
    """Submit jobs, all or none; submitting the same job twice is safe."""
    jobs = submission.submit(call.context, storage, call.body)
    call.notify()
    return _submitted(call, storage, jobs)


@router.route(
    "POST",
    "/jobs/check",
    role=Role.MEMBER,
    body=SubmitRequest,
    response=JobPage,
    limit=MAX_SUBMIT_BYTES,
)
def check_jobs(call: ApiCall, storage: JobStorage) -> JobPage:
    """Check jobs as if they were submitted, and submit none."""
    jobs = submission.check(call.context, storage, call.body)
    return _submitted(call, storage, jobs)


def _submitted(call: ApiCall, storage: JobStorage, jobs: Iterable[Job]) -> JobPage:
    return JobPage(
        jobs=tuple(
            msgspec.structs.replace(
                queries.job_row(job, None, None),
                simulated=storage.simulates(job.spec, call.context.store),
            )
            for job in jobs
        )
    )


@router.route(
    "GET",
    "/jobs",
    role=Role.VIEWER,
    response=JobPage,
    params=(
        Param("owner", "user name"),
        Param("state", "comma-separated states; `live` and `ended` are groups of states"),
        Param("pool", "pool name"),
        Param("tag", "tag"),
        Param("name", "job name"),
        Param("parent", "id of the job that was resumed or rerun"),
        Param("archived", "any value: list archived jobs instead"),
        Param("q", "a query such as `owner:me tag:sweep-* loss<0.3 since:7d -state:failed text`"),
        events.LIMIT,
        Param("before", "`next` of the previous page"),
    ),
)
def list_jobs(call: ApiCall, ended_rows: EndedJobRows) -> JobPage:
    """List jobs, newest first."""
    search = _search(call)
    archived = call.query_text("archived") is not None
    only_own = call.user.scope is TokenScope.SUBMIT
    query = JobQuery(
        owner=call.user.name if only_own else call.query_text("owner"),
        states=_states(call.query_text("state")),
        pool=call.user.pool or call.query_text("pool"),
        tag=call.query_text("tag"),
        name=call.query_text("name"),
        parent=_job_id(call.query_text("parent")),
        search=search,
        archived=archived if search is None or search.archived is None else search.archived,
        limit=call.query_int("limit", 100, least=1, most=MAX_JOBS_PER_PAGE),
        before=_job_id(call.query_text("before")),
    )
    return queries.job_page(call.store, query, ended_rows)


@router.route("GET", "/jobs/{ref}", role=Role.VIEWER, response=JobDetail)
def get_job(call: ApiCall) -> JobDetail:
    """Show one job by id, beginning of an id, name, OWNER:NAME or @last."""
    return queries.job_detail(call.store, find_job(call), call.now)


@router.route("GET", "/jobs/{ref}/why", role=Role.VIEWER, response=JobExplanation)
def explain_job(call: ApiCall, table: PriceTable) -> JobExplanation:
    """Explain why a job is waiting, or why it ended."""
    job = find_job(call)
    explanation = explain.explain(call.store, job, call.now)
    priced = tuple(
        each
        if each.provider in SIMULATED_PROVIDERS
        else replace(each, usd_per_hour=prices.source_price(job.spec, each.capacity, table))
        for each in explanation.sources
    )
    return replace(explanation, sources=priced)


@router.route(
    "PATCH",
    "/jobs/{ref}",
    role=Role.MEMBER,
    body=JobChanges,
    response=JobRow,
    foreign_action=AuditAction.EDIT_JOB,
)
def change_job(call: ApiCall) -> JobRow:
    """Change name, tags, notes or priority of a live or ended job."""
    job, changes = find_job(call), call.parse_body(JobChanges)
    if call.user.job_id is not None and changes.priority is not None:
        raise Forbidden("priority: the processes of a job cannot change it")
    job = commands.change_job(call.context, job, changes)
    call.notify()
    return queries.job_rows(call.store, [job])[0]


@router.route("GET", "/jobs/{ref}/metrics", role=Role.VIEWER, response=MetricSeries)
def job_metrics(call: ApiCall) -> MetricSeries:
    """Metrics that a job reported over time, thinned to a bounded number of points."""
    return metric_series.series(call.store, find_job(call))


@router.route(
    "GET",
    "/compare",
    role=Role.VIEWER,
    response=Comparison,
    params=(Param("jobs", "comma-separated references to jobs; code is compared with the first"),),
)
def compare_jobs(call: ApiCall, snapshots: SnapshotFiles) -> Comparison:
    """Compare jobs: differing fields and code, last metrics."""
    refs = [ref for ref in (call.query_text("jobs") or "").split(",") if ref]
    jobs = [call.find_job(ref) for ref in refs[: comparison.MAX_JOBS + 1]]
    return comparison.compare(call.store, snapshots, jobs)


@router.route(
    "POST",
    "/jobs/{ref}/cancel",
    role=Role.MEMBER,
    response=JobRow,
    foreign_action=AuditAction.CANCEL_JOB,
)
def cancel_job(call: ApiCall) -> JobRow:
    """Cancel a job."""
    job = find_job(call)
    commands.cancel(call.context, job)
    call.notify()
    return queries.job_rows(call.store, [job])[0]


@router.route(
    "POST",
    "/jobs/{ref}/resume",
    role=Role.MEMBER,
    body=ResubmitRequest,
    response=JobRow,
    foreign_action=AuditAction.RESUME_JOB,
)
def resume_job(call: ApiCall, storage: JobStorage) -> JobRow:
    """Start a new job from the last checkpoint, with the same or new code."""
    return _resubmit(call, storage, ParentRelation.RESUME)


@router.route(
    "POST",
    "/jobs/{ref}/rerun",
    role=Role.MEMBER,
    body=ResubmitRequest,
    response=JobRow,
    foreign_action=AuditAction.RERUN_JOB,
)
def rerun_job(call: ApiCall, storage: JobStorage) -> JobRow:
    """Start a new job from the beginning, with the same or new code."""
    return _resubmit(call, storage, ParentRelation.RERUN)


@router.route(
    "GET", "/jobs/{ref}/events", role=Role.VIEWER, response=EventPage, params=events.PAGE_PARAMS
)
def list_job_events(call: ApiCall) -> EventPage:
    """List the events of a job, oldest first."""
    return queries.event_page(call.store, events.event_query(call, find_job(call).id))


@router.route(
    "POST",
    "/checkpoints/release",
    role=Role.MEMBER,
    body=LocationRelease,
    response=Acknowledgement,
    foreign_action=AuditAction.RELEASE_LOCATION,
)
def release_checkpoint_location(call: ApiCall) -> Acknowledgement:
    """Let others use a checkpoint location; of another user: an admin, with a reason."""
    asked = call.parse_body(LocationRelease)
    checkpoint_owners.release(call.store, call.user, asked.location, asked.reason, call.now)
    return Acknowledgement()


def find_job(call: ApiCall) -> Job:
    """The job that the path names."""
    return call.find_job(call.path_param("ref"))


def _resubmit(call: ApiCall, storage: JobStorage, relation: ParentRelation) -> JobRow:
    job = submission.resubmit(
        call.context, storage, find_job(call), call.parse_body(ResubmitRequest), relation
    )
    call.notify()
    return queries.job_row(job, None, None)


def _search(call: ApiCall) -> JobSearch | None:
    text = call.query_text("q")
    if not text:
        return None
    search = parse_search(text, caller=call.user.name, now=call.now)
    if not search.names_owner:
        return search
    return search.with_exact_owners([user.name for user in call.store.users()])


def _job_id(text: str | None) -> JobId | None:
    return identifiers.parse_job_id(text) if text is not None else None


def _states(text: str | None) -> frozenset[JobState]:
    groups = {"live": frozenset(JobState) - ENDED_STATES, "ended": ENDED_STATES}
    known = {state.value: frozenset({state}) for state in JobState} | groups
    chosen: frozenset[JobState] = frozenset()
    for name in (text or "").split(","):
        if name and name not in known:
            raise BadInput(
                f"state: unknown state {name[:40]!r}{identifiers.suggestion(name, known)}"
            )
        chosen |= known.get(name, frozenset())
    return chosen
