"""Costs of months that are over, summed by owner: reports and budgets read neither all jobs nor all
slices that there ever were."""

from __future__ import annotations

from datetime import datetime, timedelta

from tpufleet.model.people.costs import SETTLED_COSTS, CostRow, SettledCosts
from tpufleet.model.values import encoding
from tpufleet.policy.accounting import costs
from tpufleet.service.jobs import queries
from tpufleet.stores.base import Store


def settled_costs(store: Store) -> SettledCosts | None:
    text = store.metadata(SETTLED_COSTS)
    return None if text is None else encoding.from_json(text.encode(), SettledCosts)


def settle(store: Store, now: datetime) -> SettledCosts | None:
    """Sum up all months before the last one, as far as all attempts of them have ended. Several
    servers may do this at once: they come to the same sums."""
    settled = settled_costs(store)
    goal = _month(_month(now) - timedelta(days=1))
    while settled is None or settled.until < goal:
        since = settled.until if settled is not None else _first_month(store, goal)
        until = min(_month(since + timedelta(days=32)), goal)
        found = store.usage(since, until)
        running = [attempt.created_at for attempt in found.attempts if attempt.live]
        until = min([until, *running])
        if until <= since and settled is not None:
            return settled  # an attempt of that month is running
        rows = billed(store, since, until, now)
        settled = costs.settle(settled or SettledCosts(until=since), rows, max(since, until))
        store.put_metadata(SETTLED_COSTS, encoding.to_json(settled).decode())
    return settled


def billed(store: Store, since: datetime | None, until: datetime, now: datetime) -> list[CostRow]:
    """By job, between two moments."""
    found = store.usage(since, until)
    jobs = store.find_jobs(found.job_ids)
    reporting = queries.attempts_with_steps(store, found.attempts)
    return costs.account(
        found.slices, jobs, found.attempts, now, reporting, since=since, until=until
    )


def _first_month(store: Store, goal: datetime) -> datetime:
    """In which the first slice was requested."""
    first = store.first_slice_at()
    return goal if first is None else min(_month(first), goal)


def _month(moment: datetime) -> datetime:
    return moment.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
