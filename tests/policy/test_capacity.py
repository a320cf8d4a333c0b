"""Where to ask next, and the memory of who said no."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policy.builders import MINUTE, NOON, SECOND
from tpufleet.model import topology
from tpufleet.model.jobs import Capacity
from tpufleet.policy import capacity
from tpufleet.policy.capacity import CapacitySource, RefusalHistory

SPOT, ON_DEMAND = Capacity.SPOT, Capacity.ON_DEMAND
HERE = CapacitySource("tpu-vm", "us-a", SPOT)
THERE = CapacitySource("tpu-vm", "eu-b", SPOT)


def no(place=HERE, accelerator="v5litepod-16", *, previous=None, now=NOON, **options):
    return capacity.new_refusal(
        place, accelerator, "out of stock", previous=previous, now=now, **options
    )


def test_the_kind_of_capacity_matters_more_than_the_source_and_that_more_than_the_zone():
    found = capacity.allowed_sources(("a", "b"), ("z1", "z2"), (SPOT, ON_DEMAND), {})
    assert [(place.capacity, place.provider, place.zone) for place in found] == [
        (kind, provider, zone)
        for kind in (SPOT, ON_DEMAND)
        for provider in ("a", "b")
        for zone in ("z1", "z2")
    ]


def test_without_zones_each_source_offers_its_own():
    found = capacity.allowed_sources(("a", "b", "c"), (), (SPOT,), {"a": ["x"], "b": ["y", "z"]})
    assert [(place.provider, place.zone) for place in found] == [("a", "x"), ("b", "y"), ("b", "z")]


def test_the_first_place_that_has_not_just_refused_is_asked():
    memory = RefusalHistory([no(HERE)])
    choice = capacity.choose_source((HERE, THERE), "v5litepod-16", memory, NOON)
    assert choice.source == THERE
    assert (
        capacity.choose_source((HERE, THERE), "v5litepod-16", RefusalHistory(), NOON).source == HERE
    )


def test_when_all_have_refused_the_words_tell_each_and_the_time_is_the_soonest():
    first, second = no(HERE), no(THERE, previous=no(THERE))
    choice = capacity.choose_source(
        (HERE, THERE), "v5litepod-16", RefusalHistory([first, second]), NOON
    )
    assert choice.source is None and not choice.permanent
    assert choice.until == min(first.until, second.until)
    assert choice.message == "us-a (spot): out of stock; eu-b (spot): out of stock"
    again = capacity.choose_source(
        (HERE, THERE), "v5litepod-16", RefusalHistory([first, second]), choice.until
    )
    assert again.source is not None


def test_nowhere_allowed_is_hopeless():
    choice = capacity.choose_source((), "v5litepod-16", RefusalHistory(), NOON)
    assert choice.source is None and choice.permanent and choice.message


@pytest.mark.parametrize("asked", ["v5litepod-4", "v5litepod-16", "v5litepod-256"])
@pytest.mark.parametrize("refused", ["v5litepod-4", "v5litepod-16", "v5litepod-256"])
def test_a_refusal_counts_for_the_same_size_and_larger_ones(refused, asked):
    memory = RefusalHistory([no(accelerator=refused)])
    blocked = memory.blocking(HERE, asked, NOON) is not None
    assert blocked == (topology.find(asked).chips >= topology.find(refused).chips)


@pytest.mark.parametrize("asked", ["v6e-16", "v4-32", "v5p-32"])
def test_a_refusal_says_nothing_of_other_generations(asked):
    assert RefusalHistory([no()]).blocking(HERE, asked, NOON) is None


@pytest.mark.parametrize(
    "elsewhere",
    [
        CapacitySource("gke", "us-a", SPOT),
        CapacitySource("tpu-vm", "us-c", SPOT),
        CapacitySource("tpu-vm", "us-a", ON_DEMAND),
    ],
    ids=str,
)
def test_a_refusal_says_nothing_of_other_places(elsewhere):
    assert RefusalHistory([no(HERE)]).blocking(elsewhere, "v5litepod-16", NOON) is None


def test_a_permanent_refusal_is_of_one_size_is_looked_at_again_later_and_all_make_it_hopeless():
    refusal = no(permanent=True)
    memory = RefusalHistory([refusal])
    assert refusal.until == NOON + capacity.PERMANENT_BACKOFF
    assert memory.blocking(HERE, "v5litepod-32", NOON) is None
    assert memory.blocking(HERE, "v5litepod-16", refusal.until) is None
    assert capacity.choose_source((HERE,), "v5litepod-16", memory, NOON).permanent
    memory.record(no(THERE))
    assert not capacity.choose_source((HERE, THERE), "v5litepod-16", memory, NOON).permanent


def test_of_several_refusals_the_one_that_lasts_longest_counts():
    small, large = no(accelerator="v5litepod-4"), no(previous=no(previous=no()))
    memory = RefusalHistory([large, small])
    assert memory.blocking(HERE, "v5litepod-16", NOON) == max(
        small, large, key=lambda refusal: refusal.until
    )


def test_a_newer_answer_replaces_an_older_one_at_once():
    memory = RefusalHistory()
    assert memory.blocking(HERE, "v5litepod-16", NOON) is None
    first = no()
    memory.record(first)
    assert memory.blocking(HERE, "v5litepod-16", NOON) == first
    second = no(previous=first, now=NOON + MINUTE)
    memory.record(second)
    assert memory.latest(HERE, "v5litepod-16") == second
    assert memory.blocking(HERE, "v5litepod-16", NOON) == second


def test_each_no_in_a_row_is_remembered_longer_up_to_a_bound():
    refusal, waits = None, []
    for _ in range(12):
        refusal = no(previous=refusal)
        waits.append(refusal.until - NOON)
    assert refusal.streak == 12
    for streak, wait in enumerate(waits):
        middle = min(capacity.REFUSAL_BACKOFF.first * 2**streak, capacity.REFUSAL_BACKOFF.longest)
        assert 0.8 * middle <= wait <= 1.2 * middle


def test_the_streak_begins_anew_after_a_grant():
    granted = no(previous=no(previous=no()))
    forgotten = type(granted)(
        **{name: getattr(granted, name) for name in granted.__dataclass_fields__}
        | {"streak": 0, "until": NOON}
    )
    assert RefusalHistory([forgotten]).blocking(HERE, "v5litepod-16", NOON) is None
    assert no(previous=forgotten).streak == 1


places = st.builds(
    CapacitySource,
    st.sampled_from("ab"),
    st.sampled_from(("z1", "z2")),
    st.sampled_from(list(Capacity)),
)
sizes = st.sampled_from(["v5litepod-1", "v5litepod-16", "v5litepod-64", "v6e-8", "v4-8"])
refusals = st.lists(
    st.builds(
        lambda place, size, late, permanent: no(
            place, size, now=NOON - timedelta(seconds=late), permanent=permanent
        ),
        places,
        sizes,
        st.integers(0, 40),
        st.booleans(),
    ),
    max_size=12,
)


@given(st.lists(places, min_size=1, max_size=6, unique=True), sizes, refusals)
def test_a_place_is_chosen_when_and_only_when_one_is_open_and_it_is_the_first(allowed, size, told):
    memory = RefusalHistory(told)
    choice = capacity.choose_source(allowed, size, memory, NOON)
    still_open = [place for place in allowed if memory.blocking(place, size, NOON) is None]
    assert choice.source == (still_open[0] if still_open else None)
    if choice.source is None:
        assert choice.until > NOON and choice.message
        assert capacity.choose_source(
            allowed, size, memory, choice.until
        ).source is not None or any(
            memory.blocking(place, size, NOON).until > choice.until for place in allowed
        )


@given(places, sizes, refusals)
def test_what_blocks_a_size_blocks_every_larger_one_unless_it_is_permanent(place, size, told):
    memory = RefusalHistory(told)
    blocking = memory.blocking(place, size, NOON)
    if blocking is None or blocking.permanent:
        return
    wanted = topology.find(size)
    for other in topology.all_types().values():
        if other.generation == wanted.generation and other.chips >= wanted.chips:
            assert memory.blocking(place, other.name, NOON) is not None
    assert memory.blocking(place, size, NOON + capacity.PERMANENT_BACKOFF + SECOND) is None
