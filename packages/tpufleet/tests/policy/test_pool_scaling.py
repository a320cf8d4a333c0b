"""Scaling a pool between its smallest and its largest size."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policy.builders import MINUTE, NOON, SECOND, make_slice
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.fleet.slices import SliceState, TpuSlice
from tpufleet.model.job.jobs import Capacity
from tpufleet.policy.scheduling import pool_scaling

LONG_AGO = NOON - timedelta(hours=1)


def make_pool(smallest: int = 0, largest: int = 8) -> Pool:
    return Pool(
        name="lab",
        provider="fake",
        accelerator="v5litepod-16",
        smallest=smallest,
        largest=largest,
        idle_after=10 * MINUTE,
    )


def idle(name: str, since=LONG_AGO, state=SliceState.READY):
    return make_slice(name, state=state, job_id=None, pool="lab", idle_since=since, ready_at=since)


def busy(name: str, state=SliceState.READY):
    return make_slice(name, state=state, pool="lab")


def test_idle_slices_are_released_down_to_the_smallest_size():
    slices = [idle("a"), idle("b", LONG_AGO + SECOND), idle("c"), busy("d")]
    assert pool_scaling.surplus_slices(make_pool(0), slices, NOON) == ["a", "c", "b"]
    assert pool_scaling.surplus_slices(make_pool(2), slices, NOON) == ["a", "c"]
    assert pool_scaling.surplus_slices(make_pool(4), slices, NOON) == []


def test_a_recently_idle_slice_is_kept():
    pool = make_pool(0)
    assert pool_scaling.surplus_slices(pool, [idle("a", NOON - 9 * MINUTE)], NOON) == []
    assert pool_scaling.surplus_slices(pool, [idle("a", NOON - 10 * MINUTE)], NOON) == ["a"]


def test_a_shrunk_pool_releases_idle_slices_at_once_and_never_busy_ones():
    slices = [idle("a", NOON), idle("b", NOON), busy("c"), busy("d")]
    assert pool_scaling.surplus_slices(make_pool(0, largest=3), slices, NOON) == ["a"]
    assert pool_scaling.surplus_slices(make_pool(0, largest=1), slices, NOON) == ["a", "b"]


def test_a_deleted_pool_releases_every_idle_slice():
    slices = [idle("a", NOON), busy("b"), idle("c", state=SliceState.BOOTING)]
    assert set(pool_scaling.surplus_slices(None, slices, NOON)) == {"a", "c"}


def test_an_adopted_node_stays_however_long_it_is_idle_and_counts_for_the_size():
    adopted, own = replace(idle("a"), node="mels"), idle("b")
    assert pool_scaling.surplus_slices(make_pool(0), [adopted, own], NOON) == ["b"]
    assert pool_scaling.surplus_slices(make_pool(1), [adopted, own], NOON) == ["b"]
    assert pool_scaling.surplus_slices(make_pool(0, largest=1), [adopted], NOON) == []
    assert pool_scaling.next_surplus_at(make_pool(0), [adopted]) is None
    assert pool_scaling.shortfall(make_pool(1), [adopted]) == 0
    assert pool_scaling.surplus_slices(None, [adopted], NOON) == ["a"], "its pool was deleted"


def test_an_unused_doomed_slice_is_released_and_replaced():
    slices = [idle("a", NOON, SliceState.DOOMED), idle("b", NOON), busy("c", SliceState.DOOMED)]
    assert pool_scaling.surplus_slices(make_pool(3), slices, NOON) == ["a"]
    assert pool_scaling.shortfall(make_pool(3), slices) == 2
    assert pool_scaling.shortfall(make_pool(3, largest=4), slices) == 1, "until they are gone"


@pytest.mark.parametrize("state", SliceState)
def test_what_counts_towards_the_smallest_size(state):
    counts = state in (SliceState.REQUESTED, SliceState.BOOTING, SliceState.READY)
    assert pool_scaling.shortfall(make_pool(3), [busy("a", state), busy("b")]) == (
        1 if counts else 2
    )


def test_the_next_check_is_when_the_oldest_idle_slice_expires():
    slices = [idle("a", NOON), idle("b", NOON - MINUTE), busy("c")]
    assert pool_scaling.next_surplus_at(make_pool(0), slices) == NOON + 9 * MINUTE
    assert pool_scaling.next_surplus_at(make_pool(3), slices) is None
    assert pool_scaling.next_surplus_at(make_pool(0), [busy("c")]) is None


CHANGES = [
    pytest.param({"provider": "other"}, id="provider"),
    pytest.param({"accelerator": "v5litepod-8"}, id="type"),
    pytest.param({"zones": ("z2",)}, id="zones"),
    pytest.param({"capacity": (Capacity.ON_DEMAND,)}, id="capacity"),
]


@pytest.mark.parametrize("changed", CHANGES)
def test_idle_slices_of_a_changed_pool_are_released_and_do_not_count(changed):
    pool = replace(make_pool(2, largest=4), **changed)
    old = [idle("a", NOON), idle("b", NOON, SliceState.BOOTING), busy("c")]
    assert set(pool_scaling.surplus_slices(pool, old, NOON)) == {"a", "b"}
    assert pool_scaling.shortfall(pool, old) == 1, "room for one more until they are gone"
    assert pool_scaling.shortfall(pool, [busy("c")]) == 2


@pytest.mark.parametrize("changed", CHANGES)
def test_a_slice_held_after_a_failure_is_released_later_when_its_pool_changed(changed):
    until = NOON + 5 * MINUTE
    held = replace(idle("a", NOON), reserved_for="ann", reserved_until=until)
    pool = replace(make_pool(1), **changed)
    assert pool_scaling.surplus_slices(pool, [held], NOON) == []
    assert pool_scaling.next_surplus_at(pool, [held]) == until
    assert pool_scaling.surplus_slices(pool, [held], until) == ["a"]


def test_idle_slices_with_other_settings_are_released_and_do_not_count():
    pool = make_pool(2, largest=4)
    slices = [
        replace(idle("old", NOON), settings="1"),
        replace(idle("booting", NOON, SliceState.BOOTING), settings="1"),
        replace(busy("busy"), settings="1"),
        replace(idle("new", NOON), settings="2"),
    ]
    assert set(pool_scaling.surplus_slices(pool, slices, NOON, "2")) == {"old", "booting"}
    assert pool_scaling.shortfall(pool, slices[2:], "2") == 1
    assert pool_scaling.surplus_slices(pool, slices[2:], NOON, "2") == []
    assert pool_scaling.surplus_slices(pool, slices, NOON, "1") == ["new"]


def test_a_slice_held_after_a_failure_is_released_later_when_the_settings_changed():
    until = NOON + 5 * MINUTE
    held = replace(idle("a", NOON), reserved_for="ann", reserved_until=until, settings="1")
    assert pool_scaling.surplus_slices(make_pool(1), [held], NOON, "2") == []
    assert pool_scaling.next_surplus_at(make_pool(1), [held], "2") == until
    assert pool_scaling.surplus_slices(make_pool(1), [held], until, "2") == ["a"]


@pytest.mark.parametrize(
    ("recorded", "wanted", "node"),
    [
        pytest.param("", "2", "", id="requested by an earlier version"),
        pytest.param("1", "", "", id="a provider without such settings"),
        pytest.param("1", "2", "mels", id="an adopted node"),
        pytest.param("2", "2", "", id="the same"),
    ],
)
def test_a_slice_is_kept_unless_its_settings_are_known_to_differ(recorded, wanted, node):
    kept = replace(idle("a", NOON), settings=recorded, node=node)
    assert pool_scaling.surplus_slices(make_pool(1), [kept], NOON, wanted) == []
    assert pool_scaling.shortfall(make_pool(1), [kept], wanted) == 0


@pytest.mark.parametrize(
    ("changed", "released"),
    [
        pytest.param({"accelerator": "v5litepod-8"}, ["a"], id="type"),
        pytest.param({"zones": ("z2",)}, [], id="zones"),
        pytest.param({"capacity": (Capacity.ON_DEMAND,)}, [], id="capacity"),
    ],
)
def test_an_adopted_node_leaves_a_pool_that_gets_another_type(changed, released):
    adopted = replace(idle("a"), node="mels")
    pool = replace(make_pool(0), **changed)
    assert pool_scaling.surplus_slices(pool, [adopted], NOON) == released


def _slice(number: int, state: SliceState, used: bool, since: int, old: bool) -> TpuSlice:
    name = f"s{number}"
    made = busy(name, state) if used else idle(name, NOON - since * MINUTE, state)
    return replace(made, accelerator="v5litepod-8") if old else made


fleets = st.lists(
    st.tuples(
        st.sampled_from(list(SliceState)),
        st.booleans(),
        st.integers(0, 20),
        st.sampled_from([False, False, True]),
    ),
    max_size=10,
).map(lambda rows: [_slice(number, *row) for number, row in enumerate(rows)])


@given(fleets, st.integers(0, 6), st.integers(0, 6))
def test_scaling_never_releases_what_it_would_request_again(slices, smallest, more):
    pool = make_pool(smallest, smallest + more)
    released = pool_scaling.surplus_slices(pool, slices, NOON)
    assert len(set(released)) == len(released)
    assert all(item.job_id is None and item.live for item in slices if item.id in released)
    left = [
        replace(item, state=SliceState.RELEASING) if item.id in released else item
        for item in slices
    ]
    asked = pool_scaling.shortfall(pool, left)
    assert asked == pool_scaling.shortfall(pool, slices)
    new = [busy(f"new{number}", SliceState.REQUESTED) for number in range(asked)]
    assert pool_scaling.surplus_slices(pool, left + new, NOON) == []
    assert pool_scaling.shortfall(pool, left + new) == 0
    existing = sum(item.state is not SliceState.GONE for item in left)
    assert not asked or existing + asked <= pool.largest


@given(fleets, st.integers(0, 6))
def test_surplus_appears_exactly_at_the_predicted_time(slices, smallest):
    pool = make_pool(smallest)
    left = [
        item for item in slices if item.id not in pool_scaling.surplus_slices(pool, slices, NOON)
    ]
    moment = pool_scaling.next_surplus_at(pool, left)
    if moment is not None:
        assert moment > NOON
        assert pool_scaling.surplus_slices(pool, left, moment)
