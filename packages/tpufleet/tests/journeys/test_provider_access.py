"""Credentials, permissions, disabled APIs and quota: jobs wait, the cause is shown, and it clears
by itself. A job fails only on its own bad request."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.journeys.simulated_hosts import Program
from tpufleet.errors import BadRequest, PermissionMissing, QuotaExceeded
from tpufleet.model.job.jobs import JobState
from tpufleet.service.jobs.explain import explain
from tpufleet.service.operations import server_status
from tpufleet.stores.base import EventQuery

ERRORS = {
    "credentials": PermissionMissing("invalid authentication credentials; run `gcloud auth login`"),
    "permission": PermissionMissing("tpu.nodes.create denied; grant roles/tpu.admin"),
    "disabled API": PermissionMissing("the API is disabled; run `gcloud services enable`"),
    "quota": QuotaExceeded("quota limit TPUV5sPreemptible has been exceeded"),
}
each_error = pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)


def seconds_until_running(fleet, job) -> float:
    start = fleet.now()
    fleet.until_state(job, JobState.RUNNING, 300)
    return (fleet.now() - start).total_seconds()


@each_error
def test_a_new_job_waits_through_the_outage_and_starts_soon_after(fleet, error):
    fleet.cloud.outage = error
    job = fleet.submit()
    fleet.run(600)
    assert fleet.job(job).state is JobState.QUEUED
    assert str(error) in fleet.job(job).reason
    fleet.cloud.outage = None
    assert seconds_until_running(fleet, job) < 90
    fleet.settle(job)
    assert fleet.attempts(job) == ["finished"]


@each_error
def test_a_job_that_loses_its_host_during_the_outage_recovers(fleet, error):
    job = fleet.submit(Program(steps=300))
    fleet.until_state(job, JobState.RUNNING)
    fleet.run(30)
    fleet.cloud.outage = error
    fleet.stall_host(job)
    fleet.run(120)
    assert fleet.job(job).state is JobState.RECOVERING
    fleet.cloud.outage = None
    fleet.settle(job)
    assert fleet.attempts(job) == ["host_lost", "finished"]


@each_error
def test_jobs_after_the_outage_start_at_once_even_on_a_new_controller(fleet, error):
    fleet.cloud.outage = error
    first = fleet.submit()
    fleet.run(300)
    fleet.cloud.outage = None
    fleet.restart_controller()
    fleet.until_state(first, JobState.RUNNING, 100)
    later = fleet.submit()
    assert seconds_until_running(fleet, later) < 20
    fleet.settle()


@each_error
def test_requests_back_off_but_not_for_long(fleet, error):
    fleet.cloud.outage = error
    fleet.submit()
    refused: set = set()
    for _ in range(900):
        fleet.tick()
        refused.update(refusal.refused_at for refusal in fleet.store.refusals())
    assert 7 <= len(refused) <= 25, "at least every two minutes, and not every tick"


def test_the_end_of_an_access_outage_is_noticed_before_the_backoff_ends(fleet):
    """The listing, every few seconds, tells that credentials work again."""
    fleet.cloud.outage = ERRORS["credentials"]
    job = fleet.submit()
    fleet.run(900)
    fleet.cloud.outage = None
    assert seconds_until_running(fleet, job) < 50


def test_another_provider_of_the_same_zone_and_other_types_share_the_refusal(fleet):
    fleet.cloud.outage = ERRORS["permission"]
    fleet.submit(accelerator="v5litepod-16")
    fleet.run(3)
    other = fleet.submit(accelerator="v6e-8")
    fleet.run(3)
    assert "grant roles/tpu.admin" in fleet.job(other).reason
    assert [item for item in fleet.store.slices(live_only=False) if item.job_id == other] == []


def test_a_bad_request_fails_only_the_job_that_sent_it(fleet):
    fleet.cloud.errors = [BadRequest("node name is taken by another fleet")]
    unlucky = fleet.submit()
    fleet.until(lambda: fleet.job(unlucky).ended)
    assert fleet.job(unlucky).state is JobState.FAILED
    assert "taken by another fleet" in fleet.job(unlucky).reason
    for later in (fleet.submit(), fleet.submit()):
        fleet.settle(later)
        assert fleet.job(later).state is JobState.SUCCEEDED


def test_jobs_queued_together_each_fail_on_their_own_bad_request(fleet):
    fleet.cloud.outage = BadRequest("this type does not exist")
    jobs = [fleet.submit() for _ in range(20)]
    fleet.run(30)
    assert {fleet.job(job).state for job in jobs} == {JobState.FAILED}


def test_a_pool_that_the_provider_rejects_is_retried(fleet):
    fleet.cloud.errors = [BadRequest("wrong network")]
    fleet.put_pool(name="p", smallest=1, largest=1)
    fleet.until(lambda: len(fleet.cloud.existing()) == 1, 120)


def test_the_status_shows_the_error_while_it_lasts_and_why_quotes_it(fleet):
    fleet.run(20)
    [healthy] = server_status.status(fleet.store, fleet.now()).controller.providers
    assert healthy.problems == () and fleet.now() - healthy.answered_at < timedelta(seconds=30)
    fleet.cloud.outage = ERRORS["credentials"]
    job = fleet.submit()
    fleet.run(60)
    status = server_status.status(fleet.store, fleet.now())
    [provider] = status.controller.providers
    assert {problem.call for problem in provider.problems} >= {"listing", "request"}
    assert all("gcloud auth login" in problem.message for problem in provider.problems)
    assert status.waiting_for and not status.controller_stale
    details = " / ".join(explain(fleet.store, fleet.job(job), fleet.now()).details)
    assert "provider fake: listing fails" in details and "gcloud auth login" in details
    assert details.count("gcloud auth login") <= 2, "the refusal, and the failing listing"
    fleet.cloud.outage = None
    fleet.settle(job)
    fleet.run(20)
    [provider] = server_status.status(fleet.store, fleet.now()).controller.providers
    assert provider.problems == ()


def test_a_leader_that_stopped_reporting_is_shown_as_missing(fleet):
    fleet.run(5)
    fleet.clock.advance(timedelta(minutes=2))
    assert server_status.status(fleet.store, fleet.now()).controller_stale


def test_refusals_do_not_name_the_slices_of_one_job(fleet):
    fleet.cloud.stock[("zone-a", "v5litepod-16")] = 0
    first = fleet.submit()
    fleet.until(lambda: fleet.store.refusals() != [])
    slice_id = fleet.store.slices(live_only=False)[0].id
    fleet.cloud.errors = [QuotaExceeded(f"create {slice_id} in zone-a: quota")]
    other = fleet.submit()
    fleet.run(60)
    for job in (first, other):
        assert str(first) not in fleet.job(job).reason


def test_waiting_through_an_outage_writes_few_events(fleet):
    fleet.cloud.outage = ERRORS["permission"]
    job = fleet.submit()
    fleet.run(1800)
    states = [event.state for event in fleet.store.events(EventQuery(job_id=job, limit=10_000))]
    assert states.count("queued") + states.count("waiting") <= 4, states


def test_recovering_through_a_stockout_writes_few_events(make_fleet):
    zones = ("us-central1-a", "us-east1-d", "europe-west4-a")
    fleet = make_fleet(zones=zones)
    job = fleet.submit(Program(steps=300))
    fleet.until_state(job, JobState.RUNNING)
    for zone in zones:
        fleet.cloud.stock[(zone, "v5litepod-16")] = 0
    fleet.preempt(job)
    fleet.run(900)
    states = [event.state for event in fleet.store.events(EventQuery(job_id=job, limit=10_000))]
    assert states.count("recovering") <= 3, states


def test_the_first_answer_of_a_provider_is_reported_at_once(fleet):
    fleet.run(3)
    [health] = server_status.status(fleet.store, fleet.now()).controller.providers
    assert health.answered_at is not None
