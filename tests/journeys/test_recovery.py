"""A job whose hardware is taken away finishes by itself."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.journeys.simulated_hosts import Program
from tpufleet.model.jobs import JobState
from tpufleet.providers.base import Fault


def test_a_job_runs_to_its_end_and_leaves_nothing_behind(world):
    job = world.submit()
    world.settle(job)
    assert world.job(job).state is JobState.SUCCEEDED
    assert world.attempts(job) == ["finished"]
    assert world.cloud.existing() == []


def test_a_preempted_attempt_is_retried_without_spending_the_failure_budget(world):
    job = world.submit(accelerator="v5litepod-16")
    world.until_state(job, JobState.RUNNING)
    world.run(25)
    world.preempt(job)
    world.until(lambda: len(world.attempts(job)) == 2)
    assert world.attempts(job) == ["preempted", "starting"]
    assert world.failures(job) == 0
    world.settle(job)
    assert world.attempts(job) == ["preempted", "finished"]
    assert world.attempt(job).start_step == 20, "it went on from the last checkpoint"


def test_a_slice_lost_before_the_start_costs_no_attempt(world):
    job = world.submit()
    world.until(lambda: world.gang(job) != [])
    world.run(2)
    world.preempt(job)
    world.settle(job)
    assert world.attempts(job) == ["finished"]


def test_a_preemption_during_setup_is_recovered(world):
    job = world.submit(Program(setup=timedelta(seconds=20)))
    world.until_state(job, JobState.STARTING)
    world.run(5)
    world.preempt(job)
    world.settle(job)
    assert world.attempts(job) == ["preempted", "finished"]


def test_on_notice_the_program_checkpoints_and_the_replacement_is_asked_for_at_once(world):
    job = world.submit(Program(steps=100, checkpoint_every=1000))
    world.until_state(job, JobState.RUNNING)
    world.run(33)
    old = world.gang(job)[0].id
    world.give_notice(job)
    world.run(2)
    assert old in world.cloud.existing(), "the old slice is still there"
    assert [item.id for item in world.gang(job) if item.id != old], "and the new one is asked for"
    world.settle(job)
    assert world.attempts(job) == ["preempted", "finished"]
    assert world.attempt(job).start_step >= 33, "it saved its work within the grace period"


def test_a_maintenance_notice_moves_the_job_too(world):
    job = world.submit()
    world.until_state(job, JobState.RUNNING)
    world.give_notice(job, kind=Fault.MAINTENANCE)
    world.settle(job)
    assert world.attempts(job) == ["maintenance", "finished"]


def test_a_preemption_in_the_middle_of_a_checkpoint_loses_only_that_checkpoint(world):
    job = world.submit(Program(checkpoint_every=10, checkpoint_on_stop=False))
    world.until(lambda: world.disk.steps.get(f"/checkpoints/{job}") == 20)
    world.run(9)
    world.preempt(job)
    world.settle(job)
    assert world.attempt(job).start_step == 20
    assert world.attempts(job) == ["preempted", "finished"]


def test_losing_one_host_of_many_replaces_the_whole_slice(world):
    job = world.submit(accelerator="v5litepod-64")
    world.until_state(job, JobState.RUNNING)
    first = world.gang(job)[0].id
    world.kill_host(job, 7)
    world.settle(job)
    assert world.attempts(job) == ["host_lost", "finished"]
    assert world.store.attempts(job)[0].slices == (first,)
    assert world.store.attempts(job)[1].slices != (first,)


def test_a_silent_host_ends_the_attempt_only_when_its_slice_is_gone(world):
    job = world.submit(Program(steps=300))
    world.until_state(job, JobState.RUNNING)
    world.run(60)
    world.stall_host(job, 2)
    stalled_at = world.now()
    world.until(lambda: world.attempts(job)[0] == "host_lost")
    assert world.now() - stalled_at < timedelta(seconds=70)
    world.settle(job)
    assert world.attempts(job) == ["host_lost", "finished"]


def test_a_slice_deleted_without_a_word_counts_as_preempted_when_it_was_spot(world):
    job = world.submit(capacity="spot")
    world.until_state(job, JobState.RUNNING)
    world.cloud.vanish(world.gang(job)[0].id)
    world.settle(job)
    assert world.attempts(job) == ["preempted", "finished"]


def test_an_agent_that_restarts_ends_the_attempt_and_its_work_is_not_run_twice(world):
    job = world.submit()
    world.until_state(job, JobState.RUNNING)
    world.run(15)
    world.restart_agent(job, 1)
    world.settle(job)
    assert world.attempts(job) == ["host_lost", "finished"]


def test_a_host_that_never_boots_gives_the_slice_up(world):
    world.cloud.boot = timedelta(seconds=3)
    job = world.submit()
    world.until(lambda: world.gang(job) != [])
    world.late_hosts.add(f"{world.gang(job)[0].id}/3")
    world.settle(job)
    assert world.attempts(job) == ["finished"]
    lost = [item for item in world.store.slices(live_only=False) if item.loss == "boot_failed"]
    assert len(lost) == 1


@pytest.mark.parametrize("storms", [3, 6])
def test_many_preemptions_never_stop_a_job(world, storms):
    job = world.submit(Program(steps=200, checkpoint_every=5))
    for storm in range(storms):
        world.until(lambda number=storm: world.running_attempt(job) == number)
        world.run(8)
        world.preempt(job)
    world.settle(job)
    assert world.attempts(job) == ["preempted"] * storms + ["finished"]
    assert world.failures(job) == 0
