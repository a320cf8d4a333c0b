"""How attempts end, who is charged, and what follows."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest

from tests.journeys.simulated_hosts import Program, failure
from tpufleet.model.end_reasons import EndReason
from tpufleet.model.hosts import Exit
from tpufleet.model.jobs import JobState


def fails_once(world, at_step, process=0, **more):
    """A program that fails in its first attempt, on one process."""
    return Program(
        fails=lambda attempt, rank, step: (
            failure(world.now(), **more)
            if attempt == 0 and rank == process and step == at_step
            else None
        )
    )


def always_fails(world, at_step=3, **more):
    return Program(
        fails=lambda attempt, rank, step: (
            failure(world.now(), **more) if rank == 0 and step >= at_step else None
        ),
        checkpoint_on_stop=False,
        checkpoint_every=1000,
    )


def test_a_program_that_fails_stops_the_job_and_says_where(world):
    job = world.submit(fails_once(world, 5, process=2, log_line="ValueError: bad batch"))
    world.settle(job)
    found = world.job(job)
    assert found.state is JobState.FAILED
    assert found.end_reason is EndReason.USER_ERROR
    assert "host 2" in found.reason and "ValueError: bad batch" in found.reason
    assert "tpu logs" in found.advice


def test_siblings_that_die_of_it_are_not_charged(world):
    """Rank 3 fails; the others lose their connection a moment before it is reported."""

    def fails(attempt, rank, step):
        if attempt or step != 10:
            return None
        if rank == 3:
            return Exit(at=world.now(), status=1, log_line="KeyError: 'labels'")
        lost = EndReason.CONNECTION_LOST
        return Exit(at=world.now() - timedelta(seconds=1), status=1, evidence=lost)

    job = world.submit(Program(fails=fails), retries={"failure": 1})
    world.settle(job)
    assert world.attempts(job) == ["user_error", "finished"]
    assert world.store.attempts(job)[0].failed_host.endswith("/3")
    assert world.failures(job) == 1


def test_a_budget_pays_for_that_many_retries_and_no_more(world):
    job = world.submit(always_fails(world), retries={"failure": 2}, crash_loop=9)
    world.settle(job)
    assert world.attempts(job) == ["user_error"] * 3
    assert "retries.failure is 2, all used" in world.job(job).reason


def test_running_out_of_device_memory_is_never_retried(world):
    job = world.submit(fails_once(world, 5, evidence=EndReason.OUT_OF_HBM), retries={"failure": 5})
    world.settle(job)
    assert world.attempts(job) == ["out_of_hbm"]
    assert "larger slice" in world.job(job).advice


def test_setup_failures_have_their_own_budget(world):
    job = world.submit(Program(setup_fails=lambda attempt, process: process == 1))
    world.settle(job)
    assert world.attempts(job) == ["setup_failed"] * 3
    assert world.job(job).state is JobState.FAILED


def test_a_full_disk_gets_other_hardware(world):
    job = world.submit(fails_once(world, 5, evidence=EndReason.DISK_FULL))
    world.settle(job)
    first, second = world.store.attempts(job)
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
def test_the_rules_decide(world, rule, evidence, attempts, same_slices):
    program = fails_once(world, 15, evidence=evidence)
    job = world.submit(program, rule=rule)
    world.settle(job)
    assert world.attempts(job) == attempts
    if same_slices is not None:
        first, second = world.store.attempts(job)
        assert (first.slices == second.slices) is same_slices


@pytest.mark.parametrize(("rule", "goes_on"), [("rerun", False), ("resume", True)])
def test_the_rule_rerun_starts_over_and_the_others_go_on(world, rule, goes_on):
    steps = []
    program = fails_once(world, 15, evidence=EndReason.CONNECTION_LOST)
    fails = program.fails
    program.fails = lambda attempt, rank, step: (
        steps.append((attempt, step)) or fails(attempt, rank, step)
    )
    job = world.submit(program, rule=rule)
    world.settle(job)
    first = min(step for attempt, step in steps if attempt == 1)
    assert (first > 0) is goes_on
    assert (world.attempt(job).start_step is not None) is goes_on


@pytest.mark.parametrize("rule", ["pass", "resume"])
def test_a_preemption_under_these_rules_is_left_to_a_person(world, rule):
    job = world.submit(rule=rule)
    world.until_state(job, JobState.RUNNING)
    world.preempt(job)
    world.settle(job)
    assert world.job(job).state is JobState.FAILED
    assert f"under rule `{rule}`" in world.job(job).reason
    assert len(world.cloud.requested) == 1, "no replacement was asked for"


def test_a_crash_loop_is_stopped(world):
    job = world.submit(
        always_fails(world, evidence=EndReason.CONNECTION_LOST), crash_loop=3, rule="pre"
    )
    world.settle(job)
    assert world.attempts(job) == ["connection_lost"] * 3
    assert "crash loop" in world.job(job).reason


def test_checkpoint_progress_breaks_the_crash_loop(world):
    """It fails every 25 steps, but each attempt leaves a newer checkpoint."""

    def fails(attempt, rank, step):
        if rank == 0 and step == 25 * (attempt + 1):
            return failure(world.now(), evidence=EndReason.CONNECTION_LOST)
        return None

    job = world.submit(Program(steps=140, fails=fails), crash_loop=2)
    world.settle(job)
    assert world.attempts(job) == ["connection_lost"] * 5 + ["finished"]


def test_retries_wait_longer_each_time(world):
    job = world.submit(always_fails(world), retries={"failure": 3}, crash_loop=9)
    world.settle(job)
    attempts = world.store.attempts(job)
    waits = [
        (after.created_at - before.ended_at).total_seconds()
        for before, after in itertools.pairwise(attempts)
    ]
    assert waits == sorted(waits) and waits[0] >= 4 and waits[-1] >= 3 * waits[0]


def test_a_time_limit_counts_running_time_over_all_attempts(world):
    job = world.submit(Program(steps=1000, checkpoint_every=5), timeout="60s")
    world.until_state(job, JobState.RUNNING)
    world.run(30)
    world.preempt(job)
    world.settle(job)
    assert world.attempts(job) == ["preempted", "timeout"]
    assert world.job(job).state is JobState.FAILED
    assert world.disk.steps[f"/checkpoints/{job}"] >= 50, "it could still checkpoint"


def test_a_program_without_progress_is_hung(world):
    job = world.submit(Program(stands_still_at=10), hung_after="2m", retries={"hang": 1})
    world.settle(job)
    assert world.attempts(job) == ["hung", "hung"]


def test_a_program_that_never_reports_progress_is_not_called_hung(world):
    job = world.submit(Program(steps=300, silent=True), hung_after="1m")
    world.settle(job)
    assert world.attempts(job) == ["finished"]


def test_a_program_that_ignores_the_stop_is_killed_after_its_grace(world):
    job = world.submit(Program(ignores_stop=True, steps=1000), grace="10s")
    world.until_state(job, JobState.RUNNING)
    world.cancel(job)
    world.settle(job)
    assert world.attempts(job) == ["cancelled"]


def test_a_program_that_reports_often_is_not_hung_however_short_the_limit(world):
    job = world.submit(Program(steps=120), hung_after="5s")
    world.settle(job)
    assert world.attempts(job) == ["finished"]
