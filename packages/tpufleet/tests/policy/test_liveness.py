"""Deadlines: when a host counts as lost, a boot as failed and a program as hung."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.policy.builders import MINUTE, NOON, SECOND, after, make_attempt, make_job, make_slice
from tpufleet.model.fleet.hosts import Progress
from tpufleet.model.fleet.slices import SliceState
from tpufleet.model.job.attempts import AttemptState
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.policy.recovery import liveness

RUNNING = make_attempt(running_at=NOON)


def past(number: int, ran_for: timedelta, checkpoint: int | None = None):
    return make_attempt(
        number,
        state=AttemptState.ENDED,
        running_at=NOON,
        ended_at=NOON + ran_for,
        end_reason=EndReason.PREEMPTED,
        checkpoint_step=checkpoint,
    )


@pytest.mark.parametrize("state", SliceState)
def test_only_a_booting_slice_can_fail_to_boot_and_only_after_the_limit(state):
    tpu_slice = make_slice(state=state)
    assert not liveness.boot_failed(tpu_slice, NOON, NOON + 5 * MINUTE, 5 * MINUTE)
    late = liveness.boot_failed(tpu_slice, NOON, NOON + 5 * MINUTE + SECOND, 5 * MINUTE)
    assert late == (state is SliceState.BOOTING)


def test_a_stopping_host_has_its_grace_period_and_a_margin():
    job = make_job(grace=timedelta(seconds=90))
    assert liveness.stop_deadline(job, RUNNING) is None
    stopping = replace(RUNNING, stopping_at=after(10))
    assert liveness.stop_deadline(job, stopping) == after(100) + liveness.STOP_MARGIN


def test_the_agent_lease_is_longer_than_the_host_lost_timeout():
    """Else a slice could be replaced while its old processes still run under a valid lease;
    they are safe only because the attempt ends when the slice is gone."""
    assert liveness.HOST_LOST_AFTER < liveness.AGENT_LEASE


def test_running_time_is_summed_over_all_attempts():
    never_ran = make_attempt(2, state=AttemptState.ENDED, ended_at=after(500))
    attempts = (past(0, 3 * MINUTE), past(1, 4 * MINUTE), never_ran, replace(RUNNING, number=3))
    assert liveness.running_time(attempts, NOON + 2 * MINUTE) == 9 * MINUTE


def test_the_time_limit_counts_earlier_attempts_but_not_waiting():
    job = make_job(timeout=10 * MINUTE)
    live = make_attempt(2, running_at=NOON + 60 * MINUTE)
    attempts = (past(0, 3 * MINUTE), past(1, 4 * MINUTE), live)
    assert liveness.timeout_at(job, attempts) == NOON + 63 * MINUTE


@pytest.mark.parametrize(
    ("timeout", "attempts"),
    [
        (None, (RUNNING,)),
        (MINUTE, ()),
        (MINUTE, (make_attempt(state=AttemptState.STARTING),)),
        (MINUTE, (past(0, 9 * MINUTE),)),
    ],
    ids=["no limit", "no attempt", "starting", "between attempts"],
)
def test_nothing_counts_towards_the_limit_while_nothing_runs(timeout, attempts):
    assert liveness.timeout_at(make_job(timeout=timeout), attempts) is None


@given(st.lists(st.integers(0, 100), max_size=5), st.integers(1, 200))
def test_the_limit_is_reached_when_running_time_equals_it(minutes, limit):
    job = make_job(timeout=limit * MINUTE)
    earlier = tuple(past(number, spent * MINUTE) for number, spent in enumerate(minutes))
    attempts = (*earlier, make_attempt(len(minutes), running_at=NOON + 1000 * MINUTE))
    moment = liveness.timeout_at(job, attempts)
    if sum(minutes) <= limit:
        assert liveness.running_time(attempts, moment) == limit * MINUTE
    else:
        assert moment < attempts[-1].running_at


HUNG = timedelta(minutes=30)


@pytest.mark.parametrize(
    ("attempts", "progress", "expected"),
    [
        ((RUNNING,), None, None),
        ((RUNNING,), Progress(step=3), None),
        ((RUNNING,), Progress(step=3, at=after(60)), after(60) + HUNG),
        ((RUNNING,), Progress(step=3, at=after(-600)), NOON + HUNG),
        ((past(0, MINUTE, checkpoint=5), make_attempt(1, running_at=NOON)), None, NOON + HUNG),
        ((past(0, MINUTE), make_attempt(1, running_at=NOON)), None, None),
        ((make_attempt(state=AttemptState.STARTING),), Progress(step=3, at=NOON), None),
        ((make_attempt(state=AttemptState.STOPPING),), Progress(step=3, at=NOON), None),
    ],
    ids=[
        "never reported",
        "reported, no one knows when",
        "reported",
        "reported by the attempt before",
        "silent, but an earlier attempt left a checkpoint",
        "silent, and so was the earlier attempt",
        "starting",
        "stopping",
    ],
)
def test_a_program_is_hung_when_it_stops_reporting_progress(attempts, progress, expected):
    assert liveness.hung_at(make_job(hung_after=HUNG), attempts, progress) == expected
    assert liveness.hung_at(make_job(hung_after=None), attempts, progress) is None


def presence(since: float = 0) -> liveness.Presence:
    return liveness.Presence(
        since=after(since),
        since_uptime=since * SECOND,
        last=after(since),
        last_uptime=since * SECOND,
    )


@pytest.mark.parametrize(
    ("wall", "uptime", "continues"),
    [(1, 1, True), (9, 9, True), (61, 61, False), (61, 1, False), (-59, 1, False), (3, 1, True)],
    ids=["tick", "slow tick", "frozen", "set forward", "set back", "slewed"],
)
def test_presence_ends_with_a_gap_or_a_clock_that_was_set(wall, uptime, continues):
    now = liveness.continue_presence(presence(), after(wall), uptime * SECOND)
    assert (now.since == NOON) == continues
    assert now.last == after(wall)


def test_a_report_that_changed_in_any_way_ends_the_silence():
    first = liveness.update_silences({}, {"s/0": after(9), "s/1": after(9)}, 10 * SECOND)
    then = liveness.update_silences(first, {"s/0": after(9), "s/1": after(2)}, 40 * SECOND)
    assert [then[host].since for host in ("s/0", "s/1")] == [10 * SECOND, 40 * SECOND]
    assert liveness.silent_hosts(then, presence(), 50 * SECOND, 50 * SECOND) == ["s/0"]
    assert liveness.silent_hosts(then, presence(1), 50 * SECOND, 50 * SECOND) == [], (
        "not present for long"
    )


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("hosts", [1, 700, 10_000, 80_000, 1_000_000])
def test_a_host_may_always_miss_a_heartbeat(hosts, servers):
    interval = liveness.heartbeat_interval(hosts, servers)
    limit = liveness.lost_after(hosts, servers)
    assert liveness.watched_after(limit) > interval
    assert limit - liveness.watched_after(limit) > interval


@pytest.mark.parametrize(("hosts", "servers"), [(10_000, 1), (30_000, 3)])
def test_a_loss_is_noticed_within_a_minute_with_10000_hosts_per_server(hosts, servers):
    assert liveness.lost_after(hosts, servers) < 51 * SECOND


def test_servers_that_announced_themselves_lately_share_the_heartbeats():
    announced = [after(0), after(50), after(61)]
    assert liveness.count_servers(announced, after(61)) == 2
    assert liveness.count_servers([], after(61)) == 1


@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=40),
    st.integers(0, 20),
    st.integers(1, 100),
)
def test_silence_never_costs_more_than_its_share_or_one_slice(sizes, lost, percent):
    slices = {f"s{number}": size for number, size in enumerate(sizes)}
    recently = {f"lost{number}": 1 for number in range(lost)}
    chosen = liveness.slices_to_give_up(list(slices), slices, recently, percent)
    cost = sum(slices[slice_id] for slice_id in chosen)
    fleet = sum(sizes) + lost
    assert chosen or lost, "one slice is always allowed"
    assert len(chosen) <= 1 or (cost + lost) * 100 <= fleet * percent
