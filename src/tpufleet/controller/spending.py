"""Watches what jobs, users and pools spend, and stops what is over its limit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import cache

from tpufleet.controller.placement_inputs import ControllerSettings
from tpufleet.controller.working_set import WorkingSet
from tpufleet.model import encoding
from tpufleet.model.attempts import Attempt
from tpufleet.model.budgets import BUDGET_REPORT, BudgetReport, BudgetUse
from tpufleet.model.costs import CostRow
from tpufleet.model.jobs import Job, JobId
from tpufleet.model.records import replace
from tpufleet.policy import budgets, costs
from tpufleet.stores.base import JobQuery, Store

# At a dollar per chip hour, a v5e-256 spends about 2 dollars between two checks.
CHECK_INTERVAL = timedelta(seconds=30)
# Name in the store's metadata of the alerts that were recorded as events.
BUDGET_ALERTS = "budget_alerts"
PAGE_SIZE = 1000


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
        # Every job that may have used a slice; those that ended are read once.
        self._jobs: dict[JobId, Job] = {}
        self._attempts: dict[JobId, Sequence[Attempt]] = {}

    def check(self, now: datetime) -> None:
        if self._checked_at is not None and now - self._checked_at < CHECK_INTERVAL:
            return
        self._checked_at = now
        for job in list(self._working_set.jobs.values()):
            limited = job.spec.max_cost is not None or job.spec.max_hours is not None
            if limited and not job.ended and not job.over_limit:
                rows = self._rows_of(job, now)
                self._stop(job, budgets.job_limit(job.spec, rows, self._prices))
        if self._budgets:
            self._check_budgets(now)
        elif self._left_from_before:  # budgets were removed from the configuration
            self._report, self._known = BudgetReport(budgets=(), now=now), set()
            self._left_from_before = False

    def next_check_at(self) -> datetime | None:
        limited = self._budgets or any(
            job.spec.max_cost is not None or job.spec.max_hours is not None
            for job in self._working_set.jobs.values()
        )
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
        self._load_jobs()
        slices = self._store.slices(live_only=False)
        attempts = [attempt for found in self._attempts.values() for attempt in found]

        @cache
        def rows_since(since: datetime | None) -> Sequence[CostRow]:
            return costs.account(slices, self._jobs, attempts, now, since=since)

        users = [user.name for user in self._store.users()]
        return budgets.usage(self._budgets, rows_since, self._prices, now, users)

    def _load_jobs(self) -> None:
        """Newest first, until a page holds nothing new."""
        live = [job_id for job_id, job in self._jobs.items() if not job.ended]
        self._jobs |= self._store.find_jobs(live)
        self._attempts |= self._store.attempts_of(live)
        before: JobId | None = None
        while page := self._store.jobs(JobQuery(archived=None, limit=PAGE_SIZE, before=before)):
            new = [job for job in page if job.id not in self._jobs]
            self._jobs |= {job.id: job for job in new}
            self._attempts |= self._store.attempts_of([job.id for job in new])
            before = page[-1].id
            if not new or len(page) < PAGE_SIZE:
                break

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
