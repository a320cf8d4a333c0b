"""Sharing a pool: priorities, limits, backfill, and jobs that make way."""

from __future__ import annotations

from datetime import timedelta

from tests.journeys.simulated_hosts import Program
from tpufleet.model.jobs import JobState


def test_a_pool_keeps_its_smallest_number_of_slices_ready(world):
    world.put_pool(name="lab", smallest=2, largest=4)
    world.run(30)
    assert len(world.store.slices(pool="lab")) == 2
    job = world.submit(pool="lab")
    world.until_state(job, JobState.RUNNING, 8)
    world.settle(job)
    assert len(world.cloud.existing()) == 2


def test_a_pool_never_grows_past_its_largest(world):
    world.put_pool(name="lab", largest=3)
    jobs = [world.submit(pool="lab") for _ in range(8)]
    most = 0
    while not all(world.job(job).ended for job in jobs):
        world.tick()
        most = max(most, len(world.cloud.existing()))
    assert most == 3
    assert all(world.job(job).state is JobState.SUCCEEDED for job in jobs)


def test_idle_slices_go_back_and_a_dropped_pool_empties(world):
    world.put_pool(name="lab", smallest=1, largest=4, idle_after=timedelta(minutes=1))
    jobs = [world.submit(pool="lab") for _ in range(3)]
    world.settle(*jobs)
    world.until(lambda: len(world.cloud.existing()) == 1, 200)
    world.drop_pool("lab")
    world.until(lambda: world.cloud.existing() == [], 60)


def test_larger_priority_goes_first_and_inside_one_the_older(world):
    world.put_pool(name="lab", largest=1)
    blocker = world.submit(Program(steps=20), pool="lab")
    world.until_state(blocker, JobState.RUNNING)
    low = world.submit(Program(steps=5), pool="lab")
    world.run(1)
    late = world.submit(Program(steps=5), pool="lab", priority=5)
    world.run(1)
    later = world.submit(Program(steps=5), pool="lab", priority=5)
    world.settle(blocker, low, late, later)
    started = sorted((low, late, later), key=lambda job: world.store.attempts(job)[0].created_at)
    assert started == [late, later, low]


def test_the_head_of_the_queue_is_not_starved_by_smaller_jobs(world):
    world.put_pool(name="lab", largest=2)
    first = world.submit(Program(steps=60), pool="lab")
    world.until_state(first, JobState.RUNNING)
    wide = world.submit(Program(steps=5), pool="lab", slices=2)
    world.run(2)
    small = [world.submit(Program(steps=30), pool="lab") for _ in range(5)]
    world.settle(first, wide, *small)
    wide_start = world.store.attempts(wide)[0].created_at
    assert all(world.store.attempts(job)[0].created_at > wide_start for job in small)


def test_a_short_job_may_use_what_is_kept_for_the_head_if_it_ends_in_time(world):
    world.put_pool(name="lab", smallest=2, largest=2)
    world.until(lambda: len(world.store.slices(pool="lab")) == 2)
    world.run(15)
    first = world.submit(Program(steps=300), pool="lab", timeout="10m")
    world.until_state(first, JobState.RUNNING)
    wide = world.submit(Program(steps=5), pool="lab", slices=2)
    world.run(2)
    long = world.submit(Program(steps=20), pool="lab", timeout="2h")
    short = world.submit(Program(steps=20), pool="lab", timeout="2m")
    world.settle(first, wide, long, short)
    start = {job: world.store.attempts(job)[0].created_at for job in (wide, long, short)}
    assert start[short] < start[wide] < start[long]


def test_one_user_cannot_take_more_than_their_share(world):
    world.put_pool(name="lab", largest=4, slices_per_user=2)
    mine = [world.submit(pool="lab", owner="ann") for _ in range(4)]
    world.run(2)
    theirs = world.submit(pool="lab", owner="bob")
    world.until(lambda: world.running(theirs))
    assert sum(1 for job in mine if world.gang(job)) == 2
    held_back = [job for job in mine if not world.gang(job)]
    assert all("ann may hold 2 slices of pool lab" in world.job(job).reason for job in held_back)
    world.settle(*mine, theirs)


def test_a_limit_over_everything_holds_without_a_pool_too(make_world):
    world = make_world(slices_per_user=2)
    jobs = [world.submit() for _ in range(4)]
    most = 0
    while not all(world.job(job).ended for job in jobs):
        world.tick()
        most = max(most, sum(1 for job in jobs if world.gang(job)))
    assert most == 2


def test_a_job_of_higher_priority_takes_the_place_of_a_lower_one_where_the_pool_allows(world):
    world.put_pool(name="lab", largest=1, supersede=True)
    low = world.submit(Program(steps=60, checkpoint_every=1000), pool="lab")
    world.until_state(low, JobState.RUNNING)
    world.run(20)
    high = world.submit(Program(steps=10), pool="lab", priority=10)
    world.settle(low, high)
    assert world.attempts(low) == ["superseded", "finished"]
    assert world.attempts(high) == ["finished"]
    assert world.failures(low) == 0
    assert world.attempt(low).start_step >= 20


def test_equal_priority_never_takes_anybodys_place(world):
    world.put_pool(name="lab", largest=1, supersede=True)
    first = world.submit(pool="lab", priority=3)
    world.until_state(first, JobState.RUNNING)
    second = world.submit(pool="lab", priority=3)
    world.settle(first, second)
    assert world.attempts(first) == ["finished"]


def test_nobody_is_stopped_in_vain(world):
    world.put_pool(name="lab", largest=2, supersede=True)
    low = world.submit(Program(steps=40), pool="lab")
    middle = world.submit(Program(steps=40), pool="lab", priority=9)
    world.until(lambda: world.running(low) and world.running(middle))
    wide = world.submit(Program(steps=5), pool="lab", slices=2, priority=5)
    world.settle(low, middle, wide)
    assert world.attempts(low) == ["finished"]


def test_a_preempted_slice_of_a_pool_is_replaced_for_its_job(world):
    world.put_pool(name="lab", largest=2)
    job = world.submit(pool="lab")
    world.until_state(job, JobState.RUNNING)
    world.preempt(job)
    world.settle(job)
    assert world.attempts(job) == ["preempted", "finished"]


def test_an_idle_slice_of_a_pool_that_is_taken_away_is_replaced(world):
    world.put_pool(name="lab", smallest=1, largest=1)
    world.run(20)
    taken = world.store.slices(pool="lab")[0].id
    world.cloud.vanish(taken)
    world.run(30)
    assert [item.id for item in world.store.slices(pool="lab")] != [taken]
    assert len(world.cloud.existing()) == 1
