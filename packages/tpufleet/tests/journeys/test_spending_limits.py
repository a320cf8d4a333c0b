"""Limits on cost: of a job, a user and a pool. A v5litepod-16 (spot) costs 7.68 dollars an hour."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.journeys.simulated_hosts import Program
from tpufleet.model.events import EventKind
from tpufleet.model.fleet.slices import LossReason, SliceId, SliceState
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import JobState
from tpufleet.model.people.budgets import (
    BUDGET_REPORT,
    Budget,
    BudgetPeriod,
    BudgetReport,
    BudgetScope,
)
from tpufleet.model.values.encoding import from_json
from tpufleet.model.values.records import replace
from tpufleet.service.people import settled_costs
from tpufleet.stores.base import ChangeSet, EventQuery

USD_PER_SECOND = 7.68 / 3600
LATE = 30 + 10  # seconds: the interval between two checks, and the way to the hosts


def budget_events(fleet):
    events = fleet.store.events(EventQuery(limit=10_000))
    return [event for event in events if event.kind is EventKind.BUDGET]


@pytest.mark.parametrize(
    "limit", [{"max_cost": 0.5}, {"max_hours": 0.5 / 7.68}], ids=["max_cost", "max_hours"]
)
def test_a_job_stops_at_its_own_limit(fleet, limit):
    job = fleet.submit(Program(steps=3600), **limit)
    fleet.settle(job)
    ended = fleet.job(job)
    assert (ended.state, ended.end_reason) == (JobState.FAILED, EndReason.OVER_BUDGET)
    name = next(iter(limit))
    assert name in ended.reason
    assert ended.advice == f"run `tpu resume {job} --set {name}=…` with a larger limit"
    attempt = fleet.store.attempts(job)[-1]
    ran = (attempt.ended_at - attempt.running_at).total_seconds()
    assert 0.5 - LATE * USD_PER_SECOND <= ran * USD_PER_SECOND <= 0.5 + LATE * USD_PER_SECOND
    assert attempt.last_step == attempt.checkpoint_step, "it had time to write a checkpoint"


def test_the_limit_of_a_job_covers_all_of_its_attempts(fleet):
    job = fleet.submit(Program(steps=3600), max_cost=0.5)
    for _ in range(2):
        fleet.until_state(job, JobState.RUNNING)
        fleet.run(60)
        fleet.preempt(job)
        fleet.until(lambda: fleet.job(job).state is not JobState.RUNNING)
    fleet.settle(job)
    attempts = fleet.store.attempts(job)
    spans = [each.ended_at - each.running_at for each in attempts if each.running_at]
    ran = sum(spans, timedelta(0)).total_seconds()
    assert len(attempts) == 3 and ran * USD_PER_SECOND <= 0.5 + LATE * USD_PER_SECOND


def test_a_job_within_its_limits_finishes(fleet):
    job = fleet.submit(Program(steps=60), max_cost=5, max_hours=1)
    fleet.settle(job)
    assert fleet.job(job).state is JobState.SUCCEEDED


def test_a_job_does_not_pay_for_the_time_before_it_got_a_slice_of_a_pool(fleet):
    fleet.put_pool(name="lab", largest=1, smallest=1)
    earlier = fleet.submit(Program(steps=900), pool="lab")
    fleet.settle(earlier)
    fleet.run(600)  # idle
    job = fleet.submit(Program(steps=60), pool="lab", max_hours=0.1)
    fleet.settle(job)
    assert fleet.job(job).state is JobState.SUCCEEDED


def test_a_user_without_money_left_waits_and_others_run(make_fleet):
    ann = Budget(scope=BudgetScope.USER, name="ann", usd=0.5, period=BudgetPeriod.DAY)
    fleet = make_fleet(budgets=[ann])
    long = fleet.submit(Program(steps=3600))
    fleet.until(lambda: fleet.job(long).ended, 600)
    assert fleet.job(long).end_reason is EndReason.OVER_BUDGET
    percents = [event.data["percent"] for event in budget_events(fleet)]
    assert percents == ["80", "100"]
    assert "budget of user ann: $0.5" in budget_events(fleet)[-1].message
    held, other = fleet.submit(), fleet.submit(owner="bob")
    fleet.settle(other)
    assert fleet.job(other).state is JobState.SUCCEEDED
    assert fleet.job(held).state is JobState.QUEUED
    assert "budget of user ann" in fleet.job(held).reason and "$0.50" in fleet.job(held).reason
    fleet.restart_controller()
    fleet.run(60)
    assert len(budget_events(fleet)) == 2, "an alert is recorded once in a period"
    assert fleet.job(held).state is JobState.QUEUED


def test_a_new_period_releases_the_jobs_that_waited(make_fleet):
    every = Budget(scope=BudgetScope.USER, name="*", usd=0.2, period=BudgetPeriod.DAY)
    fleet = make_fleet(budgets=[every])
    fleet.until(lambda: True)
    fleet.submit(Program(steps=3600))
    fleet.run(300)
    held = fleet.submit()
    fleet.run(60)
    assert fleet.job(held).state is JobState.QUEUED
    fleet.clock.advance(timedelta(days=1))
    fleet.settle(held)
    assert fleet.job(held).state is JobState.SUCCEEDED


def test_a_pool_without_money_left_takes_no_more_jobs(make_fleet):
    fleet = make_fleet(budgets=[Budget(scope=BudgetScope.POOL, name="lab", usd=0.3)])
    fleet.put_pool(name="lab", largest=1, idle_after=timedelta(seconds=30))
    first = fleet.submit(Program(steps=3600), pool="lab")
    second, elsewhere = fleet.submit(pool="lab"), fleet.submit()
    fleet.until(lambda: fleet.job(first).ended, 600)
    fleet.settle(elsewhere)
    assert fleet.job(first).end_reason is EndReason.OVER_BUDGET
    assert "budget of pool lab" in fleet.job(second).reason
    assert fleet.job(elsewhere).state is JobState.SUCCEEDED
    fleet.until(lambda: fleet.cloud.existing() == [], 200)


def test_budgets_that_were_removed_are_no_longer_reported(make_fleet):
    fleet = make_fleet(budgets=[Budget(scope=BudgetScope.USER, name="ann", usd=100)])
    job = fleet.submit(Program(steps=60))
    fleet.settle(job)
    assert "ann" in fleet.store.metadata(BUDGET_REPORT)
    fleet.restart_controller(budgets=())
    fleet.run(60)
    report = from_json(fleet.store.metadata(BUDGET_REPORT).encode(), BudgetReport)
    assert report.budgets == ()


def test_a_budget_for_all_time_counts_months_that_are_over(make_fleet):
    total = Budget(scope=BudgetScope.USER, name="ann", usd=1.0, period=BudgetPeriod.TOTAL)
    fleet = make_fleet(budgets=[total])
    first = fleet.submit(Program(steps=300))
    fleet.settle(first)
    fleet.run(60)  # its slice is released
    spent = _spent(fleet)
    assert spent == pytest.approx(300 * USD_PER_SECOND, rel=0.2)
    for _ in range(3):
        fleet.clock.advance(timedelta(days=40))
        fleet.run(60)
    assert _spent(fleet) == pytest.approx(spent)
    settled = settled_costs.settle(fleet.store, fleet.clock.now())
    assert settled is not None and sum(row.chip_hours for row in settled.rows) > 0
    fleet.restart_controller(budgets=[total])
    fleet.run(60)
    assert _spent(fleet) == pytest.approx(spent)
    second = fleet.submit(Program(steps=3600))
    fleet.until(lambda: fleet.job(second).ended, 1200)
    assert fleet.job(second).end_reason is EndReason.OVER_BUDGET
    assert _spent(fleet) == pytest.approx(1.0, abs=2 * LATE * USD_PER_SECOND)


def _spent(fleet) -> float:
    report = from_json(fleet.store.metadata(BUDGET_REPORT).encode(), BudgetReport)
    return sum(use.spent for use in report.budgets)


def store_unreadable_slice(fleet, job, age):
    """As a later version may leave one: of a type that this one does not know."""
    up = fleet.clock.now() - age
    known = next(each for each in fleet.store.slices(live_only=False) if each.job_id == job)
    unknown = replace(
        known, id=SliceId("unreadable"), accelerator="v99-1", state=SliceState.GONE,
        loss=LossReason.RELEASED, requested_at=up, up_at=up, ready_at=up,
        gone_at=up + timedelta(hours=1),
    )  # fmt: skip
    fleet.store.commit(ChangeSet(slices=[unknown]))


def test_a_row_that_cannot_be_read_stops_no_other_check(make_fleet, caplog):
    ann = Budget(scope=BudgetScope.USER, name="ann", usd=99, period=BudgetPeriod.TOTAL)
    bob = Budget(scope=BudgetScope.USER, name="bob", usd=0.5, period=BudgetPeriod.DAY)
    fleet = make_fleet(budgets=[ann, bob])
    unreadable = fleet.submit(Program(steps=3600), max_cost=0.2)
    fleet.until_state(unreadable, JobState.RUNNING)
    store_unreadable_slice(fleet, unreadable, timedelta(days=3))
    fleet.restart_controller()
    limited, of_bob = fleet.submit(Program(steps=3600), max_cost=0.3), fleet.submit(owner="bob")
    fleet.until(lambda: fleet.job(limited).ended, 600)
    assert fleet.job(limited).end_reason is EndReason.OVER_BUDGET
    assert fleet.job(of_bob).state is JobState.SUCCEEDED
    assert fleet.job(unreadable).state is JobState.RUNNING, "nobody knows what it cost"
    report = from_json(fleet.store.metadata(BUDGET_REPORT), BudgetReport)
    assert [use.name for use in report.budgets] == ["bob"]
    assert "v99-1" in caplog.text
