"""Fault plans: reproducible by seed, with precise errors."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tpufleet.clocks import ManualClock
from tpufleet.errors import BadInput, NoCapacity
from tpufleet.model.fleet.cloud_slices import CloudState
from tpufleet.model.fleet.hosts import NoticeKind
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity
from tpufleet.providers.base import Fault, Order
from tpufleet.providers.local import fault_plan, processes
from tpufleet.providers.local.provider import LocalProvider

PLAN = {
    "seed": 7,
    "preempt_every": 100,
    "notice_share": 0.5,
    "kill_host_every": 120,
    "slow_boot": [2, 9],
    "partial_boot": 0.3,
}


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for root in tmp_path.iterdir():
        LocalProvider(root).release_all()
        assert processes.leftovers(root) == []


def order(name: str, zone: str = "us-central1-a") -> Order:
    return Order(
        id=f"order-{name}",
        slices=(SliceId(name),),
        accelerator="v5litepod-16",
        zone=zone,
        capacity=Capacity.SPOT,
        tokens={SliceId(name): "token"},
        server_url="http://127.0.0.1:1",
        fleet="test",
    )


def history(root: Path, prefix: str, seed: int) -> list[list[tuple]]:
    """The states of five slices every 20 seconds."""
    clock = ManualClock()
    plan = fault_plan.parse({**PLAN, "seed": seed})
    provider = LocalProvider(root, clock=clock, agent=("sleep", "1000"), plan=plan)
    for number in range(5):
        provider.request(order(f"{prefix}{number}"))
    seen = []
    for _ in range(10):
        clock.advance(timedelta(seconds=20))
        provider.advance()
        seen.append([(s.state, s.lost_hosts, s.notice) for s in provider.listing()])
    return seen


def test_the_same_seed_gives_the_same_faults_at_the_same_times(folders):
    first = history(folders / "one", "x", seed=7)
    assert first == history(folders / "two", "other-name-", seed=7)
    assert first != history(folders / "three", "x", seed=8)
    states = {state for row in first for state, _, _ in row}
    assert {CloudState.UP, CloudState.PREEMPTED} <= states


def test_changing_one_rate_does_not_change_other_faults():
    base = fault_plan.parse({"seed": 3, "preempt_every": 100})
    extended = fault_plan.parse({"seed": 3, "preempt_every": 100, "kill_host_every": 50})
    for number in range(20):
        kept = [f for f in extended.schedule_for(number, 4).faults if f.fault is Fault.PREEMPT]
        assert kept == list(base.schedule_for(number, 4).faults)


def test_mean_times_and_shares_match_the_plan():
    plan = fault_plan.parse(PLAN)
    schedules = [plan.schedule_for(number, 4) for number in range(2000)]
    taken = [
        planned
        for schedule in schedules
        for planned in schedule.faults
        if planned.fault in (Fault.PREEMPT, Fault.PREEMPT_NOTICE)
    ]
    mean = sum(planned.after.total_seconds() for planned in taken) / len(taken)
    announced = sum(planned.fault is Fault.PREEMPT_NOTICE for planned in taken) / len(taken)
    assert 90 < mean < 110
    assert 0.45 < announced < 0.55
    assert 0.25 < sum(bool(schedule.missing) for schedule in schedules) / len(schedules) < 0.35
    boots = [schedule.boot_time.total_seconds() for schedule in schedules]
    assert 2 <= min(boots) < 2.5
    assert 8.5 < max(boots) <= 9


def test_a_slice_is_creating_during_a_slow_boot(folders):
    clock = ManualClock()
    plan = fault_plan.parse({"slow_boot": [10, 10]})
    provider = LocalProvider(folders / "root", clock=clock, agent=("sleep", "1000"), plan=plan)
    provider.request(order("a"))
    clock.advance(timedelta(seconds=9))
    provider.advance()
    assert provider.listing()[0].state is CloudState.CREATING
    clock.advance(timedelta(seconds=1))
    provider.advance()
    assert provider.listing()[0].state is CloudState.UP


def test_the_provider_does_not_see_a_host_missing_after_a_partial_boot(folders):
    plan = fault_plan.parse({"partial_boot": 1})
    provider = LocalProvider(folders / "root", agent=("sleep", "1000"), plan=plan)
    provider.request(order("a"))
    provider.advance()
    assert provider.listing()[0].state is CloudState.UP
    assert provider.listing()[0].lost_hosts == ()
    assert len(processes.leftovers(folders / "root")) == 3


def test_a_zone_is_out_of_stock_in_its_window_only(folders):
    clock = ManualClock()
    plan = fault_plan.parse({"out_of_stock": [{"zone": "us-*", "until": 120}]})
    provider = LocalProvider(folders / "root", clock=clock, agent=("sleep", "1000"), plan=plan)
    with pytest.raises(NoCapacity, match="us-central1-a"):
        provider.request(order("a"))
    provider.request(order("b", zone="europe-west4-b"))
    clock.advance(timedelta(seconds=119))
    with pytest.raises(NoCapacity):
        provider.request(order("a"))
    clock.advance(timedelta(seconds=1))
    provider.request(order("a"))
    assert len(provider.listing()) == 2


def test_planned_faults_happen_once_even_across_server_restarts(folders):
    clock = ManualClock()
    script = [
        {"slice": 0, "after": 5, "fault": "kill-host", "host": 3},
        {"slice": 0, "after": 10, "fault": "preempt-notice"},
        {"slice": 0, "after": 15, "fault": "stall-host", "host": 3},
    ]
    plan = fault_plan.parse({"script": script})

    def server() -> LocalProvider:
        return LocalProvider(folders / "root", clock=clock, agent=("sleep", "1000"), plan=plan)

    def seen() -> tuple:
        (found,) = server().listing()
        return found.state, found.lost_hosts, found.notice

    server().request(order("a"))
    server().advance()
    assert seen() == (CloudState.UP, (), None)
    clock.advance(timedelta(seconds=5))
    server().advance()
    assert seen() == (CloudState.UP, (3,), None)
    clock.advance(timedelta(seconds=10))
    server().advance()  # a dead host cannot stall; the plan continues
    assert seen() == (CloudState.UP, (3,), NoticeKind.PREEMPTED)
    clock.advance(timedelta(seconds=30))
    server().advance()
    assert seen() == (CloudState.PREEMPTED, (), NoticeKind.PREEMPTED)


def test_a_plan_is_read_from_yaml(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text("seed: 3\npreempt_every: 60\nout_of_stock:\n  - {zone: us-*, from: 5}\n")
    plan = fault_plan.load(file)
    assert plan.preempt_every == timedelta(minutes=1)
    assert plan.in_stock("us-central1-a", timedelta(seconds=4))
    assert not plan.in_stock("us-central1-a", timedelta(days=400))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        pytest.param({"preempt_evry": 3}, "did you mean preempt_every", id="typo"),
        pytest.param({"partial_boot": 2}, "partial_boot", id="share above one"),
        pytest.param({"preempt_every": 0}, "more than 0", id="no rate at all"),
        pytest.param({"slow_boot": 5}, "shortest, longest", id="no range"),
        pytest.param({"slow_boot": [5, 1]}, "shortest, longest", id="range backwards"),
        pytest.param({"seed": "x"}, "seed", id="seed"),
        pytest.param({"script": [{"fault": "explode"}]}, "preempt-notice", id="fault"),
        pytest.param({"out_of_stock": [{"zones": "x"}]}, "did you mean zone", id="nested typo"),
        pytest.param({"script": {"slice": 0}}, "script.fault: required", id="no fault"),
    ],
)
def test_an_invalid_plan_names_the_field_and_a_fix(plan, message):
    with pytest.raises(BadInput, match=message):
        fault_plan.parse(plan)
