"""Placement: gangs are all-or-nothing, in order, within every limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.policy.builders import MINUTE, NOON, after
from tests.policy.placement_builders import (
    SOURCES,
    TYPE,
    decide,
    free,
    kinds,
    make_pending,
    make_pool,
    make_supply,
    occupant,
    refusal,
)
from tpufleet.model.job.jobs import Capacity
from tpufleet.policy.scheduling import placement
from tpufleet.policy.scheduling.placement import ReleaseGang, RequestSlices, Supersede, Supply, Wait
from tpufleet.policy.scheduling.source_choice import CapacitySource, RefusalHistory


def test_a_job_without_a_pool_requests_from_the_first_open_source():
    [request] = decide([make_pending("a", 2, pool=None)], refusals=RefusalHistory([refusal()]))
    assert (request.source, request.count, request.pool) == (SOURCES[1], 2, None)


def test_a_partial_gang_is_released_where_the_rest_is_unavailable():
    [decision] = decide(
        [make_pending("a", 1, pool=None, held=1)], refusals=RefusalHistory([refusal()])
    )
    assert isinstance(decision, ReleaseGang) and "z1" in decision.reason


def test_the_rest_of_a_gang_is_requested_where_it_holds_the_first_part():
    pending_job = replace(make_pending("a", 1, pool=None, held=1), held_source=SOURCES[1])
    [request] = decide([pending_job])
    assert request.source == SOURCES[1]


def test_pending_requests_per_source_are_limited_in_order():
    nearly = {(SOURCES[0], TYPE): placement.MAX_PENDING_REQUESTS - 1}
    pending = [make_pending("a", 2, pool=None, order=1), make_pending("b", 1, pool=None, order=2)]
    assert kinds(decide(pending, Supply(pending_requests=nearly))) == [("a", "Wait"), ("b", "Wait")]
    [big] = decide([make_pending("a", placement.MAX_PENDING_REQUESTS + 5, pool=None)])
    assert big.count == placement.MAX_PENDING_REQUESTS + 5, (
        "a gang larger than that is asked for alone"
    )


def expired(source=SOURCES[0]):
    """A refusal that was long enough ago to try again."""
    known = refusal(source)
    length = known.until - known.refused_at
    return replace(known, refused_at=NOON - 2 * length, until=NOON - length)


def test_a_source_that_refused_is_tried_with_few_requests_at_first():
    waiting = [make_pending(f"j{number:02}", 1, pool=None, order=number) for number in range(50)]
    waiting = [replace(each, sources=SOURCES[:1]) for each in waiting]
    tried = decide(waiting, refusals=RefusalHistory([expired()]))
    assert [type(each) for each in tried] == [RequestSlices] * 8 + [Wait] * 42
    assert "queued behind pending requests in" in tried[-1].reason
    pending = Supply(pending_requests={(SOURCES[0], TYPE): 8})
    assert {type(each) for each in decide(waiting, pending, RefusalHistory([expired()]))} == {Wait}
    granted = replace(expired(), streak=0)
    assert {type(each) for each in decide(waiting, pending, RefusalHistory([granted]))} == {
        RequestSlices
    }


def test_requests_for_other_types_do_not_keep_a_refused_one_from_being_tried():
    waiting = replace(make_pending("a", 2, pool=None), sources=SOURCES[:1])
    pending = Supply(pending_requests={(SOURCES[0], "v4-8"): 100})
    [request] = decide([waiting], pending, RefusalHistory([expired()]))
    assert isinstance(request, RequestSlices)


def test_a_smaller_job_does_not_overtake_one_that_waits_for_an_answer():
    sizes = [7, 4, 1]
    waiting = [make_pending(f"j{n}", size, pool=None, order=n) for n, size in enumerate(sizes)]
    waiting = [replace(each, sources=SOURCES[:1]) for each in waiting]
    tried = decide(waiting, refusals=RefusalHistory([expired()]))
    assert [type(each) for each in tried] == [RequestSlices, Wait, Wait]


def test_in_a_queue_of_the_provider_every_request_keeps_its_place():
    queued = replace(expired(), capacity=Capacity.QUEUED)
    source = SOURCES[0]._replace(capacity=Capacity.QUEUED)
    waiting = [make_pending(f"j{number:02}", 1, pool=None, order=number) for number in range(20)]
    waiting = [replace(each, sources=(source,)) for each in waiting]
    tried = decide(waiting, refusals=RefusalHistory([queued]))
    assert {type(each) for each in tried} == {RequestSlices}


def test_a_pool_grows_by_the_slices_missing_beside_the_free_ones():
    decisions = decide([make_pending("a", 3)], make_supply(make_pool(), free("x")))
    request, assign = decisions
    assert (request.count, request.source.zone) == (2, "z1")
    assert assign.slices == ("x",)


def test_a_gang_is_taken_from_the_zone_with_most_free_slices():
    available = free("a1", zone="z1") + free("b1", "b2", zone="z2")
    [assign] = decide([make_pending("a", 2)], make_supply(make_pool(), available))
    assert assign.slices == ("b1", "b2")


def test_a_gang_never_spans_two_zones():
    available = free("a1", zone="z1") + free("b1", zone="z2")
    [wait] = decide([make_pending("a", 2)], make_supply(make_pool(largest=2), available))
    assert isinstance(wait, Wait)


@pytest.mark.parametrize(
    ("available", "largest", "expected"),
    [
        (("s1", "s2"), 2, ("s2",)),
        (("s1",), 2, None),
        (("s1",), 1, ("s1",)),
    ],
    ids=["it gets another one", "one is requested", "there is no other one"],
)
def test_a_job_gets_another_slice_than_the_one_where_it_failed(available, largest, expected):
    pending = replace(make_pending("a"), avoided=frozenset({"s1"}))
    [decision] = decide([pending], make_supply(make_pool(largest=largest), free(*available)))
    if expected is None:
        assert isinstance(decision, RequestSlices) and decision.count == 1
    else:
        assert decision.slices == expected


def test_a_zone_removed_from_a_pool_does_not_block_its_jobs():
    supply = make_supply(make_pool(), free("old", zone="z9"))
    [request] = decide([make_pending("a", 2)], supply)
    assert isinstance(request, RequestSlices) and request.count == 2
    stuck = replace(
        make_pending("b", 1, held=1), held_source=CapacitySource("fake", "z9", Capacity.SPOT)
    )
    [decision] = decide([stuck], make_supply(make_pool()))
    assert isinstance(decision, ReleaseGang)


@pytest.mark.parametrize(
    ("pending_job", "supply", "message"),
    [
        (make_pending("a", 5), make_supply(make_pool()), "at most 4"),
        (
            make_pending("a", 3, held=2),
            make_supply(make_pool(), (), [occupant("a", 2)]),
            "at most 4",
        ),
        (
            make_pending("a", pool="nowhere"),
            make_supply(make_pool()),
            "pool nowhere does not exist",
        ),
        (
            replace(make_pending("a", pool=None), rejected=dict.fromkeys(SOURCES, "bad type")),
            Supply(),
            "bad type",
        ),
    ],
    ids=["larger than the pool", "larger than the pool became", "no such pool", "refused for good"],
)
def test_a_request_that_can_never_be_met_is_unsatisfiable(pending_job, supply, message):
    [wait] = decide([pending_job], supply)
    assert wait.unsatisfiable and message in wait.reason


def test_a_stockout_makes_the_head_and_the_jobs_behind_it_wait():
    refusals = RefusalHistory([refusal(source) for source in SOURCES])
    pending = [make_pending("a", 2, order=1), make_pending("b", 1, order=2)]
    decisions = decide(pending, make_supply(make_pool(), free("x")), refusals)
    assert kinds(decisions) == [("a", "Wait"), ("b", "Wait")]
    assert decisions[0].until == refusals.blocking(SOURCES[0], TYPE, NOON).until


def test_a_user_at_the_quota_waits_without_blocking_others():
    supply = make_supply(
        make_pool(slices_per_user=1), free("x"), [occupant("r")], held={("lab", "ada"): 1}
    )
    decisions = decide(
        [make_pending("a", order=1), make_pending("b", order=2, owner="bob")], supply
    )
    assert kinds(decisions) == [("a", "Wait"), ("b", "AssignSlices")]
    assert decisions[0].reason == "quota: ada may hold 1 slices of pool lab"


@pytest.mark.parametrize("limits", [(1, None), (None, 1)], ids=["in the pool", "over everything"])
def test_slices_assigned_in_the_same_pass_count_towards_the_quota(limits):
    in_pool, in_all = limits
    pool = make_pool(slices_per_user=in_pool)
    supply = make_supply(pool, free("x", "y"), slices_per_user=in_all)
    decisions = decide([make_pending("a", order=1), make_pending("b", order=2)], supply)
    assert kinds(decisions) == [("a", "AssignSlices"), ("b", "Wait")]


# Backfill: the head opens when enough occupants are sure to have gone.
BACKFILL = {
    "ends in time": (10, True),
    "ends too late": (31, False),
    "has no time limit": (None, False),
}


@pytest.mark.parametrize(("minutes", "taken"), BACKFILL.values(), ids=BACKFILL)
def test_a_short_job_backfills_slices_reserved_for_the_head(minutes, taken):
    pool = make_pool(largest=2)
    supply = make_supply(pool, free("x"), [occupant("r", minutes=30)])
    timeout = minutes * MINUTE if minutes else None
    pending = [make_pending("head", 2, order=1), make_pending("short", order=2, timeout=timeout)]
    decisions = decide(pending, supply)
    assert kinds(decisions) == [("head", "Wait"), ("short", "AssignSlices" if taken else "Wait")]
    assert decisions[0].until == NOON + 30 * MINUTE


def test_there_is_no_backfill_when_the_start_of_the_head_is_unknown():
    supply = make_supply(make_pool(largest=2), free("x"), [occupant("r")])
    pending = [make_pending("head", 2, order=1), make_pending("short", order=2, timeout=MINUTE)]
    assert kinds(decide(pending, supply)) == [("head", "Wait"), ("short", "Wait")]


# Which jobs are superseded, if any.
SUPERSEDE = {
    "the least important": ([occupant("lo", priority=1), occupant("mid", priority=2)], 1, ["lo"]),
    "of those the youngest": (
        [occupant("old"), occupant("young", since=after(9))], 1, ["young"],
    ),
    "never an equal": ([occupant("equal", priority=5)], 1, []),
    "never in vain": ([occupant("lo"), occupant("equal", priority=5)], 2, []),
    "as many as it takes": ([occupant("a"), occupant("b", since=after(1))], 2, ["b", "a"]),
    "not one that others make up for": (
        [occupant("small"), occupant("large", 3, priority=1)], 3, ["large"],
    ),
    "not when enough are leaving": ([occupant("lo"), occupant("gone", stopping=True)], 1, []),
}  # fmt: skip


@pytest.mark.parametrize(("occupants", "missing", "victims"), SUPERSEDE.values(), ids=SUPERSEDE)
def test_which_jobs_a_job_of_higher_priority_supersedes(occupants, missing, victims):
    full = sum(item.slices for item in occupants)
    pending_job = make_pending("urgent", missing, priority=5)
    for allowed in (True, False):
        pool = make_pool(largest=full, supersede=allowed)
        decisions = decide([pending_job], make_supply(pool, (), occupants))
        stopped = [item.job_id for item in decisions if isinstance(item, Supersede)]
        assert stopped == (victims if allowed else [])
