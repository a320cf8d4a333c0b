"""The provider on the emulated Compute Engine: what is created, how often, and what is deleted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.auth", reason="pip install 'tpufleet[compute]'")

from tests.providers.compute.emulated_compute import ZONE, EmulatedCompute
from tests.providers.orders import order
from tpufleet.errors import (
    BadRequest,
    NoCapacity,
    ProviderBusy,
    ProviderUnavailable,
    QuotaExceeded,
    RateLimited,
)
from tpufleet.model.fleet import bootstrap
from tpufleet.model.fleet.bootstrap import BootstrapReport, BootstrapStage
from tpufleet.model.fleet.cloud_slices import CloudState, ExpectedSlice
from tpufleet.model.fleet.pools import RefusalKind
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu.type_lookup import find
from tpufleet.providers.compute import requests
from tpufleet.providers.compute.naming import Location
from tpufleet.providers.compute.provider import ComputeProvider
from tpufleet.providers.tpu_vm.google_rest import Answer, GoogleRest
from tpufleet_testbed.compute_engine.fault_plan import (
    IMMEDIATE,
    ComputeCallFault,
    QuotaLimit,
    ReservedCapacity,
    Switches,
)
from tpufleet_testbed.compute_engine.records import Vm
from tpufleet_testbed.compute_engine.vm_hosts import VmHosts

HOUR = timedelta(hours=1)


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Callable[..., EmulatedCompute]]:
    opened: list[EmulatedCompute] = []

    def make(**plan: Any) -> EmulatedCompute:
        opened.append(EmulatedCompute(tmp_path, **plan))
        return opened[-1]

    yield make
    for world in opened:
        world.close()


def becomes(world: EmulatedCompute, name: str, state: CloudState, within: int = 120) -> Any:
    for _ in range(within):
        found = world.listed().get(name)
        if found is not None and found.state is state:
            return found
        world.pass_time(1)
    raise AssertionError(world.listed())


def ordered(*names: str, capacity: Capacity = Capacity.SPOT, accelerator: str = "v5p-32"):
    return order(*names, accelerator=accelerator, zone=ZONE, capacity=capacity)


def test_slices_share_policy_and_template_which_are_deleted_when_unused(worlds):
    world = worlds()
    for name in ("a", "b"):
        world.provider.request(ordered(name))
        becomes(world, name, CloudState.UP)
    inserts = world.calls("resourcePolicies.insert", "instanceTemplates.insert")
    assert inserts == ["resourcePolicies.insert", "instanceTemplates.insert"]
    for _ in range(3):
        world.pass_time(600)
        world.listed()
    assert world.calls("instanceTemplates.delete") == [], "in use"
    for name in ("a", "b"):
        world.provider.release(SliceId(name), ZONE)
    for _ in range(4):
        world.pass_time(300)
        world.listed()
    assert world.left() == []
    world.provider.request(ordered("c"))
    becomes(world, "c", CloudState.UP)


@pytest.mark.parametrize("kind", ["resourcePolicies", "instanceTemplates"])
def test_what_somebody_else_deleted_is_made_again(worlds, kind):
    world = worlds()
    world.provider.request(ordered("a"))
    stored = world.emulator.project.tpus.stored
    del stored[next(key for key in stored if key[1] == kind)]
    with pytest.raises(ProviderBusy):
        world.provider.request(ordered("b"))
    world.provider.request(ordered("b"))
    becomes(world, "b", CloudState.UP)


def test_an_operation_that_takes_longer_than_a_call_may_is_in_progress(worlds):
    """Google's `wait` answers within two minutes: our own deadline is earlier."""

    class ShortDeadline(GoogleRest):
        def post(self, api: str, path: str, body: Any = None, **query: str) -> Answer:
            if path.endswith("/wait"):
                raise ProviderUnavailable(f"{path}: Read timed out.")
            return super().post(api, path, body, **query)

    world = worlds(latencies=replace(IMMEDIATE, operation=timedelta(seconds=5)))
    world.provider.close()
    world.provider = ComputeProvider(
        world.settings, fleet="test", clock=world.clock, rest=ShortDeadline(world.settings.endpoint)
    )  # fmt: skip
    for _ in ("the workload policy", "the template"):
        with pytest.raises(ProviderBusy, match="in progress"):
            world.provider.request(ordered("a"))
        world.pass_time(10)
    world.provider.request(ordered("a"))
    becomes(world, "a", CloudState.UP)


def test_a_call_whose_answer_is_lost_creates_one_group(worlds):
    lost = ComputeCallFault(method="instanceGroupManagers.insert", error="lost-answer", calls=(1,))
    world = worlds(calls=(lost,))
    with pytest.raises(ProviderUnavailable):
        world.provider.request(ordered("a"))
    world.reopen()
    world.provider.request(ordered("a"))
    becomes(world, "a", CloudState.UP)
    assert len(world.engine.groups) == 1 and len(world.engine.vms) == 4


def test_a_project_with_few_calls_a_minute_gets_its_slices_late_and_once(worlds):
    world = worlds(calls_per_minute=6)
    names = ["a", "b", "c"]
    waiting, up = list(names), set()
    for _ in range(600):
        world.pass_time(5)
        try:
            if waiting:
                world.provider.request(ordered(waiting[0]))
                waiting.pop(0)
            up = {name for name, each in world.listed().items() if each.state is CloudState.UP}
        except (RateLimited, ProviderBusy):
            continue
        if len(up) == len(names):
            break
    assert up == set(names) and len(world.engine.vms) == 12
    assert len(world.emulator.project.tpus.stored) == 2  # a policy and a template


QUEUED_ONLY = ("FLEX_START", "RESERVATION_BOUND")


def modes(world: EmulatedCompute) -> list[bool]:
    """Of the groups that were requested: whether in bulk mode."""
    requests = world.emulator.project.tpus.requests
    groups = [body for method, _, body in requests if method == "instanceGroupManagers.insert"]
    return ["targetSizePolicy" in body for body in groups]


def test_a_refusal_of_bulk_mode_stays_the_reason_when_nothing_else_is_accepted(worlds):
    """The emulator refuses a topology without bulk mode too, as Google was seen to do."""
    world = worlds(switches=Switches(bulk_models=QUEUED_ONLY))
    for name in ("a", "b"):
        with pytest.raises(BadRequest, match=r"does not support SPOT.* without .* require BULK"):
            world.provider.request(ordered(name))
    assert modes(world) == [True, False] * 2
    world.provider.request(ordered("c", capacity=Capacity.QUEUED))
    becomes(world, "c", CloudState.UP)


@pytest.mark.parametrize("late", [False, True], ids=["by its checks", "by its operation"])
def test_a_zone_that_refuses_bulk_mode_after_it_accepted_the_group_is_asked_without_it(
    worlds, late
):
    switches = Switches(bulk_models=QUEUED_ONLY, bulk_refusal="check", topology_needs_bulk=False)
    failing = ComputeCallFault(
        method="instanceGroupManagers.insert", error="bulk-model", late=True, calls=(1,)
    )
    world = worlds(switches=switches, calls=(failing,) if late else ())
    world.provider.request(ordered("a"))
    refused = becomes(world, "a", CloudState.REFUSED)
    assert refused.refusal is RefusalKind.CAPACITY and "only supported for" in refused.message
    world.provider.release(SliceId("a"), ZONE)
    world.provider.request(ordered("b"))
    becomes(world, "b", CloudState.UP)
    assert modes(world) == [True, False]


def test_a_zone_that_allows_bulk_mode_later_is_asked_with_it_again(worlds):
    world = worlds(switches=Switches(bulk_models=(), topology_needs_bulk=False))
    world.provider.request(ordered("a"))
    assert not world.engine.groups[f"zones/{ZONE}", "a"].bulk
    world.engine.switches = Switches()
    world.pass_time(24 * 3600)
    world.provider.request(ordered("b"))
    assert world.engine.groups[f"zones/{ZONE}", "b"].bulk


def test_a_group_that_gets_only_some_of_its_vms_one_by_one_is_refused_and_deleted(worlds):
    world = worlds(switches=Switches(bulk_models=(), topology_needs_bulk=False))
    world.limit(2)
    world.provider.request(ordered("a"))
    refused = becomes(world, "a", CloudState.REFUSED)
    assert refused.refusal is RefusalKind.CAPACITY and not refused.fenced
    assert "does not have enough resources" in refused.message
    world.provider.release(SliceId("a"), ZONE)
    world.pass_time(60)
    assert world.listed() == {} and not world.engine.ledger.running()


def test_what_a_group_waits_for_is_read_from_its_past_errors_where_nothing_else_tells(worlds):
    """Its VMs are between two attempts."""
    members = ComputeCallFault(method="instanceGroupManagers.listManagedInstances", error="omitted")
    world = worlds(switches=Switches(bulk_models=(), topology_needs_bulk=False), calls=(members,))
    world.limit(0)
    world.provider.request(ordered("a"))
    refused = becomes(world, "a", CloudState.REFUSED, 20)
    assert "does not have enough resources" in refused.message
    assert world.calls("instanceGroupManagers.listErrors")


def test_flex_start_waits_in_its_queue_until_there_is_capacity(worlds):
    world = worlds()
    world.limit(2)
    world.provider.request(ordered("a", capacity=Capacity.QUEUED))
    for _ in range(10):
        world.pass_time(60)
        assert world.listed()["a"].state is CloudState.PENDING
    world.limit(4)
    becomes(world, "a", CloudState.UP)


def test_a_gang_in_the_queue_gives_up_once_one_slice_has_cost_money_for_its_patience(worlds):
    world = worlds()
    world.limit(4)
    world.provider.request(ordered("a", "b", capacity=Capacity.QUEUED))
    becomes(world, "a", CloudState.UP)
    assert world.listed()["b"].state is CloudState.PENDING
    patience = world.settings.gang_patience.total_seconds()
    refused = becomes(world, "b", CloudState.REFUSED, int(patience))
    assert refused.refusal is RefusalKind.CAPACITY
    assert world.listed()["a"].state is CloudState.REFUSED
    [paid, *_] = world.engine.ledger.entries
    assert world.clock.now() - paid.began_at <= world.settings.gang_patience


def preemptible(most: int) -> tuple[QuotaLimit, ...]:
    return (QuotaLimit(most=most, kind="preemptible"), QuotaLimit(most=0, kind="standard"))


@pytest.mark.parametrize(
    ("most", "slices", "used"), [(0, 1, 0), (16, 2, 0), (24, 1, 16), (40, 2, 16)]
)
def test_flex_start_that_exceeds_the_quota_is_refused_before_a_slice_is_paid_for(
    worlds, most, slices, used
):
    """By itself, with its gang, or with what others use. Google would let it wait."""
    world, gang = worlds(quota=preemptible(most)), ["a", "b"][:slices]
    if used:
        world.provider.request(ordered("other"))
        becomes(world, "other", CloudState.UP)
    with pytest.raises(
        QuotaExceeded, match=rf"allows {most} \+ 0 chips.*; {slices * 16} are"
    ) as it:
        world.provider.request(ordered(*gang, capacity=Capacity.QUEUED))
    assert (f"{used} of them in use" in str(it.value)) == bool(used)
    assert len(world.engine.ledger.entries) == used // 4
    if most >= slices * 16:
        world.provider.release(SliceId("other"), ZONE)
        world.pass_time(60)
        world.provider.request(ordered(*gang, capacity=Capacity.QUEUED))
        becomes(world, gang[-1], CloudState.UP)


def test_chips_of_vms_that_a_person_made_are_in_use_and_those_of_a_reservation_are_not(worlds):
    held = ReservedCapacity(name="held", zone=ZONE, machine="ct5p-hightpu-4t", vms=4)
    world = worlds(quota=preemptible(19), reservations=(held,))
    world.reopen(reservation="held")
    world.provider.request(ordered("reserved", capacity=Capacity.RESERVED))
    becomes(world, "reserved", CloudState.UP)
    world.provider.request(ordered("a", capacity=Capacity.QUEUED))
    becomes(world, "a", CloudState.UP)
    world.provider.release(SliceId("a"), ZONE)
    world.pass_time(60)
    spot, place = ordered("mine", accelerator="v5p-8"), Location(project="my-project", zone=ZONE)
    body = requests.instance(spot, SliceId("mine"), find("v5p-8"), world.settings, place)
    mine = {key: body[key] for key in body if key != "labels"}
    rest = GoogleRest(world.settings.endpoint, "my-project")
    assert rest.post("compute", f"compute/v1/{place.zone_path}/instances", mine).status == 200
    with pytest.raises(QuotaExceeded, match="4 of them in use"):
        world.provider.request(ordered("b", capacity=Capacity.QUEUED))


def test_a_place_in_the_queue_is_given_up_when_the_quota_has_become_too_small(worlds):
    world = worlds()
    world.limit(0)
    world.provider.request(ordered("a", capacity=Capacity.QUEUED))
    assert becomes(world, "a", CloudState.PENDING)
    world.engine.quota = preemptible(15)
    world.pass_time(600)
    refused = becomes(world, "a", CloudState.REFUSED)
    assert refused.refusal is RefusalKind.QUOTA and "allows 15 + 0 chips" in refused.message


@pytest.mark.parametrize("accelerator", ["v5p-8", "v5p-32"])
def test_the_end_of_the_run_duration_of_flex_start_is_no_fault_of_the_job(worlds, accelerator):
    world = worlds()
    world.reopen(max_run_duration=HOUR)
    world.provider.request(ordered("a", capacity=Capacity.QUEUED, accelerator=accelerator))
    left = becomes(world, "a", CloudState.UP).ends_at - world.clock.now()
    assert timedelta(minutes=50) < left <= HOUR
    world.pass_time(3700)
    ended = becomes(world, "a", CloudState.PREEMPTED)
    assert "the run duration of flex-start is over" in ended.message
    world.provider.release(SliceId("a"), ZONE)
    world.pass_time(60)
    assert world.listed() == {}


def test_a_reservation_grants_what_it_holds_until_it_ends(worlds):
    held = ReservedCapacity(
        name="calendar", zone=ZONE, machine="ct5p-hightpu-4t", vms=4, until=timedelta(hours=2)
    )
    world = worlds(reservations=(held,))
    world.reopen(reservation="calendar")
    end = world.clock.now() + timedelta(hours=2)
    world.provider.request(ordered("a", capacity=Capacity.RESERVED))
    assert becomes(world, "a", CloudState.UP).ends_at == end
    world.provider.request(ordered("b", capacity=Capacity.RESERVED))
    refused = becomes(world, "b", CloudState.REFUSED)
    assert refused.refusal is RefusalKind.CAPACITY
    assert "does not have available resources" in refused.message
    world.pass_time(2 * 3600)
    assert "the reservation ended" in becomes(world, "a", CloudState.PREEMPTED).message
    with pytest.raises(NoCapacity, match=f"ended at {end:%Y-%m-%d %H:%M}"):
        world.provider.request(ordered("c", capacity=Capacity.RESERVED))


def test_a_reservation_of_calendar_mode_is_waited_for_until_google_has_made_it(worlds):
    """Which it does at its start, or a little later."""
    held = ReservedCapacity(
        name="calendar", zone=ZONE, machine="ct5p-hightpu-4t", vms=4,
        after=timedelta(hours=5), until=timedelta(hours=30),
    )  # fmt: skip
    late = replace(IMMEDIATE, reservation=timedelta(seconds=90))
    world = worlds(reservations=(held,), latencies=late)
    world.reopen(reservation="calendar")
    start, refused = world.clock.now() + timedelta(hours=5), 0
    while not world.engine.groups:
        try:
            world.provider.request(ordered("a", capacity=Capacity.RESERVED))
        except NoCapacity as error:
            assert f"begins at {start:%Y-%m-%d %H:%M}" in str(error) and error.until is not None
            wait = error.until - world.clock.now()
            assert start - world.clock.now() >= wait or wait <= timedelta(seconds=30)
            world.clock.advance(wait)
            refused += 1
    assert world.clock.now() - start == timedelta(seconds=90) and refused == 33
    becomes(world, "a", CloudState.UP)


def test_a_slice_whose_chips_cannot_be_joined_has_failed(worlds):
    world = worlds(failing_topologies=1.0)
    world.provider.request(ordered("a"))
    failed = becomes(world, "a", CloudState.FAILED)
    assert "the chips of its VMs cannot be joined" in failed.message


def test_an_operation_that_fails_later_refuses_the_slice(worlds):
    late = ComputeCallFault(method="instances.insert", error="stockout", late=True)
    world = worlds(calls=(late,))
    world.provider.request(ordered("a", accelerator="v5p-8"))
    refused = becomes(world, "a", CloudState.REFUSED)
    assert refused.refusal is RefusalKind.CAPACITY
    world.provider.release(SliceId("a"), ZONE)
    assert world.listed() == {}


def test_a_zone_that_does_not_respond_hides_no_other(worlds):
    dead = ComputeCallFault(method="instances.list", zone="us-east5-a", error="unavailable")
    world = worlds(calls=(dead,))
    world.provider.request(ordered("a"))
    listing = world.provider.listing()
    assert [found.id for found in listing] == ["a"]
    assert listing.unreachable_zones == {"us-east5-a"}


@pytest.mark.parametrize("kind", ["instances", "instanceGroupManagers"])
def test_a_listing_that_warns_that_it_is_incomplete_hides_its_zone_only(worlds, kind):
    warned = ComputeCallFault(method=f"{kind}.list", zone=ZONE, error="unreachable", calls=(2,))
    world = worlds(calls=(warned,))
    assert not world.provider.listing().unreachable_zones
    assert list(world.provider.listing().unreachable_zones) == [ZONE]
    assert not world.provider.listing().unreachable_zones


def test_a_listing_that_lacks_a_slice_does_not_lose_it(worlds):
    omitted = ComputeCallFault(
        method="instanceGroupManagers.list", error="omitted", after=timedelta(minutes=10)
    )
    world = worlds(calls=(omitted,))
    world.provider.request(ordered("a"))
    becomes(world, "a", CloudState.UP)
    world.pass_time(1000)
    expected = [ExpectedSlice(id=SliceId("a"), zone=ZONE)]
    assert [found.id for found in world.provider.listing(expected)] == ["a"]


class Reporting(VmHosts):
    """Hosts that tell how far they came."""

    def guest_attributes(self, vm: Vm, path: str) -> dict[tuple[str, str], str]:
        report = BootstrapReport(
            host=vm.worker, stage=BootstrapStage.CONNECTING, message="connection refused"
        )
        return {("tpufleet", "bootstrap"): bootstrap.to_json(report)}


def test_hosts_that_do_not_connect_tell_why_through_guest_attributes(worlds):
    world = worlds()
    world.engine.hosts = Reporting()
    world.provider.request(ordered("a"))
    found = becomes(world, "a", CloudState.UP)
    assert sorted(report.host for report in found.bootstrap) == [0, 1, 2, 3]
    assert {report.message for report in found.bootstrap} == {"connection refused"}


@pytest.mark.parametrize(
    ("until", "model"), [(None, "STANDARD"), (timedelta(hours=2), "RESERVATION_BOUND")]
)
def test_vms_are_bound_to_a_reservation_of_calendar_mode_and_to_no_other(worlds, until, model):
    """The emulator refuses both the other way round, as the page of the model says."""
    held = ReservedCapacity(name="held", zone=ZONE, machine="ct5p-hightpu-4t", vms=4, until=until)
    world = worlds(reservations=(held,), switches=Switches(bound_to_any_reservation=False))
    world.reopen(reservation="held")
    world.provider.request(ordered("a", capacity=Capacity.RESERVED))
    becomes(world, "a", CloudState.UP)
    [template] = [
        body for method, _, body in world.emulator.project.tpus.requests
        if method == "instanceTemplates.insert"
    ]  # fmt: skip
    assert template["properties"]["scheduling"]["provisioningModel"] == model
    affinity = template["properties"]["reservationAffinity"]
    assert affinity["consumeReservationType"] == "SPECIFIC_RESERVATION"


def test_a_reservation_that_cannot_be_read_is_taken_for_one_of_calendar_mode(worlds):
    denied = ComputeCallFault(method="reservations.get", error="forbidden")
    held = ReservedCapacity(name="held", zone=ZONE, machine="ct5p-hightpu-4t", vms=4)
    world = worlds(reservations=(held,), calls=(denied,))
    world.reopen(reservation="projects/other/reservations/held")
    world.provider.request(ordered("a", capacity=Capacity.RESERVED))
    becomes(world, "a", CloudState.UP)


@pytest.mark.parametrize(
    ("accelerator", "kind"), [("v5p-32", "instanceGroupManagers"), ("v5p-8", "instances")]
)
@pytest.mark.parametrize("restarts", [False, True], ids=["same server", "restarted"])
def test_a_release_after_a_lost_answer_deletes_what_no_listing_shows(
    worlds, accelerator, kind, restarts
):
    lost = ComputeCallFault(method=f"{kind}.insert", error="lost-answer", calls=(1,))
    omitted = ComputeCallFault(method=f"{kind}.list", error="omitted")
    world = worlds(calls=(lost, omitted))
    with pytest.raises(ProviderUnavailable):
        world.provider.request(ordered("a", accelerator=accelerator))
    if restarts:
        world.reopen()
    world.provider.release(SliceId("a"), ZONE)
    world.pass_time(60)
    assert not any(name.startswith(("groups/", "vms/")) for name in world.left())
    assert world.calls(f"{kind}.delete") == [f"{kind}.delete"]


@pytest.mark.parametrize("kind", ["resourcePolicies", "instanceTemplates"])
def test_what_slices_share_is_collected_though_nobody_knows_that_it_was_made(worlds, kind):
    lost = ComputeCallFault(method=f"{kind}.insert", error="lost-answer", calls=(1,))
    world = worlds(calls=(lost,))
    with pytest.raises(ProviderUnavailable):
        world.provider.request(ordered("a"))
    world.provider.release(SliceId("a"), ZONE)
    assert world.left(), "made, although the answer was lost"
    world.reopen()
    for _ in range(3):
        world.pass_time(600)
        world.listed()
    assert world.left() == []
