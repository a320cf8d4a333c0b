"""Finding capacity: stockouts, other zones and kinds, gangs, and the memory of who refused."""

from __future__ import annotations

import itertools
from datetime import timedelta

from tests.journeys.simulated_hosts import Program
from tpufleet.errors import (
    BadRequest,
    PermissionMissing,
    ProviderUnavailable,
    QuotaExceeded,
    RateLimited,
)
from tpufleet.model.jobs import JobState
from tpufleet.providers.base import Fault

TYPE = "v5litepod-16"


def test_a_job_waits_for_stock_and_says_so(world):
    world.cloud.stock[("zone-a", TYPE)] = 0
    job = world.submit()
    world.run(40)
    assert world.job(job).state is JobState.QUEUED
    assert "no v5litepod-16 in zone-a" in world.job(job).reason
    world.cloud.stock[("zone-a", TYPE)] = 1
    world.settle(job)
    assert world.attempts(job) == ["finished"]


def test_while_out_of_stock_it_asks_less_and_less_often(world):
    world.cloud.stock[("zone-a", TYPE)] = 0
    world.submit()
    refused = []
    for _ in range(900):
        world.tick()
        refusals = world.store.refusals()
        if refusals and (not refused or refusals[0].refused_at != refused[-1]):
            refused.append(refusals[0].refused_at)
    gaps = [(after - before).total_seconds() for before, after in itertools.pairwise(refused)]
    assert len(refused) < 10
    assert all(after > before for before, after in itertools.pairwise(gaps))


def test_the_next_zone_is_tried_at_once(make_world):
    world = make_world(zones=("us-central1-a", "europe-west4-b"))
    world.cloud.stock[("us-central1-a", TYPE)] = 0
    job = world.submit(zones=["us-central1-a", "europe-west4-b"])
    world.until(lambda: any(item.zone == "europe-west4-b" for item in world.gang(job)), 10)
    world.settle(job)
    assert world.job(job).state is JobState.SUCCEEDED


def test_the_kind_of_capacity_falls_back_after_all_zones(make_world):
    world = make_world(zones=("us-central1-a", "us-central1-b"))
    world.cloud.errors = [QuotaExceeded("spot quota"), QuotaExceeded("spot quota")]
    job = world.submit(capacity=["spot", "on-demand"])
    world.until(lambda: world.cloud.existing() != [])
    first = world.gang(job)[0]
    assert (first.zone, first.capacity) == ("us-central1-a", "on-demand")


def test_a_size_that_was_refused_makes_larger_ones_wait_and_not_smaller_ones(world):
    world.cloud.stock[("zone-a", TYPE)] = 0
    world.submit()
    world.run(4)
    larger = world.submit(accelerator="v5litepod-64")
    smaller = world.submit(accelerator="v5litepod-4")
    world.run(4)
    assert world.gang(larger) == []
    assert world.gang(smaller) != []


def test_a_request_that_can_never_work_fails_the_job_with_what_to_fix(world):
    world.cloud.errors = [PermissionMissing("grant roles/tpu.admin to the service account")]
    job = world.submit()
    world.settle(job)
    assert world.job(job).state is JobState.FAILED
    assert "grant roles/tpu.admin" in world.job(job).reason


def test_a_bad_request_in_one_zone_still_allows_the_other(make_world):
    world = make_world(zones=("us-central1-a", "europe-west4-b"))
    world.cloud.errors = [BadRequest("this zone has no v5e")]
    job = world.submit()
    world.settle(job)
    assert world.job(job).state is JobState.SUCCEEDED


def test_passing_errors_are_tried_again_under_the_same_name(world):
    world.cloud.errors = [RateLimited("slow down"), ProviderUnavailable("503")]
    job = world.submit()
    world.settle(job)
    assert world.attempts(job) == ["finished"]
    assert len(world.store.slices(live_only=False)) == 1


def test_a_multislice_gang_starts_together_and_is_numbered(world):
    job = world.submit(slices=3, accelerator="v5litepod-8")
    world.until_state(job, JobState.RUNNING)
    ids = [
        (host.workload.assignment.slice_index, host.workload.assignment.process_id)
        for host in world.all_hosts()
    ]
    assert sorted(ids) == [(0, 0), (1, 1), (2, 2)]
    assert {host.workload.assignment.num_slices for host in world.all_hosts()} == {3}
    world.settle(job)


def test_half_a_gang_never_runs(world):
    world.cloud.stock[("zone-a", TYPE)] = 1
    job = world.submit(slices=2)
    world.run(60)
    assert world.attempts(job) == []
    assert world.cloud.existing() == [], "and half a gang is not paid for either"
    world.cloud.stock[("zone-a", TYPE)] = 2
    world.settle(job)
    assert world.attempts(job) == ["finished"]


def test_losing_one_slice_of_a_gang_keeps_the_others(world):
    job = world.submit(slices=3, accelerator="v5litepod-8")
    world.until_state(job, JobState.RUNNING)
    before = {item.id for item in world.gang(job)}
    world.preempt(job, which=1)
    world.until(lambda: world.running_attempt(job) == 1)
    after = {item.id for item in world.gang(job)}
    assert len(before & after) == 2 and len(after) == 3
    world.settle(job)
    assert world.attempts(job) == ["preempted", "finished"]


def test_a_gang_that_cannot_be_made_whole_lets_go_and_moves(make_world):
    world = make_world(zones=("us-central1-a", "europe-west4-b"))
    job = world.submit(slices=2)
    world.until_state(job, JobState.RUNNING)
    world.cloud.stock[("us-central1-a", TYPE)] = 0
    world.preempt(job)
    world.until(lambda: world.running_attempt(job) == 1)
    assert {item.zone for item in world.gang(job)} == {"europe-west4-b"}
    world.settle(job)


def test_a_gang_hit_by_a_notice_on_one_slice_checkpoints_as_a_whole(world):
    job = world.submit(Program(steps=120, checkpoint_every=1000), slices=2)
    world.until_state(job, JobState.RUNNING)
    world.run(30)
    world.give_notice(job, which=1)
    world.settle(job)
    assert world.attempts(job) == ["preempted", "finished"]
    assert world.attempt(job).start_step >= 30


def test_a_slice_that_becomes_ready_after_its_job_was_cancelled_is_released(world):
    world.cloud.boot = timedelta(seconds=40)
    job = world.submit()
    world.until(lambda: world.cloud.existing() != [])
    world.cancel(job)
    world.settle(job)
    world.run(60)
    assert world.cloud.existing() == []


def test_preempted_machines_that_still_exist_are_deleted(world):
    job = world.submit()
    world.until_state(job, JobState.RUNNING)
    taken = world.gang(job)[0].id
    world.cloud.inject(taken, Fault.PREEMPT)
    world.until(lambda: taken not in world.cloud.existing(), 30)
    world.settle(job)
