"""Costs of months that are over are summed by owner, and nothing of them is lost or counted twice.
A v5litepod-16 has 16 chips."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from tests.polling import wait_until
from tests.service.harness import ServiceHarness
from tpufleet.model.fleet.slices import LossReason, SliceState
from tpufleet.model.job.attempts import AttemptState
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.people.costs import Badput
from tpufleet.service.people import settled_costs
from tpufleet.stores.base import ChangeSet

HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def housekeeping_was_done(service: ServiceHarness) -> None:
    """At the start of the server: nothing was billed yet, and it is not done again."""
    wait_until(lambda: settled_costs.settled_costs(service.store) is not None)


def run_job(service: ServiceHarness, name: str, hours: float, by: str = "mel") -> None:
    """On a slice of its own, which is released at its end."""
    start = service.clock.now()
    service.submit(name, by)
    held = service.add_slice(f"s-{name}", name, up_at=start, ready_at=start, assigned_at=start)
    attempt = service.add_attempt(name, 0, held.id, running_at=start)
    service.clock.advance(hours * HOUR)
    end = service.clock.now()
    service.store.commit(
        ChangeSet(
            slices=[
                replace(
                    held,
                    state=SliceState.GONE,
                    loss=LossReason.RELEASED,
                    lost_at=end,
                    gone_at=end,
                )
            ],
            attempts=[
                replace(
                    attempt,
                    state=AttemptState.ENDED,
                    ended_at=end,
                    end_reason=EndReason.PREEMPTED,
                    start_step=0,
                    checkpoint_step=5,
                    last_step=10,
                )
            ],
        )
    )
    service.end_job(name)


def hours(service: ServiceHarness, since: datetime | None = None) -> Counter[str]:
    totals: Counter[str] = Counter()
    for row in service.client("mel").costs(since).rows:
        totals[row.owner] += round(row.chip_hours, 6)
    return totals


@pytest.fixture
def long_lived(service: ServiceHarness) -> ServiceHarness:
    """January to May: one job each month, and one of February that ran into March."""
    for month in range(1, 6):
        service.clock.advance(datetime(2026, month, 28, 12, tzinfo=UTC) - service.clock.now())
        by = "mel" if month % 2 else "mo"
        run_job(service, f"job-{month}", 24.0 * 5 if month == 2 else 2.0, by)
    service.clock.advance(datetime(2026, 5, 30, tzinfo=UTC) - service.clock.now())
    return service


def test_a_report_sums_earlier_months_by_owner_and_loses_nothing(long_lived: ServiceHarness):
    before, everything = hours(long_lived), long_lived.client("mel").costs()
    assert [row.job_id for row in everything.rows].count(None) == 0 and len(everything.rows) == 5
    settled_costs.settle(long_lived.store, long_lived.clock.now())
    report = long_lived.client("mel").costs()
    assert hours(long_lived) == before == {"mel": 3 * 32, "mo": 16 * 120 + 32}
    assert report.jobs_since == datetime(2026, 4, 1, tzinfo=UTC)
    assert [row.job_id for row in report.rows if row.job_id] == ["job-4", "job-5"]
    assert {row.owner for row in report.rows if row.job_id is None} == {"mel", "mo"}
    for kind in Badput:
        assert sum(row.badput.get(kind, 0.0) for row in report.rows) == pytest.approx(
            sum(row.badput.get(kind, 0.0) for row in everything.rows)
        )


def test_what_was_billed_since_a_moment_is_listed_by_job(long_lived: ServiceHarness):
    settled_costs.settle(long_lived.store, long_lived.clock.now())
    march = datetime(2026, 3, 1, tzinfo=UTC)
    report = long_lived.client("mel").costs(march)
    assert {row.job_id: round(row.chip_hours, 6) for row in report.rows} == {
        "job-2": 16 * (120 - 12),  # it began at noon of 28 February
        "job-3": 32,
        "job-4": 32,
        "job-5": 32,
    }
    assert report.jobs_since == march


def test_settling_again_and_month_by_month_gives_the_same_sums(long_lived: ServiceHarness):
    now = long_lived.clock.now()
    months = [
        settled_costs.settle(long_lived.store, datetime(2026, month, 1, tzinfo=UTC))
        for month in range(2, 6)
    ]
    last = settled_costs.settle(long_lived.store, now)
    assert last == months[-1] == settled_costs.settle(long_lived.store, now)


def test_a_month_is_not_settled_before_its_attempts_have_ended(service: ServiceHarness):
    service.submit("long")
    start = service.clock.now() + timedelta(days=10)
    service.clock.advance(timedelta(days=10))
    service.add_slice("s1", "long", up_at=start, assigned_at=start)
    service.add_attempt("long", 0, "s1", running_at=start)
    service.clock.advance(timedelta(days=100))
    settled = settled_costs.settle(service.store, service.clock.now())
    assert settled is not None and settled.until == start
    assert service.client("mel").costs().rows[0].job_id == "long"
    assert hours(service) == {"mel": 16 * 24 * 100}


def test_without_slices_there_is_nothing_to_settle(service: ServiceHarness):
    settled = settled_costs.settle(service.store, service.clock.now())
    assert settled is not None and settled.rows == ()
    assert service.client("mel").costs().rows == ()


@pytest.mark.parametrize("since", ["yesterday", "2026-13-01", "2026-05-01T00:00:00+99:00", "²"])
def test_a_moment_that_is_none_is_refused(service: ServiceHarness, since: str):
    with service.http(service.tokens["mel"]) as http:
        answer = http.get("/costs", params={"since": since})
    assert answer.status_code == 400
    assert "since: must be a time such as " in answer.text


@pytest.mark.parametrize("since", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-12:00"])
def test_the_first_and_the_last_moment_are_accepted(long_lived: ServiceHarness, since: str):
    moment = datetime.fromisoformat(since)
    expected = {} if moment.year > 2026 else hours(long_lived)
    assert hours(long_lived, moment) == expected
