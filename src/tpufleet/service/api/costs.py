"""What people read of costs and stock."""

from __future__ import annotations

from datetime import datetime

from tpufleet.model.attempts import Attempt
from tpufleet.model.costs import CostReport, StockReport
from tpufleet.model.jobs import Job, JobId
from tpufleet.policy import costs
from tpufleet.service.routing import ApiCall
from tpufleet.stores.base import JobQuery, Store

PAGE_SIZE = 1000


def get_costs(call: ApiCall) -> CostReport:
    jobs = all_jobs(call.store)
    attempts: list[Attempt] = []
    for job_id in jobs:
        attempts += call.store.attempts(job_id)
    rows = costs.account(call.store.slices(live_only=False), jobs, attempts, call.now)
    return CostReport(rows=tuple(rows), now=call.now)


def get_stock(call: ApiCall) -> StockReport:
    rows = costs.stock(call.store.slices(live_only=False), call.store.refusals())
    return StockReport(rows=tuple(rows), now=call.now)


def all_jobs(store: Store, since: datetime | None = None) -> dict[JobId, Job]:
    found: dict[JobId, Job] = {}
    before: JobId | None = None
    while page := store.jobs(JobQuery(limit=PAGE_SIZE, before=before)):
        found |= {job.id: job for job in page if since is None or job.submitted_at >= since}
        before = page[-1].id
        if len(page) < PAGE_SIZE:
            break
    return found
