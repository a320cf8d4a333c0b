"""The next step of a job: when an attempt starts, why it is stopped, what is released."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
from msgspec import structs

from tests.policy.builders import (
    MINUTE,
    NOON,
    SECOND,
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
from tpufleet.model.job import mounts
from tpufleet.model.job.attempts import AttemptState, EnvironmentReport, Startup
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import JobState, Retries, Rule
from tpufleet.policy.recovery.job_step import JobView, fail_job, missing_slices, next_step
from tpufleet.policy.recovery.liveness import AGENT_LEASE

S = SliceState
STARTING = make_attempt(state=AttemptState.STARTING)
RUNNING = make_attempt(running_at=NOON)


def make_view(job, attempt=None, *, slices=None, hosts=None, history=(), progress=None) -> JobView:
    """A job whose attempt, if it has one, runs on the four hosts of slice s0."""
    slices = [make_slice()] if slices is None else slices
    if hosts is None and attempt is not None:
        hosts = [make_host(index, attempt=attempt) for index in range(4)]
    grouped: dict = {}
    for host in hosts or ():
        grouped.setdefault(host.slice_id, []).append(host)
    return JobView(
        job=job,
        attempts=(*history, *([attempt] if attempt else [])),
        slices={item.id: item for item in slices},
        hosts={slice_id: tuple(items) for slice_id, items in grouped.items()},
        progress=progress,
    )


def stopping(reason: EndReason | None, **options):
    return replace(
        RUNNING, state=AttemptState.STOPPING, stopping_at=NOON, stop_reason=reason, **options
    )


def all_exited(attempt, **how):
    return [exited(attempt, index, **how) for index in range(4)]


running_job = make_job(state=JobState.RUNNING)


# Before an attempt.
@pytest.mark.parametrize("state", SliceState)
def test_an_attempt_starts_only_when_the_whole_gang_is_ready(state):
    job = make_job(slices=2, state=JobState.WAITING)
    step = next_step(make_view(job, slices=[make_slice("s0"), make_slice("s1", state=state)]), NOON)
    if state is S.READY:
        assert step.attempt.slices == ("s0", "s1") and step.job.state is JobState.STARTING
    else:
        assert step.attempt is None and step.job.state is JobState.WAITING


def test_the_slices_of_an_attempt_keep_the_order_of_their_requests():
    early, late = make_slice("z", requested_at=after(-9)), make_slice("a")
    step = next_step(make_view(make_job(slices=2), slices=[late, early]), NOON)
    assert step.attempt.slices == ("z", "a")


def test_nothing_starts_during_backoff():
    job = make_job(state=JobState.RECOVERING, not_before=after(60))
    view = make_view(job, history=[ended_attempt(0, EndReason.HUNG)])
    step = next_step(view, NOON)
    assert step.attempt is None and step.wake_at == after(60)
    assert missing_slices(structs.replace(view, slices={}), NOON) == 0
    assert next_step(view, after(60)).attempt.number == 1


def test_the_next_attempt_starts_from_the_latest_valid_checkpoint():
    history = [
        ended_attempt(0, EndReason.HUNG, None, 200),
        ended_attempt(1, EndReason.CONNECTION_LOST, 200, 250),
        ended_attempt(2, EndReason.PREEMPTED, None, 40),
    ]
    job = make_job(state=JobState.RECOVERING)
    assert next_step(make_view(job, history=history), NOON).attempt.start_step == 250
    fresh = replace(job, fresh_from=2)
    assert next_step(make_view(fresh, history=history[:2]), NOON).attempt.start_step is None
    assert next_step(make_view(fresh, history=history), NOON).attempt.start_step == 40


def test_a_job_that_lost_all_requested_slices_is_queued_again():
    step = next_step(make_view(make_job(state=JobState.WAITING), slices=[]), NOON)
    assert step.job.state is JobState.QUEUED and step.job.reason == "looking for capacity"


def test_an_unused_doomed_slice_is_released_at_once():
    doomed = make_slice(state=S.DOOMED, loss=LossReason.PREEMPTED)
    step = next_step(make_view(make_job(state=JobState.WAITING), slices=[doomed]), NOON)
    assert [(item.state, item.loss) for item in step.slices] == [
        (S.RELEASING, LossReason.PREEMPTED)
    ]


def test_an_unplaceable_job_ends_and_releases_its_slices():
    step = fail_job(make_view(make_job(state=JobState.WAITING)), "no pool", "make one", NOON)
    assert (step.job.state, step.job.reason) == (JobState.FAILED, "no pool")
    assert step.job.advice == "make one" and step.slices[0].state is S.RELEASING


# Cancelling.
def test_a_cancelled_job_without_an_attempt_ends_at_once():
    step = next_step(make_view(make_job(cancel_requested_by="bob")), NOON)
    assert step.job.state is JobState.CANCELLED and step.job.reason == "cancelled by bob"
    assert step.job.end_reason is EndReason.CANCELLED and step.job.ended_at == NOON


@pytest.mark.parametrize("attempt", [STARTING, RUNNING], ids=lambda item: item.state)
def test_a_cancelled_attempt_is_stopped_first_and_ends_when_its_processes_are_gone(attempt):
    job = replace(running_job, cancel_requested_by="bob")
    step = next_step(make_view(job, attempt), NOON)
    assert step.attempt.state is AttemptState.STOPPING
    assert step.attempt.stop_reason is EndReason.CANCELLED
    assert missing_slices(make_view(step.job, step.attempt, slices=[]), NOON) == 0
    gone = all_exited(step.attempt, signal=signal.SIGTERM, stopped_by_agent=True)
    last = next_step(make_view(step.job, step.attempt, hosts=gone), after(3))
    assert last.job.state is JobState.CANCELLED and not last.attempt.live


def test_cancelled_too_late_is_finished():
    job = replace(running_job, cancel_requested_by="bob")
    step = next_step(make_view(job, RUNNING, hosts=all_exited(RUNNING, status=0)), NOON)
    assert step.job.state is JobState.SUCCEEDED


# Following an attempt.
def test_an_attempt_runs_when_every_host_runs():
    hosts = [make_host(index, attempt=STARTING) for index in range(4)]
    slow = [*hosts[:3], replace(hosts[3], phase=Phase.SETUP)]
    job = make_job(state=JobState.STARTING)
    assert next_step(make_view(job, STARTING, hosts=slow), NOON).attempt is STARTING
    step = next_step(make_view(job, STARTING, hosts=hosts), NOON)
    assert (step.attempt.state, step.attempt.running_at) == (AttemptState.RUNNING, NOON)
    assert step.job.state is JobState.RUNNING


def test_a_gang_is_neither_running_nor_finished_while_a_slice_has_not_reported():
    attempt = replace(STARTING, slices=("s0", "s1"))
    slices = [make_slice("s0"), make_slice("s1")]
    job = make_job(state=JobState.STARTING, slices=2)
    assert next_step(make_view(job, attempt, slices=slices), NOON).attempt.state is STARTING.state
    done = all_exited(attempt, status=0)
    step = next_step(make_view(job, attempt, slices=slices, hosts=done), NOON)
    assert step.attempt.live and step.job.state is JobState.STARTING


def lost(state, loss=LossReason.PREEMPTED):
    return make_slice(state=state, loss=loss, lost_at=NOON)


REASONS_TO_STOP = {
    "a notice": (dict(slices=[lost(S.DOOMED)]), EndReason.PREEMPTED),
    "maintenance": (dict(slices=[lost(S.DOOMED, LossReason.MAINTENANCE)]), EndReason.MAINTENANCE),
    "a slice lost": (dict(slices=[lost(S.RELEASING, LossReason.HOST_LOST)]), EndReason.HOST_LOST),
    "a slice forgotten": (dict(slices=[]), EndReason.HOST_LOST),
    "a failure": (dict(hosts=[exited(RUNNING, 0, status=1)]), None),
    "a process that its agent stopped": (
        dict(hosts=[exited(RUNNING, 0, status=143, stopped_by_agent=True)]), None,
    ),
    "an agent that restarted": (
        dict(hosts=[make_host(0, attempt=RUNNING, phase=Phase.IDLE)]), None,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("observed", "reason"), REASONS_TO_STOP.values(), ids=REASONS_TO_STOP)
def test_what_stops_an_attempt(observed, reason):
    hosts = [make_host(index, attempt=RUNNING) for index in range(4)]
    hosts[: len(observed.get("hosts", ()))] = observed.get("hosts", ())
    view = make_view(running_job, RUNNING, hosts=hosts, slices=observed.get("slices"))
    step = next_step(view, NOON)
    if view.slices:
        assert step.attempt.state is AttemptState.STOPPING
    assert step.attempt.stop_reason is reason
    assert step.job.state is JobState.RECOVERING and step.job.reason
    assert step.events


def test_the_failure_that_is_shown_is_not_a_lost_connection():
    """Siblings that died of it may be reported in the same moment, or before."""
    lost = [
        exited(RUNNING, index, evidence=EndReason.CONNECTION_LOST, log_line="UNAVAILABLE: peer")
        for index in range(3)
    ]
    crash = exited(RUNNING, 3, at=after(1), log_line="KeyError: 'labels'")
    step = next_step(make_view(running_job, RUNNING, hosts=[*lost, crash]), after(2))
    reasons = {step.job.reason, *(event.message for event in step.events)}
    assert any("KeyError" in reason for reason in reasons)
    assert not any("UNAVAILABLE" in reason for reason in reasons)


def test_a_program_is_stopped_when_its_time_limit_is_reached():
    job = replace(running_job, spec=structs.replace(running_job.spec, timeout=10 * MINUTE))
    view = make_view(job, RUNNING)
    assert next_step(view, after(599)).wake_at == after(600)
    step = next_step(view, after(600))
    assert step.attempt.stop_reason is EndReason.TIMEOUT


def test_a_program_is_stopped_when_it_counts_as_hung():
    job = replace(running_job, spec=structs.replace(running_job.spec, hung_after=5 * MINUTE))
    view = make_view(job, RUNNING, progress=Progress(step=9, at=after(60)))
    assert next_step(view, after(359)).wake_at == after(360)
    assert next_step(view, after(360)).attempt.stop_reason is EndReason.HUNG


# Stopping.
def test_an_attempt_ends_only_when_every_process_is_known_to_be_gone():
    attempt = stopping(EndReason.PREEMPTED)
    hosts = all_exited(attempt, signal=signal.SIGTERM, stopped_by_agent=True)
    still = [*hosts[:3], make_host(3, attempt=attempt, phase=Phase.STOPPING)]
    waiting = next_step(make_view(running_job, attempt, hosts=still), after(5))
    assert waiting.attempt is attempt
    assert waiting.wake_at == NOON + running_job.spec.grace + 30 * SECOND
    assert not next_step(make_view(running_job, attempt, hosts=hosts), after(5)).attempt.live


def of_gang(change, index=0):
    """The hosts of a stopping gang, of which one is different."""

    def hosts(attempt):
        others = [make_host(each, attempt=attempt, phase=Phase.STOPPING) for each in range(4)]
        return [*others[:index], change(attempt), *others[index + 1 :]]

    return hosts


@pytest.mark.parametrize(
    ("reason", "hosts", "slices", "aborted"),
    [
        pytest.param(None, of_gang(exited), {}, True, id="a process failed"),
        pytest.param(
            EndReason.PREEMPTED, of_gang(exited), {}, True, id="one failed while it was stopped"
        ),
        pytest.param(
            EndReason.CANCELLED,
            of_gang(lambda attempt: exited(attempt, signal=15, stopped_by_agent=True)),
            {},
            False,
            id="one stopped as asked",
        ),
        pytest.param(
            EndReason.PREEMPTED,
            of_gang(lambda attempt: exited(attempt, status=0)),
            {},
            False,
            id="one has finished",
        ),
        pytest.param(
            None, of_gang(lambda attempt: make_host(attempt=attempt, phase=Phase.IDLE)), {}, True,
            id="an agent restarted",
        ),
        pytest.param(
            None,
            of_gang(lambda attempt: exited(attempt, status=None, stopped_by_agent=True)),
            {},
            True,
            id="an earlier agent ran it",
        ),
        pytest.param(EndReason.HUNG, of_gang(make_host), {}, True, id="hung"),
        pytest.param(EndReason.TIMEOUT, of_gang(make_host), {}, False, id="time limit"),
        pytest.param(
            EndReason.PREEMPTED,
            of_gang(make_host),
            {"state": S.DOOMED, "loss": LossReason.PREEMPTED},
            False,
            id="preemption notice",
        ),
        pytest.param(
            EndReason.PREEMPTED,
            of_gang(make_host),
            {"state": S.DOOMED, "loss": LossReason.PREEMPTED, "fenced_at": NOON},
            True,
            id="machines gone",
        ),
        pytest.param(
            EndReason.HOST_LOST,
            of_gang(make_host),
            {"state": S.DOOMED, "loss": LossReason.HOST_LOST},
            True,
            id="host lost",
        ),
    ],
)  # fmt: skip
def test_a_gang_is_aborted_when_it_can_complete_no_step(reason, hosts, slices, aborted):
    attempt = replace(stopping(reason), slices=("s0", "s1"))
    on_s1 = make_host(0, "s1", attempt=attempt, phase=Phase.STOPPING)
    gang = [make_slice(**slices), make_slice("s1")]
    view = make_view(running_job, attempt, slices=gang, hosts=[*hosts(attempt), on_s1])
    step = next_step(view, after(1))
    assert step.attempt.live and step.attempt.aborted is aborted
    again = next_step(structs.replace(view, attempts=(step.attempt,)), after(1))
    assert again.attempt is step.attempt


def test_stopping_does_not_wait_for_a_slice_that_is_gone():
    attempt = stopping(EndReason.PREEMPTED)
    silent = [make_host(index, attempt=attempt) for index in range(4)]
    for state, live in ((S.RELEASING, True), (S.GONE, False)):
        view = make_view(running_job, attempt, slices=[lost(state)], hosts=silent)
        assert next_step(view, after(5)).attempt.live is live
    preempted = replace(lost(S.RELEASING), fenced_at=NOON)
    view = make_view(running_job, attempt, slices=[preempted], hosts=silent)
    assert not next_step(view, after(5)).attempt.live, "its machines are gone, if not the node"


def test_a_host_that_does_not_stop_loses_its_slice():
    attempt = stopping(EndReason.CANCELLED)
    job = replace(running_job, cancel_requested_by="bob")
    hosts = all_exited(attempt, status=0, stopped_by_agent=True)[:3]
    hosts.append(make_host(3, attempt=attempt, phase=Phase.STOPPING))
    step = next_step(make_view(job, attempt, hosts=hosts), NOON + job.spec.grace + 30 * SECOND)
    [released] = step.slices
    assert (released.state, released.loss) == (S.RELEASING, LossReason.HOST_LOST)
    assert "host 3 did not stop in time" in released.reason
    assert step.attempt.live
    assert step.wake_at == NOON + job.spec.grace + 30 * SECOND + AGENT_LEASE, "it is gone by then"


# Afterwards.
def test_a_replacement_is_requested_while_the_doomed_slice_still_stops():
    attempt = stopping(EndReason.PREEMPTED)
    doomed = lost(S.DOOMED)
    assert missing_slices(make_view(running_job, attempt, slices=[doomed]), NOON) == 1


def test_no_replacement_is_requested_when_the_job_will_end():
    attempt = stopping(None)
    failed = [exited(attempt, 0, status=1), *all_exited(attempt, status=0)[1:]]
    view = make_view(running_job, attempt, slices=[], hosts=failed)
    assert missing_slices(view, NOON) == 0


def test_progress_counts_in_the_prediction_whether_the_job_is_retried():
    """Else a job that is about to be tried again would look for its slice too late."""
    attempt = stopping(None, start_step=10)
    history = [ended_attempt(0, EndReason.HUNG, None, None)]
    spec = structs.replace(running_job.spec, crash_loop=2, retries=Retries(failure=5))
    view = make_view(
        replace(running_job, spec=spec),
        replace(attempt, number=1),
        history=history,
        slices=[lost(S.RELEASING, LossReason.RELEASED)],
        hosts=[exited(attempt, 0, status=1)],
    )
    assert missing_slices(view, NOON) == 0
    assert missing_slices(structs.replace(view, progress=Progress(checkpoint_step=20)), NOON) == 1


@pytest.mark.parametrize(
    ("rule", "reason", "pool", "kept"),
    [
        (Rule.PRE, EndReason.CONNECTION_LOST, None, True),
        (Rule.REAPPLY, EndReason.CONNECTION_LOST, None, False),
        (Rule.PRE, EndReason.SUPERSEDED, "lab", False),
    ],
    ids=["the same slices", "new slices", "superseded"],
)
def test_which_slices_are_kept_for_the_next_attempt(rule, reason, pool, kept):
    attempt = stopping(reason if reason is EndReason.SUPERSEDED else None)
    hosts = all_exited(attempt, status=1, evidence=EndReason.CONNECTION_LOST)
    job = replace(running_job, spec=structs.replace(running_job.spec, rule=rule, pool=pool))
    step = next_step(make_view(job, attempt, slices=[make_slice(pool=pool)], hosts=hosts), NOON)
    assert step.job.state is JobState.RECOVERING and step.attempt.end_reason is reason
    changed = {item.id: item for item in step.slices}
    if kept:
        assert not changed
    elif pool:
        assert (changed["s0"].state, changed["s0"].job_id) == (S.READY, None)
    else:
        assert changed["s0"].state is S.RELEASING


@pytest.mark.parametrize(
    ("pool", "status", "during_setup", "returned"),
    [
        ("lab", mounts.FAILED, True, ["s1"]),
        ("lab", 1, True, []),
        ("lab", mounts.FAILED, False, []),
        (None, mounts.FAILED, True, []),
    ],
    ids=["its host cannot mount", "its setup command fails", "its program fails", "no pool"],
)
def test_a_job_returns_a_slice_that_cannot_mount_to_its_pool(pool, status, during_setup, returned):
    attempt = stopping(None, slices=("s0", "s1"))
    hosts = [
        exited(attempt, index, "s0", signal=signal.SIGTERM, stopped_by_agent=True)
        for index in range(4)
    ] + [
        exited(attempt, index, "s1", status=status, during_setup=during_setup) for index in range(4)
    ]
    retry = structs.replace(running_job.spec.retries, failure=1)
    spec = structs.replace(running_job.spec, slices=2, pool=pool, retries=retry)
    slices = [make_slice(name, pool=pool) for name in ("s0", "s1")]
    job = replace(running_job, spec=spec)
    view = make_view(job, attempt, slices=slices, hosts=hosts)
    step = next_step(view, NOON)
    assert step.job.state is JobState.RECOVERING
    assert [
        item.id for item in step.slices if (item.state, item.job_id) == (S.READY, None)
    ] == returned
    after_it = structs.replace(view, attempts=(step.attempt,))
    assert after_it.avoided == ({"s1"} if during_setup else set())


@pytest.mark.parametrize("pool", [None, "lab"])
def test_only_the_doomed_slice_of_a_gang_is_released(pool):
    attempt = stopping(EndReason.PREEMPTED, slices=("s0", "s1"))
    doomed = replace(lost(S.DOOMED), pool=pool)
    hosts = [
        exited(attempt, index, name, signal=signal.SIGTERM, stopped_by_agent=True)
        for name in ("s0", "s1")
        for index in range(4)
    ]
    job = replace(running_job, spec=structs.replace(running_job.spec, slices=2, pool=pool))
    slices = [doomed, make_slice("s1", pool=pool)]
    step = next_step(make_view(job, attempt, slices=slices, hosts=hosts), after(9))
    assert step.job.state is JobState.RECOVERING
    assert [(item.id, item.state, item.loss) for item in step.slices] == [
        ("s0", S.RELEASING, LossReason.PREEMPTED)
    ]


def test_the_rule_rerun_restarts_from_scratch():
    attempt = stopping(None)
    hosts = all_exited(attempt, status=1, evidence=EndReason.CONNECTION_LOST)
    job = replace(running_job, spec=structs.replace(running_job.spec, rule=Rule.RERUN))
    view = make_view(job, attempt, hosts=hosts, progress=Progress(checkpoint_step=70))
    step = next_step(view, NOON)
    assert step.job.fresh_from == 1 and step.attempt.checkpoint_step == 70


@pytest.mark.parametrize("pool", [None, "lab"])
def test_a_finished_job_releases_its_slices(pool):
    view = make_view(
        running_job, RUNNING, slices=[make_slice(pool=pool)], hosts=all_exited(RUNNING, status=0)
    )
    step = next_step(view, after(9))
    [released] = step.slices
    if pool:
        assert released.job_id is None and released.idle_since == after(9)
    else:
        assert (released.state, released.loss) == (S.RELEASING, LossReason.RELEASED)
    assert step.job.ended_at == after(9) and step.job.state is JobState.SUCCEEDED


def test_an_ended_attempt_keeps_the_last_reported_progress():
    reported = Progress(step=9, total=10, at=NOON, message="epoch 1", metrics={"loss": 0.5})
    view = make_view(running_job, RUNNING, hosts=all_exited(RUNNING, status=0), progress=reported)
    ended = next_step(view, after(9)).attempt
    assert (ended.last_step, ended.total_steps, ended.metrics) == (9, 10, {"loss": 0.5})
    assert (ended.progress_message, ended.progress_at) == ("epoch 1", NOON)


def test_a_slice_that_becomes_ready_for_an_ended_job_is_released():
    ended = make_job(state=JobState.CANCELLED, ended_at=NOON)
    step = next_step(make_view(ended, slices=[make_slice(state=S.BOOTING)]), after(60))
    assert [item.state for item in step.slices] == [S.RELEASING]
    assert step.job is ended


def test_an_attempt_without_a_checkpoint_keeps_the_one_it_started_from():
    attempt = stopping(EndReason.PREEMPTED, start_step=30)
    view = make_view(running_job, attempt, slices=[lost(S.GONE)])
    assert next_step(view, after(60)).attempt.checkpoint_step == 30


def test_how_the_python_environment_was_made_is_an_event_once_all_hosts_have_it():
    made = [
        EnvironmentReport(source="uv.lock", seconds=2.0 + index, packages=14, cached=11)
        for index in range(4)
    ]
    hosts = [
        make_host(index, attempt=STARTING, phase=Phase.SETUP, environment=made[index])
        for index in range(4)
    ]
    partly = make_view(
        make_job(), STARTING, hosts=[*hosts[:3], replace(hosts[3], environment=None)]
    )
    assert next_step(partly, NOON).events == []
    step = next_step(make_view(make_job(), STARTING, hosts=hosts), NOON)
    assert step.attempt.environment == made[3], "of the slowest"
    [event] = step.events
    assert event.state == "setup" and "slowest of 4 hosts" in event.message
    assert "11 from the cache, in 5.0 s (from uv.lock)" in event.message
    again = make_view(make_job(), step.attempt, hosts=hosts)
    assert next_step(again, NOON).events == [], "once"


def test_a_short_attempt_keeps_how_its_environment_was_made():
    made = EnvironmentReport(source="uv.lock", seconds=1.0, packages=3, cached=3)
    hosts = [replace(host, environment=made) for host in all_exited(RUNNING, status=0)]
    step = next_step(make_view(make_job(), RUNNING, hosts=hosts), NOON)
    assert step.attempt.end_reason is EndReason.FINISHED and step.attempt.environment == made


# How fast it starts and recovers.
def test_an_attempt_started_from_a_checkpoint_that_no_heartbeat_reported():
    """The slice that had saved it was lost before."""
    startup = Startup(assigned_at=NOON, started_at=NOON, stepped_at=NOON, checkpoint_step=30)
    attempt = replace(RUNNING, start_step=20)
    host = make_host(0, attempt=attempt, startup=startup)
    step = next_step(make_view(running_job, attempt, hosts=[host]), NOON)
    assert step.attempt.start_step == 30


def test_the_start_of_process_0_is_recorded_by_the_clock_of_the_server():
    hour = 3600
    startup = Startup(
        assigned_at=after(hour + 1), started_at=after(hour + 2), stepped_at=after(3 * hour)
    )
    host = make_host(0, attempt=RUNNING, startup=startup, clock_offset=-60 * MINUTE)
    step = next_step(make_view(running_job, RUNNING, hosts=[host]), after(30))
    recorded = step.attempt.startup
    assert (recorded.assigned_at, recorded.started_at) == (after(1), after(2))
    assert recorded.stepped_at == after(30), "never later than now"
    again = replace(host, clock_offset=-61 * MINUTE)
    view = make_view(running_job, step.attempt, hosts=[again])
    assert next_step(view, after(40)).attempt is step.attempt, "each fact once"


@pytest.mark.parametrize(
    ("reason", "how", "fault"),
    [
        pytest.param(None, {"status": 1, "at": after(-3)}, after(-3), id="a process failed"),
        pytest.param(EndReason.HUNG, {"stopped_by_agent": True}, after(-9), id="hung"),
        pytest.param(EndReason.PREEMPTED, {"stopped_by_agent": True}, NOON, id="notice"),
    ],
)
def test_the_moment_of_the_fault_is_recorded(reason, how, fault):
    attempt = replace(stopping(reason), created_at=after(-60))
    progress = Progress(step=8, at=after(-9), save_seconds=2.5)
    view = make_view(running_job, attempt, hosts=all_exited(attempt, **how), progress=progress)
    ended = next_step(view, after(1)).attempt
    assert (ended.ended_at, ended.fault_at, ended.save_seconds) == (after(1), fault, 2.5)
