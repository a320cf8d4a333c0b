"""Groups and instances as slices: a table of what Compute Engine shows, and what we make of it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.providers.compute.errors import NO_QUOTA, STOCKOUT
from tpufleet.model.fleet.cloud_slices import CloudSlice, CloudState
from tpufleet.model.fleet.hosts import NoticeKind
from tpufleet.model.fleet.pools import RefusalKind
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import Capacity
from tpufleet.providers.compute import states
from tpufleet.providers.compute.zone_observer import ZoneSlice, refuse_gangs

NOW = datetime(2026, 11, 19, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
SPOT, FLEX = Capacity.SPOT, Capacity.QUEUED


def vms(*statuses: str) -> list[dict[str, Any]]:
    return [{"name": f"vm-{index}", "status": status} for index, status in enumerate(statuses)]


def group(
    *, waits: bool = False, topology: str = "", error: Any = None, age: int = 600, **more: Any
) -> dict[str, Any]:
    bulk: dict[str, Any] = {"inProgress": waits}
    if error is not None:
        bulk["lastProgressCheck"] = {"error": {"errors": [error]}}
    status: dict[str, Any] = {"bulkInstanceOperation": bulk}
    if topology:
        failure = {"error": {"errors": [{"message": "chip 3 is broken"}]}}
        status["appliedAcceleratorTopologies"] = [{"state": topology, "stateDetails": failure}]
    return {
        "name": "s", "targetSize": 4, "status": status,
        "targetSizePolicy": {"mode": "BULK"},
        "resourcePolicies": {"workloadPolicy": "regions/r/resourcePolicies/p"},
        "creationTimestamp": (NOW - timedelta(seconds=age)).isoformat(), **more,
    }  # fmt: skip


def seen(group: dict[str, Any], instances=(), capacity=SPOT, errors=()) -> states.Observation:
    patience = timedelta(hours=24) if capacity is FLEX else timedelta(minutes=30)
    return states.of_group(group, instances, errors, capacity=capacity, patience=patience, now=NOW)


UP = vms(*["RUNNING"] * 4)


@pytest.mark.parametrize(
    ("group", "instances", "capacity", "state", "message"),
    [
        (group(topology="ACTIVE"), UP, SPOT, CloudState.UP, ""),
        (group(targetSize=0), (), FLEX, CloudState.PREEMPTED, "run duration"),
        (group(topology="ACTIVATING"), UP, SPOT, CloudState.CREATING, "joining its chips"),
        (group(topology="REACTIVATING"), UP, SPOT, CloudState.CREATING, "reactivating"),
        (group(), UP, SPOT, CloudState.CREATING, "joining its chips"),
        (group(topology="FAILED"), UP, SPOT, CloudState.FAILED, "chip 3 is broken"),
        (group(resourcePolicies={}), UP, SPOT, CloudState.UP, ""),
        (group(waits=True), [], SPOT, CloudState.PENDING, "waiting for capacity"),
        (group(waits=True), vms(*["PENDING"] * 4), FLEX, CloudState.PENDING, "waiting"),
        (group(waits=True), vms("STAGING", "PROVISIONING"), SPOT, CloudState.CREATING, "0 of 4"),
        (group(waits=True), vms("RUNNING", "STAGING"), SPOT, CloudState.CREATING, "1 of 4"),
        (group(age=5), [], SPOT, CloudState.PENDING, "requested"),
        (group(), vms(*["REPAIRING"] * 4), SPOT, CloudState.CREATING, "0 of 4"),
        (group(topology="INCOMPLETE"), [*UP[1:], *vms("STOPPING")], SPOT, CloudState.UP,
         "being preempted"),
        (group(topology="INCOMPLETE"), [*UP[1:], *vms("TERMINATED")], SPOT, CloudState.PREEMPTED,
         "preempted: 1 of its 4 VMs"),
        (group(topology="INCOMPLETE"), vms(*["TERMINATED"] * 4), SPOT, CloudState.PREEMPTED,
         "preempted: its VMs"),
        (group(), UP[1:], Capacity.ON_DEMAND, CloudState.FAILED, "1 of its 4 VMs stopped"),
        (group(), [], FLEX, CloudState.PREEMPTED, "run duration of flex-start is over"),
        (group(), [], Capacity.RESERVED, CloudState.PREEMPTED, "the reservation ended"),
        (group(), [{**vm, "scheduling": {"provisioningModel": "STANDARD"}} for vm in UP[1:]],
         Capacity.RESERVED, CloudState.FAILED, "1 of its 4 VMs stopped"),
        (group(currentActions={"deleting": 4}), UP, SPOT, CloudState.STOPPING, "deleting"),
    ],
)  # fmt: skip
def test_a_group_is_up_only_when_all_vms_run_and_their_chips_are_joined(
    group, instances, capacity, state, message
):
    found = seen(group, instances, capacity)
    assert (found.state, found.refusal) == (state, RefusalKind.CAPACITY)
    assert message in found.message


@pytest.mark.parametrize(
    ("error", "capacity", "state", "kind"),
    [
        (STOCKOUT, SPOT, CloudState.REFUSED, RefusalKind.CAPACITY),
        (STOCKOUT, FLEX, CloudState.PENDING, RefusalKind.CAPACITY),
        (NO_QUOTA, SPOT, CloudState.REFUSED, RefusalKind.QUOTA),
        (NO_QUOTA, FLEX, CloudState.REFUSED, RefusalKind.QUOTA),
    ],
)
def test_a_group_that_waits_for_ever_is_refused_by_us(error, capacity, state, kind):
    """By its own error, or by those of its VMs."""
    for found in (
        seen(group(waits=True, error=error), [], capacity),
        seen(group(waits=True), [], capacity, [error]),
    ):
        assert (found.state, found.refusal) == (state, kind)


def test_waiting_ends_when_patience_does():
    late = group(waits=True, age=1801)
    assert seen(late).state is CloudState.REFUSED
    assert "no capacity within 1801 s" in seen(late).message
    assert seen(late, capacity=FLEX).state is CloudState.PENDING


def test_a_group_without_bulk_mode_says_so_while_it_waits():
    plain = group(targetSizePolicy={"mode": "INDIVIDUAL"}, currentActions={"creating": 4})
    assert seen(plain).state is CloudState.PENDING
    assert "refuses bulk mode" in seen(plain).message


@pytest.mark.parametrize("error", [(), (STOCKOUT,)], ids=["only time passes", "stockout"])
def test_a_group_without_bulk_mode_that_gets_some_of_its_vms_does_not_wait_for_ever(error):
    """What it has is paid for meanwhile."""
    partly = {"targetSizePolicy": {}, "currentActions": {"creating": 2}}
    some = vms("RUNNING", "STAGING")
    assert seen(group(**partly), some).state is CloudState.CREATING
    found = seen(group(**partly, age=5 if error else 1801), some, errors=error)
    assert (found.state, found.fenced) == (CloudState.REFUSED, False)
    assert states.needs_errors(group(**partly), some)
    assert seen(group(**partly, age=1801), vms(*["STAGING"] * 4)).state is CloudState.CREATING


@pytest.mark.parametrize("listed", [(), UP[:3]], ids=["none", "three of four"])
def test_vms_that_a_listing_lacks_run_on_if_their_group_counts_them(listed):
    alive = group(topology="ACTIVE")
    alive["status"]["currentInstanceStatuses"] = {"running": 4, "nonExistent": 0}
    assert seen(alive, listed).state is CloudState.UP
    lost = group(topology="INCOMPLETE")
    lost["status"]["currentInstanceStatuses"] = {"running": 3, "nonExistent": 1}
    found = seen(lost, listed)
    assert (found.state, found.fenced) == (CloudState.PREEMPTED, False)


def test_machines_are_known_to_be_stopped_only_when_all_are():
    assert seen(group(), vms(*["TERMINATED"] * 4)).fenced
    assert not seen(group(), vms("RUNNING", "TERMINATED", "TERMINATED", "TERMINATED")).fenced


@pytest.mark.parametrize(
    ("status", "capacity", "state", "fenced"),
    [
        ("PENDING", SPOT, CloudState.PENDING, False),
        ("PROVISIONING", SPOT, CloudState.CREATING, False),
        ("STAGING", SPOT, CloudState.CREATING, False),
        ("REPAIRING", SPOT, CloudState.CREATING, False),
        ("RUNNING", SPOT, CloudState.UP, False),
        ("STOPPING", SPOT, CloudState.UP, False),
        ("STOPPING", Capacity.ON_DEMAND, CloudState.FAILED, False),
        ("TERMINATED", SPOT, CloudState.PREEMPTED, True),
        ("TERMINATED", Capacity.ON_DEMAND, CloudState.FAILED, True),
    ],
)
def test_an_instance_is_a_slice_of_one_host(status, capacity, state, fenced):
    found = states.of_instance({"name": "s", "status": status}, capacity)
    assert (found.state, found.fenced) == (state, fenced)


def test_announced_maintenance_has_a_time_and_one_that_has_begun_is_a_notice():
    def with_window(status: str) -> list[dict[str, Any]]:
        window = {"maintenanceStatus": status, "windowStartTime": "2026-11-26T03:00:00Z"}
        return [*UP[:3], {**UP[3], "resourceStatus": {"upcomingMaintenance": window}}]

    planned = seen(group(topology="ACTIVE"), with_window("PENDING"))
    assert planned.maintenance_at == datetime(2026, 11, 26, 3, tzinfo=UTC)
    assert planned.notice is None
    begun = seen(group(topology="ACTIVE"), with_window("ONGOING"))
    assert (begun.state, begun.notice) == (CloudState.UP, NoticeKind.MAINTENANCE)


def test_a_slice_ends_with_the_first_of_its_vms():
    def ending(*moments: str) -> list[dict[str, Any]]:
        ends = [{"scheduling": {"terminationTimestamp": moment}} for moment in moments]
        first = zip(UP, ends, strict=False)
        return [*UP[len(ends) :], *({**vm, "resourceStatus": end} for vm, end in first)]

    soon, late = "2026-11-26T03:00:00Z", "2026-11-26T04:00:00-08:00"
    up = group(topology="ACTIVE")
    assert seen(up, ending(late, soon)).ends_at == datetime(2026, 11, 26, 3, tzinfo=UTC)
    assert seen(up, ending("soon")).ends_at == states.NEVER
    assert seen(up, UP).ends_at is None


def test_slices_requested_together_are_refused_together():
    def each(name: str, state: CloudState, order: str) -> ZoneSlice:
        cloud = CloudSlice(id=SliceId(name), zone="z", state=state, message=f"of {name}")
        return ZoneSlice(cloud_slice=cloud, order=order)

    found = [
        each("a-0", CloudState.UP, "a"), each("a-1", CloudState.REFUSED, "a"),
        each("a-2", CloudState.STOPPING, "a"), each("b-0", CloudState.UP, "b"),
    ]  # fmt: skip
    after = refuse_gangs({item.cloud_slice.id: item for item in found}, HOUR, NOW)
    assert [item.cloud_slice.state.value for item in after.values()] == [
        "refused", "refused", "stopping", "up"
    ]  # fmt: skip
    assert after[SliceId("a-0")].cloud_slice.message == "of a-1"
