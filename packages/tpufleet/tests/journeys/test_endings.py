"""How attempts end, who is charged, and what follows."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest

from tests.journeys.simulated_hosts import Program, failure
from tpufleet.model.fleet.hosts import Exit
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import JobState


def fails_once(fleet, at_step, process=0, **more):
    """A program that fails in its first attempt, on one process."""
    return Program(
        fails=lambda attempt, rank, step: (
            failure(fleet.now(), **more)
            if attempt == 0 and rank == process and step == at_step
            else None
        )
    )


def always_fails(fleet, at_step=3, **more):
    return Program(
        fails=lambda attempt, rank, step: (
            failure(fleet.now(), **more) if rank == 0 and step >= at_step else None
        ),
        checkpoint_on_stop=False,
        checkpoint_every=1000,
    )


def test_a_program_that_fails_stops_the_job_and_says_where(fleet):
    job = fleet.submit(fails_once(fleet, 5, process=2, log_line="ValueError: bad batch"))
    fleet.settle(job)
    stored = fleet.job(job)
    assert stored.state is JobState.FAILED
    assert stored.end_reason is EndReason.USER_ERROR
    assert "host 2" in stored.reason and "ValueError: bad batch" in stored.reason
    assert "tpu logs" in stored.advice


def test_siblings_that_die_with_it_are_not_charged(fleet):
    """Rank 3 fails; the others lose their connection a moment before it is reported."""

    def fails(attempt, rank, step):
        if attempt or step != 10:
            return None
        if rank == 3:
            return Exit(at=fleet.now(), status=1, log_line="KeyError: 'labels'")
        lost = EndReason.CONNECTION_LOST
        return Exit(at=fleet.now() - timedelta(seconds=1), status=1, evidence=lost)

    job = fleet.submit(Program(fails=fails), retries={"failure": 1})
    fleet.settle(job)
    assert fleet.attempts(job) == ["user_error", "finished"]
    assert fleet.store.attempts(job)[0].failed_host.endswith("/3")
    assert fleet.failures(job) == 1


def test_a_budget_allows_exactly_that_many_retries(fleet):
    job = fleet.submit(always_fails(fleet), retries={"failure": 2}, crash_loop=9)
    fleet.settle(job)
    assert fleet.attempts(job) == ["user_error"] * 3
    assert "retries.failure is 2, all used" in fleet.job(job).reason


def test_running_out_of_device_memory_is_never_retried(fleet):
    job = fleet.submit(fails_once(fleet, 5, evidence=EndReason.OUT_OF_HBM), retries={"failure": 5})
    fleet.settle(job)
    assert fleet.attempts(job) == ["out_of_hbm"]
    assert "larger slice" in fleet.job(job).advice


def test_setup_failures_have_their_own_budget(fleet):
    job = fleet.submit(Program(setup_fails=lambda attempt, process: process == 1))
    fleet.settle(job)
    assert fleet.attempts(job) == ["setup_failed"] * 3
    assert fleet.job(job).state is JobState.FAILED


def test_a_full_disk_gets_new_slices(fleet):
    job = fleet.submit(fails_once(fleet, 5, evidence=EndReason.DISK_FULL))
    fleet.settle(job)
    first, second = fleet.store.attempts(job)
    assert first.end_reason is EndReason.DISK_FULL
    assert first.slices != second.slices


@pytest.mark.parametrize(
    ("rule", "evidence", "attempts", "same_slices"),
    [
        ("pre", EndReason.CONNECTION_LOST, ["connection_lost", "finished"], True),
        ("resume", EndReason.CONNECTION_LOST, ["connection_lost", "finished"], True),
        ("rerun", EndReason.CONNECTION_LOST, ["connection_lost", "finished"], True),
        ("reapply", EndReason.CONNECTION_LOST, ["connection_lost", "finished"], False),
        ("pass", EndReason.CONNECTION_LOST, ["connection_lost"], None),
        ("pre", EndReason.DEVICE_BUSY, ["device_busy"], None),
        ("reapply", EndReason.DEVICE_BUSY, ["device_busy"], None),
    ],
)
def test_the_rules_decide(fleet, rule, evidence, attempts, same_slices):
    program = fails_once(fleet, 15, evidence=evidence)
    job = fleet.submit(program, rule=rule)
    fleet.settle(job)
    assert fleet.attempts(job) == attempts
    if same_slices is not None:
        first, second = fleet.store.attempts(job)
        assert (first.slices == second.slices) is same_slices


@pytest.mark.parametrize(("rule", "goes_on"), [("rerun", False), ("resume", True)])
def test_the_rule_rerun_restarts_from_scratch_and_the_others_resume(fleet, rule, goes_on):
    steps = []
    program = fails_once(fleet, 15, evidence=EndReason.CONNECTION_LOST)
    fails = program.fails
    program.fails = lambda attempt, rank, step: (
        steps.append((attempt, step)) or fails(attempt, rank, step)
    )
    job = fleet.submit(program, rule=rule)
    fleet.settle(job)
    first = min(step for attempt, step in steps if attempt == 1)
    assert (first > 0) is goes_on
    assert (fleet.attempt(job).start_step is not None) is goes_on


@pytest.mark.parametrize("rule", ["pass", "resume"])
def test_a_preemption_fails_the_job_under_these_rules(fleet, rule):
    job = fleet.submit(rule=rule)
    fleet.until_state(job, JobState.RUNNING)
    fleet.preempt(job)
    fleet.settle(job)
    assert fleet.job(job).state is JobState.FAILED
    assert f"under rule `{rule}`" in fleet.job(job).reason
    assert len(fleet.cloud.requested) == 1, "no replacement was asked for"


def test_a_crash_loop_is_stopped(fleet):
    job = fleet.submit(
        always_fails(fleet, evidence=EndReason.CONNECTION_LOST), crash_loop=3, rule="pre"
    )
    fleet.settle(job)
    assert fleet.attempts(job) == ["connection_lost"] * 3
    assert "crash loop" in fleet.job(job).reason


def test_checkpoint_progress_breaks_the_crash_loop(fleet):
    """It fails every 25 steps, but each attempt leaves a newer checkpoint."""

    def fails(attempt, rank, step):
        if rank == 0 and step == 25 * (attempt + 1):
            return failure(fleet.now(), evidence=EndReason.CONNECTION_LOST)
        return None

    job = fleet.submit(Program(steps=140, fails=fails), crash_loop=2)
    fleet.settle(job)
    assert fleet.attempts(job) == ["connection_lost"] * 5 + ["finished"]


def test_retries_back_off(fleet):
    job = fleet.submit(always_fails(fleet), retries={"failure": 3}, crash_loop=9)
    fleet.settle(job)
    attempts = fleet.store.attempts(job)
    waits = [
        (after.created_at - before.ended_at).total_seconds()
        for before, after in itertools.pairwise(attempts)
    ]
    assert waits == sorted(waits) and waits[0] == 0 and 2 * waits[1] > waits[-1] > waits[1] >= 4


def test_a_time_limit_counts_running_time_over_all_attempts(fleet):
    job = fleet.submit(Program(steps=1000, checkpoint_every=5), timeout="60s")
    fleet.until_state(job, JobState.RUNNING)
    fleet.run(30)
    fleet.preempt(job)
    fleet.settle(job)
    assert fleet.attempts(job) == ["preempted", "timeout"]
    assert fleet.job(job).state is JobState.FAILED
    assert fleet.disk.steps[f"/checkpoints/{job}"] >= 50, "it could still checkpoint"


def test_a_program_without_progress_is_hung(fleet):
    job = fleet.submit(Program(stuck_at=10), hung_after="2m", retries={"hang": 1})
    fleet.settle(job)
    assert fleet.attempts(job) == ["hung", "hung"]


def test_a_program_that_never_reports_progress_is_not_hung(fleet):
    job = fleet.submit(Program(steps=2000, silent=True))
    fleet.settle(job)
    assert fleet.attempts(job) == ["finished"]


def test_unless_it_says_for_how_long_it_may_be_silent(fleet):
    job = fleet.submit(Program(steps=300, silent=True), hung_after="1m", retries={"hang": 0})
    fleet.settle(job)
    assert fleet.attempts(job) == ["hung"]
    assert "no progress or output for 0:01:00" in fleet.event_log()


def test_a_program_that_ignores_the_stop_is_killed_after_its_grace(fleet):
    job = fleet.submit(Program(ignores_stop=True, steps=1000), grace="10s")
    fleet.until_state(job, JobState.RUNNING)
    fleet.cancel(job)
    fleet.settle(job)
    assert fleet.attempts(job) == ["cancelled"]


def test_a_program_that_reports_often_is_not_hung_however_short_the_limit(fleet):
    job = fleet.submit(Program(steps=120), hung_after="5s")
    fleet.settle(job)
    assert fleet.attempts(job) == ["finished"]
