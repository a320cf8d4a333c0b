"""What was spent of budgets, and when an alert is due."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tpufleet.errors import BadInput
from tpufleet.model.job.job_file import parse_job
from tpufleet.model.job.jobs import Capacity, Job, JobId
from tpufleet.model.people import budgets as model
from tpufleet.model.people.budgets import Budget, BudgetPeriod, BudgetScope, BudgetUse
from tpufleet.model.people.costs import CostRow
from tpufleet.model.tpu import prices
from tpufleet.policy.accounting import budgets

NOW = datetime(2026, 11, 18, 15, 30, tzinfo=UTC)  # a Wednesday
PRICES = prices.price_table({"v5e": {"spot": 0.5, "on-demand": 1.0}})


def row(owner: str = "ann", hours: float = 10, **fields) -> CostRow:
    return CostRow(
        **{
            "job_id": JobId("j"), "job_name": "j", "owner": owner, "pool": None,
            "accelerator": "v5litepod-16", "capacity": Capacity.SPOT, "slices": 1,
            "chip_hours": hours, "useful": hours, **fields,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("period", "start"),
    [
        (BudgetPeriod.DAY, datetime(2026, 11, 18, tzinfo=UTC)),
        (BudgetPeriod.WEEK, datetime(2026, 11, 16, tzinfo=UTC)),
        (BudgetPeriod.MONTH, datetime(2026, 11, 1, tzinfo=UTC)),
        (BudgetPeriod.TOTAL, None),
    ],
)
def test_periods_start_at_midnight_utc(period, start):
    assert budgets.period_start(period, NOW) == start


def test_spending_is_summed_by_user_and_pool():
    rows = [row(), row(capacity=Capacity.ON_DEMAND), row("bob", pool="lab"), row("", pool="lab")]
    configured = [
        Budget(scope=BudgetScope.USER, name="ann", usd=100),
        Budget(scope=BudgetScope.USER, name="*", usd=50),
        Budget(scope=BudgetScope.POOL, name="lab", usd=20),
    ]
    uses = budgets.usage(configured, lambda since: rows, PRICES, NOW, users=["ann", "carol"])
    assert [(use.name, use.spent, use.usd) for use in uses] == [
        ("ann", 15.0, 100), ("bob", 5.0, 50), ("carol", 0.0, 50), ("lab", 10.0, 20),
    ]  # fmt: skip


def use(spent: float, usd: float = 100) -> BudgetUse:
    return BudgetUse(
        scope=BudgetScope.USER, name="ann", usd=usd, period=BudgetPeriod.MONTH, spent=spent,
        since=budgets.period_start(BudgetPeriod.MONTH, NOW),
    )  # fmt: skip


def test_each_share_gives_one_alert_and_the_highest_wins():
    known: set[str] = set()
    found = []
    for spent in (10, 79, 80, 95, 100, 130):
        found += [alert.share for alert in budgets.alerts([use(spent)], known)]
        known |= set(budgets.alert_keys(use(spent)))
    assert found == [0.8, 1.0]
    assert [alert.share for alert in budgets.alerts([use(120)], set())] == [1.0]


def test_a_raised_budget_alerts_again():
    known = set(budgets.alert_keys(use(100)))
    assert [a.share for a in budgets.alerts([use(100, usd=120)], known)] == [0.8]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.00"), (1234.5, "1,234.50"), (0.5, "0.50"), (0.00314, "0.0031"), (0.0123, "0.012")],
)
def test_small_amounts_have_two_significant_digits(value, text):
    assert prices.amount(value) == text


def test_the_estimate_names_price_and_limit():
    spec = parse_job(
        {"command": "x", "accelerator": "v5e-16", "slices": 2, "max_hours": 3, "max_cost": 100}
    )
    found = prices.estimate(spec, PRICES)
    assert (found.chips, found.usd_per_hour, found.limit) == (32, 16.0, 48.0)
    assert prices.estimate(spec, {}).usd_per_hour is None


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"user": {}}, "did you mean users"),
        ({"users": [1]}, "mapping"),
        ({"users": {"ann": "much"}}, r"ann\.usd: must be a number"),
        ({"users": {"ann": -1}}, r"ann\.usd: must be a number"),
        ({"pools": {"lab": {"usd": 5, "period": "year"}}}, "day, week, month, total"),
        ({"pools": {"lab": {"dollars": 5}}}, "usd"),
    ],
)
def test_invalid_budgets_are_rejected(document, message):
    with pytest.raises(BadInput, match=message):
        model.parse(document)


def test_budgets_are_read_from_the_config():
    document = {
        "period": "week",
        "users": {"ann": 5},
        "pools": {"lab": {"usd": 9, "period": "day"}},
    }
    ann, lab = model.parse(document)
    assert (ann.name, ann.usd, ann.period) == ("ann", 5.0, BudgetPeriod.WEEK)
    assert (lab.scope, lab.period) == (BudgetScope.POOL, BudgetPeriod.DAY)


@pytest.mark.parametrize("value", [0, -1, "free", True])
def test_limits_of_a_job_are_positive_numbers(value):
    with pytest.raises(BadInput, match="max_cost"):
        parse_job({"command": "x", "accelerator": "v5e-16", "max_cost": value})


@pytest.mark.parametrize(
    ("period", "until"),
    [
        (BudgetPeriod.DAY, "until 2026-11-19 00:00 UTC, unless an admin"),
        (BudgetPeriod.WEEK, "until 2026-11-23 00:00 UTC, unless an admin"),
        (BudgetPeriod.MONTH, "until 2026-12-01 00:00 UTC, unless an admin"),
        (BudgetPeriod.TOTAL, "no slices until an admin raises `budgets`"),
    ],
)
def test_a_job_that_waits_for_a_budget_says_until_when(period: BudgetPeriod, until: str):
    spec = parse_job({"command": "x", "accelerator": "v5e-4"})
    job = Job(id=JobId("j"), spec=spec, owner="ann", submitted_at=NOW)
    use = BudgetUse(
        scope=BudgetScope.USER, name="ann", usd=1.0, period=period, spent=2.0,
        since=budgets.period_start(period, NOW),
    )  # fmt: skip
    assert until in budgets.hold_reason(job, [use])
