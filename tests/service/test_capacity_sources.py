"""What a waiting job shows: the sources of its slices with their prices, and what it has cost."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.service.harness import ServiceHarness
from tpufleet.model.jobs import Capacity, JobState
from tpufleet.model.pools import CapacityRefusal, Pool
from tpufleet.model.slices import SliceState
from tpufleet.stores.base import ChangeSet

ZONES = ["us-central1-a", "us-west4-a"]
WANTED = {"providers": ["tpu-vm"], "zones": ZONES, "capacity": ["spot", "on-demand"]}


def refuse(service: ServiceHarness, zone: str, capacity: Capacity) -> None:
    now = service.clock.now()
    refusal = CapacityRefusal(
        provider="tpu-vm",
        zone=zone,
        accelerator="v5litepod-16",
        capacity=capacity,
        message="no more capacity in the zone",
        refused_at=now,
        until=now + timedelta(seconds=40),
    )
    service.store.commit(ChangeSet(refusals=[refusal]))


def sources(service: ServiceHarness, job: str) -> list[tuple[str, str, str]]:
    rows = service.client("vic").why(job).sources
    return [(row.zone, row.capacity.value, row.state.value) for row in rows]


def test_a_waiting_job_shows_every_source_its_answer_and_its_price(service):
    job = service.submit(slices=2, **WANTED)
    assert sources(service, job) == [
        ("us-central1-a", "spot", "next"),
        ("us-west4-a", "spot", "open"),
        ("us-central1-a", "on-demand", "open"),
        ("us-west4-a", "on-demand", "open"),
    ]
    refuse(service, "us-central1-a", Capacity.SPOT)
    first, second, third, _ = service.client("vic").why(job).sources
    assert (first.state, first.message) == ("refused", "no more capacity in the zone")
    assert first.next_try == service.clock.now() + timedelta(seconds=40)
    assert second.state == "next"
    assert second.usd_per_hour == pytest.approx(0.48 * 32)  # the assumed price of spot, 32 chips
    assert third.usd_per_hour == pytest.approx(1.2 * 32)
    zone = {"provider": "tpu-vm", "zone": "us-west4-a", "state": SliceState.REQUESTED}
    service.add_slice("s1", job, with_hosts=False, **zone)
    assert [state for *_, state in sources(service, job)] == [
        "refused",
        "requested",
        "open",
        "open",
    ]


def test_a_job_of_a_pool_shows_the_sources_of_the_pool(service):
    pool = Pool(
        name="lab", provider="tpu-vm", accelerator="v5e-16", largest=2, zones=("us-west4-a",)
    )
    service.client("ada").put_pool(pool)
    job = service.submit(pool="lab")
    assert sources(service, job) == [("us-west4-a", "spot", "next")]


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.FAILED])
def test_a_job_that_does_not_wait_shows_no_sources(service, state):
    job = service.submit(**WANTED)
    service.change_job(job, state=state)
    assert sources(service, job) == []


def test_the_cost_of_a_job_includes_slices_of_a_pool_that_others_use_now(service):
    job = service.submit("job-1")
    start = service.clock.now()
    service.add_slice("s1", None, ready_at=start, provider="tpu-vm", zone="us-west4-a")
    service.add_attempt(job, 0, "s1", running_at=start, ended_at=None)
    service.clock.advance(timedelta(hours=2))
    (row,) = service.client("vic").job_cost(job).rows
    assert row.job_id == job
    assert row.chip_hours == pytest.approx(32)
    assert row.unknown == pytest.approx(32)  # it reported no step
    assert row.usd_per_chip_hour == pytest.approx(0.48)
