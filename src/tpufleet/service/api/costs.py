"""Costs and stock: chip hours, grants and refusals."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta

from tpufleet.model import encoding, prices
from tpufleet.model.budgets import BUDGET_REPORT, BudgetReport
from tpufleet.model.costs import CostReport, CostRow, StockReport
from tpufleet.model.jobs import Job, JobId
from tpufleet.model.users import Role
from tpufleet.policy import costs
from tpufleet.service import queries
from tpufleet.service.rate_limiter import TooManyRequests
from tpufleet.service.routing import ApiCall, Router
from tpufleet.stores.base import JobQuery, Store

PAGE_SIZE = 1000
_reporting = threading.Lock()  # one at a time: it reads all jobs
_BUSY_RETRY = timedelta(seconds=5)

router = Router()


@router.route(
    "GET",
    "/costs",
    role=Role.VIEWER,
    summary="Report chip hours and costs, paid and lost",
    response=CostReport,
)
def get_costs(call: ApiCall) -> CostReport:
    if not _reporting.acquire(blocking=False):
        raise TooManyRequests("another report of costs is being computed", _BUSY_RETRY)
    try:
        return _report(call)
    finally:
        _reporting.release()


def _report(call: ApiCall) -> CostReport:
    jobs = all_jobs(call.store)
    found = call.store.attempts_of(list(jobs)).values()
    attempts = [attempt for of_job in found for attempt in of_job]
    reporting = queries.attempts_with_steps(call.store, attempts)
    slices = call.store.slices(live_only=False)
    rows = costs.account(slices, jobs, attempts, call.now, reporting)
    return CostReport(rows=_priced(call, rows), now=call.now)


@router.route(
    "GET",
    "/jobs/{ref}/cost",
    role=Role.VIEWER,
    summary="Report chip hours of one job, by type of slice: billed, running and lost",
    response=CostReport,
)
def get_job_cost(call: ApiCall) -> CostReport:
    job = call.find_job(call.path_param("ref"))
    attempts = call.store.attempts(job.id)
    slices = {each.id: each for each in call.store.slices(live_only=False, job_id=job.id)}
    for slice_id in {slice_id for attempt in attempts for slice_id in attempt.slices}:
        if slice_id not in slices and (found := call.store.slice(slice_id)) is not None:
            slices[slice_id] = found  # of a pool, and free or with another job now
    reporting = queries.attempts_with_steps(call.store, attempts)
    rows = costs.account(slices.values(), {job.id: job}, attempts, call.now, reporting)
    return CostReport(
        rows=_priced(call, [row for row in rows if row.job_id == job.id]), now=call.now
    )


def _priced(call: ApiCall, rows: Iterable[CostRow]) -> tuple[CostRow, ...]:
    table = call.components.deps.prices
    return tuple(
        replace(row, usd_per_chip_hour=prices.chip_hour_price(row.accelerator, row.capacity, table))
        for row in rows
    )


@router.route(
    "GET",
    "/budgets",
    role=Role.VIEWER,
    summary="Report what users and pools have spent of their budgets",
    response=BudgetReport,
)
def get_budgets(call: ApiCall) -> BudgetReport:
    report = call.store.metadata(BUDGET_REPORT)
    if report is None:
        return BudgetReport(budgets=(), now=call.now)
    return encoding.from_json(report.encode(), BudgetReport)


@router.route(
    "GET",
    "/stock",
    role=Role.VIEWER,
    summary="Report grants and refusals of capacity",
    response=StockReport,
)
def get_stock(call: ApiCall) -> StockReport:
    rows = costs.stock(call.store.slices(live_only=False), call.store.refusals())
    return StockReport(rows=tuple(rows), now=call.now)


def all_jobs(store: Store, since: datetime | None = None) -> dict[JobId, Job]:
    jobs: dict[JobId, Job] = {}
    before: JobId | None = None
    while page := store.jobs(JobQuery(archived=None, limit=PAGE_SIZE, before=before)):
        jobs |= {job.id: job for job in page if since is None or job.submitted_at >= since}
        before = page[-1].id
        if len(page) < PAGE_SIZE:
            break
    return jobs
