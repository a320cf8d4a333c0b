"""Jobs: submit, list, search, show, explain, change, cancel, resume, rerun."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec

from tpufleet.errors import Forbidden, unknown
from tpufleet.model import identifiers
from tpufleet.model.api_types import (
    Comparison,
    EventPage,
    JobChanges,
    JobDetail,
    JobExplanation,
    JobPage,
    JobRow,
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
    commands,
    comparison,
    explain,
    metric_series,
    queries,
    submission,
)
from tpufleet.service.jobs.queries import EndedJobRows
from tpufleet.service.jobs.submission import JobStorage
from tpufleet.service.transport.routing import ApiCall, Param, PriceTable, Router
from tpufleet.stores.base import JobQuery

MAX_JOBS_PER_PAGE = 20_000
MAX_SUBMIT_BYTES = 64 * 1024 * 1024

router = Router()


@router.post(
    "/jobs", Role.MEMBER, body=SubmitRequest, limit=MAX_SUBMIT_BYTES, foreign=AuditAction.SUBMIT_JOB
)
def submit_jobs(call: ApiCall, storage: JobStorage) -> JobPage:
    """Submit jobs, all or none; submitting the same job twice is safe."""
    return _submitted(call, storage, submission.submit(call.context, storage, call.body))


@router.post("/jobs/check", Role.MEMBER, body=SubmitRequest, limit=MAX_SUBMIT_BYTES)
def check_jobs(call: ApiCall, storage: JobStorage) -> JobPage:
    """Check jobs as if they were submitted, and submit none."""
    return _submitted(call, storage, submission.check(call.context, storage, call.body))


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


@router.get(
    "/jobs",
    Role.VIEWER,
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
        pool=call.query_text("pool"),
        tag=call.query_text("tag"),
        name=call.query_text("name"),
        parent=_job_id(call.query_text("parent")),
        search=search,
        archived=archived if search is None or search.archived is None else search.archived,
        limit=call.query_int("limit", 100, least=1, most=MAX_JOBS_PER_PAGE),
        before=_job_id(call.query_text("before")),
    )
    return queries.job_page(call.store, query, ended_rows)


@router.get("/jobs/{ref}", Role.VIEWER)
def get_job(call: ApiCall, job: Job) -> JobDetail:
    """Show one job by id, beginning of an id, name, OWNER:NAME or @last."""
    return queries.job_detail(call.store, job, call.now)


@router.get("/jobs/{ref}/why", Role.VIEWER)
def explain_job(call: ApiCall, table: PriceTable, job: Job) -> JobExplanation:
    """Explain why a job is waiting, or why it ended."""
    explanation = explain.explain(call.store, job, call.now)
    priced = tuple(
        each
        if each.provider in SIMULATED_PROVIDERS
        else replace(each, usd_per_hour=prices.source_price(job.spec, each.capacity, table))
        for each in explanation.sources
    )
    return replace(explanation, sources=priced)


@router.patch("/jobs/{ref}", Role.MEMBER, foreign=AuditAction.EDIT_JOB)
def change_job(call: ApiCall, body: JobChanges, job: Job) -> JobRow:
    """Change name, tags, notes or priority of a live or ended job."""
    if call.user.job_id is not None and body.priority is not None:
        raise Forbidden("priority: the processes of a job cannot change it")
    job = commands.change_job(call.context, job, body)
    return queries.job_rows(call.store, [job])[0]


@router.get("/jobs/{ref}/metrics", Role.VIEWER)
def job_metrics(call: ApiCall, job: Job) -> MetricSeries:
    """Metrics that a job reported over time, thinned to a bounded number of points."""
    return metric_series.series(call.store, job)


@router.get(
    "/compare",
    Role.VIEWER,
    params=(Param("jobs", "comma-separated references to jobs; code is compared with the first"),),
)
def compare_jobs(call: ApiCall, snapshots: SnapshotFiles) -> Comparison:
    """Compare jobs: differing fields and code, last metrics."""
    refs = [ref for ref in (call.query_text("jobs") or "").split(",") if ref]
    jobs = [call.find_job(ref) for ref in refs[: comparison.MAX_JOBS + 1]]
    return comparison.compare(call.store, snapshots, jobs)


@router.post("/jobs/{ref}/cancel", Role.MEMBER, foreign=AuditAction.CANCEL_JOB)
def cancel_job(call: ApiCall, job: Job) -> JobRow:
    """Cancel a job."""
    commands.cancel(call.context, job)
    return queries.job_rows(call.store, [job])[0]


@router.post("/jobs/{ref}/resume", Role.MEMBER, foreign=AuditAction.RESUME_JOB)
def resume_job(call: ApiCall, storage: JobStorage, job: Job, body: ResubmitRequest) -> JobRow:
    """Start a new job from the last checkpoint, with the same or new code."""
    new = submission.resubmit(call.context, storage, job, body, ParentRelation.RESUME)
    return queries.job_row(new, None, None)


@router.post("/jobs/{ref}/rerun", Role.MEMBER, foreign=AuditAction.RERUN_JOB)
def rerun_job(call: ApiCall, storage: JobStorage, job: Job, body: ResubmitRequest) -> JobRow:
    """Start a new job from the beginning, with the same or new code."""
    new = submission.resubmit(call.context, storage, job, body, ParentRelation.RERUN)
    return queries.job_row(new, None, None)


@router.get("/jobs/{ref}/events", Role.VIEWER, params=events.PAGE_PARAMS)
def list_job_events(call: ApiCall, job: Job) -> EventPage:
    """List the events of a job, oldest first."""
    return queries.event_page(call.store, events.event_query(call, job.id))


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
            raise unknown("state", name, known, "state")
        chosen |= known.get(name, frozenset())
    return chosen
