"""Watches what jobs, users and pools spend, and stops what is over its limit."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import cache

from tpufleet.controller.placement_inputs import ControllerSettings
from tpufleet.controller.working_set import WorkingSet
from tpufleet.errors import Unreachable, unexpected
from tpufleet.model.job.jobs import Job, JobId
from tpufleet.model.people.budgets import BUDGET_REPORT, BudgetReport, BudgetUse
from tpufleet.model.people.costs import SETTLED_COSTS, CostRow, SettledCosts
from tpufleet.model.values import encoding
from tpufleet.model.values.records import replace
from tpufleet.policy.accounting import budgets, costs
from tpufleet.stores.base import Store

log = logging.getLogger(__name__)

# At a dollar per chip hour, a v5e-256 spends about 2 dollars between two checks.
CHECK_INTERVAL = timedelta(seconds=30)
# Name in the store's metadata of the alerts that were recorded as events.
BUDGET_ALERTS = "budget_alerts"
# Longer than it takes to record the end of an attempt or of a slice.
SETTLED_AFTER = timedelta(hours=1)


class SpendingMonitor:
    """For one leadership term."""

    def __init__(self, store: Store, working_set: WorkingSet, settings: ControllerSettings) -> None:
        self._store = store
        self._working_set = working_set
        self._budgets = settings.budgets
        self._prices = settings.prices
        self._checked_at: datetime | None = None
        self._known = set(json.loads(store.metadata(BUDGET_ALERTS) or "[]"))
        self._report: BudgetReport | None = None  # not saved yet
        self._left_from_before = store.metadata(BUDGET_REPORT) is not None
        self._spent: dict[datetime | None, SettledCosts] = {}  # since the start of each period

    def check(self, now: datetime) -> None:
        if self._checked_at is not None and now - self._checked_at < CHECK_INTERVAL:
            return
        self._checked_at = now
        for job_id in sorted(self._working_set.limited_jobs):
            job = self._working_set.jobs[job_id]
            if not job.ended and not job.over_limit:
                with _logged(f"adding up the cost of job {job_id}"):
                    rows = self._rows_of(job, now)
                    self._stop(job, budgets.job_limit(job.spec, rows, self._prices))
        if self._budgets:
            self._check_budgets(now)
        elif self._left_from_before:  # budgets were removed from the configuration
            self._report, self._known = BudgetReport(budgets=(), now=now), set()
            self._left_from_before = False

    def next_check_at(self) -> datetime | None:
        limited = self._budgets or self._working_set.limited_jobs
        return self._checked_at + CHECK_INTERVAL if limited and self._checked_at else None

    def save(self) -> None:
        """Publish the report, and remember its alerts. After the commit that records them."""
        if self._report is not None:
            text = encoding.to_json(self._report).decode()
            self._store.put_metadata(BUDGET_REPORT, text)
            self._store.put_metadata(BUDGET_ALERTS, json.dumps(sorted(self._known)))
            self._report = None

    def _check_budgets(self, now: datetime) -> None:
        uses = self._uses(now)
        self._report = BudgetReport(budgets=tuple(uses), now=now)
        for alert in budgets.alerts(uses, self._known):
            self._working_set.record_events(budgets.alert_event(alert, now))
        self._known = {key for use in uses for key in budgets.alert_keys(use)}
        exhausted = tuple(use for use in uses if use.exhausted)
        before = {(use.scope, use.name) for use in self._working_set.exhausted_budgets}
        if before != {(use.scope, use.name) for use in exhausted}:
            self._working_set.placement_due = True
        self._working_set.exhausted_budgets = exhausted
        for job in list(self._working_set.jobs.values()) if exhausted else ():
            if not job.ended and not job.over_limit and self._holds_slices(job.id):
                self._stop(job, budgets.budget_limit(job, exhausted))

    def _uses(self, now: datetime) -> list[BudgetUse]:
        @cache
        def rows_since(since: datetime | None) -> Sequence[CostRow] | None:
            with _logged(f"adding up what was spent since {since or 'the beginning'}"):
                return self._spent_since(since, now)
            return None

        users = [user.name for user in self._store.users()]
        uses = budgets.usage(self._budgets, rows_since, self._prices, now, users)
        # What cannot be added up now stays as it was.
        uses += [
            use for use in self._working_set.exhausted_budgets if rows_since(use.since) is None
        ]
        current = {use.since for use in uses}
        self._spent = {since: spent for since, spent in self._spent.items() if since in current}
        return uses

    def _spent_since(self, since: datetime | None, now: datetime) -> list[CostRow]:
        """Days that are over are read once, one by one, and only their sums are kept."""
        spent = self._spent.get(since) or self._first(since, now)
        today = now.replace(hour=0, minute=0, second=0, microsecond=0)
        while spent.until < today - SETTLED_AFTER:
            until = min(spent.until + timedelta(days=1), today - SETTLED_AFTER)
            spent = costs.settle(spent, self._billed(spent.until, until, now), until)
        self._spent[since] = spent
        return [*spent.rows, *self._billed(spent.until, now, now)]

    def _first(self, since: datetime | None, now: datetime) -> SettledCosts:
        if since is not None:
            return SettledCosts(until=since)
        settled = self._store.metadata(SETTLED_COSTS)
        if settled is not None:
            return encoding.from_json(settled.encode(), SettledCosts)
        return SettledCosts(until=self._store.first_slice_at() or now)

    def _billed(self, since: datetime, until: datetime, now: datetime) -> list[CostRow]:
        found = self._store.usage(since, until)
        jobs = self._store.find_jobs(found.job_ids)
        return costs.account(found.slices, jobs, found.attempts, now, since=since, until=until)

    def _holds_slices(self, job_id: JobId) -> bool:
        slices = self._working_set.slices
        held = self._working_set.slices_by_job.get(job_id, ())
        return any(slices[slice_id].live for slice_id in held)

    def _stop(self, job: Job, limit: budgets.LimitReached | None) -> None:
        if limit is not None:
            advice = limit.advice.replace("JOB", job.id)
            self._working_set.put_job(replace(job, over_limit=limit.reason, advice=advice))
            self._working_set.dirty_jobs.add(job.id)

    def _rows_of(self, job: Job, now: datetime) -> list[CostRow]:
        """What one job has spent, on slices of its own and of pools."""
        attempts = self._working_set.attempts.get(job.id, [])
        own = self._store.slices(live_only=False, job_id=job.id)
        slices = {tpu_slice.id: tpu_slice for tpu_slice in own}
        for slice_id in {slice_id for attempt in attempts for slice_id in attempt.slices}:
            stored = slices.get(slice_id) or self._store.slice(slice_id)
            if stored is not None:
                slices[slice_id] = stored
        rows = costs.account(slices.values(), {job.id: job}, attempts, now)
        return [row for row in rows if row.job_id == job.id]


@contextmanager
def _logged(activity: str) -> Iterator[None]:
    """A row that cannot be read must not keep other jobs and budgets from being checked."""
    try:
        yield
    except Unreachable:
        raise
    except Exception:
        log.exception(unexpected(activity))
