"""A job whose hardware is taken away finishes by itself."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.journeys.simulated_hosts import Program, failure
from tpufleet.model.fleet.hosts import Exit
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import JobState
from tpufleet.policy.recovery import recovery_time
from tpufleet.providers.base import Fault
from tpufleet.service.jobs import explain


def test_a_job_runs_to_its_end_and_leaves_nothing_behind(fleet):
    job = fleet.submit()
    fleet.settle(job)
    assert fleet.job(job).state is JobState.SUCCEEDED
    assert fleet.attempts(job) == ["finished"]
    assert fleet.cloud.existing() == []


def test_a_preempted_attempt_is_retried_without_spending_the_failure_budget(fleet):
    job = fleet.submit(accelerator="v5litepod-16")
    fleet.until_state(job, JobState.RUNNING)
    fleet.run(25)
    fleet.preempt(job)
    fleet.until(lambda: len(fleet.attempts(job)) == 2)
    assert fleet.attempts(job) == ["preempted", "starting"]
    assert fleet.failures(job) == 0
    fleet.settle(job)
    assert fleet.attempts(job) == ["preempted", "finished"]
    assert fleet.attempt(job).start_step == 20, "it went on from the last checkpoint"


def test_the_time_from_a_fault_to_the_next_step_is_recorded_with_its_parts(fleet):
    """Steps take a second of this clock."""
    job = fleet.submit(Program(checkpoint_on_stop=False))
    fleet.until_state(job, JobState.RUNNING)
    fleet.run(25)
    fleet.preempt(job)
    fleet.settle(job)
    before, after = fleet.store.attempts(job)
    [recovery] = recovery_time.recoveries([before, after])
    assert (recovery.attempt, recovery.resumed_step) == (1, 20)
    assert recovery.lost_steps == before.last_step - 20
    assert recovery.parts["redo"] == recovery.lost_steps
    assert sum(recovery.parts.values()) == recovery.seconds
    details = explain.explain(fleet.store, fleet.job(job), fleet.now()).details
    assert any(f"step 20, {recovery.lost_steps} steps again" in line for line in details), details


@pytest.mark.parametrize("lost", [0, 1])
def test_hosts_of_the_slice_that_is_left_keep_the_ids_of_their_processes(fleet, lost):
    """By which they find their part of a checkpoint on their disk."""
    job = fleet.submit(slices=2)
    fleet.until_state(job, JobState.RUNNING)
    fleet.run(20)
    left = fleet.attempt(job).slices[1 - lost]
    fleet.preempt(job, which=lost)
    fleet.until(lambda: fleet.running_attempt(job) == 1)
    assert fleet.attempt(job).slices[1 - lost] == left


def test_a_slice_lost_before_the_start_costs_no_attempt(fleet):
    job = fleet.submit()
    fleet.until(lambda: fleet.gang(job) != [])
    fleet.run(2)
    fleet.preempt(job)
    fleet.settle(job)
    assert fleet.attempts(job) == ["finished"]


def test_a_preemption_during_setup_is_recovered(fleet):
    job = fleet.submit(Program(setup=timedelta(seconds=20)))
    fleet.until_state(job, JobState.STARTING)
    fleet.run(5)
    fleet.preempt(job)
    fleet.settle(job)
    assert fleet.attempts(job) == ["preempted", "finished"]


def test_on_notice_the_program_checkpoints_and_a_replacement_is_requested_at_once(fleet):
    job = fleet.submit(Program(steps=100, checkpoint_every=1000))
    fleet.until_state(job, JobState.RUNNING)
    fleet.run(33)
    old = fleet.gang(job)[0].id
    fleet.send_notice(job)
    fleet.run(2)
    assert old in fleet.cloud.existing(), "the old slice is still there"
    assert [item.id for item in fleet.gang(job) if item.id != old], "and the new one is asked for"
    fleet.settle(job)
    assert fleet.attempts(job) == ["preempted", "finished"]
    assert fleet.attempt(job).start_step >= 33, "it saved its work within the grace period"


def test_a_maintenance_notice_moves_the_job_too(fleet):
    job = fleet.submit()
    fleet.until_state(job, JobState.RUNNING)
    fleet.send_notice(job, kind=Fault.MAINTENANCE)
    fleet.settle(job)
    assert fleet.attempts(job) == ["maintenance", "finished"]


def test_a_preemption_in_the_middle_of_a_checkpoint_loses_only_that_checkpoint(fleet):
    job = fleet.submit(Program(checkpoint_every=10, checkpoint_on_stop=False))
    fleet.until(lambda: fleet.disk.steps.get(f"/checkpoints/{job}") == 20)
    fleet.run(9)
    fleet.preempt(job)
    fleet.settle(job)
    assert fleet.attempt(job).start_step == 20
    assert fleet.attempts(job) == ["preempted", "finished"]


def test_losing_one_host_of_many_replaces_the_whole_slice(fleet):
    job = fleet.submit(accelerator="v5litepod-64")
    fleet.until_state(job, JobState.RUNNING)
    first = fleet.gang(job)[0].id
    fleet.kill_host(job, 7)
    fleet.settle(job)
    assert fleet.attempts(job) == ["host_lost", "finished"]
    assert fleet.store.attempts(job)[0].slices == (first,)
    assert fleet.store.attempts(job)[1].slices != (first,)


def test_a_silent_host_ends_the_attempt_only_when_its_slice_is_gone(fleet):
    job = fleet.submit(Program(steps=300))
    fleet.until_state(job, JobState.RUNNING)
    fleet.run(60)
    fleet.stall_host(job, 2)
    stalled_at = fleet.now()
    fleet.until(lambda: fleet.attempts(job)[0] == "host_lost")
    assert fleet.now() - stalled_at < timedelta(seconds=70)
    fleet.settle(job)
    assert fleet.attempts(job) == ["host_lost", "finished"]


def test_a_spot_slice_deleted_without_notice_counts_as_preempted(fleet):
    job = fleet.submit(capacity="spot")
    fleet.until_state(job, JobState.RUNNING)
    fleet.cloud.vanish(fleet.gang(job)[0].id)
    fleet.settle(job)
    assert fleet.attempts(job) == ["preempted", "finished"]


def test_an_agent_that_restarts_ends_the_attempt_and_its_work_is_not_run_twice(fleet):
    job = fleet.submit()
    fleet.until_state(job, JobState.RUNNING)
    fleet.run(15)
    fleet.restart_agent(job, 1)
    fleet.settle(job)
    assert fleet.attempts(job) == ["host_lost", "finished"]
    first, second = fleet.store.attempts(job)
    assert second.slices == first.slices, "its slice stays"


def test_a_host_that_never_boots_releases_the_slice(fleet):
    fleet.cloud.boot = timedelta(seconds=3)
    job = fleet.submit()
    fleet.until(lambda: fleet.gang(job) != [])
    fleet.late_hosts.add(f"{fleet.gang(job)[0].id}/3")
    fleet.settle(job)
    assert fleet.attempts(job) == ["finished"]
    lost = [item for item in fleet.store.slices(live_only=False) if item.loss == "boot_failed"]
    assert len(lost) == 1


@pytest.mark.parametrize("storms", [3, 6])
def test_many_preemptions_never_stop_a_job(fleet, storms):
    job = fleet.submit(Program(steps=200, checkpoint_every=5))
    for storm in range(storms):
        fleet.until(lambda number=storm: fleet.running_attempt(job) == number)
        fleet.run(8)
        fleet.preempt(job)
    fleet.settle(job)
    assert fleet.attempts(job) == ["preempted"] * storms + ["finished"]
    assert fleet.failures(job) == 0


def seconds_to_the_next(fleet, job) -> float:
    """From the moment at which the first attempt was to stop until the second one starts."""
    first, second = fleet.store.attempts(job)
    return (second.created_at - first.stopping_at).total_seconds()


def test_a_gang_of_which_one_process_failed_restarts_at_once_on_its_slices(fleet):
    """The others are blocked in a collective with it: no grace period helps them."""
    crash = lambda attempt, process, step: (
        failure(fleet.now()) if (attempt, process, step) == (0, 2, 15) else None
    )
    job = fleet.submit(Program(fails=crash), retries={"failure": 1}, grace="1h")
    fleet.settle(job)
    first, second = fleet.store.attempts(job)
    assert (first.slices, second.start_step) == (second.slices, 10)
    assert first.failed_host.endswith("/2") and fleet.failures(job) == 1
    assert seconds_to_the_next(fleet, job) <= 3


def test_a_gang_that_hangs_restarts_at_once_on_its_slices(fleet):
    job = fleet.submit(Program(stuck_at=15, ignores_stop=True), hung_after="2m", grace="1h")
    fleet.until(lambda: len(fleet.attempts(job)) == 2)
    first, second = fleet.store.attempts(job)
    assert fleet.attempts(job)[0] == "hung" and first.slices == second.slices
    assert seconds_to_the_next(fleet, job) <= 3


def test_the_rest_of_a_gang_does_not_wait_for_a_slice_that_is_gone(fleet):
    job = fleet.submit(slices=2, grace="1h")
    fleet.until_state(job, JobState.RUNNING)
    fleet.run(15)
    fleet.preempt(job, which=1)
    fleet.settle(job)
    assert fleet.attempts(job) == ["preempted", "finished"]
    first, second = fleet.store.attempts(job)
    assert first.slices[0] in second.slices and first.slices[1] not in second.slices
    assert fleet.failures(job) == 0
    ended = (first.ended_at - first.stopping_at).total_seconds()
    assert ended <= 3


def test_a_gang_has_its_grace_period_as_long_as_the_hosts_with_a_notice_run(fleet):
    job = fleet.submit(Program(stops_after=timedelta(seconds=20)), slices=2, grace="1h")
    fleet.until_state(job, JobState.RUNNING)
    fleet.run(15)
    fleet.send_notice(job, which=1)
    fleet.settle(job)
    first, second = fleet.store.attempts(job)
    assert not first.aborted and second.start_step == first.last_step > 10


@pytest.mark.parametrize(
    ("fault", "reason", "says", "seconds"),
    [
        pytest.param({"log_line": "KeyError: 'x'"}, "user_error", "KeyError", 3, id="crash"),
        pytest.param(
            {"signal": 9, "oom_killed": True}, "out_of_host_memory", "host 2 of", 3,
            id="out of memory",
        ),
        pytest.param("hang", "hung", "no progress", 62 + 3, id="hang"),
        pytest.param("host", "host_lost", "lost a host", 3, id="host lost"),
    ],
)  # fmt: skip
def test_the_first_failure_is_the_cause_and_nobody_waits_for_the_grace_period(
    fleet, fault, reason, says, seconds
):
    """The others lose their connection a moment before it is reported, and are blocked."""

    def fails(attempt, rank, step):
        if attempt or step != 15 or not isinstance(fault, dict):
            return None
        if rank == 2:
            return Exit(at=fleet.now(), **{"status": None if "signal" in fault else 1, **fault})
        lost = EndReason.CONNECTION_LOST
        at = fleet.now() - timedelta(seconds=1)
        return Exit(at=at, status=1, evidence=lost) if rank == 1 else None

    program = Program(fails=fails, stuck_at=15 if fault == "hang" else None, ignores_stop=True)
    job = fleet.submit(
        program, grace="5m", hung_after="1m", retries={"failure": 1, "memory": 1, "hang": 1}
    )
    fleet.until(lambda: fleet.disk.steps.get(f"/checkpoints/{job}") == 10)
    fleet.run(5)
    began = fleet.now()
    if fault == "host":
        fleet.kill_host(job, 2)
    fleet.until(lambda: fleet.attempts(job)[0] != "running" and fleet.attempts(job)[0] == reason)
    first = fleet.store.attempts(job)[0]
    assert first.aborted and says in first.message
    assert first.ended_at - began <= timedelta(seconds=seconds + 2)
