"""Nodes that people made, in a pool: jobs run on them, and nothing that happens deletes one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from google.cloud import tpu_v2

from tests.contract.fake_store import FakeStore
from tests.journeys.simulated_fleet import SimulatedFleet
from tests.journeys.simulated_hosts import Program, failure
from tests.journeys.tpu_vm_cloud import TpuVmCloud
from tpufleet.errors import Conflict, NotFound
from tpufleet.model.api_types import AdoptRequest
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.fleet.slices import SliceId, SliceState, TpuSlice
from tpufleet.model.inbox import InboxMessage, InboxMessageKind
from tpufleet.model.job.jobs import JobState
from tpufleet.providers.tpu_vm import api
from tpufleet.service.fleet import adopted_nodes, pool_commands
from tpufleet.stores.base import ChangeSet, EventQuery

ZONE, NODE = "us-central1-a", "mels-v5e-16"


class SharedCloud(TpuVmCloud):
    """A project in which a person has made a node."""

    def existing(self) -> list[SliceId]:
        return [one.id for one in self.listing()]

    def make_node(self) -> None:
        node = tpu_v2.Node(
            accelerator_type="v5litepod-16",
            runtime_version="v2-alpha-tpuv5-lite",
            scheduling_config=tpu_v2.SchedulingConfig(spot=True),
        )
        parent = f"projects/my-project/locations/{ZONE}"
        client = api.connect(self.emulator.endpoint)
        client.create_node(parent=parent, node_id=NODE, node=node)

    def node_state(self) -> str:
        with self.emulator.cloud.lock:
            [node] = [one for one in self.emulator.cloud.nodes.values() if one.id == NODE]
            return node.state.name

    def was_deleted(self) -> bool:
        return any(
            NODE in str(request)
            for method, request in self.emulator.service.calls
            if method in ("DeleteNode", "DeleteQueuedResource", "StopNode")
        )


class SharedFleet(SimulatedFleet):
    def __init__(self, folder: Path) -> None:
        clouds: list[SharedCloud] = []

        def make(clock):
            clouds.append(SharedCloud(clock, (ZONE,)))
            return clouds

        super().__init__(folder, FakeStore(), other_clouds=make)
        self.shared = clouds[0]
        pool = Pool(name="lab", provider="tpu-vm", accelerator="v5litepod-16", largest=2)
        pool_commands.put_pool(self.context("root"), pool, ("tpu-vm",))
        self.shared.make_node()
        self.run(15)

    def adopt(self) -> TpuSlice:
        request = AdoptRequest(node=NODE, zone=ZONE, pool="lab")
        adopted_nodes.adopt(self.context("root"), request)
        self.until(lambda: [one.state for one in self.adopted()] == [SliceState.READY], 30)
        return self.adopted()[0]

    def adopted(self) -> list[TpuSlice]:
        return [one for one in self.store.slices() if one.adopted]

    def close(self) -> None:
        self.shared.close()
        super().close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[SharedFleet]:
    fleet = SharedFleet(tmp_path)
    yield fleet
    assert not fleet.shared.was_deleted()
    fleet.close()


def test_jobs_run_on_an_adopted_node_until_it_is_given_back(fleet):
    adopted = fleet.adopt()
    assert (adopted.node, adopted.pool, adopted.capacity) == (NODE, "lab", "spot")
    adopted_nodes.adopt(fleet.context("root"), AdoptRequest(node=NODE, zone=ZONE, pool="lab"))
    fleet.run(3)
    assert len(fleet.adopted()) == 1, "a second request changes nothing"

    job = fleet.submit(Program(steps=20), pool="lab")
    fleet.until_state(job, JobState.RUNNING)
    assert [one.id for one in fleet.gang(job)] == [adopted.id]
    with pytest.raises(Conflict, match=f"job {job} runs on {NODE}"):
        adopted_nodes.unregister(fleet.context("root"), NODE)
    fleet.settle(job)
    fleet.restart_controller()
    fleet.clock.advance(timedelta(hours=1))  # no pool keeps an idle slice of its own for so long
    fleet.run(90)
    assert [one.id for one in fleet.adopted()] == [adopted.id]

    adopted_nodes.unregister(fleet.context("root"), NODE)
    fleet.until(lambda: fleet.adopted() == [], 30)
    assert fleet.shared.node_state() == "READY" and fleet.existing() == []
    with pytest.raises(NotFound):
        adopted_nodes.unregister(fleet.context("root"), NODE)
    assert fleet.adopt().id != adopted.id, "it can be adopted again"
    done = fleet.store.events(EventQuery(by="root"))
    assert any(f"root took {NODE} back" in each.message for each in done)


def test_a_job_that_was_placed_meanwhile_keeps_the_node_and_an_event_says_so(fleet):
    adopted = fleet.adopt()
    job = fleet.submit(Program(steps=60), pool="lab")
    fleet.until_state(job, JobState.RUNNING)
    kind, now = InboxMessageKind.UNREGISTER, fleet.now()
    message = InboxMessage(kind=kind, at=now, by="root", slice_id=adopted.id)
    fleet.store.commit(ChangeSet(messages=[message]))
    fleet.settle(job)
    assert fleet.attempts(job) == ["finished"]
    reported = [each for each in events(fleet) if "not given back" in each.message]
    assert [(each.by, each.slice_id) for each in reported] == [("root", adopted.id)]
    assert f"job {job}" in reported[0].message


def test_a_job_recovers_elsewhere_when_the_adopted_node_is_preempted(fleet):
    adopted = fleet.adopt()
    job = fleet.submit(Program(steps=60), pool="lab")
    fleet.until_state(job, JobState.RUNNING)
    with fleet.shared.emulator.cloud.lock:
        [node] = [one for one in fleet.shared.emulator.cloud.nodes.values() if one.id == NODE]
        fleet.shared.emulator.cloud.reclaim(node, fleet.now())
    fleet.settle(job)
    assert fleet.attempts(job) == ["preempted", "finished"]
    assert fleet.store.slice(adopted.id).state is SliceState.GONE
    assert fleet.shared.node_state() == "PREEMPTED", "whoever made it decides what becomes of it"


def test_a_failing_job_and_a_deleted_pool_leave_the_node_alone(fleet):
    fleet.adopt()
    fails = Program(fails=lambda attempt, process, step: failure(fleet.now()) if step else None)
    job = fleet.submit(fails, pool="lab")
    fleet.settle(job)
    assert fleet.job(job).state is JobState.FAILED and len(fleet.adopted()) == 1
    fleet.delete_pool("lab")
    fleet.until(lambda: fleet.adopted() == [], 60)
    assert fleet.shared.node_state() == "READY"


def test_what_the_provider_refuses_is_told_and_not_retried(fleet):
    request = AdoptRequest(node="no-such-node", zone=ZONE, pool="lab")
    adopted_nodes.adopt(fleet.context("root"), request)
    fleet.until(lambda: any("'no-such-node'" in each.message for each in events(fleet)), 30)
    fleet.until(lambda: fleet.adopted() == [], 30)
    job = fleet.submit(Program(steps=5), pool="lab")
    fleet.settle(job)
    assert fleet.job(job).state is JobState.SUCCEEDED, "the pool is not blamed for it"


def events(fleet: SharedFleet) -> list:
    return fleet.store.events(EventQuery(limit=1000))


def test_a_node_whose_update_takes_half_a_minute_is_adopted_and_given_back(fleet):
    """As long as UpdateNode runs, no listing shows the node as ours."""
    cloud = fleet.shared.emulator.cloud
    cloud.latencies = replace(cloud.latencies, update=timedelta(seconds=30))
    request = AdoptRequest(node=NODE, zone=ZONE, pool="lab")
    adopted_nodes.adopt(fleet.context("root"), request)
    fleet.until(lambda: [one.state for one in fleet.adopted()] == [SliceState.READY], 90)
    adopted_nodes.unregister(fleet.context("root"), NODE)
    fleet.until(lambda: fleet.adopted() == [] and fleet.existing() == [], 90)
    assert fleet.shared.node_state() == "READY"
