"""`tpu queue`, as users and admins type it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.service.harness import ServiceHarness
from tests.views.cli_runner import Tpu
from tests.views.job_scenarios import cancelled
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.fleet.reservations import Reservation
from tpufleet.model.fleet.server_status import CONTROLLER_REPORT, ControllerReport
from tpufleet.model.inbox import InboxMessageKind
from tpufleet.model.job.jobs import JobState
from tpufleet.model.people.budgets import (
    BUDGET_REPORT,
    BudgetPeriod,
    BudgetReport,
    BudgetScope,
    BudgetUse,
)
from tpufleet.model.values.encoding import to_json
from tpufleet.policy.accounting import budgets
from tpufleet.policy.scheduling.fair_share import LEDGER_NAME, UsageLedger
from tpufleet.stores.base import ChangeSet


@pytest.fixture
def pool(world: ServiceHarness) -> str:
    lab = Pool(name="lab", provider="local", accelerator="v5litepod-16", largest=1)
    world.store.commit(ChangeSet(pools=[lab]))
    return "lab"


def submit(world: ServiceHarness, *jobs: str, by: str = "mel", **spec) -> None:
    for job in jobs:
        world.clock.advance(timedelta(seconds=1))
        world.submit(job, by=by, name=job, **spec)


def order(tpu: Tpu, *options: str) -> list[str]:
    return [entry["job"]["name"] for entry in tpu.json("queue", *options)["queue"]]


def test_a_job_is_behind_a_running_one_until_its_time_limit(world, tpu: Tpu, pool):
    submit(world, "first", by="ada", pool=pool, timeout="2h", grace="0s")
    world.add_slice("s-1", "first", pool=pool)
    world.change_job("first", state=JobState.STARTING)
    world.add_attempt("first", 0, "s-1", running_at=world.clock.now())
    world.change_job("first", state=JobState.RUNNING)
    submit(world, "second", "third", pool=pool, timeout="1h", grace="0s")
    second, third = tpu.json("queue")["queue"]
    assert (second["position"], second["behind"]) == (1, "ada/first")
    assert (third["position"], third["behind"]) == (2, "mel/second")
    assert second["behind_until"] == second["earliest_start"] < third["earliest_start"]
    assert "waits for ada/first until" in tpu.ok("queue")
    explained = tpu.json("why", "third")
    assert explained["until"] == third["earliest_start"]
    assert any("1 job ahead" in each and "at the latest" in each for each in explained["details"])


def test_a_job_without_the_reservation_that_it_requires_has_no_start(world, tpu: Tpu, pool):
    submit(world, "needs", pool=pool, require_reservation=True)
    submit(world, "next", pool=pool)
    starts = {each["job"]["name"]: each["earliest_start"] for each in tpu.json("queue")["queue"]}
    assert starts["needs"] is None and starts["next"] is not None


def test_a_job_starts_after_the_reservation_of_another_user_everywhere(world, tpu, admin, pool):
    world.add_slice("s-1", None, pool=pool)
    admin.ok("reserve", pool, "--for", "1h")
    submit(world, "next", pool=pool, timeout="30m")
    ends = world.store.documents(Reservation)[0].ends_at.isoformat().replace("+00:00", "Z")
    (entry,) = tpu.json("queue")["queue"]
    assert entry["earliest_start"] == ends
    assert tpu.json("why", "next")["until"] == ends


def test_a_spent_budget_keeps_a_job_from_starting_now(world, tpu, pool):
    world.add_slice("s-1", None, pool=pool)
    spent = BudgetUse(
        scope=BudgetScope.USER, name="mel", usd=1, period=BudgetPeriod.TOTAL, spent=2, since=None
    )
    submit(world, "next", pool=pool)
    assert tpu.json("queue")["queue"][0]["earliest_start"] is not None
    report = BudgetReport(budgets=(spent,), now=world.clock.now())
    world.store.put_metadata(BUDGET_REPORT, to_json(report).decode())
    assert tpu.json("queue")["queue"][0]["earliest_start"] is None


def test_a_job_that_may_start_next_month_leaves_its_slice_to_the_next(world, tpu, pool):
    world.add_slice("s-1", None, pool=pool)
    now = world.clock.now()
    spent = BudgetUse(
        scope=BudgetScope.USER, name="ada", usd=1, period=BudgetPeriod.MONTH, spent=2, since=now
    )
    report = BudgetReport(budgets=(spent,), now=now)
    world.store.put_metadata(BUDGET_REPORT, to_json(report).decode())
    submit(world, "first", by="ada", pool=pool, timeout="1h")
    submit(world, "next", pool=pool, timeout="1h")
    first, following = world.client().queue()
    assert following.earliest_start == world.clock.now() and following.behind is None
    assert first.earliest_start == budgets.period_end(BudgetPeriod.MONTH, now)
    assert tpu.json("why", "next")["until"] == tpu.json("queue")["queue"][1]["earliest_start"]


@pytest.mark.parametrize("limit", ["pool", "server"])
def test_a_job_over_the_quota_of_its_owner_waits_for_a_job_of_theirs(world, limit):
    quota = {limit: 1}
    lab = Pool(
        name="lab", provider="local", accelerator="v5litepod-16", largest=2,
        slices_per_user=quota.get("pool"),
    )  # fmt: skip
    world.store.commit(ChangeSet(pools=[lab]))
    report = ControllerReport(
        holder="one", leader_since=world.clock.now(), reported_at=world.clock.now(),
        slices_per_user=quota.get("server"),
    )  # fmt: skip
    world.store.put_metadata(CONTROLLER_REPORT, to_json(report).decode())
    submit(world, "runs", pool="lab", timeout="2h", grace="0s")
    world.add_slice("s-1", "runs", pool="lab")
    began = world.clock.now()
    world.add_attempt("runs", 0, "s-1", running_at=began)
    world.change_job("runs", state=JobState.RUNNING)
    submit(world, "more", pool="lab")
    submit(world, "other", by="ada", pool="lab")
    starts = {each.job.name: each.earliest_start for each in world.client().queue()}
    assert starts == {"more": began + timedelta(hours=2), "other": world.clock.now()}


def test_own_jobs_are_reordered_but_not_ahead_of_others(world, tpu: Tpu, admin: Tpu, pool):
    submit(world, "hers", by="ada", pool=pool)
    submit(world, "a", "b", "c", pool=pool)
    tpu.ok("queue", "move", "c", "--before", "a")
    assert order(tpu) == ["hers", "c", "a", "b"]
    refused = tpu("queue", "move", "b", "--first")
    assert refused.exit_code != 0 and "ahead of ada/hers" in refused.stderr
    admin.ok("queue", "run-now", "mel/b")
    assert order(tpu) == ["b", "hers", "c", "a"]
    tpu.ok("queue", "move", "b", "--last")
    assert order(tpu) == ["hers", "c", "a", "b"]
    assert order(tpu, "--mine") == ["c", "a", "b"]
    assert "pass one of" in tpu("queue", "move", "b").stderr
    assert "ahead of itself" in tpu("queue", "move", "b", "--before", "b").stderr
    assert "belongs to ada" in tpu("queue", "move", "ada/hers", "--last").stderr


def test_a_held_job_has_no_position(world, tpu: Tpu, admin: Tpu, pool):
    submit(world, "a", "b", pool=pool)
    tpu.ok("queue", "hold", "a")
    held, next_one = tpu.json("queue")["queue"]
    assert (held["job"]["held_by"], held["position"], next_one["position"]) == ("mel", None, 1)
    assert "held" in tpu.ok("queue")
    tpu.ok("queue", "release", "a")
    assert [entry["position"] for entry in tpu.json("queue")["queue"]] == [1, 2]
    admin.ok("queue", "hold", "mel/a")
    assert "which ada holds, requires the admin role" in tpu("queue", "release", "a").stderr


def test_a_waiting_job_is_tried_again_by_its_owner(world, tpu: Tpu, admin: Tpu, pool):
    submit(world, "hers", by="ada", pool=pool)
    submit(world, "a", pool=pool)
    assert tpu.ok("queue", "retry", "a").endswith("): trying again\n")
    kinds = [message.kind for message in world.store.inbox(0) if message.job_id == "a"]
    assert kinds[-1] is InboxMessageKind.RETRY
    assert "mel asked to try again now" in tpu.ok("events", "a")
    assert "belongs to ada" in tpu("queue", "retry", "ada/hers").stderr
    world.change_job("a", state=JobState.STARTING)
    assert tpu.ok("queue", "retry", "a").endswith("): starting\n")
    world.change_job("a", state=JobState.FAILED)
    assert "next: `tpu resume a` makes a new one" in tpu("queue", "retry", "a").stderr


def test_a_running_job_cannot_be_held(world, tpu: Tpu, pool):
    submit(world, "a", pool=pool)
    world.change_job("a", state=JobState.STARTING)
    world.change_job("a", state=JobState.RUNNING)
    refused = tpu("queue", "hold", "a")
    assert refused.exit_code != 0
    assert "job a is running" in refused.stderr
    assert tpu.json("show", "a")["job"]["held_by"] is None


def test_users_with_less_usage_go_first(world, tpu: Tpu, pool):
    submit(world, "mine", pool=pool)
    submit(world, "hers", by="ada", pool=pool)
    ledger = UsageLedger(at=world.clock.now(), usage={"mel": 100 * 3600.0})
    world.store.put_metadata(LEDGER_NAME, to_json(ledger).decode())
    assert order(tpu) == ["hers", "mine"]
    assert {entry["owner_chip_hours"] for entry in tpu.json("queue")["queue"]} == {0, 100}


def test_remove_cancels(world, tpu: Tpu, pool):
    submit(world, "a", pool=pool)
    assert "cancel" in tpu.ok("cancel", "--waiting", "a")
    assert tpu("cancel", "--waiting", "b").exit_code != 0


def test_only_waiting_jobs_of_the_caller_are_removed(world, tpu: Tpu, pool):
    submit(world, "waits", pool=pool)
    submit(world, "hers", by="mo", pool=pool)
    submit(world, "runs", pool=pool)
    world.change_job("runs", state=JobState.RUNNING)
    assert " waits (" in tpu.ok("queue", "remove", "--all", "--yes")
    assert [name for name in ("waits", "hers", "runs") if cancelled(world, name)] == ["waits"]
    refused = tpu("cancel", "--waiting", "runs")
    assert refused.exit_code != 0 and "`tpu cancel runs` ends it" in refused.stderr
    assert tpu("cancel", "--waiting", "hers").exit_code != 0


def test_queues_are_filtered(world, tpu: Tpu, pool):
    submit(world, "a", pool=pool)
    submit(world, "b", accelerator="v4-8", zones=["us-central2-b"])
    assert order(tpu, "--pool", "lab") == ["a"]
    assert order(tpu, "--user", "me") == order(tpu) and order(tpu, "--user", "ada") == []
    assert "no pool named 'lap'" in tpu("queue", "--pool", "lap").stderr
