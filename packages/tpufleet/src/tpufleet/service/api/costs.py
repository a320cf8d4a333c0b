"""Costs and stock: chip hours, grants and refusals."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from tpufleet.errors import busy
from tpufleet.model.job.jobs import Job
from tpufleet.model.people.budgets import BUDGET_REPORT, BudgetReport
from tpufleet.model.people.costs import CostReport, CostRow, StockReport
from tpufleet.model.people.users import Role
from tpufleet.model.tpu import prices
from tpufleet.model.values import encoding
from tpufleet.policy.accounting import costs
from tpufleet.service.jobs import queries
from tpufleet.service.people import settled_costs
from tpufleet.service.transport.limits import TooManyRequests
from tpufleet.service.transport.routing import ApiCall, Param, PriceTable, Router

_reporting = threading.Lock()  # one at a time: it may read very many jobs

router = Router()


@router.get(
    "/costs",
    Role.VIEWER,
    params=(
        Param(
            "since",
            "Only what was billed since then, such as 2026-05-01T00:00:00Z. Without it, "
            "everything: by job for this month and the last one, by owner for earlier months.",
        ),
    ),
)
def get_costs(call: ApiCall, table: PriceTable) -> CostReport:
    """Report chip hours and costs, and what was not useful of them."""
    since = call.query_time("since")
    if not _reporting.acquire(blocking=False):
        raise TooManyRequests(busy("report of costs"))
    try:
        return _report(call, since, table)
    finally:
        _reporting.release()


def _report(call: ApiCall, since: datetime | None, table: PriceTable) -> CostReport:
    settled = settled_costs.settled_costs(call.store) if since is None else None
    jobs_since = since if settled is None else settled.until
    rows = settled_costs.billed(call.store, jobs_since, call.now, call.now)
    earlier = () if settled is None else settled.rows
    return CostReport(rows=_priced(table, (*rows, *earlier)), now=call.now, jobs_since=jobs_since)


@router.get("/jobs/{ref}/cost", Role.VIEWER)
def get_job_cost(call: ApiCall, table: PriceTable, job: Job) -> CostReport:
    """Report chip hours of one job, by type of slice: billed, useful, and the rest by class."""
    attempts = call.store.attempts(job.id)
    slices = {each.id: each for each in call.store.slices(live_only=False, job_id=job.id)}
    for slice_id in {slice_id for attempt in attempts for slice_id in attempt.slices}:
        if slice_id not in slices and (found := call.store.slice(slice_id)) is not None:
            slices[slice_id] = found  # of a pool, and free or with another job now
    reporting = queries.attempts_with_steps(call.store, attempts)
    rows = costs.account(slices.values(), {job.id: job}, attempts, call.now, reporting)
    return CostReport(
        rows=_priced(table, [row for row in rows if row.job_id == job.id]), now=call.now
    )


def _priced(table: PriceTable, rows: Iterable[CostRow]) -> tuple[CostRow, ...]:
    return tuple(
        replace(row, usd_per_chip_hour=prices.chip_hour_price(row.accelerator, row.capacity, table))
        for row in rows
    )


@router.get("/budgets", Role.VIEWER)
def get_budgets(call: ApiCall) -> BudgetReport:
    """Report what users and pools have spent of their budgets."""
    report = call.store.metadata(BUDGET_REPORT)
    if report is None:
        return BudgetReport(budgets=(), now=call.now)
    return encoding.from_json(report.encode(), BudgetReport)


@router.get("/stock", Role.VIEWER)
def get_stock(call: ApiCall) -> StockReport:
    """Report grants and refusals of capacity."""
    rows = costs.stock(call.store.slices(live_only=False), call.store.refusals())
    return StockReport(rows=tuple(rows), now=call.now)
