"""Limits on money and time: of a job, a user and a pool. What was spent, and what follows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from tpufleet.model.events import Event, EventKind
from tpufleet.model.job.jobs import Job, JobSpec
from tpufleet.model.people.budgets import EVERY_USER, Budget, BudgetPeriod, BudgetScope, BudgetUse
from tpufleet.model.people.costs import CostRow
from tpufleet.model.tpu import prices, type_lookup
from tpufleet.model.tpu.prices import Price, amount

# An event is recorded when this share of a budget has been spent.
ALERTS = (0.8, 1.0)

Prices = Mapping[tuple[str, str], Price]


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """A budget of which a share has been spent."""

    use: BudgetUse
    share: float


def period_start(period: BudgetPeriod, now: datetime) -> datetime | None:
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    match period:
        case BudgetPeriod.DAY:
            return midnight
        case BudgetPeriod.WEEK:
            return midnight - timedelta(days=midnight.weekday())
        case BudgetPeriod.MONTH:
            return midnight.replace(day=1)
        case BudgetPeriod.TOTAL:
            return None


def period_end(period: BudgetPeriod, start: datetime | None) -> datetime | None:
    if start is None:
        return None
    days = {BudgetPeriod.DAY: 1, BudgetPeriod.WEEK: 7, BudgetPeriod.MONTH: 32}[period]
    return period_start(period, start + timedelta(days=days))


def usage(
    budgets: Sequence[Budget],
    rows_since: Callable[[datetime | None], Sequence[CostRow] | None],
    price_table: Prices,
    now: datetime,
    users: Iterable[str] = (),
) -> list[BudgetUse]:
    """What each user and pool has spent, where that is known. A budget for every user gives one
    entry for each of `users`, and of those who spent something, unless they have a budget of their
    own."""
    own = {budget.name for budget in budgets if budget.scope is BudgetScope.USER}
    found = []
    for budget in budgets:
        since = period_start(budget.period, now)
        rows = rows_since(since)
        if rows is None:
            continue
        names: Iterable[str] = (budget.name,)
        if budget.scope is BudgetScope.USER and budget.name == EVERY_USER:
            spenders = {row.owner for row in rows if row.owner}
            names = sorted((spenders | set(users)) - own)
        for name in names:
            of_scope = [row for row in rows if _belongs(row, budget.scope, name)]
            found.append(
                BudgetUse(
                    scope=budget.scope,
                    name=name,
                    usd=budget.usd,
                    period=budget.period,
                    spent=cost(of_scope, price_table),
                    since=since,
                )
            )
    return found


def cost(rows: Iterable[CostRow], price_table: Prices) -> float:
    """In dollars. Types without a known price count as free; `tpu cost` marks them."""
    return sum(
        row.chip_hours * (prices.chip_hour_price(row.accelerator, row.capacity, price_table) or 0.0)
        for row in rows
    )


def alert_keys(use: BudgetUse) -> list[str]:
    """One for each share that was reached in this period; the highest last."""
    since = use.since.isoformat() if use.since else "total"
    reached = [share for share in ALERTS if use.share >= share]
    return [f"{use.scope}/{use.name}/{since}/{use.usd:g}/{share:g}" for share in reached]


def alerts(uses: Iterable[BudgetUse], known: Collection[str]) -> list[Alert]:
    """The highest share that each budget reached, unless its key is known already."""
    return [
        Alert(use=use, share=ALERTS[len(keys) - 1])
        for use in uses
        if (keys := alert_keys(use)) and keys[-1] not in known
    ]


def alert_event(alert: Alert, now: datetime) -> Event:
    use = alert.use
    consequence = "; running jobs are stopped, and queued ones wait" if use.exhausted else ""
    return Event(
        at=now,
        kind=EventKind.BUDGET,
        state="exhausted" if use.exhausted else "warning",
        message=f"{describe(use)}{consequence}",
        pool=use.name if use.scope is BudgetScope.POOL else None,
        data={"scope": use.scope, "name": use.name, "percent": f"{alert.share * 100:.0f}"},
    )


def describe(use: BudgetUse) -> str:
    period = "in total" if use.period is BudgetPeriod.TOTAL else f"this {use.period}"
    return (
        f"budget of {use.scope} {use.name}: ${amount(use.spent)} of ${amount(use.usd)} spent "
        f"{period} ({use.share:.0%})"
    )


def hold_reason(job: Job, uses: Iterable[BudgetUse]) -> str:
    """Why a job gets no slices; empty when no budget forbids it."""
    for use in uses:
        if holds(use, job):
            end = period_end(use.period, use.since)
            until = f"until {end:%Y-%m-%d %H:%M} UTC, unless" if end else "until"
            return (
                f"{describe(use)}; no slices {until} an admin raises `budgets` in the config file "
                "of the server and restarts it"
            )
    return ""


def holds(use: BudgetUse, job: Job) -> bool:
    """Whether the job gets no slices until the period of this budget ends."""
    return use.exhausted and _covers(use, job)


class LimitReached(msgspec.Struct, frozen=True):
    """A limit that stops a job, and how to continue it."""

    reason: str
    advice: str


def job_limit(spec: JobSpec, rows: Sequence[CostRow], price_table: Prices) -> LimitReached | None:
    """Which of `max_cost` and `max_hours` a job has reached."""
    if spec.max_cost is not None and (spent := cost(rows, price_table)) >= spec.max_cost:
        return LimitReached(
            f"cost limit of ${amount(spec.max_cost)} (max_cost) reached: ${amount(spent)} spent",
            "run `tpu resume JOB --set max_cost=…` with a larger limit",
        )
    if spec.max_hours is not None and (hours := billed_hours(spec, rows)) >= spec.max_hours:
        return LimitReached(
            f"limit of {spec.max_hours:g} billed hours (max_hours) reached: {amount(hours)} h",
            "run `tpu resume JOB --set max_hours=…` with a larger limit",
        )
    return None


def budget_limit(job: Job, uses: Iterable[BudgetUse]) -> LimitReached | None:
    """Which budget stops a job."""
    if reason := hold_reason(job, uses):
        return LimitReached(reason, "run `tpu resume JOB` when the budget has been raised")
    return None


def billed_hours(spec: JobSpec, rows: Iterable[CostRow]) -> float:
    """Hours for which a slice of the job was billed, on average over its slices."""
    chips = type_lookup.find(spec.accelerator).chips * spec.max_slices
    return sum(row.chip_hours for row in rows) / chips


def _belongs(row: CostRow, scope: BudgetScope, name: str) -> bool:
    return name == (row.owner if scope is BudgetScope.USER else row.pool)


def _covers(use: BudgetUse, job: Job) -> bool:
    return use.name == (job.owner if use.scope is BudgetScope.USER else job.spec.pool)
