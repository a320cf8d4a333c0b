"""Finding capacity: stockouts, other zones and kinds, gangs, and the memory of who refused."""

from __future__ import annotations

import itertools
from datetime import timedelta

from tests.journeys.simulated_hosts import Program
from tpufleet.errors import (
    BadRequest,
    ProviderUnavailable,
    QuotaExceeded,
    RateLimited,
)
from tpufleet.model.job.jobs import JobState
from tpufleet.model.people.users import Role
from tpufleet.policy.scheduling import placement
from tpufleet.providers.base import Fault
from tpufleet.service.jobs import job_queue
from tpufleet.service.jobs.commands import CommandContext
from tpufleet.service.transport.auth import Caller

TYPE = "v5litepod-16"


def test_a_job_waits_for_capacity_with_a_reason(fleet):
    fleet.cloud.stock[("zone-a", TYPE)] = 0
    job = fleet.submit()
    fleet.run(40)
    assert fleet.job(job).state is JobState.QUEUED
    assert "no v5litepod-16 in zone-a" in fleet.job(job).reason
    fleet.cloud.stock[("zone-a", TYPE)] = 1
    fleet.settle(job)
    assert fleet.attempts(job) == ["finished"]


def test_requests_back_off_during_a_stockout(fleet):
    fleet.cloud.stock[("zone-a", TYPE)] = 0
    fleet.submit()
    refused = []
    for _ in range(900):
        fleet.tick()
        refusals = fleet.store.refusals()
        if refusals and (not refused or refusals[0].refused_at != refused[-1]):
            refused.append(refusals[0].refused_at)
    gaps = [(after - before).total_seconds() for before, after in itertools.pairwise(refused)]
    assert len(refused) < 10
    assert all(after > before for before, after in itertools.pairwise(gaps))


def test_jobs_in_a_long_queue_are_not_written_whenever_capacity_is_tried(fleet, monkeypatch):
    fleet.cloud.stock[("zone-a", TYPE)] = 0
    jobs = [fleet.submit() for _ in range(40)]
    fleet.run(60)
    written, commit = [], fleet.store.commit

    def counting(change, **options):
        written.append(len(change.jobs))
        return commit(change, **options)

    monkeypatch.setattr(fleet.store, "commit", counting)
    refused_at = fleet.store.refusals()[0].refused_at
    fleet.run(900)
    assert fleet.store.refusals()[0].refused_at > refused_at
    assert max(written) <= placement.MAX_PROBES
    assert all("no v5litepod-16 in zone-a" in fleet.job(job).reason for job in jobs[10:])


def test_a_retry_does_not_wait_for_the_backoff(fleet):
    fleet.cloud.stock[("zone-a", TYPE)] = 0
    job = fleet.submit()
    fleet.run(900)
    [refusal] = fleet.store.refusals()
    assert refusal.until - fleet.now() > timedelta(seconds=30)
    fleet.cloud.stock[("zone-a", TYPE)] = 1
    caller = Caller(name="user", role=Role.ADMIN)
    context = CommandContext(store=fleet.store, caller=caller, now=fleet.now())
    job_queue.retry(context, fleet.job(job))
    fleet.until(lambda: fleet.cloud.existing() != [], 5)
    fleet.settle(job)
    job_queue.retry(context, fleet.job(fleet.submit()))  # waits for nothing yet: no effect


def test_the_next_zone_is_tried_at_once(make_fleet):
    fleet = make_fleet(zones=("us-central1-a", "europe-west4-b"))
    fleet.cloud.stock[("us-central1-a", TYPE)] = 0
    job = fleet.submit(zones=["us-central1-a", "europe-west4-b"])
    fleet.until(lambda: any(item.zone == "europe-west4-b" for item in fleet.gang(job)), 10)
    fleet.settle(job)
    assert fleet.job(job).state is JobState.SUCCEEDED


def test_the_capacity_type_falls_back_after_all_zones(make_fleet):
    fleet = make_fleet(zones=("us-central1-a", "us-central1-b"))
    fleet.cloud.errors = [QuotaExceeded("spot quota"), QuotaExceeded("spot quota")]
    job = fleet.submit(capacity=["spot", "on-demand"])
    fleet.until(lambda: fleet.cloud.existing() != [])
    first = fleet.gang(job)[0]
    assert (first.zone, first.capacity) == ("us-central1-a", "on-demand")


def test_a_size_that_was_refused_makes_larger_ones_wait_and_not_smaller_ones(fleet):
    fleet.cloud.stock[("zone-a", TYPE)] = 0
    fleet.submit()
    fleet.run(4)
    larger = fleet.submit(accelerator="v5litepod-64")
    smaller = fleet.submit(accelerator="v5litepod-4")
    fleet.run(4)
    assert fleet.gang(larger) == []
    assert fleet.gang(smaller) != []


def test_a_request_that_can_never_work_fails_the_job_with_what_to_fix(fleet):
    fleet.cloud.errors = [BadRequest("v5litepod-16 is not available as a TPU VM")]
    job = fleet.submit()
    fleet.settle(job)
    assert fleet.job(job).state is JobState.FAILED
    assert "not available as a TPU VM" in fleet.job(job).reason


def test_a_bad_request_in_one_zone_still_allows_the_other(make_fleet):
    fleet = make_fleet(zones=("us-central1-a", "europe-west4-b"))
    fleet.cloud.errors = [BadRequest("this zone has no v5e")]
    job = fleet.submit()
    fleet.settle(job)
    assert fleet.job(job).state is JobState.SUCCEEDED


def test_temporary_errors_are_retried_under_the_same_name(fleet):
    fleet.cloud.errors = [RateLimited("slow down"), ProviderUnavailable("503")]
    job = fleet.submit()
    fleet.settle(job)
    assert fleet.attempts(job) == ["finished"]
    assert len(fleet.store.slices(live_only=False)) == 1


def test_a_multislice_gang_starts_together_and_is_numbered(fleet):
    job = fleet.submit(slices=3, accelerator="v5litepod-8")
    fleet.until_state(job, JobState.RUNNING)
    ids = [
        (host.workload.assignment.slice_index, host.workload.assignment.process_id)
        for host in fleet.all_hosts()
    ]
    assert sorted(ids) == [(0, 0), (1, 1), (2, 2)]
    assert {host.workload.assignment.num_slices for host in fleet.all_hosts()} == {3}
    fleet.settle(job)


def test_half_a_gang_never_runs(fleet):
    fleet.cloud.stock[("zone-a", TYPE)] = 1
    job = fleet.submit(slices=2)
    fleet.run(60)
    assert fleet.attempts(job) == []
    assert fleet.cloud.existing() == [], "and half a gang is not paid for either"
    fleet.cloud.stock[("zone-a", TYPE)] = 2
    fleet.settle(job)
    assert fleet.attempts(job) == ["finished"]


def test_losing_one_slice_of_a_gang_keeps_the_others(fleet):
    job = fleet.submit(slices=3, accelerator="v5litepod-8")
    fleet.until_state(job, JobState.RUNNING)
    before = {item.id for item in fleet.gang(job)}
    fleet.preempt(job, which=1)
    fleet.until(lambda: fleet.running_attempt(job) == 1)
    after = {item.id for item in fleet.gang(job)}
    assert len(before & after) == 2 and len(after) == 3
    fleet.settle(job)
    assert fleet.attempts(job) == ["preempted", "finished"]


def test_a_gang_that_cannot_be_completed_is_released_and_moved(make_fleet):
    fleet = make_fleet(zones=("us-central1-a", "europe-west4-b"))
    job = fleet.submit(slices=2)
    fleet.until_state(job, JobState.RUNNING)
    fleet.cloud.stock[("us-central1-a", TYPE)] = 0
    fleet.preempt(job)
    fleet.until(lambda: fleet.running_attempt(job) == 1)
    assert {item.zone for item in fleet.gang(job)} == {"europe-west4-b"}
    fleet.settle(job)


def test_a_gang_hit_by_a_notice_on_one_slice_checkpoints_as_a_whole(fleet):
    job = fleet.submit(Program(steps=120, checkpoint_every=1000), slices=2)
    fleet.until_state(job, JobState.RUNNING)
    fleet.run(30)
    fleet.send_notice(job, which=1)
    fleet.settle(job)
    assert fleet.attempts(job) == ["preempted", "finished"]
    assert fleet.attempt(job).start_step >= 30


def test_a_slice_that_becomes_ready_after_its_job_was_cancelled_is_released(fleet):
    fleet.cloud.boot = timedelta(seconds=40)
    job = fleet.submit()
    fleet.until(lambda: fleet.cloud.existing() != [])
    fleet.cancel(job)
    fleet.settle(job)
    fleet.run(60)
    assert fleet.cloud.existing() == []


def test_preempted_machines_that_still_exist_are_deleted(fleet):
    job = fleet.submit()
    fleet.until_state(job, JobState.RUNNING)
    taken = fleet.gang(job)[0].id
    fleet.cloud.inject(taken, Fault.PREEMPT)
    fleet.until(lambda: taken not in fleet.cloud.existing(), 30)
    fleet.settle(job)
