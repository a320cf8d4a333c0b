"""Waiting longer each time, and not all at the same moment."""

from __future__ import annotations

import itertools
from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from tpufleet.policy import retry_delay

FIRST, LONGEST = timedelta(seconds=2), timedelta(minutes=3)


def wait(tries: int, key: str = "job", spread: float = 0.2) -> timedelta:
    return retry_delay.retry_delay(tries, initial=FIRST, maximum=LONGEST, key=key, spread=spread)


def test_without_jitter_it_doubles_up_to_the_longest():
    seconds = [wait(tries, spread=0).total_seconds() for tries in range(10)]
    assert seconds == [2, 2, 4, 8, 16, 32, 64, 128, 180, 180]


@given(st.integers(0, 10**9), st.text(max_size=20), st.floats(0, 1))
def test_the_jitter_stays_within_its_spread_and_is_the_same_each_time(tries, key, spread):
    middle = wait(tries, spread=0)
    found = wait(tries, key, spread)
    margin = timedelta(microseconds=2)
    assert middle * (1 - spread) - margin <= found <= middle * (1 + spread) + margin
    assert found == wait(tries, key, spread)


def test_a_thousand_jobs_spread_over_the_whole_range():
    waits = sorted(wait(7, f"job-{number}").total_seconds() for number in range(1000))
    assert waits[0] < 0.81 * 128 and waits[-1] > 1.19 * 128
    gaps = [later - earlier for earlier, later in itertools.pairwise(waits)]
    assert max(gaps) < 2, "no crowd and no hole"


def test_the_same_job_waits_differently_each_time():
    fractions = {wait(tries) / wait(tries, spread=0) for tries in range(1, 9)}
    assert len(fractions) == 8
