"""Which source to request from next, given recent refusals."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policy.builders import MINUTE, NOON, SECOND
from tpufleet.model.fleet.pools import RefusalKind
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu import type_lookup
from tpufleet.policy.scheduling import source_choice
from tpufleet.policy.scheduling.source_choice import CapacitySource, RefusalHistory

SPOT, ON_DEMAND = Capacity.SPOT, Capacity.ON_DEMAND
HERE = CapacitySource("tpu-vm", "us-a", SPOT)
THERE = CapacitySource("tpu-vm", "eu-b", SPOT)


def no(source=HERE, accelerator="v5litepod-16", *, previous=None, now=NOON, **options):
    return source_choice.new_refusal(
        source, accelerator, "out of stock", previous=previous, now=now, **options
    )


def test_the_capacity_type_outranks_the_provider_which_outranks_the_zone():
    sources = source_choice.allowed_sources(("a", "b"), ("z1", "z2"), (SPOT, ON_DEMAND), {})
    assert [(source.capacity, source.provider, source.zone) for source in sources] == [
        (kind, provider, zone)
        for kind in (SPOT, ON_DEMAND)
        for provider in ("a", "b")
        for zone in ("z1", "z2")
    ]


def test_without_zones_each_provider_uses_its_own():
    sources = source_choice.allowed_sources(
        ("a", "b", "c"), (), (SPOT,), {"a": ["x"], "b": ["y", "z"]}
    )
    assert [(source.provider, source.zone) for source in sources] == [
        ("a", "x"),
        ("b", "y"),
        ("b", "z"),
    ]


def test_the_first_source_without_a_current_refusal_is_chosen():
    refusal_history = RefusalHistory([no(HERE)])
    choice = source_choice.choose_source((HERE, THERE), "v5litepod-16", refusal_history, NOON)
    assert choice.source == THERE
    assert (
        source_choice.choose_source((HERE, THERE), "v5litepod-16", RefusalHistory(), NOON).source
        == HERE
    )


def test_a_refusal_ends_when_the_provider_says_however_many_there_were_before():
    begin, refusal = NOON + timedelta(hours=1), None
    for minute in range(0, 60, 10):
        until = NOON + timedelta(minutes=minute + 10)
        refusal = no(previous=refusal, now=until - timedelta(minutes=10), until=until)
    assert refusal is not None and (refusal.until, refusal.streak) == (begin, 6)


def test_when_all_sources_refused_the_message_lists_each_and_the_earliest_time_counts():
    first, second = no(HERE), no(THERE, previous=no(THERE))
    choice = source_choice.choose_source(
        (HERE, THERE), "v5litepod-16", RefusalHistory([first, second]), NOON
    )
    assert choice.source is None and not choice.unsatisfiable
    assert choice.until == min(first.until, second.until)
    assert choice.message == "us-a (spot): out of stock; eu-b (spot): out of stock"
    again = source_choice.choose_source(
        (HERE, THERE), "v5litepod-16", RefusalHistory([first, second]), choice.until
    )
    assert again.source is not None


def test_no_allowed_source_is_unsatisfiable():
    choice = source_choice.choose_source((), "v5litepod-16", RefusalHistory(), NOON)
    assert choice.source is None and choice.unsatisfiable and choice.message


@pytest.mark.parametrize("asked", ["v5litepod-4", "v5litepod-16", "v5litepod-256"])
@pytest.mark.parametrize("refused", ["v5litepod-4", "v5litepod-16", "v5litepod-256"])
def test_a_refusal_counts_for_the_same_size_and_larger_ones(refused, asked):
    refusal_history = RefusalHistory([no(accelerator=refused)])
    blocked = refusal_history.blocking(HERE, asked, NOON) is not None
    assert blocked == (type_lookup.find(asked).chips >= type_lookup.find(refused).chips)


@pytest.mark.parametrize("asked", ["v6e-16", "v4-32", "v5p-32"])
def test_a_refusal_does_not_cover_other_generations(asked):
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
def test_a_refusal_does_not_cover_other_sources(elsewhere):
    assert RefusalHistory([no(HERE)]).blocking(elsewhere, "v5litepod-16", NOON) is None


@pytest.mark.parametrize(
    ("kind", "covered"),
    [
        (RefusalKind.CAPACITY, {"v5litepod-16", "v5litepod-32"}),
        (RefusalKind.QUOTA, {"v5litepod-16", "v5litepod-32"}),
        (RefusalKind.ACCESS, {"v5litepod-8", "v5litepod-16", "v5litepod-32", "v6e-8"}),
        (RefusalKind.REQUEST, {"v5litepod-16"}),
    ],
)
def test_what_a_refusal_covers_depends_on_its_kind(kind, covered):
    refusal = no(kind=kind)
    history = RefusalHistory([refusal])
    types = ("v5litepod-8", "v5litepod-16", "v5litepod-32", "v6e-8")
    assert {name for name in types if history.blocking(HERE, name, NOON)} == covered
    assert history.blocking(HERE, "v5litepod-16", refusal.until) is None
    assert not source_choice.choose_source((HERE,), "v5litepod-16", history, NOON).unsatisfiable


@pytest.mark.parametrize("kind", [RefusalKind.QUOTA, RefusalKind.ACCESS])
def test_what_a_person_can_fix_is_retried_at_least_every_72_seconds(kind):
    refusal = None
    for _ in range(20):
        refusal = no(previous=refusal, kind=kind)
    assert refusal.until - NOON <= timedelta(seconds=72)


def test_a_refusal_of_another_kind_starts_a_new_streak():
    assert no(previous=no(previous=no()), kind=RefusalKind.ACCESS).streak == 1


def test_the_refusal_that_expires_last_counts():
    small, large = no(accelerator="v5litepod-4"), no(previous=no(previous=no()))
    refusal_history = RefusalHistory([large, small])
    assert refusal_history.blocking(HERE, "v5litepod-16", NOON) == max(
        small, large, key=lambda refusal: refusal.until
    )


def test_a_newer_refusal_replaces_an_older_one_at_once():
    refusal_history = RefusalHistory()
    assert refusal_history.blocking(HERE, "v5litepod-16", NOON) is None
    first = no()
    refusal_history.record(first)
    assert refusal_history.blocking(HERE, "v5litepod-16", NOON) == first
    second = no(previous=first, now=NOON + MINUTE)
    refusal_history.record(second)
    assert refusal_history.latest(HERE, "v5litepod-16") == second
    assert refusal_history.blocking(HERE, "v5litepod-16", NOON + MINUTE) == second


def test_a_refusal_from_the_future_blocks_nothing():
    """The clock was set back: nobody knows how old it is."""
    refusal_history = RefusalHistory([no(now=NOON + MINUTE)])
    assert refusal_history.blocking(HERE, "v5litepod-16", NOON) is None
    assert not refusal_history.refused_recently(HERE, "v5litepod-16", NOON)


def test_consecutive_refusals_last_longer_up_to_a_maximum():
    refusal, waits = None, []
    for _ in range(12):
        refusal = no(previous=refusal)
        waits.append(refusal.until - NOON)
    assert refusal.streak == 12
    for streak, wait in enumerate(waits):
        backoff = source_choice.REFUSAL_BACKOFF[RefusalKind.CAPACITY]
        middle = min(backoff.first * 2**streak, backoff.longest)
        assert 0.8 * middle <= wait <= 1.2 * middle


def test_the_streak_restarts_after_a_grant():
    granted = no(previous=no(previous=no()))
    forgotten = type(granted)(
        **{name: getattr(granted, name) for name in granted.__dataclass_fields__}
        | {"streak": 0, "until": NOON}
    )
    assert RefusalHistory([forgotten]).blocking(HERE, "v5litepod-16", NOON) is None
    assert no(previous=forgotten).streak == 1


sources_strategy = st.builds(
    CapacitySource,
    st.sampled_from("ab"),
    st.sampled_from(("z1", "z2")),
    st.sampled_from(list(Capacity)),
)
sizes = st.sampled_from(["v5litepod-1", "v5litepod-16", "v5litepod-64", "v6e-8", "v4-8"])
refusals = st.lists(
    st.builds(
        lambda source, size, late, kind: no(
            source, size, now=NOON - timedelta(seconds=late), kind=kind
        ),
        sources_strategy,
        sizes,
        st.integers(0, 40),
        st.sampled_from(RefusalKind),
    ),
    max_size=12,
)


@given(st.lists(sources_strategy, min_size=1, max_size=6, unique=True), sizes, refusals)
def test_the_first_open_source_is_chosen_if_there_is_one(allowed, size, refused):
    refusal_history = RefusalHistory(refused)
    choice = source_choice.choose_source(allowed, size, refusal_history, NOON)
    still_open = [
        source for source in allowed if refusal_history.blocking(source, size, NOON) is None
    ]
    untried = [
        source for source in still_open if not refusal_history.refused_recently(source, size, NOON)
    ]
    assert choice.source == next(iter([*untried, *still_open]), None)

    if choice.source is None:
        assert choice.until > NOON and choice.message
        assert source_choice.choose_source(
            allowed, size, refusal_history, choice.until
        ).source is not None or any(
            refusal_history.blocking(source, size, NOON).until > choice.until for source in allowed
        )


@given(sources_strategy, sizes, refusals)
def test_a_temporary_refusal_of_a_size_blocks_every_larger_size(source, size, refused):
    refusal_history = RefusalHistory(refused)
    blocking = refusal_history.blocking(source, size, NOON)
    if blocking is None or blocking.kind is RefusalKind.REQUEST:
        return
    longest = source_choice.REFUSAL_BACKOFF[RefusalKind.UNREACHABLE].longest
    wanted = type_lookup.find(size)
    for other in type_lookup.all_types().values():
        if other.generation == wanted.generation and other.chips >= wanted.chips:
            assert refusal_history.blocking(source, other.name, NOON) is not None
    assert refusal_history.blocking(source, size, NOON + longest + SECOND) is None


def test_a_server_that_hosts_cannot_reach_blocks_every_source_of_the_provider():
    history = RefusalHistory([no(HERE, kind=RefusalKind.UNREACHABLE)])
    elsewhere = CapacitySource(HERE.provider, "another-zone", Capacity.ON_DEMAND)
    other = CapacitySource("another-provider", HERE.zone, HERE.capacity)
    assert history.blocking(elsewhere, "v4-8", NOON) is not None
    assert history.blocking(other, "v4-8", NOON) is None
    choice = source_choice.choose_source((HERE, elsewhere), "v4-8", history, NOON)
    assert choice.source is None and choice.message.count(";") == 0, "said once"


def test_every_source_is_tried_once_before_one_that_refused_slowly_is_tried_again():
    """A provider that needs five minutes to refuse outlasts the first backoff."""
    sources = [
        CapacitySource("gke", zone, kind)
        for kind in (Capacity.SPOT, Capacity.ON_DEMAND)
        for zone in ("a", "b", "c")
    ]
    history, now, tried = RefusalHistory(), NOON, []
    for _ in sources:
        chosen = source_choice.choose_source(sources, "v6e-8", history, now).source
        assert chosen is not None
        tried.append(chosen)
        now += timedelta(minutes=5)
        previous = history.latest(chosen, "v6e-8")
        history.record(
            source_choice.new_refusal(
                chosen, "v6e-8", "none", previous=previous, now=now, took=timedelta(minutes=5)
            )
        )
    assert tried == sources
