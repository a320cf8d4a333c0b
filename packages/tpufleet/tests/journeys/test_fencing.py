"""The next attempt starts as soon as the old one cannot run; deletion goes on beside it."""

from __future__ import annotations

from datetime import timedelta

from tests.journeys.simulated_hosts import Program
from tpufleet.model.job.jobs import JobState
from tpufleet.policy.recovery.liveness import AGENT_LEASE

SLOW = timedelta(seconds=55)  # the invariants allow a minute from unneeded to deleted


def test_a_preempted_slice_that_is_deleted_slowly_does_not_delay_the_next_attempt(fleet):
    fleet.cloud.deletion, fleet.cloud.boot = SLOW, timedelta(seconds=4)
    job = fleet.submit(Program(steps=120))
    fleet.until_state(job, JobState.RUNNING)
    fleet.run(30)
    old = fleet.gang(job)[0].id
    fleet.preempt(job)
    preempted_at = fleet.now()
    fleet.until(lambda: fleet.running_attempt(job) == 1)
    assert fleet.now() - preempted_at < timedelta(seconds=20)
    assert old in fleet.cloud.existing(), "its deletion goes on"
    fleet.settle(job)
    assert fleet.attempts(job) == ["preempted", "finished"]


def test_one_preempted_slice_of_a_gang_does_not_delay_it_either(fleet):
    fleet.cloud.deletion, fleet.cloud.boot = SLOW, timedelta(seconds=4)
    job = fleet.submit(Program(steps=120), slices=3, accelerator="v5litepod-8")
    fleet.until_state(job, JobState.RUNNING)
    fleet.preempt(job, which=1)
    preempted_at = fleet.now()
    fleet.until(lambda: fleet.running_attempt(job) == 1)
    assert fleet.now() - preempted_at < timedelta(seconds=20)
    fleet.settle(job)


def test_a_full_pool_replaces_a_preempted_slice_before_it_is_deleted(fleet):
    fleet.cloud.deletion, fleet.cloud.boot = SLOW, timedelta(seconds=4)
    fleet.put_pool(name="p", largest=1)
    job = fleet.submit(Program(steps=120), pool="p")
    fleet.until_state(job, JobState.RUNNING)
    fleet.preempt(job)
    preempted_at = fleet.now()
    fleet.until(lambda: fleet.running_attempt(job) == 1)
    assert fleet.now() - preempted_at < timedelta(seconds=20)
    fleet.settle(job)


def test_a_slice_that_may_still_run_is_waited_for(fleet):
    """Its host is silent; only the end of the deletion proves that its processes are gone."""
    fleet.cloud.deletion, fleet.cloud.boot = SLOW, timedelta(seconds=4)
    job = fleet.submit(Program(steps=300))
    fleet.until_state(job, JobState.RUNNING)
    fleet.unreachable_hosts.add(f"{fleet.gang(job)[0].id}/0")
    fleet.until(lambda: fleet.job(job).state is JobState.RECOVERING)
    lost_at = fleet.now()
    fleet.until(lambda: fleet.running_attempt(job) == 1)
    assert fleet.now() - lost_at >= SLOW
    fleet.settle(job)


def test_a_deletion_that_hangs_is_waited_for_only_until_the_agents_have_stopped(fleet):
    job = fleet.submit(Program(steps=2000))
    fleet.until_state(job, JobState.RUNNING)
    fleet.cloud.deletion = timedelta(hours=2)
    fleet.invariants.release_bound = timedelta(hours=3)
    fleet.unreachable_hosts.add(f"{fleet.gang(job)[0].id}/0")
    fleet.until(lambda: fleet.job(job).state is JobState.RECOVERING)
    lost_at = fleet.now()
    fleet.until(lambda: fleet.running_attempt(job) == 1, 1500)
    assert AGENT_LEASE < fleet.now() - lost_at < AGENT_LEASE + timedelta(minutes=3)


def test_a_gang_that_moves_does_not_wait_for_the_deletion_of_its_sibling(make_fleet):
    """Its zone has no slice left: the healthy slice of the gang is given back as well."""
    fleet = make_fleet(zones=("zone-a", "zone-b"))
    fleet.cloud.deletion, fleet.cloud.boot = SLOW, timedelta(seconds=4)
    job = fleet.submit(Program(steps=120), slices=2, accelerator="v5litepod-8")
    fleet.until_state(job, JobState.RUNNING)
    sibling = fleet.gang(job)[1]
    fleet.cloud.stock["zone-a", "v5litepod-8"] = 1
    fleet.preempt(job)
    preempted_at = fleet.now()
    fleet.until(lambda: fleet.running_attempt(job) == 1)
    assert fleet.now() - preempted_at < timedelta(seconds=30)
    assert {each.zone for each in fleet.gang(job)} == {"zone-b"}
    assert sibling.id in fleet.cloud.existing(), "its deletion goes on"
    fleet.settle(job)
    assert fleet.attempts(job) == ["preempted", "finished"]
