"""Sharing a pool: priorities, limits, backfill, and jobs that make way."""

from __future__ import annotations

from datetime import timedelta

from tests.journeys.simulated_hosts import Program
from tpufleet.model.jobs import JobState


def test_a_pool_keeps_its_smallest_number_of_slices_ready(fleet):
    fleet.put_pool(name="lab", smallest=2, largest=4)
    fleet.run(30)
    assert len(fleet.store.slices(pool="lab")) == 2
    job = fleet.submit(pool="lab")
    fleet.until_state(job, JobState.RUNNING, 8)
    fleet.settle(job)
    assert len(fleet.cloud.existing()) == 2


def test_a_pool_never_grows_past_its_largest(fleet):
    fleet.put_pool(name="lab", largest=3)
    jobs = [fleet.submit(pool="lab") for _ in range(8)]
    most = 0
    while not all(fleet.job(job).ended for job in jobs):
        fleet.tick()
        most = max(most, len(fleet.cloud.existing()))
    assert most == 3
    assert all(fleet.job(job).state is JobState.SUCCEEDED for job in jobs)


def test_idle_slices_are_released_and_a_deleted_pool_empties(fleet):
    fleet.put_pool(name="lab", smallest=1, largest=4, idle_after=timedelta(minutes=1))
    jobs = [fleet.submit(pool="lab") for _ in range(3)]
    fleet.settle(*jobs)
    fleet.until(lambda: len(fleet.cloud.existing()) == 1, 200)
    fleet.delete_pool("lab")
    fleet.until(lambda: fleet.cloud.existing() == [], 60)


def test_jobs_start_by_priority_then_age(fleet):
    fleet.put_pool(name="lab", largest=1)
    blocker = fleet.submit(Program(steps=20), pool="lab")
    fleet.until_state(blocker, JobState.RUNNING)
    low = fleet.submit(Program(steps=5), pool="lab")
    fleet.run(1)
    late = fleet.submit(Program(steps=5), pool="lab", priority=5)
    fleet.run(1)
    later = fleet.submit(Program(steps=5), pool="lab", priority=5)
    fleet.settle(blocker, low, late, later)
    started = sorted((low, late, later), key=lambda job: fleet.store.attempts(job)[0].created_at)
    assert started == [late, later, low]


def test_the_head_of_the_queue_is_not_starved_by_smaller_jobs(fleet):
    fleet.put_pool(name="lab", largest=2)
    first = fleet.submit(Program(steps=60), pool="lab")
    fleet.until_state(first, JobState.RUNNING)
    wide = fleet.submit(Program(steps=5), pool="lab", slices=2)
    fleet.run(2)
    small = [fleet.submit(Program(steps=30), pool="lab") for _ in range(5)]
    fleet.settle(first, wide, *small)
    wide_start = fleet.store.attempts(wide)[0].created_at
    assert all(fleet.store.attempts(job)[0].created_at > wide_start for job in small)


def test_a_short_job_backfills_if_it_ends_in_time(fleet):
    fleet.put_pool(name="lab", smallest=2, largest=2)
    fleet.until(lambda: len(fleet.store.slices(pool="lab")) == 2)
    fleet.run(15)
    first = fleet.submit(Program(steps=300), pool="lab", timeout="10m")
    fleet.until_state(first, JobState.RUNNING)
    wide = fleet.submit(Program(steps=5), pool="lab", slices=2)
    fleet.run(2)
    long = fleet.submit(Program(steps=20), pool="lab", timeout="2h")
    short = fleet.submit(Program(steps=20), pool="lab", timeout="2m")
    fleet.settle(first, wide, long, short)
    start = {job: fleet.store.attempts(job)[0].created_at for job in (wide, long, short)}
    assert start[short] < start[wide] < start[long]


def test_a_user_cannot_exceed_the_pool_quota(fleet):
    fleet.put_pool(name="lab", largest=4, slices_per_user=2)
    mine = [fleet.submit(pool="lab", owner="ann") for _ in range(4)]
    fleet.run(2)
    theirs = fleet.submit(pool="lab", owner="bob")
    fleet.until(lambda: fleet.running(theirs))
    assert sum(1 for job in mine if fleet.gang(job)) == 2
    held_back = [job for job in mine if not fleet.gang(job)]
    assert all("ann may hold 2 slices of pool lab" in fleet.job(job).reason for job in held_back)
    fleet.settle(*mine, theirs)


def test_the_global_quota_also_holds_without_a_pool(make_fleet):
    fleet = make_fleet(slices_per_user=2)
    jobs = [fleet.submit() for _ in range(4)]
    most = 0
    while not all(fleet.job(job).ended for job in jobs):
        fleet.tick()
        most = max(most, sum(1 for job in jobs if fleet.gang(job)))
    assert most == 2


def test_a_job_of_higher_priority_supersedes_a_lower_one_where_the_pool_allows(fleet):
    fleet.put_pool(name="lab", largest=1, supersede=True)
    low = fleet.submit(Program(steps=60, checkpoint_every=1000), pool="lab")
    fleet.until_state(low, JobState.RUNNING)
    fleet.run(20)
    high = fleet.submit(Program(steps=10), pool="lab", priority=10)
    fleet.settle(low, high)
    assert fleet.attempts(low) == ["superseded", "finished"]
    assert fleet.attempts(high) == ["finished"]
    assert fleet.failures(low) == 0
    assert fleet.attempt(low).start_step >= 20


def test_equal_priority_never_supersedes(fleet):
    fleet.put_pool(name="lab", largest=1, supersede=True)
    first = fleet.submit(pool="lab", priority=3)
    fleet.until_state(first, JobState.RUNNING)
    second = fleet.submit(pool="lab", priority=3)
    fleet.settle(first, second)
    assert fleet.attempts(first) == ["finished"]


def test_no_job_is_superseded_unless_it_helps(fleet):
    fleet.put_pool(name="lab", largest=2, supersede=True)
    low = fleet.submit(Program(steps=40), pool="lab")
    middle = fleet.submit(Program(steps=40), pool="lab", priority=9)
    fleet.until(lambda: fleet.running(low) and fleet.running(middle))
    wide = fleet.submit(Program(steps=5), pool="lab", slices=2, priority=5)
    fleet.settle(low, middle, wide)
    assert fleet.attempts(low) == ["finished"]


def test_a_preempted_slice_of_a_pool_is_replaced_for_its_job(fleet):
    fleet.put_pool(name="lab", largest=2)
    job = fleet.submit(pool="lab")
    fleet.until_state(job, JobState.RUNNING)
    fleet.preempt(job)
    fleet.settle(job)
    assert fleet.attempts(job) == ["preempted", "finished"]


def test_a_lost_idle_slice_of_a_pool_is_replaced(fleet):
    fleet.put_pool(name="lab", smallest=1, largest=1)
    fleet.run(20)
    taken = fleet.store.slices(pool="lab")[0].id
    fleet.cloud.vanish(taken)
    fleet.run(30)
    assert [item.id for item in fleet.store.slices(pool="lab")] != [taken]
    assert len(fleet.cloud.existing()) == 1
