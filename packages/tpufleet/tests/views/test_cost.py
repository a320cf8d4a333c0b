"""`tpu cost`, as users type it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tests.polling import wait_until
from tests.service.harness import ServiceHarness
from tests.views.cli_runner import Tpu
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.people.costs import SETTLED_COSTS, CostRow, SettledCosts
from tpufleet.model.values.encoding import to_json


@pytest.fixture
def used(world: ServiceHarness) -> ServiceHarness:
    """A slice of 16 chips, for four hours."""
    wait_until(lambda: world.store.metadata(SETTLED_COSTS))  # by the housekeeping at the start
    start = world.clock.now()
    world.submit("job-1", name="train")
    world.add_slice("s-1", "job-1", up_at=start, ready_at=start, assigned_at=start)
    world.clock.advance(timedelta(hours=4))
    return world


def test_costs_are_limited_to_a_date_or_a_time_ago(used: ServiceHarness, tpu: Tpu):
    hours = lambda *args: [row["chip_hours"] for row in tpu.json("cost", *args)["rows"]]
    three = used.clock.now() - timedelta(hours=3)
    assert hours() == [64]
    for written in (three.isoformat(), f"{three:%Y-%m-%dT%H:%M}"):
        assert hours("--since", written) == [48]
    ago = datetime.now(UTC) - used.clock.now() + timedelta(hours=1)
    assert hours("--since", f"{int(ago.total_seconds())}s") == [pytest.approx(16, abs=1)]
    assert "nothing was billed since then" in tpu("cost", "--since", "2999-01-01").stderr


def test_what_was_useful_is_not_known_of_a_running_program_without_steps(
    used: ServiceHarness, tpu: Tpu
):
    start = used.clock.now()
    used.add_attempt("job-1", 0, "s-1", running_at=start)
    used.clock.advance(timedelta(hours=8))
    assert "not known" in tpu.ok("cost")


def test_months_that_are_settled_are_shown_by_user(used: ServiceHarness, tpu: Tpu):
    earlier = CostRow(
        job_id=None,
        job_name="",
        owner="mo",
        pool=None,
        accelerator="v4-8",
        capacity=Capacity.SPOT,
        slices=3,
        chip_hours=12.0,
        useful=8.0,
    )
    settled = SettledCosts(until=used.clock.now() - timedelta(hours=4), rows=(earlier,))
    used.store.put_metadata(SETTLED_COSTS, to_json(settled).decode())
    shown = tpu.ok("cost")
    assert "job-1 (train)" in shown and "(earlier jobs of mo)" in shown
    rows = tpu.json("cost", "--by", "user")["rows"]
    assert {row["label"]: row["chip_hours"] for row in rows} == {"mel": 64, "mo": 12}


@pytest.mark.parametrize("written", ["tomorrow", "none", "2026-13-01", "-3d", "99999d"])
def test_a_moment_that_is_none_is_explained_before_the_server_is_asked(alone: Tpu, written: str):
    refused = alone("cost", "--since", written)
    assert refused.exit_code != 0
    assert refused.stderr.startswith("error: --since: ")
    assert "or a date such as 2026-01-31" in refused.stderr


def test_a_month_is_not_a_minute(alone: Tpu):
    assert "for example 1m for a minute, 30d for a month" in alone("cost", "--since", "1M").stderr
