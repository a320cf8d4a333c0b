"""A node that a person made becomes a slice, and the provider never deletes it: not by a release, a
repeated release, a restart of the server, or an API that fails at any call."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from google.cloud import tpu_v2

from tests.providers.tpu_vm.emulated_tpus import OTHER_ZONE, ZONE, EmulatedTpus, order
from tpufleet.errors import BadRequest, ProviderError, ProviderUnavailable
from tpufleet.model.fleet.cloud_slices import CloudState
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity
from tpufleet.providers.tpu_vm import api
from tpufleet_testbed.cloud_tpu.fault_plan import CallFault, CloudFaultPlan

NODE, SLICE = "kmh-tpuvm-v4-32-1", SliceId("kmh-tpuvm-v4-32-1-a1b2c3")
PARENT = f"projects/my-project/locations/{ZONE}"
THEIRS = {"startup-script": "echo mine", "team": "vision"}
DELETIONS = ("DeleteNode", "DeleteQueuedResource", "StopNode")


def make_node(world: EmulatedTpus, name: str = NODE, **fields: Any) -> None:
    """As a person does, with gcloud."""
    node = tpu_v2.Node(
        **{
            "accelerator_type": "v5litepod-16",
            "runtime_version": "v2-alpha-tpuv5-lite",
            "labels": {"owner": "mel"},
            "metadata": THEIRS,
            **fields,
        }
    )
    client(world).create_node(parent=PARENT, node_id=name, node=node)
    world.pass_time(20)


def client(world: EmulatedTpus) -> tpu_v2.TpuClient:
    return api.connect(world.emulator.endpoint)


def adopt(world: EmulatedTpus, slice_id: str = SLICE, **fields: Any) -> None:
    world.provider.request(order(slice_id, **{"node": NODE, "pool": "lab", **fields}))
    world.pass_time(2)


def labels(world: EmulatedTpus, name: str = NODE) -> dict[str, str]:
    return dict(world.node(name).template.labels)


def metadata(world: EmulatedTpus, name: str = NODE) -> dict[str, str]:
    return dict(world.node(name).template.metadata)


def test_an_adopted_node_is_a_slice_with_the_agent_in_its_startup_script(world):
    make_node(world)
    assert world.listed() == {}, "a node of a person is not listed"
    adopt(world)
    [listed] = world.listed().values()
    assert (listed.id, listed.state, listed.capacity) == (SLICE, CloudState.UP, Capacity.ON_DEMAND)
    assert "tpufleet" in metadata(world)["startup-script"]
    assert SLICE in metadata(world)["tpufleet-tokens"]
    assert labels(world)["owner"] == "mel" and metadata(world)["team"] == "vision"
    assert world.calls("CreateNode") == ["CreateNode"], "only the person's own"


def test_a_repeated_request_changes_nothing(world):
    make_node(world)
    adopt(world)
    before = metadata(world)
    adopt(world)
    world.reopen()
    adopt(world)
    assert metadata(world) == before
    assert world.calls("UpdateNode") == ["UpdateNode"]


def test_a_release_gives_it_back_as_it_was(world):
    make_node(world)
    adopt(world)
    world.provider.release(SLICE, ZONE)
    world.pass_time(2)
    assert world.node(NODE).state is tpu_v2.Node.State.READY
    assert labels(world) == {"owner": "mel"} and metadata(world) == THEIRS
    assert world.listed() == {}
    world.provider.release(SLICE, ZONE)
    world.provider.release(SliceId(NODE), ZONE)
    assert not world.calls(*DELETIONS)
    adopt(world, "kmh-tpuvm-v4-32-1-d4e5f6")
    assert list(world.listed()) == ["kmh-tpuvm-v4-32-1-d4e5f6"]


def test_a_node_of_somebodys_queued_resource_is_given_back_with_it(world):
    """Deleting the queued resource would delete the node."""
    spec = tpu_v2.QueuedResource.Tpu.NodeSpec(
        parent=PARENT,
        node_id=NODE,
        node=tpu_v2.Node(
            accelerator_type="v5litepod-16", runtime_version="v2-alpha-tpuv5-lite", metadata=THEIRS
        ),
    )
    queued = tpu_v2.QueuedResource(tpu=tpu_v2.QueuedResource.Tpu(node_spec=[spec]))
    client(world).create_queued_resource(
        parent=PARENT, queued_resource_id="mels", queued_resource=queued
    )
    world.pass_time(60)
    adopt(world)
    assert SLICE in world.listed()
    world.provider.release(SLICE, ZONE)
    world.pass_time(60)
    assert world.node(NODE).state is tpu_v2.Node.State.READY
    assert world.queued("mels") is not None and not world.calls(*DELETIONS)


@pytest.mark.parametrize("error", ["unavailable", "not-found", "permission", "aborted"])
@pytest.mark.parametrize("seed", range(2))
def test_faults_of_the_api_never_delete_it(tpus, error, seed):
    faults = CallFault(error=error, probability=0.4)
    world = tpus(plan=CloudFaultPlan(seed=seed, calls=(faults,)))
    for _ in range(50):
        if world.node(NODE) is None:
            try:
                make_node(world)
            except Exception:
                world.pass_time(1)
    for _ in range(30):
        for step in (lambda: adopt(world), lambda: world.provider.release(SLICE, ZONE)):
            try:
                step()
            except ProviderError:
                world.reopen()  # the server died meanwhile, and starts over
            world.pass_time(5)
    assert world.node(NODE).state is tpu_v2.Node.State.READY
    assert not world.calls(*DELETIONS)


def test_a_preempted_node_leaves_the_listing_and_stays_in_the_cloud(world):
    make_node(world, scheduling_config=tpu_v2.SchedulingConfig(spot=True))
    adopt(world)
    assert world.listed()[SLICE].capacity is Capacity.SPOT
    with world.emulator.cloud.lock:
        world.emulator.cloud.reclaim(world.node(NODE), world.clock.now())
    world.pass_time(60)
    lost = world.listed()[SLICE]
    assert lost.state is CloudState.PREEMPTED and lost.fenced
    world.provider.release(SLICE, ZONE)
    assert world.listed() == {}
    world.reopen()
    assert SLICE in world.listed(), "an orphan of a server that has forgotten it"
    world.provider.release(SLICE, ZONE)
    assert world.listed() == {} and world.node(NODE) is not None
    assert not world.calls(*DELETIONS)


def test_the_autostop_time_that_its_owner_set_still_holds(world):
    ends = int((world.clock.now() + timedelta(hours=1)).timestamp())
    make_node(world, labels={"tpufleet-operation": "by-hand", "tpufleet-expires": str(ends)})
    adopt(world)
    world.provider.release(SLICE, ZONE)
    world.pass_time(2)
    assert labels(world)["tpufleet-expires"] == str(ends)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"node": "other"}, "no TPU VM in us-central1-a named 'other'"),
        ({"accelerator": "v5litepod-8"}, f"TPU VM {NODE} is a v5e-16, and pool lab has v5e-8"),
        ({"zone": OTHER_ZONE}, f"no TPU VM in {OTHER_ZONE} named {NODE!r}"),
        ({"zone": "us-east1-c"}, "zone us-east1-c is not configured"),
    ],
    ids=["no such node", "another type", "another zone", "a zone of no provider"],
)
def test_what_cannot_be_adopted_is_refused(world, fields, message):
    make_node(world)
    with pytest.raises(BadRequest, match=message):
        adopt(world, **fields)
    assert labels(world) == {"owner": "mel"} and not world.calls("UpdateNode")


def test_nodes_of_another_fleet_and_slices_of_this_one_are_refused(world):
    make_node(world, labels={"tpufleet-fleet": "theirs"})
    with pytest.raises(BadRequest, match="belongs to another fleet"):
        adopt(world)
    world.provider.request(order("tpf-1"))
    world.pass_time(20)
    with pytest.raises(BadRequest, match="was created by this server"):
        adopt(world, node="tpf-1")


def test_a_node_that_is_not_ready_yet_is_tried_again_and_a_stopped_one_is_not(world):
    make_node(world, "small", accelerator_type="v5litepod-1")
    world.node("small").state = tpu_v2.Node.State.CREATING
    with pytest.raises(ProviderUnavailable):
        adopt(world, node="small", accelerator="v5litepod-1")
    world.node("small").state = tpu_v2.Node.State.STOPPED
    with pytest.raises(BadRequest, match="`tpu vm repair small`"):
        adopt(world, node="small", accelerator="v5litepod-1")


def test_reports_of_a_former_adoption_are_not_those_of_this_one(world):
    make_node(world)
    adopt(world)
    old = '{"host": 0, "stage": "checking chips", "failed": true, "slice_id": "former"}'
    mine = old.replace("former", SLICE).replace("checking", "waiting for")

    class Hosts(type(world.emulator.cloud.hosts)):
        value = old

        def guest_attributes(self, node, host, query_path):
            return {("tpufleet", "bootstrap"): self.value}

    world.emulator.cloud.hosts = hosts = Hosts()
    assert world.listed()[SLICE].bootstrap == ()
    hosts.value = mine
    world.pass_time(60)
    assert world.listed()[SLICE].bootstrap[0].failed
