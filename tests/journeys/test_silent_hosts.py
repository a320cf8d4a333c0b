"""Machines that run while no agent connects: explained early, and not bought without end."""

from __future__ import annotations

import pytest

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
