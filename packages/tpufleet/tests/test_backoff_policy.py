"""Deterministic backoff: exponential, capped, and jittered by key."""

from __future__ import annotations

import itertools
from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from tpufleet.backoff import BackoffPolicy

FIRST, LONGEST = timedelta(seconds=2), timedelta(minutes=3)


def delay(failures: int, key: str = "job", jitter: float = 0.2) -> timedelta:
    return BackoffPolicy(first=FIRST, longest=LONGEST, jitter=jitter).delay(failures, key=key)


def test_without_jitter_it_doubles_up_to_the_longest():
    seconds = [delay(failures, jitter=0).total_seconds() for failures in range(10)]
    assert seconds == [2, 2, 4, 8, 16, 32, 64, 128, 180, 180]


@given(st.integers(0, 10**9), st.text(max_size=20), st.floats(0, 1))
def test_the_jitter_stays_in_its_range_and_is_the_same_each_time(failures, key, jitter):
    middle = delay(failures, jitter=0)
    jittered = delay(failures, key, jitter)
    margin = timedelta(microseconds=2)
    assert middle * (1 - jitter) - margin <= jittered <= middle * (1 + jitter) + margin
    assert jittered == delay(failures, key, jitter)


def test_delays_of_many_jobs_cover_the_whole_range():
    delays = sorted(delay(7, f"job-{number}").total_seconds() for number in range(1000))
    assert delays[0] < 0.81 * 128 and delays[-1] > 1.19 * 128
    gaps = [later - earlier for earlier, later in itertools.pairwise(delays)]
    assert max(gaps) < 2, "no clusters and no gaps"


def test_the_jitter_of_a_job_differs_each_time():
    fractions = {delay(failures) / delay(failures, jitter=0) for failures in range(1, 9)}
    assert len(fractions) == 8
