"""The queue: list it, and move, hold and release jobs."""

from __future__ import annotations

from tpufleet.model.api_types import JobRow, QueueMove, QueuePage
from tpufleet.model.job.jobs import Job
from tpufleet.model.people.audit import AuditAction
from tpufleet.model.people.users import Role
from tpufleet.service import lookups
from tpufleet.service.jobs import job_queue, queries
from tpufleet.service.transport.routing import ApiCall, Param, Router

router = Router()


@router.get(
    "/queue",
    Role.VIEWER,
    params=(
        Param("pool", "pool name"),
        Param("owner", "user name"),
    ),
)
def list_queue(call: ApiCall) -> QueuePage:
    """Waiting jobs in order, what each is behind, and when it starts."""
    pool = call.query_text("pool")
    if pool is not None:
        lookups.require_pool(call.store, pool)
    return job_queue.queue_page(call.store, call.now, pool=pool, owner=call.query_text("owner"))


@router.post("/queue/{ref}/move", Role.MEMBER, foreign=AuditAction.MOVE_JOB)
def move_job(call: ApiCall, body: QueueMove, job: Job) -> JobRow:
    """Move a waiting job within its queue; ahead of other users requires the admin role."""
    return _row(call, job_queue.move(call.context, job, body))


@router.post("/queue/{ref}/hold", Role.MEMBER, foreign=AuditAction.HOLD_JOB)
def hold_job(call: ApiCall, job: Job) -> JobRow:
    """Keep a job from being placed."""
    return _row(call, job_queue.hold(call.context, job))


@router.post("/queue/{ref}/release", Role.MEMBER, foreign=AuditAction.RELEASE_JOB)
def release_job(call: ApiCall, job: Job) -> JobRow:
    """Let a held job be placed again."""
    return _row(call, job_queue.release(call.context, job))


@router.post("/queue/{ref}/retry", Role.MEMBER, foreign=AuditAction.RETRY_JOB)
def retry_job(call: ApiCall, job: Job) -> JobRow:
    """Request capacity for a waiting job now, without waiting for the backoff."""
    return _row(call, job_queue.retry(call.context, job))


def _row(call: ApiCall, job: Job) -> JobRow:
    return queries.job_rows(call.store, [job])[0]
