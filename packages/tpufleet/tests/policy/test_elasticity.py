"""When an elastic job starts with fewer slices, and when it takes more."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.policy.builders import (
    MINUTE,
    NOON,
    after,
    ended_attempt,
    make_attempt,
    make_job,
    make_slice,
)
from tests.policy.placement_builders import (
    SOURCES,
    decide,
    free,
    kinds,
    make_pool,
    make_supply,
    occupant,
    refusal,
)
from tpufleet.model.fleet.slices import SliceState
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.spec_types import SliceRange
from tpufleet.policy.recovery import elasticity
from tpufleet.policy.scheduling.placement import PendingJob, RequestSlices
from tpufleet.policy.scheduling.source_choice import RefusalHistory

SPEC = make_job(slices=SliceRange(min=2, max=4)).spec
E = EndReason


def held(*ready_at: float | None):
    """Slices s0, s1, …; None: on its way."""
    return [
        make_slice(
            f"s{index}",
            state=SliceState.READY if at is not None else SliceState.BOOTING,
            ready_at=after(at) if at is not None else None,
        )
        for index, at in enumerate(ready_at)
    ]


@pytest.mark.parametrize(
    ("slices", "used", "until"),
    [
        pytest.param((10, 20, 30, 40), (), None, id="whole"),
        pytest.param((10, 20), (), None, id="no-other-is-on-its-way"),
        pytest.param((10, 20, None), (), 80, id="from-when-there-were-enough"),
        pytest.param((10, 20, 30, None), (), 80, id="not-longer-for-a-third"),
        pytest.param((10, 20, None), ("s0", "s1", "s9"), None, id="enough-are-left"),
        pytest.param((10, 20, None), ("s0", "s9"), 80, id="not-enough-are-left"),
    ],
)
def test_how_long_it_waits_for_slices_on_their_way(slices, used, until):
    attempts = [make_attempt(slices=used)] if used else []
    waits = elasticity.gathers_until(SPEC, held(*slices), attempts)
    assert waits == (None if until is None else after(until))


RUNNING = make_attempt(9, slices=("s0", "s1"), running_at=after(100))


@pytest.mark.parametrize(
    ("slices", "at"),
    [
        pytest.param((0, 0), None, id="it-uses-all-that-it-holds"),
        pytest.param((0, 0, None), None, id="the-third-boots"),
        pytest.param((0, 0, 120), 160, id="it-has-run-for-a-minute"),
        pytest.param((0, 0, 300), 300, id="long-ago"),
        pytest.param((0, 0, 300, None), 360, id="another-one-boots"),
    ],
)
def test_when_it_takes_a_slice_that_is_ready(slices, at):
    grows = elasticity.grows_at(SPEC, [RUNNING], held(*slices))
    assert grows == (None if at is None else after(at))


@pytest.mark.parametrize(
    ("reasons", "minutes"),
    [
        ([], 1),
        ([E.PREEMPTED], 1),
        ([E.PREEMPTED, E.RESIZED], 2),
        ([E.PREEMPTED, E.RESIZED, E.HOST_LOST], 4),
        ([E.USER_ERROR, E.HUNG], 1),
        ([E.PREEMPTED] * 9, 16),
        ([E.PREEMPTED] * 5000, 16),
    ],
    ids=str,
)
def test_each_restart_within_an_hour_makes_it_wait_twice_as_long(reasons, minutes):
    history = [ended_attempt(number, reason) for number, reason in enumerate(reasons)]
    grows = elasticity.grows_at(SPEC, [*history, RUNNING], held(0, 0, 0))
    assert grows == after(100) + minutes * MINUTE


def test_restarts_are_forgotten_after_an_hour():
    history = [ended_attempt(number, E.PREEMPTED) for number in range(5)]
    later = make_attempt(9, slices=("s0",), running_at=NOON + timedelta(hours=2))
    assert elasticity.grows_at(SPEC, [*history, later], held(0, 0)) == later.running_at + MINUTE


def test_a_crash_does_not_hide_why_it_has_fewer_slices():
    history = [
        ended_attempt(0, E.PREEMPTED, slices=("s0", "s1", "s2")),
        ended_attempt(1, E.USER_ERROR, slices=("s0", "s1")),
        make_attempt(2, slices=("s0", "s1")),
    ]
    assert elasticity.cause(history) == "ended by preempted"
    assert elasticity.cause(history[1:]) == "no more were ready when it started"


@pytest.mark.parametrize(("holds", "missing"), [(0, 2), (1, 1), (2, 2), (3, 1), (4, 0)])
def test_what_it_cannot_run_without_comes_first(holds, missing):
    assert elasticity.missing(SPEC, holds) == missing


# Placement.


def elastic(missing=2, *, optional=True, pool: str | None = "lab", order=0):
    job = make_job("elastic", slices=SliceRange(min=2, max=4), pool=pool, submitted_at=after(order))
    return PendingJob(
        job=job,
        missing=missing,
        optional=optional,
        sources=SOURCES,
        held_source=SOURCES[0] if optional else None,
    )


def wants(name, missing=1):
    job = make_job(name, slices=missing, pool="lab", submitted_at=after(500))
    return PendingJob(job=job, missing=missing, sources=SOURCES)


def test_more_slices_are_what_other_jobs_leave():
    supply = make_supply(make_pool(), free("a", "b"), [occupant("elastic", 2)])
    decisions = decide([elastic(), wants("later")], supply)
    assert [(each.job_id, each.slices) for each in decisions[:2]] == [
        ("later", ("a",)),
        ("elastic", ("b",)),
    ]


def test_more_slices_never_stop_or_block_another_job():
    supply = make_supply(make_pool(supersede=True), (), [occupant("low", 2, priority=-5)])
    supply_full = make_supply(make_pool(largest=2, supersede=True), (), [occupant("low", 2)])
    for each in (supply, supply_full):
        assert "Supersede" not in [kind for _, kind in kinds(decide([elastic()], each))]


def test_a_refusal_never_releases_what_it_runs_on():
    refusals = RefusalHistory([refusal()])
    assert kinds(decide([elastic(pool=None)], refusals=refusals)) == [("elastic", "Wait")]


def test_a_new_elastic_job_asks_for_what_it_needs_together_and_for_the_rest_one_by_one():
    decisions = decide([elastic(2, optional=False, pool=None)])
    assert [each.count for each in decisions if isinstance(each, RequestSlices)] == [2, 1, 1]


def test_a_new_elastic_job_gets_all_free_slices_of_its_pool_at_once():
    supply = make_supply(make_pool(), free("a", "b", "c"))
    decisions = decide([elastic(2, optional=False)], supply)
    assert kinds(decisions) == [
        ("elastic", "AssignSlices"), ("elastic", "AssignSlices"), ("elastic", "RequestSlices"),
    ]  # fmt: skip
