"""Properties of every step: idempotent, legal, and never ahead of running processes."""

from __future__ import annotations

import signal
from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.examples import examples
from tests.policy.builders import (
    MINUTE,
    NOON,
    after,
    ended_attempt,
    exited,
    make_attempt,
    make_host,
    make_job,
    make_slice,
)
from tpufleet.model.fleet.hosts import Phase, Progress
from tpufleet.model.fleet.slices import LossReason, SliceState
from tpufleet.model.job.attempts import AttemptState
from tpufleet.model.job.end_reasons import END_REASONS, EndReason, RetryBudget
from tpufleet.model.job.jobs import JobState, Retries, Rule
from tpufleet.model.job.lifecycle import can_transition
from tpufleet.policy.recovery.job_step import JobView, Step, missing_slices, next_step

S = SliceState
LOST = (
    LossReason.PREEMPTED,
    LossReason.MAINTENANCE,
    LossReason.HOST_LOST,
    LossReason.OUT_OF_MEMORY,
    LossReason.VANISHED,
)
GOES_ON = [reason for reason in EndReason if END_REASONS[reason].budget is not RetryBudget.NONE]
exits = st.sampled_from(
    [
        {"status": 0},
        {"status": 1},
        {"status": 1, "evidence": EndReason.CONNECTION_LOST},
        {"status": 1, "evidence": EndReason.DISK_FULL},
        {"signal": signal.SIGKILL, "oom_killed": True},
        {"signal": signal.SIGTERM},
        {"signal": signal.SIGTERM, "stopped_by_agent": True},
        {"status": 0, "stopped_by_agent": True},
    ]
)
moments = st.integers(-120, 120).map(after)
budgets = st.builds(Retries, failure=st.integers(0, 2), infrastructure=st.integers(0, 3))


@st.composite
def any_slice(draw, name: str, pool: str | None, states=tuple(SliceState)):
    state = draw(st.sampled_from(states))
    if state in (S.REQUESTED, S.BOOTING, S.READY):
        return make_slice(name, state=state, pool=pool)
    loss = draw(st.sampled_from(LOST if state is S.DOOMED else (*LOST, LossReason.RELEASED)))
    return make_slice(name, state=state, pool=pool, loss=loss, lost_at=draw(moments))


@st.composite
def any_host(draw, attempt, index: int, slice_name: str):
    phase = draw(st.sampled_from([*Phase, Phase.EXITED, Phase.EXITED]))
    if phase is Phase.EXITED:
        return exited(attempt, index, slice_name, at=draw(moments), **draw(exits))
    known = attempt if draw(st.integers(0, 4)) else None
    return make_host(index, slice_name, attempt=known, phase=phase)


@st.composite
def specs(draw) -> dict:
    return dict(
        slices=draw(st.integers(1, 2)),
        pool=draw(st.sampled_from([None, "lab"])),
        rule=draw(st.sampled_from(list(Rule))),
        timeout=draw(st.sampled_from([None, MINUTE, 60 * MINUTE])),
        hung_after=draw(st.sampled_from([None, MINUTE])),
        crash_loop=draw(st.integers(1, 4)),
        retries=draw(budgets),
        cancel_requested_by=draw(st.sampled_from([None, None, "bob"])),
    )


@st.composite
def waiting(draw) -> JobView:
    """A job without a live attempt."""
    spec = draw(specs())
    reasons = draw(st.lists(st.sampled_from(GOES_ON), max_size=3))
    history = tuple(
        ended_attempt(number, reason, reached=draw(st.none() | st.integers(1, 50)))
        for number, reason in enumerate(reasons)
    )
    states = [JobState.RECOVERING] if history else [JobState.QUEUED, JobState.WAITING]
    job = make_job(
        state=draw(st.sampled_from(states)),
        not_before=draw(st.none() | moments) if history else None,
        fresh_from=draw(st.integers(0, len(history))),
        **spec,
    )
    slices = [
        draw(any_slice(f"s{number}", spec["pool"])) for number in range(draw(st.integers(0, 3)))
    ]
    return JobView(job=job, attempts=history, slices={item.id: item for item in slices})


@st.composite
def running(draw) -> JobView:
    """A job with a live attempt."""
    spec = draw(specs())
    names = [f"s{number}" for number in range(spec["slices"])]
    state = draw(
        st.sampled_from([AttemptState.STARTING, AttemptState.RUNNING, AttemptState.STOPPING])
    )
    stop = state is AttemptState.STOPPING
    causes = [None, EndReason.PREEMPTED, EndReason.SUPERSEDED, EndReason.HUNG, EndReason.TIMEOUT]
    if spec["cancel_requested_by"]:
        causes.append(EndReason.CANCELLED)
    history = tuple(
        ended_attempt(number, reason)
        for number, reason in enumerate(draw(st.lists(st.sampled_from(GOES_ON), max_size=2)))
    )
    attempt = make_attempt(
        len(history),
        slices=names,
        state=state,
        running_at=None if state is AttemptState.STARTING else draw(moments),
        stopping_at=draw(moments) if stop else None,
        stop_reason=draw(st.sampled_from(causes)) if stop else None,
        start_step=draw(st.none() | st.integers(1, 9)),
    )
    job_state = {
        AttemptState.STARTING: JobState.STARTING,
        AttemptState.RUNNING: JobState.RUNNING,
        AttemptState.STOPPING: JobState.RECOVERING,
    }[state]
    serving = (S.READY, S.READY, S.READY, S.DOOMED, S.RELEASING, S.GONE)
    slices = [draw(any_slice(name, spec["pool"], serving)) for name in names]
    slices += [
        draw(any_slice(f"r{number}", spec["pool"])) for number in range(draw(st.integers(0, 1)))
    ]
    hosts = {
        name: tuple(draw(any_host(attempt, index, name)) for index in range(2)) for name in names
    }
    progress = draw(
        st.none() | st.builds(Progress, checkpoint_step=st.none() | st.integers(1, 20), at=moments)
    )
    return JobView(
        job=make_job(state=job_state, **spec),
        attempts=(*history, attempt),
        slices={item.id: item for item in slices},
        hosts=hosts,
        progress=progress,
    )


views = st.one_of(waiting(), running())


def apply(view: JobView, done: Step) -> JobView:
    attempts = list(view.attempts)
    if done.attempt is not None:
        attempts[done.attempt.number :] = [done.attempt]
    live = bool(attempts) and attempts[-1].live
    return structs.replace(
        view,
        job=done.job,
        attempts=tuple(attempts),
        slices={**view.slices, **{item.id: item for item in done.slices}},
        progress=view.progress if live else None,
    )


def changed(view: JobView, done: Step) -> bool:
    return apply(view, done) != structs.replace(view) or bool(done.events)


@settings(max_examples=examples(150))
@given(views)
def test_a_repeated_step_changes_nothing(view):
    """An attempt that has ended is followed by one more step, which may start the next."""
    done = next_step(view, NOON)
    after_one = apply(view, done)
    if done.attempt is not None and not done.attempt.live and not done.job.ended:
        done = next_step(after_one, NOON)
        assert done.attempt is None or done.attempt.number == len(after_one.attempts)
        after_one = apply(after_one, done)
    again = next_step(after_one, NOON)
    assert not changed(after_one, again)
    assert again.wake_at == done.wake_at


@settings(max_examples=examples(150))
@given(views)
def test_every_transition_is_legal_and_every_state_has_a_reason(view):
    done = next_step(view, NOON)
    assert can_transition(view.job.state, done.job.state)
    assert done.job.reason
    if done.attempt is not None:
        if done.attempt.number == len(view.attempts):
            assert done.attempt.state is AttemptState.STARTING
            assert view.attempt is None, "a job has at most one live attempt"
        else:
            assert done.attempt.number == len(view.attempts) - 1
            assert can_transition(view.attempts[-1].state, done.attempt.state)
            assert view.attempts[-1].live, "an ended attempt never changes"
    for tpu_slice in done.slices:
        before = view.slices[tpu_slice.id]
        assert can_transition(before.state, tpu_slice.state)
        assert before.lost_at in (None, tpu_slice.lost_at)


@settings(max_examples=examples(150))
@given(running())
def test_an_attempt_ends_only_when_every_process_is_gone(view):
    done = next_step(view, NOON)
    if done.attempt.live:
        return
    assert done.attempt.end_reason and done.attempt.message and done.attempt.ended_at == NOON
    for slice_id in done.attempt.slices:
        if view.slices[slice_id].state is S.GONE:
            continue
        for host in view.hosts[slice_id]:
            assert host.attempt_id == done.attempt.id and host.phase is Phase.EXITED


@given(running())
def test_an_attempt_that_lost_a_slice_or_a_process_is_stopped(view):
    done = next_step(view, NOON)
    lost = any(view.slices[name].state is not S.READY for name in view.attempt.slices)
    failed = any(
        host.phase is Phase.EXITED and not host.exit.clean
        for hosts in view.hosts.values()
        for host in hosts
    )
    if lost or failed or view.job.cancel_requested_by:
        assert done.attempt.state in (AttemptState.STOPPING, AttemptState.ENDED)


@settings(max_examples=examples(150))
@given(views)
def test_an_ended_job_holds_nothing_and_a_retried_one_keeps_healthy_slices(view):
    done = next_step(view, NOON)
    now = apply(view, done)
    held = [item for item in now.slices.values() if item.job_id == view.job.id and item.live]
    if done.job.ended:
        assert held == []
        assert done.job.ended_at == NOON and done.job.end_reason
        assert missing_slices(now, NOON) == 0
    for item in done.slices:
        if view.slices[item.id].state is not S.DOOMED and item.pool and not item.live:
            assert "did not stop in time" in item.reason, "a healthy slice goes back to its pool"


@given(views)
def test_the_wake_up_time_is_never_in_the_past(view):
    """A wake-up time in the past would make the controller spin."""
    done = next_step(view, NOON)
    assert done.wake_at is None or done.wake_at > NOON


@given(views)
def test_missing_slices_complete_the_gang_exactly(view):
    lacking = missing_slices(view, NOON)
    assert 0 <= lacking <= view.job.spec.slices
    if view.job.cancel_requested_by:
        assert lacking == 0
    if lacking:
        assert lacking + len(view.usable_slices) == view.job.spec.slices


@given(waiting())
def test_an_attempt_starts_on_exactly_its_gang_of_ready_slices(view):
    assume(view.job.cancel_requested_by is None)
    done = next_step(view, NOON)
    ready = [item for item in view.usable_slices if item.state is S.READY]
    backing_off = view.job.not_before is not None and view.job.not_before > NOON
    assert (done.attempt is not None) == (len(ready) >= view.job.spec.slices and not backing_off)
    if done.attempt is not None:
        assert len(set(done.attempt.slices)) == view.job.spec.slices
        assert set(done.attempt.slices) <= {item.id for item in ready}
        assert done.attempt.number == len(view.attempts)


@given(running())
def test_every_stop_completes_once_the_slices_are_gone(view):
    """However its hosts behave: stopped, released, gone, ended."""
    attempt, now = view.attempt, NOON
    for _ in range(5):
        done = next_step(view, now)
        view = apply(view, done)
        if view.attempt is None or view.attempt.id != attempt.id:
            return
        if view.attempt.state is not AttemptState.STOPPING:
            return
        now = max(now, done.wake_at or now)
        released = {
            name: replace(item, state=S.GONE)
            for name, item in view.slices.items()
            if item.state is S.RELEASING
        }
        view = structs.replace(view, slices={**view.slices, **released})
    raise AssertionError(f"{attempt.id} never ends")
