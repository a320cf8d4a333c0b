"""The price of what a job waits for, and of what it has used."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tpufleet.model.fleet.server_status import CONTROLLER_REPORT, ControllerReport, ProviderHealth
from tpufleet.model.values.encoding import to_json

WANTED = {"providers": ["tpu-vm"], "zones": ["us-west4-a"], "capacity": ["spot", "on-demand"]}


def test_a_waiting_job_shows_the_price_of_every_source(service):
    report = ControllerReport(
        holder="one",
        leader_since=service.clock.now(),
        reported_at=service.clock.now(),
        providers=(ProviderHealth(name="tpu-vm", zones=("us-west4-a",)),),
    )
    service.store.put_metadata(CONTROLLER_REPORT, to_json(report).decode())
    job = service.submit(slices=2, **WANTED)
    spot, on_demand = service.client("vic").why(job).sources
    assert spot.usd_per_hour == pytest.approx(0.48 * 32)  # the assumed price of spot, 32 chips
    assert on_demand.usd_per_hour == pytest.approx(1.2 * 32)
    simulated = service.submit("job-2", providers=["local"], zones=["local-a"])
    assert [each.usd_per_hour for each in service.client("vic").why(simulated).sources] == [None]


def test_the_cost_of_a_job_includes_slices_of_a_pool_that_others_use_now(service):
    job = service.submit("job-1")
    start = service.clock.now()
    service.add_slice("s1", None, ready_at=start, provider="tpu-vm", zone="us-west4-a")
    service.add_attempt(job, 0, "s1", running_at=start, ended_at=None)
    service.clock.advance(timedelta(hours=2))
    (row,) = service.client("vic").job_cost(job).rows
    assert row.job_id == job
    assert row.chip_hours == pytest.approx(32)
    assert row.badput == {"unknown": pytest.approx(32)}  # it reported no step
    assert row.usd_per_chip_hour == pytest.approx(0.48)
