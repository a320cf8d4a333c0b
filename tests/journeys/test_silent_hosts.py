"""Machines that run while no agent connects: explained early, and not bought without end."""

from __future__ import annotations

import pytest

from tpufleet.model.bootstrap import BootstrapReport, BootstrapStage
from tpufleet.model.jobs import JobState
from tpufleet.model.slices import SliceState
from tpufleet.policy.liveness import MAX_FUTILE_CREATIONS
from tpufleet.service.explain import explain
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
            [report(BootstrapStage.CONNECTING, message="connection refused")],
            "hosts cannot reach http://127.0.0.1",
            id="server",
        ),
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
    assert "host 2: installing tpufleet failed: wrong checksum" in fleet.job(job).reason
    assert len(fleet.cloud.requested) == MAX_FUTILE_CREATIONS
    fleet.settle(job)
