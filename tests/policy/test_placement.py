"""Which waiting job gets which slices: gangs all or nothing, in order, within every bound."""

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
from tpufleet.model.jobs import Capacity
from tpufleet.policy import placement
from tpufleet.policy.capacity import CapacitySource, RefusalHistory
from tpufleet.policy.placement import ReleaseGang, RequestSlices, Supersede, Supply, Wait


def test_a_job_without_a_pool_is_asked_for_at_the_first_place_that_is_open():
    [request] = decide([make_pending("a", 2, pool=None)], refusals=RefusalHistory([refusal()]))
    assert (request.source, request.count, request.pool) == (SOURCES[1], 2, None)


def test_part_of_a_gang_is_given_back_where_the_rest_cannot_be_had():
    [decision] = decide(
        [make_pending("a", 1, pool=None, held=1)], refusals=RefusalHistory([refusal()])
    )
    assert isinstance(decision, ReleaseGang) and "z1" in decision.reason


def test_the_rest_of_a_gang_is_asked_for_where_it_holds_the_first_part():
    pending_job = replace(make_pending("a", 1, pool=None, held=1), held_source=SOURCES[1])
    [request] = decide([pending_job])
    assert request.source == SOURCES[1]


def test_no_more_is_asked_of_a_place_than_it_can_answer_and_nobody_slips_past():
    nearly = {SOURCES[0]: placement.MAX_PENDING_REQUESTS - 1}
    pending = [make_pending("a", 2, pool=None, order=1), make_pending("b", 1, pool=None, order=2)]
    assert kinds(decide(pending, Supply(pending_requests=nearly))) == [("a", "Wait"), ("b", "Wait")]
    [big] = decide([make_pending("a", placement.MAX_PENDING_REQUESTS + 5, pool=None)])
    assert big.count == placement.MAX_PENDING_REQUESTS + 5, (
        "a gang larger than that is asked for alone"
    )


def test_a_pool_grows_by_what_is_missing_beside_the_free_ones():
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


def test_a_pool_that_left_a_zone_does_not_doom_jobs_to_it():
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
        (make_pending("a", pool=None), None, "no stock"),
    ],
    ids=["larger than the pool", "larger than the pool became", "no such pool", "refused for good"],
)
def test_waiting_that_cannot_help_is_called_hopeless(pending_job, supply, message):
    refusals = RefusalHistory([refusal(source, permanent=True) for source in SOURCES])
    [wait] = decide([pending_job], supply, refusals if supply is None else None)
    assert wait.unsatisfiable and message in wait.reason


def test_stock_that_is_out_makes_the_first_job_wait_and_the_others_behind_it():
    refusals = RefusalHistory([refusal(source) for source in SOURCES])
    pending = [make_pending("a", 2, order=1), make_pending("b", 1, order=2)]
    decisions = decide(pending, make_supply(make_pool(), free("x")), refusals)
    assert kinds(decisions) == [("a", "Wait"), ("b", "Wait")]
    assert decisions[0].until == refusals.blocking(SOURCES[0], TYPE, NOON).until


def test_a_user_at_the_limit_waits_and_does_not_hold_up_others():
    supply = make_supply(
        make_pool(slices_per_user=1), free("x"), [occupant("r")], held={("lab", "ada"): 1}
    )
    decisions = decide(
        [make_pending("a", order=1), make_pending("b", order=2, owner="bob")], supply
    )
    assert kinds(decisions) == [("a", "Wait"), ("b", "AssignSlices")]
    assert decisions[0].reason == "quota: ada may hold 1 slices of pool lab"


@pytest.mark.parametrize("limits", [(1, None), (None, 1)], ids=["in the pool", "over everything"])
def test_what_is_given_in_one_round_counts_towards_the_limit(limits):
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
def test_a_short_job_borrows_what_is_kept_for_the_head(minutes, taken):
    pool = make_pool(largest=2)
    supply = make_supply(pool, free("x"), [occupant("r", minutes=30)])
    timeout = minutes * MINUTE if minutes else None
    pending = [make_pending("head", 2, order=1), make_pending("short", order=2, timeout=timeout)]
    decisions = decide(pending, supply)
    assert kinds(decisions) == [("head", "Wait"), ("short", "AssignSlices" if taken else "Wait")]
    assert decisions[0].until == NOON + 30 * MINUTE


def test_nobody_borrows_when_it_cannot_be_known_when_the_head_starts():
    supply = make_supply(make_pool(largest=2), free("x"), [occupant("r")])
    pending = [make_pending("head", 2, order=1), make_pending("short", order=2, timeout=MINUTE)]
    assert kinds(decide(pending, supply)) == [("head", "Wait"), ("short", "Wait")]


# Superseding: who, and when nobody.
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
def test_whom_a_job_of_higher_priority_supersedes(occupants, missing, victims):
    full = sum(item.slices for item in occupants)
    pending_job = make_pending("urgent", missing, priority=5)
    for allowed in (True, False):
        pool = make_pool(largest=full, supersede=allowed)
        decisions = decide([pending_job], make_supply(pool, (), occupants))
        stopped = [item.job_id for item in decisions if isinstance(item, Supersede)]
        assert stopped == (victims if allowed else [])
