"""A storm over zones of Compute Engine: preemptions, zones without stock, slices that come in part,
operations that fail, busy and failing calls, lost answers, and servers that are killed between a
write and its answer. All jobs finish, nothing is left, and every second that was paid for is
accounted for."""

from __future__ import annotations

import random
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("google.auth", reason="pip install 'tpufleet[compute]'")

from tests.contract.fake_store import FakeStore
from tests.journeys import paid_time
from tests.journeys.compute_cloud import ComputeCloud, Killed, minutes
from tests.journeys.paid_time import Cause
from tests.journeys.simulated_fleet import SimulatedFleet
from tests.journeys.simulated_hosts import Program
from tpufleet.model.fleet.hosts import NoticeKind
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity, JobId, JobState
from tpufleet.providers.compute.naming import CAPACITY, SLICE
from tpufleet_testbed.compute_engine.fault_plan import (
    ComputeCallFault,
    ComputeFaultPlan,
    StockLimit,
    Switches,
)
from tpufleet_testbed.faults import PreemptionStorm, ZoneOutage

ZONES = ("us-central1-a", "us-east5-a", "europe-west4-b", "us-south1-a")
STEPS = 750
RUN_DURATION = minutes(10)  # of flex-start: shorter than a job
# What each job asks for, in turn.
KINDS = (
    {"accelerator": "v5p-8", "capacity": ["spot"]},
    {"accelerator": "v5p-16", "capacity": ["spot"]},
    {"accelerator": "v5p-8", "slices": 2, "capacity": ["spot", "on-demand"]},
    {"accelerator": "v5p-16", "capacity": ["queued"]},
    {"accelerator": "v5p-16", "slices": 2, "capacity": ["spot", "queued"]},
    {"accelerator": "v5p-8", "capacity": ["on-demand"]},
)
# No slice is paid for longer than this without use.
BOUNDS = {
    Cause.BOOT: minutes(20),  # the boot limit
    Cause.GANG: minutes(8),
    Cause.BETWEEN: minutes(8),  # for another slice: gang_patience, or its boot
    Cause.AFTER: minutes(2),
    Cause.RELEASE: minutes(3),
    Cause.UNKNOWN: timedelta(0),
}
MAX_UNUSED = 0.3  # of what is paid; a preempted slice boots again
# To what no document says.
OTHER_ANSWERS = Switches(
    bulk_models=("FLEX_START",), topology_needs_bulk=False, bad_topology="call",
    quota_refusal="call", topology_after_loss="FAILED",
    stable_after_loss=False,
    topology_recovers=False, worker_order="name", metadata="topology", flex_failure="internal",
)  # fmt: skip


def storm(seed: int, per_zone: int, switches: Switches) -> ComputeFaultPlan:
    def often(error: str, method: str, share: float, late: bool = False) -> ComputeCallFault:
        return ComputeCallFault(error=error, method=method, probability=share, late=late)

    return ComputeFaultPlan(
        seed=seed,
        switches=switches,
        storms=(PreemptionStorm(every=minutes(3), share=0.2),),
        closings=(ZoneOutage(zone=ZONES[1], after=minutes(6), until=minutes(13)),),
        stock=tuple(StockLimit(most=per_zone, zone=zone) for zone in ZONES),
        failing_topologies=0.05,
        calls=(
            ComputeCallFault(error="unauthenticated", after=minutes(4), until=minutes(4.5)),
            often("unavailable", "*", 0.01),
            often("too-many", "*", 0.01),
            often("rate", "*", 0.005),
            often("internal", "*", 0.005),
            often("lost-answer", "*.insert", 0.05),
            often("lost-answer", "*.delete", 0.03),
            often("stockout-with-details", "instances.insert", 0.05, late=True),
            often("internal", "instanceGroupManagers.insert", 0.03, late=True),
            often("quota", "*.insert", 0.02, late=True),
            often("permissions", "instanceTemplates.insert", 0.02, late=True),
            often("omitted", "*.list", 0.01),
            often("stale", "*.list", 0.02),
        ),
    )


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("jobs", "seed", "switches"),
    [
        pytest.param(6, 1, Switches(), id="6 jobs"),
        pytest.param(6, 2, OTHER_ANSWERS, id="6 jobs, other answers"),
        pytest.param(64, 3, Switches(), id="64 jobs", marks=pytest.mark.scale),
    ],
)
def test_all_jobs_survive_a_storm_and_nothing_is_left(
    tmp_path: Path, jobs: int, seed: int, switches: Switches
):
    plan = storm(seed, per_zone=max(4, jobs // 4), switches=switches)
    clouds: list[ComputeCloud] = []

    def make(clock):
        cloud = ComputeCloud(
            clock, tmp_path, ZONES, plan, outage="as planned", max_run_duration=RUN_DURATION,
            valid_for=minutes(60),
        )  # fmt: skip
        clouds.append(cloud)
        return clouds

    fleet = SimulatedFleet(tmp_path, FakeStore(), other_clouds=make, boot_limit=BOUNDS[Cause.BOOT])
    [cloud] = clouds
    fleet.invariants.release_bound = BOUNDS[Cause.RELEASE]
    try:
        submitted = [
            fleet.submit(
                Program(steps=STEPS, checkpoint_every=30), providers=["compute"],
                zones=[*ZONES[index % 4 :], *ZONES[: index % 4]],
                **KINDS[index % len(KINDS)],
            )
            for index in range(jobs)
        ]  # fmt: skip
        kills = run_to_the_end(fleet, cloud, submitted, random.Random(seed))
        states = {job: fleet.job(job).state for job in submitted}
        failed = [job for job, state in states.items() if state is not JobState.SUCCEEDED]
        assert not failed, "\n".join(
            [fleet.job(job).reason for job in failed]
            + [line for line in fleet.event_log().splitlines() if failed[0] in line]
        )
        left_after(fleet, cloud, minutes(25))
        check_what_was_paid(fleet, cloud, submitted)
        print(f"{jobs} jobs, kills {dict(kills)}, answers {dict(cloud.answers)}")  # with -s
        entries = cloud.engine.ledger.entries
        assert sum(entry.ended_by == "preempted" for entry in entries) >= jobs // 3
        flex = [entry for entry in entries if entry.labels[CAPACITY] == Capacity.QUEUED]
        assert any(entry.ended_at - entry.began_at >= RUN_DURATION / 2 for entry in flex)
        assert "its run duration ends at" in fleet.event_log()
        assert cloud.engine.ledger.denied >= jobs and kills["before"] + kills["after"] >= 2
        assert {401, 403, 404, 429, 500, 503} <= set(cloud.answers)
        failed_later = [each for _, each in cloud.engine.operations.inside() if "error" in each]
        assert failed_later, "it was a storm"
    finally:
        fleet.close()
        cloud.close()


def run_to_the_end(
    fleet: SimulatedFleet, cloud: ComputeCloud, jobs: list[JobId], chance: random.Random
) -> Counter[str]:
    kills: Counter[str] = Counter()
    kill_at = 60
    for second in range(6 * 3600):
        if all(fleet.job(job).ended for job in jobs):
            break
        for slice_id in cloud.hosts.noticed:
            for host in fleet.hosts.get(slice_id, []):
                host.notice = NoticeKind.PREEMPTED
        if second >= kill_at and cloud.rest.dies is None:
            cloud.rest.dies = chance.choice(("before", "after"))
            kill_at = second + chance.randint(60, 240)
        moment = cloud.rest.dies
        try:
            fleet.tick()
        except Killed:
            kills[str(moment)] += 1
            cloud.restart()
            fleet.restart_controller()
    cloud.rest.dies = None
    return kills


def left_after(fleet: SimulatedFleet, cloud: ComputeCloud, time: timedelta) -> None:
    """Templates and policies go once nothing has used them for ten minutes."""
    fleet.until(lambda: not cloud.left(), int(time.total_seconds()))
    assert not cloud.engine.ledger.running(), "nothing is left to pay for"


def check_what_was_paid(fleet: SimulatedFleet, cloud: ComputeCloud, jobs: list[JobId]) -> None:
    entries = [(SliceId(each.labels[SLICE]), each) for each in cloud.engine.ledger.entries]
    slices = {each.id: each for each in fleet.store.slices(live_only=False)}
    attempts = [attempt for job in jobs for attempt in fleet.store.attempts(job)]
    found = paid_time.spans(entries, slices, attempts, fleet.now())
    print(paid_time.report(found))
    for cause, bound in BOUNDS.items():
        assert paid_time.longest(found, cause) <= bound, paid_time.report(found)
    by_cause = paid_time.totals(found)
    paid = sum(by_cause.values(), timedelta(0))
    billed = sum((entry.ended_at - entry.began_at for _, entry in entries), timedelta(0))
    assert paid == billed
    used = by_cause[Cause.RUN] + by_cause[Cause.SETUP]
    assert 1 - used / paid < MAX_UNUSED, paid_time.report(found)
