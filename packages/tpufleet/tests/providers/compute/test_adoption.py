"""What a person made by hand, an instance or a group, becomes a slice, and the provider never
deletes it: not by a release, a restart of the server, or an API that fails at any call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

pytest.importorskip("google.cloud.compute_v1", reason="pip install google-cloud-compute")

from tests.providers.compute.emulated_compute import OTHER_ZONE, ZONE, EmulatedCompute
from tests.providers.compute.person import LABELS, METADATA, Person
from tests.providers.orders import order
from tpufleet.errors import BadRequest, ProviderError, ProviderUnavailable
from tpufleet.model.fleet.cloud_slices import CloudState, ExpectedSlice
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity
from tpufleet_testbed.compute_engine.fault_plan import IMMEDIATE, ComputeCallFault, Switches
from tpufleet_testbed.compute_engine.vm_hosts import VmHosts

NAME, SLICE = "mels", SliceId("mels-a1b2c3")
DELETIONS = ("instances.delete", "instances.stop", "instances.reset",
             "instanceGroupManagers.delete", "instanceGroupManagers.resize")  # fmt: skip
WRITES = ("instances.setMetadata", "instances.setLabels")
SWITCHES = Switches(topology_needs_bulk=False)


@dataclass(frozen=True)
class Kind:
    accelerator: str
    vms: int
    topology: str = ""
    group: bool = True
    fields: dict[str, Any] = field(default_factory=dict)

    def make(self, world: EmulatedCompute, **more: Any) -> Person:
        """As a person does; it runs."""
        person = Person(world.emulator, ZONE)
        if self.group:
            more = {"topology": self.topology, **self.fields, **more}
            person.make_group(NAME, self.vms, **more)
        else:
            person.make_instance(NAME, **more)
        for _ in range(60):
            world.pass_time(1)
            with world.engine.lock:
                world.engine.run_due()
        return person

    def adopt(self, world: EmulatedCompute, slice_id: str = SLICE, **more: Any) -> None:
        wanted = {"node": NAME, "pool": "lab", "accelerator": self.accelerator, **more}
        world.provider.request(order(slice_id, **wanted))


INSTANCE = Kind("v5p-8", 1, group=False)
BULK = Kind("v5p-32", 4, "2x2x4")
KINDS = {
    "an instance": INSTANCE,
    "a group of one": Kind("v5p-8", 1, fields={"bulk": False}),
    "a group in bulk mode": BULK,
    "a group without bulk mode": Kind("v5p-32", 4, "2x2x4", fields={"bulk": False}),
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Callable[..., EmulatedCompute]]:
    opened: list[EmulatedCompute] = []

    def make(**plan: Any) -> EmulatedCompute:
        folder = tmp_path / str(len(opened))
        opened.append(EmulatedCompute(folder, switches=SWITCHES, **plan))
        return opened[-1]

    yield make
    for world in opened:
        world.close()


@pytest.fixture
def world(worlds: Callable[..., EmulatedCompute]) -> EmulatedCompute:
    return worlds()


@kinds
def test_it_becomes_a_slice_with_the_agent_in_the_startup_script_of_each_vm(world, kind):
    person = kind.make(world)
    assert world.listed() == {}, "what a person made is not listed"
    kind.adopt(world)
    [listed] = world.listed().values()
    assert (listed.id, listed.state, listed.capacity) == (SLICE, CloudState.UP, Capacity.ON_DEMAND)
    assert len(person.metadata()) == kind.vms
    for metadata, labels in zip(person.metadata(), person.labels(), strict=True):
        assert "tpufleet" in metadata["startup-script"] and SLICE in metadata["tpufleet-tokens"]
        assert metadata["tpufleet-hosts"] == str(kind.vms) and metadata["team"] == "vision"
        assert labels["owner"] == "mel" and labels["tpufleet-slice"] == SLICE
    assert not world.calls(*DELETIONS)


@kinds
def test_a_repeated_request_changes_nothing(world, kind):
    person = kind.make(world)
    kind.adopt(world)
    before = person.metadata()
    kind.adopt(world)
    world.reopen()
    kind.adopt(world)
    assert person.metadata() == before
    assert len(world.calls(*WRITES)) == 2 * kind.vms


@kinds
def test_a_release_gives_it_back_as_it_was(world, kind):
    person = kind.make(world)
    kind.adopt(world)
    assert SLICE in world.listed()
    world.provider.release(SLICE, ZONE)
    assert person.labels() == [LABELS] * kind.vms
    assert person.metadata() == [METADATA] * kind.vms
    assert {vm.status for vm in person.instances().values()} == {"RUNNING"}
    world.pass_time(30)
    assert world.listed() == {}
    world.provider.release(SLICE, ZONE)
    world.provider.release(SliceId(NAME), ZONE)
    assert not world.calls(*DELETIONS)
    kind.adopt(world, "mels-d4e5f6")
    assert list(world.listed()) == ["mels-d4e5f6"]


@kinds
@pytest.mark.parametrize("error", ["unavailable", "lost-answer", "stale-fingerprint", "not-found"])
def test_faults_of_the_api_never_delete_it(worlds, kind, error):
    start = timedelta(minutes=2)
    fault = ComputeCallFault(error=error, method="instances.*", probability=0.3, after=start)
    world = worlds(calls=(fault,))
    kind.make(world)
    world.pass_time(120)
    for _ in range(20):
        for step in (lambda: kind.adopt(world), lambda: world.provider.release(SLICE, ZONE)):
            try:
                step()
            except ProviderError:
                world.reopen()  # the server died meanwhile, and starts over
            world.pass_time(5)
    assert not world.calls(*DELETIONS)
    with world.engine.lock:
        assert [vm.status for vm in world.engine.vms.values()] == ["RUNNING"] * kind.vms


@kinds
@pytest.mark.parametrize("method", WRITES)
@pytest.mark.parametrize("completed", [True, False], ids=["completed", "taken back"])
def test_a_crash_between_two_writes_leaves_nothing_behind(worlds, kind, method, completed):
    fault = ComputeCallFault(error="lost-answer", method=method, calls=(kind.vms // 2 + 1,))
    world = worlds(calls=(fault,))
    person = kind.make(world)
    with pytest.raises(ProviderError):
        kind.adopt(world)
    world.reopen()
    if completed:
        kind.adopt(world)
        assert world.listed()[SLICE].state is CloudState.UP
        assert all(SLICE in each["tpufleet-tokens"] for each in person.metadata())
        assert [each["tpufleet-slice"] for each in person.labels()] == [SLICE] * kind.vms
    world.provider.release(SLICE, ZONE)
    assert person.metadata() == [METADATA] * kind.vms
    assert person.labels() == [LABELS] * kind.vms


@kinds
def test_an_adopted_one_that_no_listing_shows_is_not_lost(worlds, kind):
    fault = ComputeCallFault(error="omitted", method="*.list", after=timedelta(minutes=2))
    world = worlds(calls=(fault,))
    kind.make(world)
    kind.adopt(world)
    world.pass_time(120)
    [found] = world.provider.listing([ExpectedSlice(id=SLICE, zone=ZONE, node=NAME)])
    assert (found.id, found.state) == (SLICE, CloudState.UP)


@kinds
def test_a_preempted_one_is_given_back_and_stays_in_the_cloud(world, kind):
    person = kind.make(world, model="SPOT")
    kind.adopt(world)
    assert world.listed()[SLICE].capacity is Capacity.SPOT
    with world.engine.lock:
        for vm in list(world.engine.vms.values()):
            world.engine.preempt(vm, world.clock.now())
    world.pass_time(60)
    lost = world.listed()[SLICE]
    assert lost.state is CloudState.PREEMPTED and lost.fenced
    world.provider.release(SLICE, ZONE)
    world.pass_time(30)
    assert world.listed() == {}
    assert person.labels() == [LABELS] * kind.vms and not world.calls(*DELETIONS)


def test_a_lost_vm_of_a_group_is_the_loss_of_the_slice(world):
    person = BULK.make(world)
    BULK.adopt(world)
    assert world.listed()[SLICE].state is CloudState.UP
    with world.engine.lock:
        world.engine.vanish(next(iter(world.engine.vms.values())), world.clock.now())
    world.pass_time(60)
    assert world.listed()[SLICE].state is CloudState.FAILED
    world.provider.release(SLICE, ZONE)
    assert person.labels() == [LABELS] * (BULK.vms - 1) and not world.calls(*DELETIONS)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (INSTANCE, {"node": "other"}, f"no TPU VM in {ZONE} named 'other'"),
        (INSTANCE, {"zone": OTHER_ZONE}, f"no TPU VM in {OTHER_ZONE} named"),
        (INSTANCE, {"zone": "us-east1-c"}, "is not configured"),
        (INSTANCE, {"accelerator": "v5p-32"}, "mels is a v5p-8, and pool lab has v5p-32"),
        (BULK, {"accelerator": "v5p-8"}, "mels is a v5p-32, and pool lab has v5p-8"),
        (Kind("v5p-32", 4), {}, "mels is a group of 4 ct5p-hightpu-4t, and pool lab has v5p-32"),
    ],
    ids=["no such", "another zone", "a zone of no provider", "an instance of another type",
         "a group of another type", "hosts whose chips are not joined"],
)  # fmt: skip
def test_what_cannot_be_adopted_is_refused(world, kind, fields, message):
    person = kind.make(world)
    with pytest.raises(BadRequest, match=message):
        kind.adopt(world, **fields)
    assert person.labels() == [LABELS] * kind.vms and not world.calls(*WRITES)


def test_a_vm_of_a_group_is_not_adopted_alone(world):
    kind = KINDS["a group of one"]
    [name] = kind.make(world).instances()
    with pytest.raises(BadRequest, match="run `tpu adopt mels --pool lab`"):
        kind.adopt(world, node=name)
    assert not world.calls(*WRITES)


def test_what_belongs_to_another_fleet_and_slices_of_this_one_are_refused(world):
    person = INSTANCE.make(world)
    person.set_labels(NAME, {"tpufleet-fleet": "theirs"})
    with pytest.raises(BadRequest, match="belongs to another fleet"):
        INSTANCE.adopt(world)
    for slice_id, accelerator in (("tpf-1", "v5p-8"), ("tpf-2", "v5p-32")):
        wanted = order(slice_id, accelerator=accelerator, zone=ZONE, capacity=Capacity.ON_DEMAND)
        world.provider.request(wanted)
        world.pass_time(60)
        assert world.listed()[slice_id].state is CloudState.UP
        with pytest.raises(BadRequest, match="was created by this server"):
            INSTANCE.adopt(world, node=slice_id, accelerator=accelerator)


@kinds
def test_one_that_is_not_ready_yet_is_tried_again_and_a_stopped_one_is_not(worlds, kind):
    world = worlds(latencies=replace(IMMEDIATE, boot=timedelta(minutes=5)))
    person = kind.make(world)
    with pytest.raises(ProviderUnavailable):
        kind.adopt(world)
    world.pass_time(600)
    kind.adopt(world)
    world.provider.release(SLICE, ZONE)
    with world.engine.lock:
        for vm in list(world.engine.vms.values()):
            world.engine.stop(vm, world.clock.now(), "stopped")
    world.pass_time(60)
    names = " ".join(sorted(person.instances()))
    command = f"gcloud compute instances start {names} --zone {ZONE}"
    with pytest.raises(BadRequest, match=command):
        kind.adopt(world)


def test_pages_of_the_vms_of_a_group_are_all_read(worlds):
    world = worlds()
    world.engine.switches = structs.replace(SWITCHES, page_size=1)
    kind = replace(BULK, fields={"list_managed_instances_results": "PAGINATED"})
    person = kind.make(world)
    kind.adopt(world)
    assert [each["tpufleet-slice"] for each in person.labels()] == [SLICE] * kind.vms


def test_reports_of_a_former_adoption_are_not_those_of_this_one(world):
    INSTANCE.make(world)
    INSTANCE.adopt(world)
    old = '{"host": 0, "stage": "checking chips", "failed": true, "slice_id": "former"}'

    class Hosts(VmHosts):
        value = old

        def guest_attributes(self, vm, path):
            return {("tpufleet", "bootstrap"): self.value}

    world.engine.hosts = hosts = Hosts()
    assert world.listed()[SLICE].bootstrap == ()
    hosts.value = old.replace("former", SLICE).replace("checking", "waiting for")
    world.pass_time(60)
    assert world.listed()[SLICE].bootstrap[0].failed
