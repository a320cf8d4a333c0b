"""Machines that run while no agent connects: explained early, and not bought without end."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.journeys.simulated_hosts import Program
from tpufleet.model.fleet.bootstrap import BootstrapReport, BootstrapStage
from tpufleet.model.fleet.slices import LossReason, SliceState
from tpufleet.model.job.jobs import JobState
from tpufleet.model.people.users import Role
from tpufleet.policy.recovery.liveness import MAX_FUTILE_CREATIONS, SILENT_BOOT_LIMIT
from tpufleet.service.jobs import job_queue
from tpufleet.service.jobs.commands import CommandContext
from tpufleet.service.jobs.explain import explain
from tpufleet.service.operations import server_status
from tpufleet.service.transport.auth import Caller
from tpufleet.stores.base import EventQuery


@pytest.fixture
def unreachable(make_fleet):
    """A fleet whose hosts cannot reach the server."""
    fleet = make_fleet(zones=("us-central1-a", "europe-west4-b"))
    fleet.reachable = False
    return fleet


def test_after_three_minutes_the_most_likely_cause_is_named(unreachable):
    fleet = unreachable
    job = fleet.submit()
    fleet.run(210)
    [tpu_slice] = fleet.gang(job)
    assert tpu_slice.state is SliceState.BOOTING
    assert "0 of 4 agents have connected" in tpu_slice.reason
    assert "cannot reach http://127.0.0.1" in tpu_slice.reason and "public_url" in tpu_slice.reason
    details = " / ".join(explain(fleet.store, fleet.job(job), fleet.now()).details)
    assert "public_url" in details
    events = fleet.store.events(EventQuery(job_id=job, limit=1000))
    assert sum("public_url" in event.message for event in events) == 1, "once"


def test_a_job_stops_creating_machines_that_no_agent_connects_from(unreachable):
    fleet = unreachable
    job = fleet.submit()
    fleet.until(lambda: fleet.job(job).ended, 7200)
    assert fleet.job(job).state is JobState.FAILED
    assert f"{MAX_FUTILE_CREATIONS} slices" in fleet.job(job).reason
    assert "public_url" in fleet.job(job).advice
    assert len(fleet.cloud.requested) == MAX_FUTILE_CREATIONS
    fleet.settle(job)


def test_one_slice_that_connects_ends_the_count(unreachable):
    fleet = unreachable
    job = fleet.submit()
    fleet.until(lambda: len(fleet.cloud.requested) == MAX_FUTILE_CREATIONS, 7200)
    fleet.reachable = True
    fleet.settle(job)
    assert fleet.attempts(job) == ["finished"]


def report(stage, **changes):
    return BootstrapReport(host=2, stage=stage, **changes)


@pytest.mark.parametrize(
    ("reports", "cause"),
    [
        pytest.param(
            [report(BootstrapStage.WAITING_FOR_CHIPS, message="0 of 4")],
            "shows no chips yet (host 2: waiting for chips: 0 of 4)",
            id="chips",
        ),
        pytest.param(
            [report(BootstrapStage.DOWNLOADING)],
            "check the role of their service account on the bucket",
            id="bucket",
        ),
    ],
)
def test_what_hosts_report_decides_which_cause_is_named(unreachable, reports, cause):
    fleet = unreachable
    job = fleet.submit()
    fleet.run(30)
    [tpu_slice] = fleet.gang(job)
    fleet.cloud.find(tpu_slice.id).bootstrap = tuple(reports)
    fleet.run(30)
    assert fleet.gang(job)[0].reason == reports[0].text, "before that, the stage of the slowest"
    fleet.run(150)
    details = " / ".join(explain(fleet.store, fleet.job(job), fleet.now()).details)
    assert cause in details
    events = fleet.store.events(EventQuery(job_id=job, limit=1000))
    assert sum(cause in event.message for event in events) == 1, "once"


def test_a_failed_bootstrap_releases_the_slice_at_once_and_three_fail_the_job(unreachable):
    fleet = unreachable
    job = fleet.submit()
    wrong = report(BootstrapStage.INSTALLING, failed=True, message="wrong checksum")
    for requested in range(1, MAX_FUTILE_CREATIONS + 1):
        fleet.until(lambda count=requested: len(fleet.cloud.requested) == count, 600)
        fleet.run(30)
        fleet.cloud.find(fleet.cloud.requested[-1][1]).bootstrap = (wrong,)
    fleet.until(lambda: fleet.job(job).ended, 60)
    assert "installing tpufleet failed: wrong checksum" in fleet.job(job).reason
    assert len(fleet.cloud.requested) == MAX_FUTILE_CREATIONS
    fleet.settle(job)


# Hosts that report, beside the server, that they cannot reach it.

REFUSED = report(BootstrapStage.CONNECTING, message="connection refused")


def run_reporting(fleet, seconds):
    """Hosts of slices that are up write what they see."""
    for _ in range(seconds):
        for slice_id in fleet.cloud.existing():
            reports = () if fleet.reachable else (REFUSED,)
            fleet.cloud.find(slice_id).bootstrap = reports
        fleet.tick()


def details_of(fleet, job):
    return " / ".join(explain(fleet.store, fleet.job(job), fleet.now()).details)


def provider_problems(fleet):
    controller = server_status.status(fleet.store, fleet.now()).controller
    return [problem for health in controller.providers for problem in health.problems]


def test_a_server_that_hosts_cannot_reach_costs_each_job_one_slice_for_minutes(make_fleet):
    fleet = make_fleet(zones=("us-central1-a", "europe-west4-b"), boot_limit=timedelta(minutes=20))
    fleet.reachable = False
    jobs = [fleet.submit() for _ in range(3)]
    run_reporting(fleet, 600)
    assert len(fleet.cloud.requested) == 3, "one for each job"
    ran = [s.lost_at - s.up_at for s in fleet.store.slices(live_only=False)]
    assert max(ran) <= timedelta(minutes=3)
    for job in jobs:
        assert fleet.job(job).state is JobState.QUEUED, "it waits; it does not fail"
        assert "cannot reach this server at http://127.0.0.1" in fleet.job(job).reason
        assert "connecting to the server: connection refused" in details_of(fleet, job)
        assert "one slice tries again in" in details_of(fleet, job)
    [problem] = provider_problems(fleet)
    assert "public_url" in problem.message and problem.retry_at > fleet.now()


def test_one_slice_at_a_time_tries_whether_hosts_reach_the_server_again(unreachable):
    fleet = unreachable
    jobs = [fleet.submit() for _ in range(3)]
    run_reporting(fleet, 5400)
    assert 5 <= len(fleet.cloud.requested) <= 6, "3 jobs, then single tries with backoff"
    assert len(fleet.cloud.existing()) <= 1
    fleet.reachable = True
    fleet.settle(*jobs, limit=3 * 3600)
    assert [fleet.job(job).state for job in jobs] == [JobState.SUCCEEDED] * 3
    assert not provider_problems(fleet)


def test_another_public_url_is_tried_at_once(unreachable):
    fleet = unreachable
    job = fleet.submit()
    run_reporting(fleet, 300)
    assert provider_problems(fleet)
    fleet.restart_controller()
    run_reporting(fleet, 60)
    assert len(fleet.cloud.requested) == 1, "a restart with the same address changes nothing"
    fleet.server_url = "https://fleet.example.com"
    fleet.restart_controller()
    fleet.reachable = True
    fleet.until(lambda: len(fleet.cloud.requested) == 2, 30)
    fleet.settle(job)
    assert not provider_problems(fleet)


def retry(fleet, job):
    """`tpu queue retry JOB`."""
    caller = Caller(name="user", role=Role.ADMIN)
    context = CommandContext(store=fleet.store, caller=caller, now=fleet.now())
    job_queue.retry(context, fleet.job(job))


@pytest.mark.slow
def test_after_a_repair_a_retry_lets_one_slice_try_at_once_and_all_jobs_go_on(unreachable):
    fleet = unreachable
    jobs = [fleet.submit() for _ in range(3)]
    run_reporting(fleet, 5400)  # the backoff has grown
    requested = len(fleet.cloud.requested)
    assert f"`tpu queue retry {jobs[1]}`" in details_of(fleet, jobs[1])
    fleet.reachable = True
    retry(fleet, jobs[1])
    fleet.until(lambda: len(fleet.cloud.requested) == requested + 1, 5)
    retry(fleet, jobs[0])
    fleet.run(5)
    assert len(fleet.cloud.requested) == requested + 1, "one at a time"
    fleet.settle(*jobs, limit=600)
    assert [fleet.job(job).state for job in jobs] == [JobState.SUCCEEDED] * 3


def test_a_retry_before_the_repair_costs_one_slice_and_the_backoff_goes_on(unreachable):
    fleet = unreachable
    job = fleet.submit()
    run_reporting(fleet, 600)
    [before] = provider_problems(fleet)
    retry(fleet, job)
    run_reporting(fleet, 600)
    [after] = provider_problems(fleet)
    assert len(fleet.cloud.requested) == 2 and after.count == before.count + 1
    assert after.retry_at - fleet.now() > timedelta(minutes=15)


def test_hosts_of_one_slice_that_cannot_connect_do_not_stop_the_others(make_fleet):
    fleet = make_fleet(zones=("us-central1-a", "europe-west4-b"))
    first = fleet.submit(Program(steps=4000))
    fleet.until_state(first, JobState.RUNNING)
    second = fleet.submit()
    fleet.until(lambda: fleet.gang(second), 30)
    [tpu_slice] = fleet.gang(second)
    fleet.unreachable_hosts = {f"{tpu_slice.id}/{index}" for index in range(4)}
    fleet.until(lambda: fleet.cloud.is_up(tpu_slice.id), 60)
    fleet.cloud.find(tpu_slice.id).bootstrap = (REFUSED,)
    fleet.run(240)
    assert not provider_problems(fleet)
    assert "hosts cannot reach http://127.0.0.1" in fleet.gang(second)[0].reason
    fleet.until(lambda: fleet.job(second).ended)


def test_machines_that_say_nothing_are_given_up_early(make_fleet):
    fleet = make_fleet(zones=("us-central1-a",), boot_limit=timedelta(minutes=20))
    fleet.reachable = False
    job = fleet.submit()
    fleet.until(lambda: fleet.job(job).ended, 7200)
    slices = fleet.store.slices(live_only=False)
    assert {tpu_slice.loss for tpu_slice in slices} == {LossReason.BOOT_FAILED}
    ran = sum((s.lost_at - s.up_at for s in slices), timedelta(0))
    assert ran <= 2 * SILENT_BOOT_LIMIT + timedelta(minutes=1)
    assert "its hosts have reported nothing" in fleet.job(job).reason


@pytest.mark.parametrize("stage", [BootstrapStage.DOWNLOADING, BootstrapStage.CHECKING_CHIPS])
@pytest.mark.parametrize("connected", [0, 3])
def test_a_slice_whose_last_hosts_make_no_progress_is_given_up_early(make_fleet, stage, connected):
    fleet = make_fleet(zones=("us-central1-a",), boot_limit=timedelta(minutes=20))
    job = fleet.submit()
    hosts = [index for index in range(4) if index >= connected]
    stuck = tuple(BootstrapReport(host=index, stage=stage) for index in hosts)
    for _ in range(7200):
        if fleet.job(job).ended:
            break
        for slice_id in fleet.cloud.existing():
            fleet.unreachable_hosts |= {f"{slice_id}/{index}" for index in hosts}
            fleet.cloud.find(slice_id).bootstrap = stuck
        fleet.tick()
    slices = fleet.store.slices(live_only=False)
    assert {tpu_slice.loss for tpu_slice in slices} == {LossReason.BOOT_FAILED}
    ran = sum((s.lost_at - s.up_at for s in slices), timedelta(0))
    assert ran <= 2 * SILENT_BOOT_LIMIT + timedelta(minutes=2)
    assert f"no progress in 10 min: host {hosts[0]}: {stage}" in fleet.job(job).reason


def test_a_slow_start_that_makes_progress_is_waited_for(make_fleet):
    fleet = make_fleet(zones=("us-central1-a",), boot_limit=timedelta(minutes=20))
    fleet.reachable = False
    job = fleet.submit()
    fleet.until(fleet.cloud.existing, 60)
    [slice_id] = fleet.cloud.existing()
    for stage in (BootstrapStage.WAITING_FOR_CHIPS, BootstrapStage.DOWNLOADING):
        fleet.cloud.find(slice_id).bootstrap = (report(stage),)
        fleet.run(480)
    fleet.reachable = True
    fleet.settle(job)
    assert len(fleet.cloud.requested) == 1 and fleet.attempts(job) == ["finished"]
