"""A storm over zones of TPU VMs: preemptions with and without notice, zones without stock, lost
credentials, slow deletions and killed servers. All jobs finish, and little is paid idle."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from tests.contract.fake_store import FakeStore
from tests.journeys.simulated_fleet import SimulatedFleet
from tests.journeys.simulated_hosts import Program
from tests.journeys.storm_cloud import StormyTpuVmCloud
from tpufleet.model.fleet.hosts import NoticeKind
from tpufleet.model.job.jobs import JobState
from tpufleet_testbed.cloud_tpu.capacity import CapacityLimit
from tpufleet_testbed.cloud_tpu.fault_plan import (
    CallFault,
    CloudFaultPlan,
    PreemptionStorm,
    ZoneOutage,
)

ZONES = (
    "us-central1-a", "us-south1-a", "us-west1-c", "us-west4-a", "europe-west4-b", "us-east5-a",
)  # fmt: skip
MAX_IDLE = 0.02


def minutes(count: float) -> timedelta:
    return timedelta(minutes=count)


def storm(seed: int, per_zone: int) -> CloudFaultPlan:
    blips = [minutes(4), minutes(11)]
    return CloudFaultPlan(
        seed=seed,
        storms=(
            PreemptionStorm(every=minutes(6), share=0.25, notice=True),
            PreemptionStorm(every=minutes(7), share=0.15),
        ),
        closings=(ZoneOutage(zone="us-west4-a", after=minutes(5), until=minutes(12)),),
        calls=(
            *(
                CallFault(error="unauthenticated", after=at, until=at + timedelta(seconds=40))
                for at in blips
            ),
            CallFault(error="unavailable", probability=0.02),
        ),
        stock=tuple(CapacityLimit(most=per_zone, zone=zone) for zone in ZONES),
    )


@pytest.mark.parametrize(
    ("jobs", "steps", "seed"),
    [
        pytest.param(6, 900, 3, id="6 jobs"),
        pytest.param(12, 900, 3, id="12 jobs", marks=pytest.mark.slow),
        *(
            pytest.param(64, 1800, seed, id=f"64 jobs, seed {seed}", marks=pytest.mark.chaos)
            for seed in range(3)
        ),
    ],
)
def test_all_jobs_survive_a_storm_over_six_zones(tmp_path: Path, jobs: int, steps: int, seed: int):
    plan = storm(seed, per_zone=-(-jobs // 4))
    clouds: list[StormyTpuVmCloud] = []

    def make(clock):
        clouds.append(StormyTpuVmCloud(clock, tmp_path, ZONES, plan))
        return clouds

    fleet = SimulatedFleet(
        tmp_path, FakeStore(), other_clouds=make, boot_limit=timedelta(minutes=20)
    )
    [cloud] = clouds
    # Nothing can be deleted without credentials; then the backoff passes.
    fleet.invariants.release_bound = minutes(3)
    try:
        submitted = [
            fleet.submit(
                Program(steps=steps, checkpoint_every=30),
                accelerator="v5litepod-4", providers=["tpu-vm"],
                zones=[*ZONES[index % 6 :], *ZONES[: index % 6]],
            )
            for index in range(jobs)
        ]  # fmt: skip
        kill_at = 120
        for second in range(6 * 3600):
            if all(fleet.job(job).ended for job in submitted):
                break
            deliver_notices(fleet, cloud)
            if second == kill_at:
                cloud.restart()
                fleet.restart_controller()
                kill_at += 211
            fleet.tick()
        states = {job: fleet.job(job).state for job in submitted}
        assert set(states.values()) == {JobState.SUCCEEDED}, fleet.event_log()[-6000:]
        fleet.until(lambda: cloud.listed() == 0, 600)
        assert not cloud.emulator.cloud.ledger.running(), "nothing is left to pay for"
        preempted = sum(
            entry.ended_by == "preempted" for entry in cloud.emulator.cloud.ledger.entries
        )
        assert preempted >= jobs // 6, "it was a storm"
        share = idle_share(fleet, cloud, submitted)
        print(  # shown with -s
            f"{jobs} jobs succeeded, {preempted} preemptions, {cloud.paid()} of slices paid, "
            f"{share:.2%} of it idle, {second} s"
        )
        assert share < MAX_IDLE, f"{share:.1%} of {cloud.paid()} idle"
    finally:
        fleet.close()
        cloud.close()


def deliver_notices(fleet: SimulatedFleet, cloud: StormyTpuVmCloud) -> None:
    for slice_id in cloud.hosts.noticed:
        for host in fleet.hosts.get(slice_id, []):
            host.notice = NoticeKind.PREEMPTED


def idle_share(fleet: SimulatedFleet, cloud: StormyTpuVmCloud, jobs: list) -> float:
    """Of the time that was paid for, the share in which no attempt used the slice."""
    used = timedelta(0)
    for job in jobs:
        for attempt in fleet.store.attempts(job):
            for entry in cloud.emulator.cloud.ledger.entries:
                if entry.node in attempt.slices:
                    start = max(attempt.created_at, entry.began_at)
                    used += max(min(attempt.ended_at, entry.ended_at) - start, timedelta(0))
    return 1 - used / cloud.paid()
