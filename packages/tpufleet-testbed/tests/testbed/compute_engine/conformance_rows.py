"""What Google documents about TPUs as instances of Compute Engine, and what its users report, as a
table of calls and expected answers. Written from those pages, the messages of Google's client and
the readers of other programs, not from our provider. `source` is a key of `SOURCES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from google.cloud import compute_v1 as api

from tests.testbed.compute_engine.emulated_compute import (
    BOUND,
    DELETED_SPOT,
    FLEX,
    IMAGE,
    LONG,
    MACHINE,
    PROJECT,
    REGION,
    REPAIR,
    SPOT,
    ZONE,
    EmulatedCompute,
    affinity,
    disk,
)
from tpufleet_testbed.compute_engine.fault_plan import QuotaLimit, StockLimit

DOCS = "https://docs.cloud.google.com"
SOURCES = {
    "BULK": f"{DOCS}/compute/docs/instance-groups/about-bulk-mode",
    "MH": f"{DOCS}/compute/docs/tpus/create-tpu-mig-multi-host-slice",
    "QS": f"{DOCS}/compute/docs/tpus/quickstart-create-tpu-multi-host-slice",
    "RES": f"{DOCS}/compute/docs/tpus/tpu-resources-in-compute-engine",
    "MACH": f"{DOCS}/compute/docs/tpus/tpu-machines",
    "WP": f"{DOCS}/sdk/gcloud/reference/compute/resource-policies/create/workload-policy",
    "WPA": f"{DOCS}/compute/docs/instance-groups/about-workload-policies",
    "REP": "https://cloud.google.com/compute/docs/instance-groups/about-repair",
    "RSV": f"{DOCS}/tpu/docs/consume-reservation-compute",
    "SPOT": f"{DOCS}/tpu/docs/spot-compute",
    "IMG": f"{DOCS}/tpu/docs/custom-os-image",
    "MODELS": f"{DOCS}/compute/docs/instances/provisioning-models",
    "RESIZE": f"{DOCS}/compute/docs/instance-groups/about-resize-requests-mig",
    "CONSUME": f"{DOCS}/compute/docs/instances/reservations-consume",
    "BOUND": f"{DOCS}/compute/docs/instances/about-reservation-bound-vms",
    "CAL": "https://cloud.google.com/compute/docs/instances/create-future-reservations-calendar-mode",
    "CALTPU": f"{DOCS}/tpu/docs/calendar-mode-reservation",
    "FUTURE": f"{DOCS}/compute/docs/instances/create-shared-future-reservations",
    "MN": "https://cloud.google.com/tpu/docs/view-maintenance-notifications",
    "MS": "https://cloud.google.com/tpu/docs/manually-start-maintenance",
    "REST": f"{DOCS}/compute/docs/reference/rest/v1",
    "IGM": f"{DOCS}/compute/docs/reference/rest/v1/instanceGroupManagers",
    "OPS": f"{DOCS}/compute/docs/reference/rest/v1/zoneOperations",
    "VM": f"{DOCS}/compute/docs/reference/rest/v1/instances",
    "NAMES": f"{DOCS}/compute/docs/naming-resources",
    "META": f"{DOCS}/compute/docs/metadata/setting-custom-metadata",
    "LABELS": f"{DOCS}/compute/docs/labeling-resources",
    "QUOTA": f"{DOCS}/compute/resource-usage",
    # Readers and reports of others: what Compute Engine was seen to answer.
    "CA": "https://github.com/kubernetes/autoscaler/blob/master/cluster-autoscaler/cloudprovider/"
    "gce/autoscaling_gce_client.go",
    "SKY": "https://github.com/skypilot-org/skypilot/blob/master/sky/provision/gcp/mig_utils.py",
    "JAX": "https://github.com/jax-ml/jax/blob/main/jax/_src/clusters/cloud_tpu_cluster.py",
    "XB": "https://github.com/xbill9/gemma4-dev/blob/main/HARDWARE.md",
    "ASSUMED": "docs/testbed.md#compute-engine-emulator",
}
Refusal = tuple[int, str]  # HTTP status, and a part of the message


@dataclass(frozen=True)
class Row:
    id: str
    source: str
    call: Callable[[EmulatedCompute], Any]
    check: Callable[[Any], object] | Refusal = bool


def reserved(count: int = 4, name: str = "res", machine: str = MACHINE, **more: Any) -> Any:
    return lambda w: w.done(
        w.Reservations.insert_unary(
            project=PROJECT, zone=ZONE,
            reservation_resource=api.Reservation(
                name=name, specific_reservation_required=True,
                specific_reservation={
                    "count": count, "instance_properties": {"machine_type": machine}, **more,
                },
            ),
        )
    )  # fmt: skip


def calendar(
    count: int = 4, days: int = 3, machine: str = MACHINE, zone: str = ZONE, mode: str = "CALENDAR",
    starts: float = 3600,
) -> Any:  # fmt: skip
    def call(w: EmulatedCompute) -> Any:
        start = w.clock.now() + timedelta(seconds=starts)
        return w.FutureReservations.insert_unary(
            project=PROJECT, zone=zone,
            future_reservation_resource=api.FutureReservation(
                name="cal", reservation_mode=mode, reservation_name="cal-res",
                time_window={
                    "start_time": start.isoformat(), "duration": {"seconds": days * 86400},
                },
                specific_sku_properties={
                    "total_count": count, "instance_properties": {"machine_type": machine},
                },
            ),
        )  # fmt: skip

    return call


def delay(w: EmulatedCompute, seconds: float) -> None:
    """Until the reservation is ready."""
    found = w.engine.reservations.known[ZONE, "res"]
    found.starts_at = w.clock.now() + timedelta(seconds=seconds)


def future(w: EmulatedCompute) -> api.FutureReservation:
    return w.FutureReservations.get(project=PROJECT, zone=ZONE, future_reservation="cal")


def bound(name: str = "res") -> dict[str, Any]:
    return {"scheduling": BOUND, "reservation_affinity": affinity(name)}


def after(*calls: Callable[[EmulatedCompute], Any]) -> Callable[[EmulatedCompute], Any]:
    """The answer of the last call, an hour after the ones before it."""

    def run(w: EmulatedCompute) -> Any:
        for call in calls[:-1]:
            call(w)
            w.advance(LONG)
        return calls[-1](w)

    return run


def twice(call: Callable[[EmulatedCompute], Any]) -> Callable[[EmulatedCompute], Any]:
    return lambda w: (call(w), call(w))[1]


def sliced(**more: Any) -> Callable[[EmulatedCompute], Any]:
    return lambda w: w.running_slice(**more)


def vm_error(**more: Any) -> Callable[[EmulatedCompute], Any]:
    """The error of the operation that creates a VM."""
    return lambda w: w.done(w.add_vm(**more)).error.errors[0]


def without(**plan: Any) -> Callable[[EmulatedCompute], None]:
    """Change what there is: `without(stock=0)`."""

    def change(w: EmulatedCompute) -> None:
        if "stock" in plan:
            w.engine.stock = (StockLimit(most=plan["stock"]),)
        if "quota" in plan:
            kind = plan.get("kind", "*")
            w.engine.quota = (QuotaLimit(most=plan["quota"], kind=kind),)

    return change


def then(*calls: Callable[[EmulatedCompute], Any]) -> Callable[[EmulatedCompute], Any]:
    def run(w: EmulatedCompute) -> Any:
        return [call(w) for call in calls][-1]

    return run


LATE = 121.0  # seconds from its start until a reservation of calendar mode exists
BULK_PREPARED = lambda w: w.prepare()
UUID = "5b9f6e2a-2f0c-4d6e-9a52-3f0c2d6e9a52"

POLICY_ROWS = (
    Row("policy: answered with an operation", "REST", lambda w: w.add_policy(),
        lambda op: op.operation_type == "insert" and op.region.endswith(REGION)),
    Row("policy: the mode is AUTO_CONNECT by default", "WP", after(
        lambda w: w.add_policy(), lambda w: w.get_policy()),
        lambda p: p.workload_policy.accelerator_topology_mode == "AUTO_CONNECT"),
    Row("policy: PROVISION_ONLY is kept", "WP", after(
        lambda w: w.add_policy(accelerator_topology_mode="PROVISION_ONLY"),
        lambda w: w.get_policy()),
        lambda p: p.workload_policy.accelerator_topology_mode == "PROVISION_ONLY"),
    Row("policy: HIGH_AVAILABILITY has no topology", "WP",
        lambda w: w.add_policy(type_="HIGH_AVAILABILITY"), (400, "HIGH_THROUGHPUT")),
    Row("policy: HIGH_AVAILABILITY", "WP",
        lambda w: w.add_policy("", type_="HIGH_AVAILABILITY")),
    Row("policy: an unknown type", "WP", lambda w: w.add_policy(type_="FAST"), (400, "type")),
    Row("policy: topology and distance exclude each other", "WP",
        lambda w: w.add_policy(max_topology_distance="BLOCK"), (400, "maxTopologyDistance")),
    Row("policy: distance alone", "WP", lambda w: w.add_policy("", max_topology_distance="BLOCK")),
    Row("policy: an unknown distance", "WP",
        lambda w: w.add_policy("", max_topology_distance="RACK"), (400, "RACK")),
    Row("policy: not a topology", "WP", lambda w: w.add_policy("huge"), (400, "huge")),
    Row("policy: a topology that no slice has is accepted", "ASSUMED",
        lambda w: w.done(w.add_policy("3x5")), lambda op: not op.error.errors),
    Row("policy: upper-case name", "NAMES", lambda w: w.add_policy(name="Upper"),
        (400, "resource.name")),
    Row("policy: 64 characters", "NAMES", lambda w: w.add_policy(name="a" * 64), (400, "name")),
    Row("policy: taken", "REST", twice(lambda w: w.add_policy()), (409, "already exists")),
    Row("policy: not there before its operation is DONE", "REST", then(
        lambda w: w.add_policy(), lambda w: w.get_policy()), (404, "was not found")),
    Row("policy: listed", "REST", after(
        lambda w: w.add_policy(),
        lambda w: list(w.ResourcePolicies.list(project=PROJECT, region=REGION))),
        lambda found: [each.name for each in found] == ["policy"]),
    Row("policy: of an unknown region", "REST", lambda w: w.ResourcePolicies.insert_unary(
        project=PROJECT, region="mars1",
        resource_policy_resource=api.ResourcePolicy(
            name="p", workload_policy={"type_": "HIGH_THROUGHPUT"})), (400, "mars1")),
    Row("policy: deleted", "REST", after(
        lambda w: w.add_policy(), lambda w: w.delete_policy(), lambda w: w.get_policy()),
        (404, "was not found")),
    Row("policy: in use by a group", "REST", after(
        lambda w: w.start_slice(), lambda w: w.delete_policy()), (400, "already being used")),
    Row("policy: many groups share one", "WPA", after(
        lambda w: w.start_slice(), lambda w: w.add_group("other"),
        lambda w: [w.group(name).status.is_stable for name in ("slice", "other")]), all),
    Row("policy: not on a single VM", "XB", after(
        lambda w: w.add_policy(),
        lambda w: w.add_vm(resource_policies=[f"regions/{REGION}/resourcePolicies/policy"])),
        (400, "Resource policy must have one of [VmMaintenancePolicy, GroupPlacementPolicy, "
              "InstanceSchedulePolicy]")),
)  # fmt: skip

TEMPLATE_ROWS = (
    Row("template: kept as it is", "REST", after(
        lambda w: w.add_template(scheduling=SPOT, labels={"a": "b"}), lambda w: w.get_template()),
        lambda t: t.properties.machine_type == MACHINE and dict(t.properties.labels) == {"a": "b"}),
    Row("template: the machine type is a name", "REST",
        lambda w: w.add_template(machine=f"zones/{ZONE}/machineTypes/{MACHINE}"), (400, "name")),
    Row("template: without a machine type", "REST", lambda w: w.add_template(machine=""),
        (400, "machineType")),
    Row("template: without a boot disk", "REST", lambda w: w.add_template(disks=[]),
        (400, "boot disk")),
    Row("template: without a network", "REST", lambda w: w.add_template(network_interfaces=[]),
        (400, "networkInterfaces")),
    Row("template: without an image", "REST",
        lambda w: w.add_template(disks=[disk(image="")]), (400, "sourceImage")),
    Row("template: an image by its bare name", "REST",
        lambda w: w.add_template(disks=[disk(image="ubuntu")]), (400, "malformed")),
    Row("template: an unknown image of Google's", "IMG",
        lambda w: w.add_template(disks=[disk(image=IMAGE + "-x")]), (400, "cannot be found")),
    Row("template: a disk smaller than the image", "IMG",
        lambda w: w.add_template(disks=[disk(disk_size_gb=9)]), (400, "smaller")),
    Row("template: a label with capitals", "LABELS", lambda w: w.add_template(labels={"A": "b"}),
        (400, "labels")),
    Row("template: a metadata key with a dot", "META", lambda w: w.add_template(
        metadata={"items": [{"key": "a.b", "value": "c"}]}), (400, "metadata")),
    Row("template: the same metadata key twice", "META", lambda w: w.add_template(
        metadata={"items": [{"key": "a", "value": "1"}, {"key": "a", "value": "2"}]}),
        (400, "metadata")),
    Row("template: a metadata value over 256 KiB", "META", lambda w: w.add_template(
        metadata={"items": [{"key": "a", "value": "x" * (256 * 1024 + 1)}]}), (400, "metadata")),
    Row("template: accelerators come with the machine type", "MACH", lambda w: w.add_template(
        guest_accelerators=[{"accelerator_count": 4, "accelerator_type": "ct6e"}]),
        (400, "guestAccelerators")),
    Row("template: TPUs are not migrated", "ASSUMED",
        lambda w: w.add_template(scheduling={"on_host_maintenance": "MIGRATE"}),
        (400, "onHostMaintenance")),
    Row("template: flex-start needs a run time", "MODELS", lambda w: w.add_template(scheduling={
        "provisioning_model": "FLEX_START", "instance_termination_action": "DELETE"}),
        (400, "maxRunDuration")),
    Row("template: flex-start deletes", "MODELS", lambda w: w.add_template(
        scheduling={**FLEX, "instance_termination_action": "STOP"}), (400, "DELETE")),
    Row("template: flex-start for at most seven days", "MODELS", lambda w: w.add_template(
        scheduling={**FLEX, "max_run_duration": {"seconds": 7 * 86400 + 1}}), (400, "604800")),
    Row("template: flex-start for at least ten minutes", "RESIZE", lambda w: w.add_template(
        scheduling={**FLEX, "max_run_duration": {"seconds": 599}}), (400, "600")),
    Row("template: flex-start for seven days", "MODELS", lambda w: w.add_template(
        scheduling={**FLEX, "max_run_duration": {"seconds": 7 * 86400}})),
    Row("template: flex-start from no reservation", "MODELS", lambda w: w.add_template(
        scheduling=FLEX, reservation_affinity=affinity("r")), (400, "reservations")),
    Row("template: a run time needs an action at its end", "MODELS", lambda w: w.add_template(
        scheduling={"max_run_duration": {"seconds": 60}}), (400, "instanceTerminationAction")),
    Row("template: a run time of 29 seconds", "MODELS", lambda w: w.add_template(scheduling={
        "max_run_duration": {"seconds": 29}, "instance_termination_action": "STOP"}), (400, "30")),
    Row("template: Spot does not restart", "VM", lambda w: w.add_template(
        scheduling={**SPOT, "automatic_restart": True}), (400, "automaticRestart")),
    Row("template: bound to a reservation without one", "RSV",
        lambda w: w.add_template(scheduling=BOUND), (400, "reservation")),
    Row("template: bound to a reservation deletes", "RSV", lambda w: w.add_template(
        scheduling={**BOUND, "instance_termination_action": "STOP"},
        reservation_affinity=affinity("r")), (400, "DELETE")),
    Row("template: an unknown model", "VM", lambda w: w.add_template(
        scheduling={"provisioning_model": "CHEAP"}), (400, "CHEAP")),
    Row("template: host errors after 100 seconds", "VM", lambda w: w.add_template(
        scheduling={"host_error_timeout_seconds": 100}), (400, "hostErrorTimeoutSeconds")),
    Row("template: of a machine that nobody may create", "XB",
        lambda w: w.done(w.add_template(machine="ct5lp-hightpu-1t")),
        lambda op: not op.error.errors),
    Row("template: taken", "REST", twice(lambda w: w.add_template()), (409, "already exists")),
    Row("template: in use by a group", "REST", after(
        lambda w: w.start_slice(), lambda w: w.delete_template()), (400, "already being used")),
    Row("template: free after its group", "REST", after(
        lambda w: w.start_slice(), lambda w: w.delete_group(),
        lambda w: (w.done(w.delete_template()), w.done(w.delete_policy()))),
        lambda ops: not any(op.error.errors for op in ops)),
    Row("template: a global one needs the whole subnetwork", "REST",
        lambda w: w.InstanceTemplates.insert_unary(
            project=PROJECT, instance_template_resource=api.InstanceTemplate(
                name="t", properties={"machine_type": MACHINE, "disks": [disk()],
                                      "network_interfaces": [{"subnetwork": "default"}]})),
        (400, "subnetwork")),
)  # fmt: skip

GROUP_ROWS = (
    Row("group: needs BULK with a topology", "BULK", then(
        BULK_PREPARED, lambda w: w.add_group(mode=None)),
        (400, "MIGs with TPU accelerator topology require BULK mode in target size policy")),
    Row("group: INDIVIDUAL with a topology", "BULK", then(
        BULK_PREPARED, lambda w: w.add_group(mode="INDIVIDUAL")), (400, "require BULK mode")),
    Row("group: the policy by its bare name", "IGM", then(
        BULK_PREPARED, lambda w: w.add_group(policy="policy")), (400, "The URL is malformed.")),
    Row("group: the policy from projects on", "IGM", then(BULK_PREPARED, lambda w: w.add_group(
        policy=f"projects/{PROJECT}/regions/{REGION}/resourcePolicies/policy"))),
    Row("group: the policy by its whole URL", "IGM", then(BULK_PREPARED, lambda w: w.add_group(
        policy="https://www.googleapis.com/compute/v1/projects/"
               f"{PROJECT}/regions/{REGION}/resourcePolicies/policy"))),
    Row("group: a policy that does not exist", "IGM", then(BULK_PREPARED, lambda w: w.add_group(
        policy=f"regions/{REGION}/resourcePolicies/other")), (404, "was not found")),
    Row("group: a policy of another region", "IGM", then(BULK_PREPARED, lambda w: w.add_group(
        policy="regions/us-central1/resourcePolicies/policy")), (400, "us-central1")),
    Row("group: a template that does not exist", "IGM", then(BULK_PREPARED, lambda w: w.add_group(
        template=f"regions/{REGION}/instanceTemplates/other")), (404, "was not found")),
    Row("group: a template of another region", "IGM", then(BULK_PREPARED, lambda w: w.add_group(
        template="regions/us-central1/instanceTemplates/template")), (400, "us-central1")),
    Row("group: flex-start with repairs", "BULK", then(
        lambda w: w.prepare(scheduling=FLEX), lambda w: w.add_group(on_failure=REPAIR)),
        (400, "DO_NOTHING")),
    Row("group: flex-start with repairs by default", "BULK", then(
        lambda w: w.prepare(scheduling=FLEX), lambda w: w.add_group(on_failure=None)),
        (400, "DO_NOTHING")),
    Row("group: an unknown action", "IGM", then(
        BULK_PREPARED, lambda w: w.add_group(on_failure="DELETE")),
        (400, "defaultActionOnFailure")),
    Row("group: an unknown mode", "IGM", then(BULK_PREPARED, lambda w: w.add_group(mode="HUGE")),
        (400, "mode")),
    Row("group: a standby pool", "BULK", then(BULK_PREPARED, lambda w: w.add_group(
        standby_policy={"mode": "MANUAL"})), (400, "standbyPolicy")),
    Row("group: a canary", "BULK", then(BULK_PREPARED, lambda w: w.add_group(versions=[
        {"instance_template": f"regions/{REGION}/instanceTemplates/template"}] * 2)),
        (400, "versions")),
    Row("group: 1,001 VMs", "IGM", then(BULK_PREPARED, lambda w: w.add_group(size=1001)),
        (400, "targetSize")),
    Row("group: a base name of 59 characters", "IGM", then(
        BULK_PREPARED, lambda w: w.add_group(base_instance_name="a" * 59)),
        (400, "baseInstanceName")),
    Row("group: a base name of 58 characters", "IGM", then(
        BULK_PREPARED, lambda w: w.add_group(base_instance_name="a" * 58))),
    Row("group: a name of 64 characters", "NAMES", then(
        BULK_PREPARED, lambda w: w.add_group("a" * 64)), (400, "name")),
    Row("group: taken", "REST", then(BULK_PREPARED, twice(lambda w: w.add_group())),
        (409, "already exists")),
    Row("group: the same request id has one effect", "IGM", then(
        BULK_PREPARED, twice(lambda w: w.add_group(request_id=UUID))),
        lambda op: op.name.startswith("operation-")),
    Row("group: a request id that is no UUID", "IGM", then(
        BULK_PREPARED, lambda w: w.add_group(request_id="once")), (400, "requestId")),
    Row("group: the request id of zeros", "IGM", then(
        BULK_PREPARED,
        lambda w: w.add_group(request_id="00000000-0000-0000-0000-000000000000")), (400, "zero")),
    Row("group: its operation is DONE when its VMs are only scheduled", "IGM", then(
        lambda w: w.start_slice(), lambda w: (w.advance(6), w.group())[1]),
        lambda group: group.current_actions.creating == 4),
    Row("group: the places of VMs are listed before the VMs", "BULK", then(
        without(stock=0), lambda w: w.start_slice(), lambda w: (w.advance(60), w.members())[1]),
        lambda found: len(found) == 4 and not any(vm.instance_status for vm in found)),
    Row("group: the names of VMs begin with the base name", "IGM", after(
        lambda w: w.start_slice(), lambda w: w.members()),
        lambda found: len({vm.name for vm in found}) == 4
        and all(vm.name.startswith("slice-") and len(vm.name) == 10 for vm in found)),
    Row("group: sequential names", "IGM", after(
        lambda w: w.start_slice(base_instance_name="w-##"), lambda w: w.members()),
        lambda found: [vm.name for vm in found] == ["w-00", "w-01", "w-02", "w-03"]),
    Row("group: a slice is stable, and its topology active", "QS", sliced(),
        lambda group: group.status.is_stable
        and group.status.applied_accelerator_topologies[0].accelerator_topology == "4x4"),
    Row("group: nothing is in progress any more", "BULK", sliced(),
        lambda group: not group.status.bulk_instance_operation.in_progress),
    Row("group: one counter for each status", "MH", sliced(),
        lambda group: group.status.current_instance_statuses.running == 4
        and group.status.current_instance_statuses.non_existent == 0),
    Row("group: repairs are on by default", "REP", then(
        BULK_PREPARED, lambda w: w.add_group(on_failure=None), lambda w: w.group()),
        lambda g: g.instance_lifecycle_policy.default_action_on_failure == "REPAIR"),
    Row("group: labels of the template are labels of its VMs", "RES", then(
        lambda w: w.prepare(labels={"job": "7"}), lambda w: w.add_group(),
        lambda w: w.advance(LONG), lambda w: w.vms()),
        lambda vms: len(vms) == 4 and all(dict(vm.labels) == {"job": "7"} for vm in vms)),
    Row("group: VMs name their group", "IGM", after(
        lambda w: w.start_slice(), lambda w: w.vms()),
        lambda vms: all(item.value.endswith("instanceGroupManagers/slice") for vm in vms
                        for item in vm.metadata.items if item.key == "created-by")),
    Row("group: in the aggregated listing", "REST", after(
        lambda w: w.start_slice(),
        lambda w: dict(w.InstanceGroupManagers.aggregated_list(project=PROJECT))),
        lambda found: found[f"zones/{ZONE}"].instance_group_managers[0].name == "slice"),
    Row("group: in the listing of its zone", "REST", after(
        lambda w: w.start_slice(),
        lambda w: list(w.InstanceGroupManagers.list(project=PROJECT, zone=ZONE))),
        lambda found: [group.name for group in found] == ["slice"]),
    Row("group: resize requests are refused", "SKY", after(
        lambda w: w.start_slice(),
        lambda w: w.InstanceGroupManagerResizeRequests.insert_unary(
            project=PROJECT, zone=ZONE, instance_group_manager="slice",
            instance_group_manager_resize_request_resource=api.InstanceGroupManagerResizeRequest(
                name="r", resize_by=1))),
        (400, "Creating resize requests for managed instance group with TPU is not allowed")),
    Row("group: VMs without a topology need no policy", "RES", then(
        lambda w: w.prepare(), lambda w: w.add_group(size=2, mode=None, policy=""),
        lambda w: w.advance(LONG), lambda w: w.group()),
        lambda group: group.status.is_stable
        and not group.status.applied_accelerator_topologies),
    Row("group: deleted", "REST", after(
        lambda w: w.start_slice(), lambda w: w.delete_group(), lambda w: w.group()),
        (404, "was not found")),
    Row("group: its deletion runs until its VMs are gone", "IGM", after(
        lambda w: w.start_slice(), lambda w: w.done(w.delete_group()) and w.vms()),
        lambda vms: vms == []),
    Row("group: its deletion is not DONE at once", "IGM", after(
        lambda w: w.start_slice(), lambda w: w.operation(w.delete_group())),
        lambda op: op.status is api.Operation.Status.RUNNING),
    Row("group: a regional one needs ANY_SINGLE_ZONE", "BULK", then(
        BULK_PREPARED, lambda w: add_regional(w, shape="EVEN")), (400, "ANY_SINGLE_ZONE")),
    Row("group: a regional one is in one zone", "BULK", then(
        BULK_PREPARED, lambda w: add_regional(w), lambda w: w.advance(LONG),
        lambda w: regional_zones(w)), lambda zones: len(zones) == 1),
    Row("group: a regional one takes the zone that has capacity", "ASSUMED", then(
        BULK_PREPARED, lambda w: close_zone(w, ZONE), lambda w: add_regional(w),
        lambda w: w.advance(LONG), lambda w: regional_zones(w)),
        lambda zones: zones == {"us-east5-b"}),
)  # fmt: skip


def add_regional(w: EmulatedCompute, shape: str = "ANY_SINGLE_ZONE") -> Any:
    zones = [{"zone": f"zones/{REGION}-{letter}"} for letter in "ab"]
    body = {
        "name": "slice", "target_size": 4,
        "instance_template": f"regions/{REGION}/instanceTemplates/template",
        "target_size_policy": {"mode": "BULK"},
        "resource_policies": {"workload_policy": f"regions/{REGION}/resourcePolicies/policy"},
        "distribution_policy": {"target_shape": shape, "zones": zones},
    }  # fmt: skip
    return w.RegionInstanceGroupManagers.insert_unary(
        project=PROJECT, region=REGION, instance_group_manager_resource=body
    )


def regional_zones(w: EmulatedCompute) -> set[str]:
    found = w.RegionInstanceGroupManagers.list_managed_instances(
        project=PROJECT, region=REGION, instance_group_manager="slice"
    )
    return {vm.instance.split("/zones/")[1].split("/")[0] for vm in found}


def close_zone(w: EmulatedCompute, zone: str) -> None:
    w.engine.stock = (StockLimit(most=0, zone=zone),)


def progress(*changes: Callable[[EmulatedCompute], Any]) -> Callable[[EmulatedCompute], Any]:
    """A slice that waits for capacity, and what is done then."""
    return then(without(stock=2), lambda w: w.start_slice(), lambda w: w.advance(120), *changes)


SIZE_ROWS = (
    Row("size: to 0 while it waits", "BULK", progress(
        lambda w: w.done(w.resize(0)), lambda w: (w.members(), w.status())),
        lambda found: not found[0] and not found[1].bulk_instance_operation.in_progress),
    Row("size: to another size while it waits", "BULK", progress(lambda w: w.resize(3)),
        (400, "other than 0")),
    Row("size: nothing is billed while it waits", "BULK", progress(lambda w: w.billed()),
        lambda billed: billed == {}),
    Row("size: larger from another size than 0", "BULK", after(
        lambda w: w.start_slice(), lambda w: w.resize(8)), (400, "only if its size is 0")),
    Row("size: to 0 and back", "BULK", after(
        lambda w: w.start_slice(), lambda w: w.resize(0), lambda w: w.resize(4),
        lambda w: (w.topology(), len(w.vms()))), lambda found: found == ("ACTIVE", 4)),
    Row("size: of a group that began empty", "BULK", after(
        lambda w: w.start_slice(size=0), lambda w: w.resize(4), lambda w: w.topology()),
        lambda state: state == "ACTIVE"),
    Row("size: negative", "IGM", after(
        lambda w: w.start_slice(), lambda w: w.resize(-1)), (400, "size")),
    Row("size: its operation is soon DONE", "IGM", after(
        lambda w: w.start_slice(), lambda w: (op := w.resize(0), w.advance(6), w.operation(op))[2]),
        lambda op: op.status is api.Operation.Status.DONE),
    Row("size: the mode cannot be changed", "BULK", after(
        lambda w: w.start_slice(),
        lambda w: w.patch_group(target_size_policy={"mode": "INDIVIDUAL"})), (400, "mode")),
    Row("patch: repairs", "IGM", after(
        lambda w: w.start_slice(), lambda w: w.patch_group(
            instance_lifecycle_policy={"default_action_on_failure": "REPAIR"}),
        lambda w: w.group()),
        lambda g: g.instance_lifecycle_policy.default_action_on_failure == "REPAIR"),
    Row("patch: a stale fingerprint", "IGM", after(
        lambda w: w.start_slice(), lambda w: w.patch_group(fingerprint="old")),
        (412, "fingerprint")),
    Row("patch: the fingerprint of now", "IGM", after(
        lambda w: w.start_slice(),
        lambda w: w.done(w.patch_group(fingerprint=w.group().fingerprint, description="x")))),
    Row("members: deleted, which lowers the size", "IGM", after(
        lambda w: w.start_slice(), lambda w: delete_member(w), lambda w: w.group()),
        lambda group: group.target_size == 3),
    Row("members: one that is not of the group", "IGM", after(
        lambda w: w.start_slice(), lambda w: delete_member(w, "other")), (400, "other")),
    Row("members: created again under their names", "IGM", after(
        lambda w: w.start_slice(), lambda w: recreate_first(w), lambda w: w.members()),
        lambda found: len(found) == 4 and all(vm.current_action == "NONE" for vm in found)),
)  # fmt: skip


def delete_member(w: EmulatedCompute, name: str = "") -> Any:
    url = f"zones/{ZONE}/instances/{name or w.members()[0].name}"
    return w.InstanceGroupManagers.delete_instances_unary(
        project=PROJECT, zone=ZONE, instance_group_manager="slice",
        instance_group_managers_delete_instances_request_resource={"instances": [url]},
    )  # fmt: skip


def recreate_first(w: EmulatedCompute) -> Any:
    url = f"zones/{ZONE}/instances/{w.members()[0].name}"
    return w.InstanceGroupManagers.recreate_instances_unary(
        project=PROJECT, zone=ZONE, instance_group_manager="slice",
        instance_group_managers_recreate_instances_request_resource={"instances": [url]},
    )  # fmt: skip


def waiting(*changes: Callable[[EmulatedCompute], Any], **more: Any) -> Any:
    """The error of a slice that gets no VMs."""
    return then(
        *changes, lambda w: w.start_slice(**more), lambda w: w.advance(120),
        lambda w: w.last_error(),
    )  # fmt: skip


CAPACITY_ROWS = (
    Row("stock: a slice waits with the error of its last check", "BULK", waiting(without(stock=2)),
        lambda error: error.code == "ZONE_RESOURCE_POOL_EXHAUSTED"),
    Row("stock: a Spot slice with the details", "CA", waiting(without(stock=2), scheduling=SPOT),
        lambda e: e.code == "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"
        and e.error_details[0].error_info.metadatas["vmType"] == MACHINE),
    Row("stock: every place has the error of its last attempt", "IGM", then(
        waiting(without(stock=2)), lambda w: w.members()),
        lambda found: all(vm.last_attempt.errors.errors[0].code for vm in found)),
    Row("stock: listErrors has one entry for each place", "IGM", then(
        waiting(without(stock=2)), lambda w: w.errors()),
        lambda found: len(found) == 4 and found[0].instance_action_details.action == "CREATING"),
    Row("stock: errors stay listed after a recovery", "IGM", then(
        waiting(without(stock=2)), without(stock=4), lambda w: w.advance(LONG),
        lambda w: (w.errors(), w.last_error(), w.topology())),
        lambda found: found[0] and found[1] is None and found[2] == "ACTIVE"),
    Row("stock: a flex-start slice is PENDING", "BULK", then(
        without(stock=0), lambda w: w.start_slice(scheduling=FLEX), lambda w: w.advance(60),
        lambda w: w.counts()), lambda counts: counts == {"pending": 4}),
    Row("stock: other slices' VMs do not exist", "BULK", then(
        without(stock=0), lambda w: w.start_slice(), lambda w: w.advance(60),
        lambda w: w.counts()), lambda counts: counts == {"non_existent": 4}),
    Row("stock: a VM's operation fails, and the VM is gone", "CA", then(
        without(stock=0), vm_error(), lambda w: w.vm()), (404, "was not found")),
    Row("stock: the error of a VM", "CA", then(without(stock=0), vm_error()),
        lambda error: error.code == "ZONE_RESOURCE_POOL_EXHAUSTED"),
    Row("stock: a Spot VM is told which zones have it", "XB", then(
        lambda w: close_zone(w, ZONE), vm_error(scheduling=SPOT)),
        lambda e: e.error_details[0].error_info.reason == "stockout"
        and "us-east5-b" in e.error_details[0].error_info.metadatas["zonesAvailable"]),
    Row("quota: an on-demand slice", "CA", waiting(without(quota=8)),
        lambda e: e.code == "QUOTA_EXCEEDED"
        and e.error_details[0].quota_info.metric_name == "compute.googleapis.com/"
        "tpus_per_tpu_family"
        and dict(e.error_details[0].quota_info.dimensions)
        == {"region": REGION, "tpu_family": "CT6E"}),
    Row("quota: of Spot is another", "QUOTA", waiting(without(quota=0, kind="preemptible"),
                                                      scheduling=SPOT),
        lambda e: "preemptible_tpu_v6e" in e.error_details[0].quota_info.metric_name),
    Row("quota: on demand does not use that of Spot", "QUOTA", then(
        without(quota=0, kind="preemptible"), sliced()), lambda group: group.status.is_stable),
    Row("quota: a flex-start slice is not told", "XB", then(
        without(quota=0), lambda w: w.start_slice(scheduling=FLEX), lambda w: w.advance(600),
        lambda w: (w.last_error(), w.counts())),
        lambda found: found == (None, {"pending": 4})),
    Row("quota: flex-start uses standard quota without preemptible", "MODELS", then(
        without(quota=0, kind="preemptible"), sliced(scheduling=FLEX)),
        lambda group: group.status.is_stable),
    Row("quota: and grows its use", "MODELS", then(
        lambda w: setattr(w.engine, "quota", (
            QuotaLimit(most=0, kind="preemptible"), QuotaLimit(most=20, kind="standard"))),
        sliced(scheduling=FLEX),
        lambda w: [w.done(w.add_vm(name)).error.errors for name in ("a", "b")]),
        lambda found: not found[0] and "QUOTA" in found[1][0].code),
    Row("quota: a VM", "QUOTA", then(without(quota=0), vm_error()),
        lambda error: error.code == "QUOTA_EXCEEDED" and "Limit: 0.0" in error.message),
    Row("quota: counts chips, by region", "QUOTA", then(
        without(quota=8), lambda w: w.done(w.add_vm("a")), lambda w: w.done(w.add_vm("b")),
        vm_error(name="c")), lambda error: "QUOTA" in error.code),
    Row("quota: those of TPU families are not in regions.get", "QUOTA",
        lambda w: w.Regions.get(project=PROJECT, region=REGION),
        lambda region: not any("TPU" in each.metric for each in region.quotas)),
    Row("config: a topology that the machine type cannot have", "CA",
        waiting(topology="3x5", size=4),
        lambda e: e.code == "CONDITION_NOT_MET" and e.message == "Unsupported TPU configuration"),
    Row("config: a topology that does not match the size", "CA", waiting(topology="4x4", size=2),
        lambda e: e.code == "CONDITION_NOT_MET"),
    Row("config: a machine that nobody may create", "XB",
        lambda w: w.add_vm(machine="ct5lp-hightpu-1t"),
        (400, "This user agent is not allowed to use the machine type [ct5lp-hightpu-1t]")),
    Row("config: a machine that the zone lacks", "MACH",
        lambda w: w.add_vm(machine="tpu7x-standard-4t"), (400, "does not exist in zone")),
    Row("config: v6e has Hyperdisk only", "MACH",
        vm_error(disks=[disk(disk_type=f"zones/{ZONE}/diskTypes/pd-standard")]),
        lambda error: "pd-standard" in error.message),
    Row("config: bulk insert", "VM", lambda w: w.Instances.bulk_insert_unary(
        project=PROJECT, zone=ZONE, bulk_insert_instance_resource_resource={
            "count": 4, "instance_properties": {"machine_type": MACHINE}}), (400, "not supported")),
)  # fmt: skip

VM_ROWS = (
    Row("vm: its operation runs until it runs", "VM", lambda w: (
        op := w.add_vm(), w.advance(5), w.operation(op).status, w.done(op), w.vm().status)[2::2],
        lambda found: found == (api.Operation.Status.RUNNING, "RUNNING")),
    Row("vm: addresses", "VM", lambda w: w.running_vm(network_interfaces=[
        {"network": "global/networks/default", "access_configs": [{"name": "nat"}]}]),
        lambda vm: vm.network_interfaces[0].network_i_p
        and vm.network_interfaces[0].access_configs[0].nat_i_p),
    Row("vm: no external address by default", "VM", lambda w: w.running_vm(),
        lambda vm: not vm.network_interfaces[0].access_configs),
    Row("vm: the machine type is a URL", "VM", lambda w: w.running_vm(),
        lambda vm: vm.machine_type.endswith(f"zones/{ZONE}/machineTypes/{MACHINE}")),
    Row("vm: where it stands", "VM", lambda w: w.running_vm(),
        lambda vm: vm.resource_status.physical_host_topology.host),
    Row("vm: taken", "REST", twice(lambda w: w.add_vm()), (409, "already exists")),
    Row("vm: the same request id has one effect", "VM",
        twice(lambda w: w.add_vm(request_id=UUID)), lambda op: op.operation_type == "insert"),
    Row("vm: a malformed machine type", "VM", lambda w: w.add_vm(
        machine=MACHINE, zone=ZONE, resource_policies=["policy"]), (400, "malformed")),
    Row("vm: deleted", "VM", lambda w: (
        w.running_vm(), w.done(w.on_vm("delete")), w.vm()), (404, "was not found")),
    Row("vm: one that does not exist", "VM", lambda w: w.vm("other"),
        (404, f"The resource 'projects/{PROJECT}/zones/{ZONE}/instances/other' was not found")),
    Row("vm: flex-start waits for two hours", "VM", then(
        without(stock=0), lambda w: w.add_vm(scheduling=FLEX, valid_for=7200),
        lambda w: (w.advance(7000), w.vm().status)[1]), lambda status: status == "PENDING"),
    Row("vm: and no longer", "VM", then(
        without(stock=0), lambda w: w.add_vm(scheduling=FLEX, valid_for=7200),
        lambda w: w.done(op) if (op := w.vms() and w.add_vm("b", scheduling=FLEX, valid_for=60))
        else None),
        lambda op: op.error.errors[0].code == "ZONE_RESOURCE_POOL_EXHAUSTED"),
    Row("vm: 7,201 seconds", "VM", lambda w: w.add_vm(scheduling=FLEX, valid_for=7201),
        (400, "requestValidForDuration")),
    Row("vm: flex-start that does not wait fails soon", "XB", then(
        without(stock=0), vm_error(scheduling=FLEX)), lambda error: "EXHAUSTED" in error.code),
    Row("vm: when it ends", "VM", lambda w: w.running_vm(scheduling=FLEX),
        lambda vm: vm.resource_status.scheduling.termination_timestamp),
    Row("vm: flex-start cannot be stopped", "MODELS", lambda w: (
        w.running_vm(scheduling=FLEX), w.on_vm("stop"))[1], (400, "cannot be stopped")),
    Row("vm: on demand is stopped and started", "VM", lambda w: (
        w.running_vm(), w.on_vm("stop"), w.advance(LONG), w.vm().status, w.done(w.on_vm("start")),
        w.vm().status)[3::2], lambda found: found == ("TERMINATED", "RUNNING")),
    Row("vm: labels need their fingerprint", "LABELS", lambda w: (
        w.running_vm(), w.on_vm("set_labels", instances_set_labels_request_resource={
            "labels": {"a": "b"}, "label_fingerprint": "old"})), (412, "fingerprint")),
    Row("vm: labels", "LABELS", lambda w: (
        vm := w.running_vm(), w.on_vm("set_labels", instances_set_labels_request_resource={
            "labels": {"a": "b"}, "label_fingerprint": vm.label_fingerprint}), w.vm())[2],
        lambda vm: dict(vm.labels) == {"a": "b"}),
    Row("vm: metadata needs its fingerprint", "META", lambda w: (
        w.running_vm(), w.on_vm("set_metadata", metadata_resource={"fingerprint": "old"})),
        (412, "fingerprint")),
    Row("vm: Spot is preempted and stopped", "SPOT", lambda w: (
        w.running_vm(scheduling=SPOT), w.preempt(0), w.vm().status, w.advance(LONG),
        w.vm().status)[2::2], lambda found: found == ("STOPPING", "TERMINATED")),
    Row("vm: Spot is preempted and deleted", "VM", lambda w: (
        w.running_vm(scheduling=DELETED_SPOT), w.preempt(0), w.advance(LONG), w.vm()),
        (404, "was not found")),
    Row("vm: a preemption is an operation", "VM", lambda w: (
        w.running_vm(scheduling=SPOT), w.preempt(0),
        list(w.ZoneOperations.list(project=PROJECT, zone=ZONE)))[2],
        lambda found: "compute.instances.preempted" in {op.operation_type for op in found}),
    Row("vm: a preempted one is started again", "SPOT", lambda w: (
        w.running_vm(scheduling=SPOT), w.preempt(0), w.advance(LONG), w.done(w.on_vm("start")),
        w.vm().status)[4], lambda status: status == "RUNNING"),
    Row("vm: stopped ones are not billed", "VM", lambda w: (
        w.running_vm(scheduling=SPOT), w.advance(100), w.preempt(0), w.advance(LONG),
        w.billed()["vm"])[4], lambda seconds: 100 <= seconds < 200),
)  # fmt: skip


def maintained(w: EmulatedCompute, days: float = 7, **more: Any) -> EmulatedCompute:
    w.running_slice()
    w.engine.announce_maintenance(w.record(), timedelta(days=days), **more)
    return w


def expired(w: EmulatedCompute) -> tuple[str, list[api.Instance], int]:
    w.running_slice(scheduling=FLEX)
    [group] = w.engine.groups.values()
    w.until(lambda: group.topology_state == "DEACTIVATING")
    w.advance(LONG)
    return w.topology(), w.vms(), w.group().target_size


FAULT_ROWS = (
    Row("maintenance: announced on all VMs of the slice", "MN", lambda w: maintained(w).vms(),
        lambda vms: len(vms) == 4 and all(
            vm.resource_status.upcoming_maintenance.maintenance_status == "PENDING" for vm in vms)),
    Row("maintenance: can be started early", "MN", lambda w: maintained(w).vms()[0],
        lambda vm: vm.resource_status.upcoming_maintenance.can_reschedule
        and vm.resource_status.upcoming_maintenance.type_ == "SCHEDULED"),
    Row("maintenance: started on one VM it begins on all", "MS", lambda w: (
        name := maintained(w).vms()[0].name, w.on_vm("perform_maintenance", name), w.vms())[2],
        lambda vms: all(
            vm.resource_status.upcoming_maintenance.maintenance_status == "ONGOING" for vm in vms)),
    Row("maintenance: over, the slice runs again", "MS", lambda w: (
        name := maintained(w).vms()[0].name, w.on_vm("perform_maintenance", name),
        w.advance(2 * LONG), w.vms(), w.topology())[3:],
        lambda found: found[1] == "ACTIVE" and not any(
            vm.resource_status.upcoming_maintenance.type_ for vm in found[0])),
    Row("maintenance: an urgent one cannot be started early", "MN", lambda w: (
        name := maintained(w, scheduled=False).vms()[0].name,
        w.on_vm("perform_maintenance", name)), (400, "No maintenance")),
    Row("maintenance: none that could be started", "MS", lambda w: (
        w.running_vm(), w.on_vm("perform_maintenance")), (400, "No maintenance")),
    Row("host error: on demand it is repaired under its name", "VM", lambda w: (
        w.running_vm(), w.engine.host_error(w.record(), w.clock.now()), w.vm().status,
        w.advance(LONG), w.vm().status)[2::2], lambda found: found == ("REPAIRING", "RUNNING")),
    Row("host error: a faulty host needs reasons", "VM", lambda w: (
        w.running_vm(), w.on_vm(
            "report_host_as_faulty", instances_report_host_as_faulty_request_resource={})),
        (400, "faultReasons")),
    Row("loss: with DO_NOTHING a VM stays away", "REP", lambda w: (
        w.running_slice(scheduling=DELETED_SPOT), w.preempt(1), w.advance(LONG), w.group(),
        w.counts())[3:],
        lambda found: found[0].target_size == 4
        and found[1] == {"running": 3, "non_existent": 1}),
    Row("loss: with REPAIR a VM comes back under its name", "REP", lambda w: (
        w.running_slice(on_failure=REPAIR), sorted(vm.name for vm in w.vms()),
        w.on_vm("delete", w.vms()[0].name), w.advance(LONG),
        sorted(vm.name for vm in w.vms()))[1::3], lambda found: found[0] == found[1]),
    Row("loss: at the end of its run time the topology is deactivated", "ASSUMED", expired,
        lambda found: found == ("INCOMPLETE", [], 4)),
    Row("loss: the topology is not active any more", "ASSUMED", lambda w: (
        w.running_slice(scheduling=SPOT), w.preempt(1), w.topology())[2],
        lambda state: state == "INCOMPLETE"),
)  # fmt: skip

RESERVATION_ROWS = (
    Row("reservation: a slice of it", "RSV", lambda w: (
        reserved(4)(w), w.prepare(**bound()), w.add_group(), w.advance(LONG), w.topology())[4],
        lambda state: state == "ACTIVE"),
    Row("reservation: how much of it is used", "RSV", lambda w: (
        reserved(4)(w), w.prepare(**bound()), w.add_group(), w.advance(LONG),
        w.Reservations.get(project=PROJECT, zone=ZONE, reservation="res"))[4],
        lambda found: found.specific_reservation.in_use_count == 4 and found.status == "READY"),
    Row("reservation: by its path", "RSV", lambda w: (
        reserved(4)(w), w.prepare(**bound(f"projects/{PROJECT}/reservations/res")),
        w.add_group(), w.advance(LONG), w.topology())[4], lambda state: state == "ACTIVE"),
    Row("reservation: of the slice's block", "RSV", lambda w: (
        reserved(4)(w),
        w.prepare(**bound(f"projects/{PROJECT}/reservations/res/reservationBlocks/b")),
        w.add_group(), w.advance(LONG), w.topology())[4], lambda state: state == "ACTIVE"),
    Row("reservation: missing", "CA", lambda w: (
        w.prepare(**bound()), w.add_group(), w.advance(120), w.last_error().message)[3],
        lambda text: text == "Specified reservation res does not exist."),
    Row("reservation: full", "CA", lambda w: (
        reserved(3)(w), w.prepare(**bound()), w.add_group(), w.advance(120),
        w.last_error().message)[4],
        lambda text: text.endswith("does not have available resources for the request.")),
    Row("reservation: of another machine type", "CA", lambda w: (
        reserved(4, machine="ct6e-standard-8t")(w), w.prepare(**bound()), w.add_group(),
        w.advance(120), w.last_error().message)[4],
        lambda text: "is incorrect for the requested resources" in text),
    Row("reservation: not ready", "CA", lambda w: (
        reserved(4)(w), delay(w, 2 * LONG), w.prepare(**bound()), w.add_group(), w.advance(120),
        w.last_error().message)[5],
        lambda text: "it requires reservation to be in READY state" in text),
    Row("reservation: needs no quota", "QUOTA", lambda w: (
        without(quota=0)(w), reserved(4)(w), w.prepare(**bound()), w.add_group(), w.advance(LONG),
        w.topology())[5], lambda state: state == "ACTIVE"),
    Row("reservation: beside the stock", "RSV", lambda w: (
        without(stock=0)(w), reserved(4)(w), w.prepare(**bound()), w.add_group(), w.advance(LONG),
        w.topology())[5], lambda state: state == "ACTIVE"),
    Row("reservation: with the standard model", "CONSUME", lambda w: (
        without(quota=0)(w), reserved(4)(w), w.prepare(reservation_affinity=affinity("res")),
        w.add_group(), w.advance(LONG),
        w.Reservations.get(project=PROJECT, zone=ZONE, reservation="res"))[5],
        lambda found: found.specific_reservation.in_use_count == 4),
    Row("reservation: without a count", "REST", reserved(0), (400, "count")),
    Row("reservation: of a machine that the zone lacks", "REST",
        reserved(4, machine="tpu7x-standard-4t"), (400, "machineType")),
    Row("reservation: in use it stays", "REST", lambda w: (
        reserved(4)(w), w.prepare(**bound()), w.add_group(), w.advance(LONG),
        w.Reservations.delete_unary(project=PROJECT, zone=ZONE, reservation="res")),
        (400, "already being used")),
    Row("calendar: reserved at once", "CAL", lambda w: (calendar()(w), future(w))[1],
        lambda found: found.status.procurement_status == "COMMITTED"),
    Row("calendar: its reservation is made when it starts", "FUTURE", lambda w: (
        calendar()(w), w.prepare(**bound("cal-res")), w.add_group(), w.advance(120),
        w.last_error().message)[4],
        lambda text: "does not exist" in text),
    Row("calendar: its reservation may be made late", "ASSUMED", lambda w: (
        calendar()(w), w.advance(LONG + 1), future(w))[2],
        lambda found: found.status.procurement_status == "PROVISIONING"
        and not found.status.auto_created_reservations),
    Row("calendar: fulfilled when it has started", "CAL", lambda w: (
        calendar()(w), w.advance(LONG + LATE), future(w))[2],
        lambda found: found.status.procurement_status == "FULFILLED"
        and found.status.fulfilled_count == 4),
    Row("calendar: VMs end with it", "CAL", lambda w: (
        calendar(days=1)(w), w.prepare(**bound("cal-res")), w.add_group(), w.advance(2 * LONG),
        w.topology(), w.advance(2 * 86400), w.vms(), w.counts())[4::2],
        lambda found: found == ("ACTIVE", [])),
    Row("calendar: not with the standard model", "BOUND", lambda w: (
        calendar()(w), w.advance(LONG + LATE), w.prepare(reservation_affinity=affinity("cal-res")),
        w.add_group(), w.advance(120), w.last_error().message)[5],
        lambda text: "is incorrect for the requested resources" in text),
    Row("calendar: cannot be cancelled", "CAL", lambda w: (
        calendar()(w), w.FutureReservations.cancel_unary(
            project=PROJECT, zone=ZONE, future_reservation="cal")), (400, "cannot be changed")),
    Row("calendar: cannot be deleted", "CAL", lambda w: (
        calendar()(w), w.FutureReservations.delete_unary(
            project=PROJECT, zone=ZONE, future_reservation="cal")), (400, "cannot be changed")),
    Row("calendar: of 12 chips", "CAL", calendar(3), (400, "power of two")),
    Row("calendar: of 2,048 chips", "CAL", calendar(512), (400, "1024")),
    Row("calendar: for 91 days", "CAL", calendar(days=91), (400, "1 to 90 days")),
    Row("calendar: for half a day", "CAL", calendar(days=0), (400, "days")),
    Row("calendar: TPU7x", "CALTPU", calendar(machine="tpu7x-standard-4t", zone="us-central1-c")),
    Row("calendar: v6e in Europe", "CALTPU", calendar(zone="europe-west4-a")),
    Row("calendar: in a zone without it", "CAL", calendar(
        zone="us-central1-b"), (400, "us-central1-b")),
    Row("calendar: in the past", "CAL", calendar(starts=-60), (400, "past")),
    Row("calendar: a mode that is no calendar", "CAL", calendar(mode="DEFAULT"),
        (400, "reservationMode")),
)  # fmt: skip


def metadata_of(w: EmulatedCompute, path: str) -> list[str | None]:
    return [w.read_metadata(w.record(worker).name, path) for worker in range(4)]


METADATA_ROWS = (
    Row("metadata: worker numbers", "JAX", lambda w: (
        w.running_slice(), metadata_of(w, "attributes/agent-worker-number"))[1],
        lambda found: found == ["0", "1", "2", "3"]),
    Row("metadata: bare names in the order of the workers", "JAX", lambda w: (
        w.running_slice(), metadata_of(w, "attributes/worker-network-endpoints"),
        [w.record(worker).name for worker in range(4)])[1:],
        lambda found: found[0] == [",".join(found[1])] * 4),
    Row("metadata: JAX before 0.10 cannot read the names, which have no third part", "JAX",
        lambda w: (w.running_slice(), metadata_of(w, "attributes/worker-network-endpoints"))[1],
        lambda found: max(len(each.split(":")) for each in found[0].split(",")) < 3),
    Row("metadata: the order of the API is another", "JAX", lambda w: (
        w.running_slice(topology="8x8", size=16), [vm.name for vm in w.vms()],
        [w.record(worker).name for worker in range(16)])[1:],
        lambda found: found[0] != found[1] and set(found[0]) == set(found[1])),
    Row("metadata: accelerator type", "JAX", lambda w: (
        w.running_slice(), metadata_of(w, "attributes/accelerator-type"))[1],
        lambda found: found == ["v6e-16"] * 4),
    Row("metadata: tpu-env", "JAX", lambda w: (w.running_slice(topology="2x4", size=2),
                                              w.tpu_env(1))[1],
        lambda env: (env["TPU_ACCELERATOR_TYPE"], env["TOPOLOGY"], env["HOST_BOUNDS"],
                     env["TPU_WORKER_ID"]) == ("v6e-8", "2x4", "1,2,1", "1")),
    Row("metadata: no preemption", "VM", lambda w: (
        w.running_slice(), metadata_of(w, "preempted"))[1], lambda found: found == ["FALSE"] * 4),
    Row("metadata: a preemption", "VM", lambda w: (
        w.running_slice(scheduling=SPOT), w.preempt(2), metadata_of(w, "preempted"))[2],
        lambda found: found == ["FALSE", "FALSE", "TRUE", "FALSE"]),
    Row("metadata: upcoming maintenance", "MN", lambda w: metadata_of(
        maintained(w), "upcoming-maintenance")[0],
        lambda text: '"maintenance_status": "PENDING"' in text),
    Row("metadata: maintenance begins", "VM", lambda w: (
        maintained(w, days=0), metadata_of(w, "maintenance-event"))[1],
        lambda found: found[0] == "TERMINATE_ON_HOST_MAINTENANCE"),
    Row("metadata: the token of its service account", "VM", lambda w: (
        w.running_vm(service_accounts=[{"email": "a@b", "scopes": ["cloud-platform"]}]),
        w.read_metadata("vm", "service-accounts/default/token"))[1],
        lambda text: "access_token" in text),
    Row("metadata: none without a service account", "VM", lambda w: (
        w.running_vm(), w.read_metadata("vm", "service-accounts/default/token"))[1],
        lambda text: text is None),
    Row("metadata: that of the template", "META", lambda w: (
        w.running_vm(metadata={"items": [{"key": "startup-script", "value": "echo"}]}),
        w.read_metadata("vm", "attributes/startup-script"))[1], lambda text: text == "echo"),
)  # fmt: skip

CATALOG_ROWS = (
    Row("images: the newest of a family", "IMG", lambda w: w.Images.get_from_family(
        project="ubuntu-os-accelerator-images", family=IMAGE.rpartition("/")[2]),
        lambda image: image.status == "READY" and not image.deprecated.state
        and image.disk_size_gb == 10),
    Row("images: an older one is deprecated", "IMG", lambda w: list(
        w.Images.list(project="ubuntu-os-accelerator-images")),
        lambda found: {image.deprecated.state for image in found} == {"", "DEPRECATED"}),
    Row("images: a family that does not exist", "IMG", lambda w: w.Images.get_from_family(
        project="ubuntu-os-accelerator-images", family="other"), (404, "was not found")),
    Row("machine types: of a zone with v6e", "MACH", lambda w: w.MachineTypes.get(
        project=PROJECT, zone=ZONE, machine_type=MACHINE),
        lambda machine: (machine.guest_cpus, machine.memory_mb) == (180, 720 * 1024)),
    Row("machine types: one that the zone lacks", "MACH", lambda w: w.MachineTypes.get(
        project=PROJECT, zone=ZONE, machine_type="tpu7x-standard-4t"), (404, "was not found")),
    Row("machine types: by a filter", "REST", lambda w: list(w.MachineTypes.list(
        api.ListMachineTypesRequest(project=PROJECT, zone=ZONE, filter="name : ct6e*"))),
        lambda found: len(found) == 3),
    Row("zones: of a region", "REST", lambda w: w.Zones.get(project=PROJECT, zone=ZONE),
        lambda zone: zone.region.endswith(REGION)),
    Row("zones: one that does not exist", "REST",
        lambda w: w.Zones.get(project=PROJECT, zone="us-nowhere1-a"), (404, "was not found")),
    Row("project: its number", "REST", lambda w: w.Projects.get(project=PROJECT),
        lambda project: project.id and project.default_service_account),
    Row("listing: in pages", "REST", lambda w: (
        [w.add_vm(f"vm-{n}") for n in range(5)], w.advance(LONG),
        [len(page.items) for page in w.Instances.list(api.ListInstancesRequest(
            project=PROJECT, zone=ZONE, max_results=2)).pages])[2],
        lambda sizes: sizes == [2, 2, 1]),
    Row("listing: a page token that is none", "REST", lambda w: w.vms(page_token="é"),
        (400, "pageToken")),
    Row("listing: by label", "REST", lambda w: (
        w.running_vm(name="a", labels={"x": "1"}), w.running_vm(name="b"),
        w.vms(filter="labels.x = 1"))[2], lambda vms: [vm.name for vm in vms] == ["a"]),
    Row("listing: by two clauses", "REST", lambda w: (
        w.running_vm(name="a", labels={"x": "1"}), w.running_vm(name="b"),
        w.vms(filter='(status = "RUNNING") (name eq b)'))[2],
        lambda vms: [vm.name for vm in vms] == ["b"]),
    Row("listing: by a regular expression that matches the whole field", "REST", lambda w: (
        w.running_vm(name="a"), w.vms(filter="machineType eq .*/ct6e-.*"),
        w.vms(filter="machineType eq ct6e"))[1:],
        lambda found: ([vm.name for vm in found[0]], found[1]) == (["a"], [])),
    Row("listing: by a part of a field", "ASSUMED", lambda w: (
        w.running_vm(name="a"), w.vms(filter="machineType : ct6e"))[1], lambda vms: vms == []),
    Row("listing: a filter that is none", "REST", lambda w: w.vms(filter="="), (400, "filter")),
    Row("listing: more than 500 items of a page", "REST", lambda w: w.vms(max_results=501),
        (400, "maxResults")),
    Row("listing: managed instances in pages", "IGM", lambda w: (
        w.running_slice(list_managed_instances_results="PAGINATED"),
        len(w.members(max_results=3)))[1], lambda count: count == 4),
    Row("listing: managed instances without pages", "IGM", lambda w: (
        w.running_slice(), w.InstanceGroupManagers.list_managed_instances(
            api.ListManagedInstancesInstanceGroupManagersRequest(
                project=PROJECT, zone=ZONE, instance_group_manager="slice", max_results=1)),
        )[1], lambda pager: len(next(iter(pager.pages)).managed_instances) == 4),
    Row("operations: wait returns at once here", "OPS", lambda w: w.ZoneOperations.wait(
        project=PROJECT, zone=ZONE, operation=w.add_vm().name),
        lambda op: op.status is api.Operation.Status.RUNNING),
    Row("operations: one that does not exist", "OPS", lambda w: w.ZoneOperations.get(
        project=PROJECT, zone=ZONE, operation="other"), (404, "was not found")),
    Row("operations: begin PENDING", "OPS", lambda w: w.operation(w.add_policy()),
        lambda op: op.status is api.Operation.Status.PENDING and op.progress == 0),
    Row("operations: end DONE", "OPS", lambda w: w.done(w.add_policy()),
        lambda op: op.progress == 100 and op.end_time and op.target_link.endswith("policy")),
    Row("operations: an error has an HTTP status", "OPS", then(
        without(stock=0), lambda w: w.done(w.add_vm())),
        lambda op: op.http_error_status_code == 503),
)  # fmt: skip

ROWS = (
    *POLICY_ROWS, *TEMPLATE_ROWS, *GROUP_ROWS, *SIZE_ROWS, *CAPACITY_ROWS, *VM_ROWS, *FAULT_ROWS,
    *RESERVATION_ROWS, *METADATA_ROWS, *CATALOG_ROWS,
)  # fmt: skip
