"""A zone without capacity, or down, does not delay the others. In virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from tests.contract.fake_store import FakeStore
from tests.fake_provider import InlineExecutor
from tests.providers.tpu_vm.emulated_tpus import EmulatedTpus
from tpufleet.controller.loop import Controller
from tpufleet.model.inbox import InboxMessage, InboxMessageKind
from tpufleet.model.job.jobs import Job, JobId, JobSpec
from tpufleet.stores.base import ChangeSet
from tpufleet_testbed.cloud_tpu.fault_plan import CallFault, CloudFaultPlan, ZoneOutage
from tpufleet_testbed.cloud_tpu.locations import IMMEDIATE

ZONES = ("us-central1-a", "us-west4-a", "us-west1-c", "europe-west4-b")
CLOSED = ZONES[3]
WORKERS = 32


class ControlledFleet:
    """A controller over emulated TPU VMs, one job for each worker, each bound to its zone."""

    def __init__(self, folder: Path, plan: CloudFaultPlan) -> None:
        latencies = replace(IMMEDIATE, boot=timedelta(seconds=60), deletion=timedelta(seconds=10))
        self.tpus = EmulatedTpus(folder, plan=plan, latencies=latencies)
        self.tpus.reopen(zones=ZONES)
        self.clock = self.tpus.clock
        self.store = FakeStore()
        self.controller = Controller(
            self.store,
            {"tpu-vm": self.tpus.provider},
            self.clock,
            executor=InlineExecutor(),
            holder="test",
            fleet="test",
            server_url="http://10.0.0.1:8470",
            slice_token=lambda slice_id: f"token of {slice_id}",
            bootstrap_token=lambda slice_id: f"word of {slice_id}",
        )
        for worker in range(WORKERS):
            self._submit(JobId(f"job{worker}"), ZONES[worker % len(ZONES)])

    def _submit(self, job_id: JobId, zone: str) -> None:
        now = self.clock.now()
        spec = JobSpec(name=job_id, command=("x",), accelerator="v5litepod-4", zones=(zone,))
        self.store.commit(
            ChangeSet(
                new_jobs=[Job(id=job_id, spec=spec, owner="mel", submitted_at=now)],
                messages=[InboxMessage(kind=InboxMessageKind.SUBMITTED, at=now, job_id=job_id)],
            )
        )

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.controller.tick()
            self.clock.advance(timedelta(seconds=1))

    def ready_times(self) -> list[tuple[str, str, float]]:
        """Zone, job and moment of every node that came up outside the closed zone."""
        with self.tpus.emulator.cloud.lock:
            began = self.tpus.emulator.cloud.started_at
            return sorted(
                (entry.zone, entry.labels["tpufleet-job"], (entry.began_at - began).total_seconds())
                for entry in self.tpus.emulator.cloud.ledger.entries
                if entry.zone != CLOSED
            )

    def take_all(self) -> None:
        cloud = self.tpus.emulator.cloud
        with cloud.lock:
            now = cloud.run_due()
            for node in list(cloud.nodes.values()):
                cloud.reclaim(node, now)


@pytest.fixture
def controlled(tmp_path: Path):
    opened: list[ControlledFleet] = []

    def make(plan: CloudFaultPlan) -> ControlledFleet:
        opened.append(ControlledFleet(tmp_path / str(len(opened)), plan))
        return opened[-1]

    yield make
    for one in opened:
        one.tpus.close()


def story(one: ControlledFleet) -> list[tuple[str, str, float]]:
    """Come up, lose everything at once, come up again."""
    one.run(90)
    one.take_all()
    one.run(150)
    return one.ready_times()


@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param(
            CloudFaultPlan(closings=(ZoneOutage(zone=CLOSED),)),
            id="no capacity",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            CloudFaultPlan(calls=(CallFault(error="quota", zone=CLOSED, method="Create*"),)),
            id="no quota",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            CloudFaultPlan(calls=(CallFault(error="rate", zone=CLOSED, method="Create*"),)),
            id="throttled",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            CloudFaultPlan(calls=(CallFault(error="unavailable", zone=CLOSED),)), id="down"
        ),
    ],
)
def test_a_failing_zone_does_not_delay_the_others(
    controlled: Callable[[CloudFaultPlan], ControlledFleet], trouble: CloudFaultPlan
):
    undisturbed = story(controlled(CloudFaultPlan()))
    assert len(undisturbed) == 2 * WORKERS * 3 // 4, "each came up twice"
    assert story(controlled(trouble)) == undisturbed


@pytest.mark.slow
def test_a_recovered_zone_is_used_again(controlled):
    closing = ZoneOutage(zone=CLOSED, until=timedelta(minutes=5))
    one = controlled(CloudFaultPlan(closings=(closing,)))
    one.run(60)
    asked = len(one.tpus.calls("CreateNode"))
    one.run(200)
    assert len(one.tpus.calls("CreateNode")) - asked < 60, "with growing pauses"
    one.run(700)
    with one.tpus.emulator.cloud.lock:
        up = [entry for entry in one.tpus.emulator.cloud.ledger.running() if entry.zone == CLOSED]
    assert len(up) == WORKERS // 4
