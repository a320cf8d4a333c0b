"""Slices of the emulated Compute Engine over time: grants, losses, faults, and both answers to what
no document says."""

from __future__ import annotations

import json
import urllib.request
from datetime import timedelta

import httpx
import pytest

pytest.importorskip("google.cloud.compute_v1", reason="pip install google-cloud-compute")

from google.api_core import exceptions

from tests.testbed.compute_engine.conformance_rows import (
    add_regional,
    close_zone,
)
from tests.testbed.compute_engine.emulated_compute import (
    DELETED_SPOT,
    FLEX,
    LEAVE,
    LONG,
    PROJECT,
    REPAIR,
    SPOT,
    STANDARD,
    ZONE,
)
from tpufleet_testbed.compute_engine import fault_plan
from tpufleet_testbed.compute_engine.fault_plan import (
    ComputeCallFault,
    QuotaLimit,
    StockLimit,
    Switches,
)
from tpufleet_testbed.faults import PreemptionStorm, ZoneOutage


def topologies(world, seconds):
    """The states of the only slice, in order."""
    [group] = world.engine.groups.values()
    seen = [group.topology_state]
    for _ in range(seconds):
        world.advance(1)
        with world.engine.lock:
            world.engine.run_due()
        if seen[-1] != group.topology_state:
            seen.append(group.topology_state)
    return seen


def test_a_slice_goes_from_creating_to_an_active_topology(emulated):
    world = emulated(latencies=fault_plan.IMMEDIATE)
    world.start_slice()
    world.advance(10)
    [group] = world.engine.groups.values()
    status = world.status()
    assert status.is_stable and world.counts() == {"running": 4}
    assert group.topology_state == "ACTIVE" and not status.bulk_instance_operation.in_progress


def test_the_states_on_the_way_come_in_order(world):
    world.start_slice()
    assert topologies(world, 600) == ["", "ACTIVATING", "ACTIVE"]
    assert world.billed() and len(set(world.billed())) == 4


def test_nothing_is_created_before_there_is_capacity_for_all(emulated):
    world = emulated(stock=(StockLimit(most=3),))
    world.start_slice()
    world.advance(LONG)
    assert world.counts() == {"non_existent": 4} and world.billed() == {}
    world.engine.stock = (StockLimit(most=4),)
    world.until_active(600)
    assert len(world.errors()) == 4  # one for each VM; they stay


def test_two_slices_never_share_half_of_the_stock_each(emulated):
    world = emulated(stock=(StockLimit(most=6),))
    world.start_slice()
    world.add_group("other")
    world.advance(LONG)
    running = {name: world.group(name).status.current_instance_statuses.running
               for name in ("slice", "other")}  # fmt: skip
    assert sorted(running.values()) == [0, 4]


@pytest.mark.parametrize("after", ["INCOMPLETE", "FAILED", "ACTIVE"])
@pytest.mark.parametrize("stable", [True, False])
def test_one_vm_of_a_slice_is_lost(emulated, after, stable):
    world = emulated(switches=Switches(topology_after_loss=after, stable_after_loss=stable))
    world.running_slice(scheduling=SPOT)
    world.preempt(2)
    world.advance(LONG)
    assert (world.topology(), world.status().is_stable) == (after, stable)
    assert world.counts() == {"running": 3, "terminated": 1}
    assert {member.current_action for member in world.members()} == {"NONE"}


def test_a_group_that_repairs_creates_it_again_as_soon_as_there_is_capacity(emulated):
    world = emulated()
    world.running_slice(scheduling=SPOT, on_failure=REPAIR)
    world.engine.stock = (StockLimit(most=3),)
    world.preempt(2)
    world.advance(300)
    lost = next(member for member in world.members() if member.current_action == "RECREATING")
    assert lost.last_attempt.errors.errors[0].code.startswith("ZONE_RESOURCE_POOL_EXHAUSTED")
    assert world.topology() == "REACTIVATING"
    world.engine.stock = ()
    world.until_active(900)
    assert lost.name in {vm.name for vm in world.vms()}


def test_all_vms_are_preempted_and_the_group_is_filled_again(world):
    world.running_slice(scheduling=DELETED_SPOT)
    world.preempt(0, 1, 2, 3)
    world.advance(LONG)
    assert world.group().target_size == 4 and world.counts() == {"non_existent": 4}
    world.resize(0)
    world.advance(LONG)
    assert world.members() == []
    world.resize(4)
    world.until_active(900)


def test_a_vm_that_is_lost_while_the_slice_is_created_leaves_it_incomplete(world):
    world.start_slice(scheduling=DELETED_SPOT)
    [group] = world.engine.groups.values()
    world.until(lambda: group.topology_state == "ACTIVATING")
    world.preempt(0)
    world.advance(LONG)
    assert world.counts() == {"running": 3, "non_existent": 1}
    assert world.topology() == "INCOMPLETE" and world.errors()
    assert not world.status().bulk_instance_operation.in_progress


def test_a_group_may_be_of_no_use_after_it_was_emptied(emulated):
    world = emulated(switches=Switches(resize_again=False))
    world.running_slice()
    world.resize(0)
    world.advance(LONG)
    with pytest.raises(exceptions.BadRequest):
        world.resize(4)


def test_vms_end_with_their_run_time_and_the_group_stays(world):
    world.running_slice(scheduling=FLEX, on_failure=LEAVE)
    assert all(member.scheduling.termination_timestamp for member in world.members())
    assert topologies(world, 2 * int(LONG)) == ["ACTIVE", "DEACTIVATING", "INCOMPLETE"]
    assert world.vms() == [] and world.group().target_size == 4
    assert all(seconds < 3700 + 300 for seconds in world.billed().values())


def test_a_topology_that_fails_leaves_running_vms(emulated):
    world = emulated(failing_topologies=1.0)
    world.start_slice()
    world.advance(LONG)
    applied = world.status().applied_accelerator_topologies[0]
    assert (applied.state, world.counts()) == ("FAILED", {"running": 4})
    assert applied.state_details.error.errors[0].code


@pytest.mark.parametrize("returning", ["REACTIVATING", "INCOMPLETE"])
def test_a_host_error_repairs_the_vm_and_then_the_topology(emulated, returning):
    world = emulated(switches=Switches(topology_returning=returning))
    world.running_slice()
    with world.engine.lock:
        world.engine.host_error(world.record(1), world.clock.now())
    assert world.counts() == {"running": 3, "repairing": 1}
    assert topologies(world, 1200) == list(dict.fromkeys(["INCOMPLETE", returning, "ACTIVE"]))


def test_a_storm_takes_slices_as_a_whole(emulated):
    storm = PreemptionStorm(every=timedelta(hours=1), share=1.0)
    world = emulated(storms=(storm,))
    world.running_slice(scheduling=SPOT)
    world.advance(2 * LONG)
    assert world.counts() == {"terminated": 4}


def test_a_zone_that_closes_has_no_capacity_until_it_opens(emulated):
    outage = ZoneOutage(zone=ZONE, after=timedelta(0), until=timedelta(hours=2))
    world = emulated(closings=(outage,))
    world.start_slice()
    world.advance(LONG)
    assert "EXHAUSTED" in world.last_error().code
    world.advance(2 * LONG)
    assert world.topology() == "ACTIVE"


def test_a_bulk_group_waits_for_ever_or_gives_up(emulated):
    for limit, waits in ((None, True), (timedelta(minutes=30), False)):
        world = emulated(stock=(StockLimit(most=0),), switches=Switches(waiting_limit=limit))
        world.start_slice()
        world.advance(24 * LONG)
        assert world.status().bulk_instance_operation.in_progress is waits


def test_bulk_mode_may_refuse_a_model(emulated):
    world = emulated(switches=Switches(bulk_models=("FLEX_START", "RESERVATION_BOUND")))
    world.prepare(scheduling=SPOT)
    with pytest.raises(exceptions.BadRequest, match="SPOT"):
        world.add_group()


def test_a_model_that_bulk_mode_refuses_may_be_told_by_the_checks_of_the_group(emulated):
    switches = Switches(bulk_models=("FLEX_START", "RESERVATION_BOUND"), bulk_refusal="check")
    world = emulated(switches=switches)
    world.start_slice(scheduling=SPOT)
    world.advance(LONG)
    assert "BULK is only supported" in world.last_error().message and world.vms() == []


def test_an_impossible_topology_may_be_refused_at_once(emulated):
    world = emulated(switches=Switches(bad_topology="call"))
    world.prepare(topology="4x4")
    with pytest.raises(exceptions.BadRequest, match="Unsupported TPU configuration"):
        world.add_group(size=2)


def test_a_topology_that_no_slice_has_may_be_refused_with_its_policy(emulated):
    world = emulated(switches=Switches(bad_topology="policy"))
    with pytest.raises(exceptions.BadRequest, match="Unsupported TPU configuration"):
        world.add_policy("3x5")
    world.add_policy("4x4")


def test_want_of_quota_may_be_told_by_the_call(emulated):
    world = emulated(
        quota=(QuotaLimit(most=0),), switches=Switches(quota_refusal="call")
    )  # fmt: skip
    with pytest.raises(exceptions.Forbidden, match="Quota"):
        world.add_vm()


def test_a_template_may_be_judged_when_vms_are_created(emulated):
    world = emulated(switches=Switches(bad_scheduling="vm"))
    flex = {"provisioning_model": "FLEX_START"}
    world.done(world.add_template("plain", scheduling=flex))
    world.prepare(scheduling=flex)
    world.add_group(on_failure=LEAVE)
    world.advance(LONG)
    assert world.last_error().code == "CONDITION_NOT_MET" and world.vms() == []


def test_a_vm_without_stock_may_boot_for_minutes_and_then_fail(emulated):
    world = emulated(
        stock=(StockLimit(most=0),), switches=Switches(flex_failure="internal")
    )  # fmt: skip
    operation = world.add_vm(scheduling=FLEX)
    world.advance(600)
    assert world.vm().status == "STAGING"
    assert world.done(operation).error.errors[0].code == "INTERNAL_ERROR"
    assert world.vms() == []


def test_the_attributes_of_a_slice_may_come_with_its_topology(emulated):
    world = emulated(switches=Switches(metadata="topology"))
    world.start_slice()
    world.until(
        lambda: all(vm.status == "RUNNING" for vm in world.engine.vms.values()) and world.engine.vms
    )
    name = world.record().name
    assert world.read_metadata(name, "attributes/tpu-env") is None
    world.until_active()
    assert "TOPOLOGY: '4x4'" in world.read_metadata(name, "attributes/tpu-env")


@pytest.mark.parametrize("recovers", [True, False])
def test_a_slice_works_again_when_its_vm_is_back_or_has_to_be_created_again(emulated, recovers):
    world = emulated(switches=Switches(topology_recovers=recovers))
    world.running_slice()
    with world.engine.lock:
        world.engine.host_error(world.record(1), world.clock.now())
    world.advance(LONG)
    assert world.counts() == {"running": 4}
    assert world.topology() == ("ACTIVE" if recovers else "INCOMPLETE")


@pytest.mark.parametrize("searches", [True, False])
def test_a_regional_group_may_try_its_first_zone_only(emulated, searches):
    world = emulated(switches=Switches(regional_zone_search=searches))
    world.prepare()
    close_zone(world, ZONE)
    add_regional(world)
    world.advance(LONG)
    world.vms()  # does what is due
    zones = {vm.zone for vm in world.engine.vms.values()}
    assert zones == ({"us-east5-b"} if searches else set())


def test_answers_have_the_fields_that_were_selected(world):
    world.running_slice(scheduling=SPOT)
    path = f"/compute/compute/v1/projects/{PROJECT}/zones/{ZONE}/instances"
    selector = "items(name,labels,scheduling/provisioningModel),nextPageToken,warning(code)"
    found = httpx.get(f"{world.project.url}{path}", params={"fields": selector}).json()
    assert len(found["items"]) == 4 and set(found) == {"items"}
    assert found["items"][0].keys() <= {"name", "labels", "scheduling"}
    assert found["items"][0]["scheduling"] == {"provisioningModel": "SPOT"}
    wrong = httpx.get(f"{world.project.url}{path}", params={"fields": "items(name"})
    assert wrong.status_code == 400


def test_listings_may_have_small_pages(emulated):
    world = emulated(switches=Switches(page_size=2))
    world.running_slice()
    found = world.Instances.list(request={"project": PROJECT, "zone": ZONE})
    assert [len(page.items) for page in found.pages] == [2, 2]


def test_calls_of_a_project_are_limited_by_the_minute(emulated):
    """By region, and reads apart from writes."""
    world = emulated(calls_per_minute=2)
    for _ in range(2):
        world.vms()
    with pytest.raises(exceptions.Forbidden, match="Quota exceeded") as refused:
        world.vms()
    assert refused.value.errors[0]["reason"] == "rateLimitExceeded"
    world.Instances.list(project=PROJECT, zone="us-central1-a")
    world.add_policy()
    world.advance(60)
    assert world.vms() == []


def test_workers_may_be_in_the_order_of_names(emulated):
    world = emulated(switches=Switches(worker_order="name"))
    world.running_slice()
    assert [world.record(n).name for n in range(4)] == [vm.name for vm in world.vms()]


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        ("rate", 403, "Quota exceeded"), ("too-many", 429, "Quota exceeded"),
        ("unavailable", 503, "retry"), ("internal", 500, "Internal error"),
        ("forbidden", 403, "compute.instanceGroupManagers.create"),
        ("disabled", 403, "has not been used in project"),
    ],
)  # fmt: skip
def test_calls_fail_as_planned(emulated, error, status, text):
    fault = ComputeCallFault(method="instanceGroupManagers.insert", error=error)
    world = emulated(calls=(fault,))
    world.prepare()
    with pytest.raises(exceptions.GoogleAPICallError, match=text) as refused:
        world.add_group()
    assert refused.value.code == status
    assert not world.engine.groups


def test_an_answer_that_is_lost_has_taken_effect(emulated):
    fault = ComputeCallFault(method="instanceGroupManagers.insert", error="lost-answer", calls=(1,))
    world = emulated(calls=(fault,))
    world.prepare()
    identity = "5b9f6e2a-2f0c-4d6e-9a52-3f0c2d6e9a52"
    with pytest.raises(exceptions.ServiceUnavailable):
        world.add_group(request_id=identity)
    assert world.group().name == "slice"
    assert world.add_group(request_id=identity).name  # the same operation
    with pytest.raises(exceptions.Conflict):
        world.add_group()


@pytest.mark.parametrize("error", ["stockout", "external-ip", "permissions", "ip-space"])
def test_an_operation_fails_late_and_leaves_nothing(emulated, error):
    fault = ComputeCallFault(method="*.insert", error=error, late=True)
    world = emulated(calls=(fault,))
    failed = world.done(world.add_policy())
    assert failed.error.errors[0].code and not world.project.tpus.stored
    assert world.done(world.add_vm()).error.errors and world.vms() == []


def test_a_group_that_is_refused_late_leaves_none_of_the_vms_that_it_began_with(emulated):
    fault = ComputeCallFault(method="instanceGroupManagers.insert", error="quota", late=True)
    world = emulated(calls=(fault,))
    world.done(world.add_template(scheduling=SPOT))
    failed = world.done(world.add_group(mode="INDIVIDUAL", policy=""))
    assert failed.error.errors and world.vms() == [] and not world.engine.groups
    world.advance(LONG)
    assert world.vms() == []


def test_listings_may_lag(emulated):
    lags = (ComputeCallFault(method="instances.list", error="omitted", calls=(1,)),)
    world = emulated(calls=lags)
    world.running_vm()
    assert world.vms() == [] and len(world.vms()) == 1


def test_an_aggregated_listing_may_lack_a_zone(emulated):
    fault = ComputeCallFault(method="instances.aggregatedList", error="unreachable")
    world = emulated(calls=(fault,))
    world.running_vm()
    found = dict(world.Instances.aggregated_list(project=PROJECT))
    assert found[f"zones/{ZONE}"].warning.code == "UNREACHABLE"


def test_a_permission_that_is_missing_is_named(world):
    world.project.state.denied_permissions.add("compute.instanceTemplates.create")
    with pytest.raises(exceptions.Forbidden, match=r"compute\.instanceTemplates\.create"):
        world.add_template()
    world.add_policy()


def test_faults_on_command(world):
    world.running_slice(scheduling=SPOT)
    body = {"target": "slice", "fault": "preempt", "host": 3}
    request = urllib.request.Request(
        f"{world.project.url}/compute/testbed/v1/injectFault", json.dumps(body).encode()
    )
    with urllib.request.urlopen(request) as answer:
        [status] = json.load(answer)["vms"].values()
    assert status == "STOPPING" and world.record(3).preempted


def test_the_quotas_that_clients_read_are_those_of_the_plan(emulated):
    world = emulated(quota=(QuotaLimit(most=32, region="us-east5", kind="preemptible"),))
    path = "/quotas/v1/projects/p/locations/global/services/compute.googleapis.com/quotaInfos/"
    status, body = world.project.answer(f"{path}PREEMPTIBLE-TPU-V6E-per-project-region", {})
    here = [each for each in body["dimensionsInfos"]
            if each["dimensions"] == {"region": "us-east5"}]  # fmt: skip
    assert status == 200 and [each["details"]["value"] for each in here] == ["32"]


def test_a_plan_is_read_from_text():
    plan = fault_plan.parse(
        "stock: [{zone: us-east5-*, machine: ct6e-*, model: SPOT, most: 8}]\n"
        "switches: {topology_after_loss: FAILED}\n"
        "latencies: {boot: [30s, 2m]}\n"
        "calls: [{method: instances.insert, error: rate, probability: 0.5}]\n"
    )
    assert plan.stock[0].covers("us-east5-b", "ct6e-standard-4t", "SPOT")
    assert plan.switches.topology_after_loss == "FAILED"


def test_on_demand_and_spot_are_limited_apart(emulated):
    world = emulated(stock=(StockLimit(most=0, model="SPOT"),))
    assert world.done(world.add_vm(scheduling=SPOT)).error.errors
    assert not world.done(world.add_vm(scheduling=STANDARD)).error.errors


def test_a_page_in_a_browser_cannot_create_a_vm(world):
    """Its agent would run what the page says."""
    url = f"{world.project.url}/compute/compute/v1/projects/{PROJECT}/zones/{ZONE}/instances"
    answer = httpx.post(url, content=b'{"name": "vm"}', headers={"Origin": "https://example.com"})
    assert answer.status_code == 403
