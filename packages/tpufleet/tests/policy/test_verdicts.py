"""Why an attempt ended: the first rank to fail decides; a lost slice explains what follows."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.policy.builders import (
    NOON,
    SECOND,
    after,
    ended_attempt,
    exited,
    make_attempt,
    make_host,
    make_slice,
)
from tpufleet.model.fleet.hosts import Exit, Phase
from tpufleet.model.fleet.slices import LossReason, SliceState
from tpufleet.model.job.end_reasons import END_REASONS, EndReason, RetryBudget
from tpufleet.policy.recovery.verdicts import LOSS_DETECTION_DELAY, cause_of, describe_exit, judge

ATTEMPT = make_attempt()
SLICE = make_slice()
LATE = NOON + LOSS_DETECTION_DELAY
PEER_DIED = {"status": 1, "evidence": EndReason.CONNECTION_LOST}
STOPPED = {"signal": signal.SIGTERM, "stopped_by_agent": True}
CLEAN = {"status": 0}

EXITS = {
    "exit status": (dict(status=1), EndReason.USER_ERROR),
    "crash": (dict(signal=signal.SIGSEGV), EndReason.USER_ERROR),
    "abort": (dict(signal=signal.SIGABRT), EndReason.USER_ERROR),
    "killed from outside": (dict(signal=signal.SIGKILL), EndReason.USER_ERROR),
    "killed by the kernel for memory": (
        dict(signal=signal.SIGKILL, oom_killed=True), EndReason.OUT_OF_HOST_MEMORY,
    ),
    "memory kill beats what the log says": (
        dict(signal=signal.SIGKILL, oom_killed=True, evidence=EndReason.CONNECTION_LOST),
        EndReason.OUT_OF_HOST_MEMORY,
    ),
    "setup": (dict(status=1, during_setup=True), EndReason.SETUP_FAILED),
    "setup that ends well is not the program": (
        dict(status=0, during_setup=True), EndReason.SETUP_FAILED,
    ),
    "setup fills the disk": (
        dict(status=1, during_setup=True, evidence=EndReason.DISK_FULL), EndReason.DISK_FULL,
    ),
    "hbm": (dict(status=1, evidence=EndReason.OUT_OF_HBM), EndReason.OUT_OF_HBM),
    "host memory": (
        dict(status=1, evidence=EndReason.OUT_OF_HOST_MEMORY), EndReason.OUT_OF_HOST_MEMORY,
    ),
    "disk": (dict(status=1, evidence=EndReason.DISK_FULL), EndReason.DISK_FULL),
    "busy": (dict(status=1, evidence=EndReason.DEVICE_BUSY), EndReason.DEVICE_BUSY),
    "not to be retried": (dict(status=65), EndReason.DATA_ERROR),
    "not to be retried, whatever its log says": (
        dict(status=65, evidence=EndReason.CONNECTION_LOST), EndReason.DATA_ERROR,
    ),
    "setup has other rules": (dict(status=65, during_setup=True), EndReason.SETUP_FAILED),
    "connection": (PEER_DIED, EndReason.CONNECTION_LOST),
}  # fmt: skip


@pytest.mark.parametrize(("how", "reason"), EXITS.values(), ids=EXITS)
def test_one_exit_alone(how, reason):
    assert cause_of(Exit(at=NOON, **how)) is reason
    verdict = judge(ATTEMPT, [SLICE], [exited(ATTEMPT, **how)])
    assert verdict.reason is reason
    assert verdict.failed_host == "s0/0" and "host 0 of s0" in verdict.message


@pytest.mark.parametrize(
    ("how", "reason"),
    [row for name, row in EXITS.items() if name not in ("connection", "killed from outside")],
)
def test_siblings_that_lost_their_connection_never_win_over_the_root_cause(how, reason):
    hosts = [
        exited(ATTEMPT, 0, at=after(1), **PEER_DIED),
        exited(ATTEMPT, 1, at=after(2), **PEER_DIED),
        exited(ATTEMPT, 2, at=after(9), **how),
        exited(ATTEMPT, 3, at=after(0), **STOPPED),
    ]
    verdict = judge(ATTEMPT, [SLICE], hosts)
    assert (verdict.reason, verdict.failed_host) == (reason, "s0/2")


def test_the_earlier_of_two_own_failures_decides():
    hosts = [
        exited(ATTEMPT, 0, at=after(5), status=1, log_line="KeyError: 'b'"),
        exited(
            ATTEMPT, 1, at=after(4), evidence=EndReason.OUT_OF_HBM, log_line="RESOURCE_EXHAUSTED"
        ),
    ]
    verdict = judge(ATTEMPT, [SLICE], hosts)
    assert (verdict.reason, verdict.failed_host) == (EndReason.OUT_OF_HBM, "s0/1")
    assert verdict.message == "RESOURCE_EXHAUSTED (exit status 1, host 1 of s0)"


@pytest.mark.parametrize(
    "how",
    [
        dict(signal=signal.SIGTERM),
        dict(signal=signal.SIGKILL),
        dict(signal=signal.SIGHUP),
        dict(status=128 + signal.SIGTERM),
        dict(status=128 + signal.SIGKILL),
    ],
    ids=["SIGTERM", "SIGKILL", "SIGHUP", "a shell tells of SIGTERM", "a shell tells of SIGKILL"],
)
def test_an_external_signal_outranks_only_a_lost_connection(how):
    killed = exited(ATTEMPT, 0, at=after(1), **how)
    lost = exited(ATTEMPT, 1, at=after(0), **PEER_DIED)
    own = exited(ATTEMPT, 2, at=after(2), status=1)
    assert judge(ATTEMPT, [SLICE], [killed, lost]).failed_host == "s0/0"
    assert judge(ATTEMPT, [SLICE], [killed, lost, own]).failed_host == "s0/2"
    gone = make_slice(state=SliceState.GONE, loss=LossReason.PREEMPTED, lost_at=after(60))
    assert judge(ATTEMPT, [gone], [killed, lost]).reason is EndReason.PREEMPTED


LOSSES = {
    LossReason.PREEMPTED: EndReason.PREEMPTED,
    LossReason.MAINTENANCE: EndReason.MAINTENANCE,
    LossReason.HOST_LOST: EndReason.HOST_LOST,
    LossReason.OUT_OF_MEMORY: EndReason.OUT_OF_HOST_MEMORY,
    LossReason.BOOT_FAILED: EndReason.HOST_LOST,
    LossReason.VANISHED: EndReason.HOST_LOST,
    LossReason.REFUSED: EndReason.HOST_LOST,
}
each_loss = pytest.mark.parametrize(("loss", "reason"), LOSSES.items())


@each_loss
def test_a_lost_slice_explains_every_later_failure(loss, reason):
    lost = make_slice(state=SliceState.GONE, loss=loss, lost_at=after(10), reason="so it says")
    hosts = [exited(ATTEMPT, 0, at=after(10), status=1), exited(ATTEMPT, 1, at=after(12), status=1)]
    verdict = judge(ATTEMPT, [lost], hosts)
    assert (verdict.reason, verdict.failed_host) == (reason, None)
    assert "s0" in verdict.message and "so it says" in verdict.message


@each_loss
def test_a_failure_well_before_the_loss_is_the_programs_own(loss, reason):
    lost = make_slice(state=SliceState.GONE, loss=loss, lost_at=LATE + SECOND)
    verdict = judge(ATTEMPT, [lost], [exited(ATTEMPT, 0, at=NOON, status=1)])
    assert verdict.reason is EndReason.USER_ERROR
    lost = replace(lost, lost_at=LATE)
    assert judge(ATTEMPT, [lost], [exited(ATTEMPT, 0, at=NOON, status=1)]).reason is reason


@each_loss
def test_a_connection_lost_before_the_loss_was_detected_is_explained_by_it(loss, reason):
    lost = make_slice(state=SliceState.GONE, loss=loss, lost_at=after(10))
    verdict = judge(ATTEMPT, [lost], [exited(ATTEMPT, 0, at=after(3), **PEER_DIED)])
    assert verdict.reason is reason


@pytest.mark.parametrize(
    ("message", "shown"),
    [("", ""), ("preempted", ""), ("the zone is full", ": the zone is full")],
    ids=["none", "the reason again", "more"],
)
def test_a_loss_is_described_once(message, shown):
    lost = make_slice(
        "s0",
        state=SliceState.GONE,
        loss=LossReason.PREEMPTED,
        lost_at=after(60),
        reason=message,
    )
    verdict = judge(make_attempt(), [lost], [])
    assert verdict.message == f"slice s0 was preempted{shown}"


def test_a_released_slice_explains_nothing():
    released = make_slice(state=SliceState.RELEASING, loss=LossReason.RELEASED, lost_at=after(0))
    verdict = judge(ATTEMPT, [released], [exited(ATTEMPT, 0, at=after(9), status=1)])
    assert verdict.reason is EndReason.USER_ERROR


def test_a_preemption_outranks_an_earlier_lost_host():
    attempt = make_attempt(slices=("s0", "s1"))
    slices = [
        make_slice("s0", state=SliceState.GONE, loss=LossReason.HOST_LOST, lost_at=after(1)),
        make_slice("s1", state=SliceState.GONE, loss=LossReason.PREEMPTED, lost_at=after(300)),
    ]
    assert judge(attempt, slices, []).reason is EndReason.PREEMPTED
    between = [exited(attempt, 0, "s1", at=after(10), status=1)]
    assert judge(attempt, slices, between).reason is EndReason.PREEMPTED


def test_a_notice_counts_as_a_loss_from_its_time():
    doomed = make_slice(state=SliceState.DOOMED, loss=LossReason.PREEMPTED, lost_at=after(0))
    attempt = replace(ATTEMPT, stopping_at=after(0), stop_reason=EndReason.PREEMPTED)
    hosts = [exited(attempt, index, at=after(5), **STOPPED) for index in range(4)]
    assert judge(attempt, [doomed], hosts).reason is EndReason.PREEMPTED


@pytest.mark.parametrize("reason", [EndReason.PREEMPTED, EndReason.MAINTENANCE])
def test_a_program_that_exits_with_0_after_a_notice_has_finished(reason):
    doomed = make_slice(state=SliceState.DOOMED, loss=LossReason.PREEMPTED, lost_at=after(0))
    attempt = replace(ATTEMPT, stopping_at=after(0), stop_reason=reason)
    done = [
        exited(attempt, host, at=after(5), status=0, stopped_by_agent=True) for host in range(4)
    ]
    assert judge(attempt, [doomed], done).reason is EndReason.FINISHED
    one_saved = [*done[:3], exited(attempt, 3, at=after(5), status=1, stopped_by_agent=True)]
    assert judge(attempt, [doomed], one_saved).reason is not EndReason.FINISHED


@pytest.mark.parametrize("reason", [EndReason.PREEMPTED, EndReason.MAINTENANCE])
def test_a_loss_counts_after_the_slice_is_deleted(reason):
    """After a restart the controller no longer knows of slices that are gone."""
    attempt = make_attempt(slices=("s0", "s1"), stopping_at=after(5), stop_reason=reason)
    left = [exited(attempt, index, "s1", at=after(6), **PEER_DIED) for index in range(4)]
    assert judge(attempt, [make_slice("s1")], left).reason is reason
    own = [exited(attempt, 0, "s1", at=after(6), status=1)]
    assert judge(attempt, [make_slice("s1")], own).reason is reason
    before = [exited(attempt, 0, "s1", at=after(4) - LOSS_DETECTION_DELAY, status=1)]
    assert judge(attempt, [make_slice("s1")], before).reason is EndReason.USER_ERROR


@pytest.mark.parametrize(
    "reason",
    [EndReason.CANCELLED, EndReason.TIMEOUT, EndReason.SUPERSEDED, EndReason.HUNG],
)
def test_a_stop_by_the_controller_decides_whatever_the_exits(reason):
    attempt = replace(ATTEMPT, stopping_at=NOON, stop_reason=reason)
    lost = make_slice(state=SliceState.GONE, loss=LossReason.PREEMPTED, lost_at=after(1))
    hosts = [exited(attempt, 0, at=after(2), **STOPPED), exited(attempt, 1, at=after(2), status=1)]
    verdict = judge(attempt, [lost], hosts)
    assert (verdict.reason, verdict.message) == (reason, END_REASONS[reason].description)


@pytest.mark.parametrize("asked", [None, EndReason.CANCELLED, EndReason.TIMEOUT])
def test_a_program_that_finished_by_itself_has_finished_despite_a_stop(asked):
    attempt = replace(ATTEMPT, stopping_at=NOON if asked else None, stop_reason=asked)
    hosts = [exited(attempt, index, **CLEAN) for index in range(4)]
    assert judge(attempt, [SLICE], hosts).reason is EndReason.FINISHED


def test_clean_exits_of_some_hosts_are_not_enough():
    attempt = replace(ATTEMPT, stopping_at=NOON, stop_reason=EndReason.CANCELLED)
    hosts = [exited(attempt, 0, **CLEAN), exited(attempt, 1, status=0, stopped_by_agent=True)]
    assert judge(attempt, [SLICE], hosts).reason is EndReason.CANCELLED


def test_a_gang_with_a_slice_that_has_not_reported_has_not_finished():
    attempt = make_attempt(slices=("s0", "s1"))
    hosts = [exited(attempt, index, "s0", **CLEAN) for index in range(4)]
    assert judge(attempt, [make_slice("s0")], hosts).reason is EndReason.HOST_LOST
    assert judge(ATTEMPT, [], []).reason is EndReason.HOST_LOST


def test_an_agent_restart_counts_as_a_lost_host():
    idle = replace(exited(ATTEMPT, 0, **CLEAN), phase=Phase.IDLE, exit=None)
    verdict = judge(ATTEMPT, [SLICE], [idle, exited(ATTEMPT, 1, **STOPPED)])
    assert verdict.reason is EndReason.HOST_LOST and "restarted" in verdict.message


def test_exits_of_another_attempt_are_ignored():
    older = ended_attempt(7, EndReason.USER_ERROR)
    hosts = [exited(older, 0, status=1), exited(ATTEMPT, 1, evidence=EndReason.OUT_OF_HBM)]
    assert judge(ATTEMPT, [SLICE], hosts).failed_host == "s0/1"


@st.composite
def exits(draw, earliest: int = 0):
    how = draw(
        st.sampled_from(
            [row for row, _ in EXITS.values()] + [STOPPED, CLEAN, {"signal": signal.SIGTERM}]
        )
    )
    return {**how, "at": after(draw(st.integers(earliest, earliest + 20)))}


@st.composite
def gangs(draw, earliest: int = 0):
    """An attempt on one to three slices, with how each of their hosts ended."""
    names = [f"s{index}" for index in range(draw(st.integers(1, 3)))]
    stop = draw(st.none() | st.sampled_from([EndReason.CANCELLED, EndReason.HUNG]))
    attempt = make_attempt(slices=names, stop_reason=stop, stopping_at=NOON if stop else None)
    hosts = [
        exited(attempt, index, name, **draw(exits(earliest)))
        for name in names
        for index in range(draw(st.integers(1, 4)))
    ]
    losses = st.none() | st.sampled_from(list(LossReason))
    slices = []
    for name in names:
        loss = draw(losses)
        lost_at = after(draw(st.integers(0, 20))) if loss else None
        state = SliceState.GONE if loss else SliceState.READY
        slices.append(make_slice(name, state=state, loss=loss, lost_at=lost_at))
    return attempt, slices, hosts


@given(gangs(), st.randoms(use_true_random=False))
def test_the_verdict_does_not_depend_on_the_order_of_hosts_or_slices(gang, random):
    attempt, slices, hosts = gang
    expected = judge(attempt, slices, hosts)
    for _ in range(3):
        random.shuffle(hosts)
        random.shuffle(slices)
        assert judge(attempt, slices, hosts) == expected


@given(gangs(earliest=1), st.data())
def test_an_own_failure_before_everything_else_decides(gang, data):
    attempt, slices, hosts = gang
    assume(attempt.stop_reason is None)
    names = [name for name in EXITS if name not in ("connection", "killed from outside")]
    how, reason = EXITS[data.draw(st.sampled_from(names))]
    at = data.draw(st.integers(0, len(hosts) - 1))
    first = hosts[at]
    long_before = after(-1) - LOSS_DETECTION_DELAY
    hosts[at] = exited(attempt, first.index, first.slice_id, at=long_before, **how)
    verdict = judge(attempt, slices, hosts)
    assert (verdict.reason, verdict.failed_host) == (reason, first.id)


@given(gangs(earliest=5), st.sampled_from([LossReason.PREEMPTED, LossReason.MAINTENANCE]))
def test_a_preemption_before_all_failures_is_never_charged_to_the_user(gang, loss):
    attempt, slices, hosts = gang
    assume(attempt.stop_reason is None)
    slices[0] = make_slice(slices[0].id, state=SliceState.GONE, loss=loss, lost_at=after(4))
    verdict = judge(attempt, slices, hosts)
    assert (
        verdict.reason is EndReason.FINISHED
        or END_REASONS[verdict.reason].budget is RetryBudget.FREE
    )


@given(gangs())
def test_every_verdict_has_a_message_and_names_only_a_host_that_failed_by_itself(gang):
    verdict = judge(*gang)
    assert verdict.message
    deciding = [host for host in gang[2] if host.id == verdict.failed_host]
    assert all(not host.exit.stopped_by_agent and not host.exit.clean for host in deciding)
    assert (verdict.failed_host is None) == (not deciding)


def test_a_signal_is_named_before_the_last_output():
    host = make_host(0, "s-1")
    killed = Exit(signal=9, at=NOON, log_line="secret is ***")
    shown = describe_exit(host, killed)
    assert shown == "killed by signal 9 on host 0 of s-1; last line: secret is ***"


def test_the_last_line_of_output_is_not_taken_for_the_cause():
    host = make_host(0, "s-1")
    exit = Exit(status=3, at=NOON, log_line="loss=0.5", unexplained=True)
    assert describe_exit(host, exit) == "exit status 3 on host 0 of s-1; last line: loss=0.5"
