"""More of what Google documents, mostly in its guides: maintenance, disks, quota, networks, and
what happens to operations and bills. Each row names its page below cloud.google.com."""

from __future__ import annotations

from typing import Any

from google.api_core import exceptions
from google.cloud import tpu_v2

from tests.testbed.cloud_tpu.clients import PARENT, node, queued
from tests.testbed.cloud_tpu.conformance_rows import (
    DISKS_PAGE,
    LONG,
    MAINTENANCE_PAGE,
    OPERATIONS_PAGE,
    PROTO,
    Invalid,
    Precondition,
    Row,
    alpha,
    create,
    created,
    delete_queued,
    disk,
    enqueue,
    gang,
    name,
    names,
    update,
)  # fmt: skip
from tests.testbed.cloud_tpu.emulated_cloud import EmulatedCloud

MANUAL_PAGE = "tpu/docs/manually-start-maintenance"
QUOTA_PAGE = "tpu/docs/quota"
QUEUE_QUOTA_REPORT = "github.com/marin-community/marin/issues/87"
SPOT_PAGE = "tpu/docs/spot"
MANAGE_PAGE = "tpu/docs/managing-tpus-tpu-vm"
V6E_PARENT = "projects/p/locations/us-east5-b"
V3_PARENT = "projects/p/locations/europe-west4-a"


def v6e(accelerator: str = "v6e-8", **fields: Any) -> tpu_v2.Node:
    return tpu_v2.Node(accelerator_type=accelerator, runtime_version="v2-alpha-tpuv6e", **fields)


def v3(accelerator: str = "v3-8") -> tpu_v2.Node:
    return tpu_v2.Node(accelerator_type=accelerator, runtime_version="tpu-ubuntu2204-base")


def announced(world: EmulatedCloud, request: tpu_v2.Node, parent: str = V6E_PARENT) -> Any:
    """A node with maintenance in seven days, as v2alpha1 shows it."""
    created(world, node=request, parent=parent)
    world.plan_maintenance("a", days=7, parent=parent)
    return maintenance(world, parent)


def maintenance(world: EmulatedCloud, parent: str = V6E_PARENT) -> Any:
    return alpha(world).get_node(name=f"{parent}/nodes/a").upcoming_maintenance


def start_maintenance(world: EmulatedCloud, parent: str = V6E_PARENT) -> Any:
    return alpha(world).perform_maintenance(request={"name": f"{parent}/nodes/a"}, timeout=900)


def disks(count: int, zone: str) -> list[tpu_v2.AttachedDisk]:
    return [disk(f"d{number}", zone, read_only=True) for number in range(count)]


def two(world: EmulatedCloud, request: tpu_v2.Node, parent: str = PARENT) -> Any:
    create(world, "a", node=request, parent=parent)
    return create(world, "b", node=request, parent=parent)


def deleted_while_creating(world: EmulatedCloud) -> Any:
    operation = create(world)
    world.client.delete_node(name=name(), timeout=900)
    world.advance(LONG)
    return world.client.get_operation({"name": operation.operation.name}, timeout=900)


def pages(world: EmulatedCloud, size: int) -> list[str]:
    for index in range(5):
        create(world, f"n{index}")
    found = world.client.list_nodes(request={"parent": PARENT, "page_size": size}, timeout=900)
    return [each.name.rpartition("/")[2] for each in found]


GUIDE_ROWS = (
    # Maintenance
    Row("maintenance: can be started by hand on v6e-8", MANUAL_PAGE,
        lambda w: announced(w, v6e()),
        check=lambda found: found.can_reschedule and found.maintenance_status.name == "PENDING"),
    Row("maintenance: cannot be started by hand on v6e-4", MANUAL_PAGE,
        lambda w: announced(w, v6e("v6e-4")), check=lambda found: not found.can_reschedule
        and found.maintenance_status.name == "PENDING"),
    Row("maintenance: cannot be started by hand on v5e", MANUAL_PAGE,
        lambda w: announced(w, node("v5litepod-16"), PARENT),
        check=lambda found: not found.can_reschedule),
    Row("maintenance: ongoing when its window opens", MAINTENANCE_PAGE,
        lambda w: (announced(w, v6e()), w.advance(7 * 86400 + 5), maintenance(w))[-1],
        check=lambda found: found.maintenance_status.name == "ONGOING"
        and not found.can_reschedule),
    Row("maintenance: the window is not after its latest start", MAINTENANCE_PAGE,
        lambda w: announced(w, v6e()), check=lambda found: found.window_start_time
        <= found.latest_window_start_time),
    Row("maintenance: one that is not scheduled", MAINTENANCE_PAGE,
        lambda w: (created(w), w.plan_maintenance("a", days=0.1, scheduled=False),
                   maintenance(w, PARENT))[-1],
        check=lambda found: found.type_.name == "UNSCHEDULED"),
    Row("maintenance: starts immediately by hand", MANUAL_PAGE,
        lambda w: (announced(w, v6e()), start_maintenance(w), maintenance(w))[-1],
        check=lambda found: found.maintenance_status.name == "ONGOING"),
    Row("maintenance: by hand on v5e", MANUAL_PAGE,
        lambda w: (announced(w, node("v5litepod-16"), PARENT), start_maintenance(w, PARENT)),
        Precondition),
    Row("maintenance: by hand without a notification", MANUAL_PAGE,
        lambda w: (created(w, node=v6e(), parent=V6E_PARENT), start_maintenance(w)), Precondition),
    # Disks: the boot disk counts.
    Row("disks: 31 of a v6e", DISKS_PAGE,
        lambda w: create(w, node=v6e(data_disks=disks(31, "us-east5-b")), parent=V6E_PARENT)),
    Row("disks: 32 of a v6e", DISKS_PAGE,
        lambda w: create(w, node=v6e(data_disks=disks(32, "us-east5-b")), parent=V6E_PARENT),
        Invalid),
    Row("disks: 127 of a v5e", DISKS_PAGE,
        lambda w: create(w, data_disks=disks(127, "us-central1-a"))),
    Row("disks: 128 of a v5e", DISKS_PAGE,
        lambda w: create(w, data_disks=disks(128, "us-central1-a")), Invalid),
    Row("disks: attached later", "sdk/gcloud/reference/compute/tpus/tpu-vm/attach-disk",
        lambda w: (created(w), update(w, "data_disks", data_disks=[disk()]), w.advance(LONG),
                   w.client.get_node(name=name()))[-1],
        check=lambda found: [each.source_disk for each in found.data_disks]
        == [disk().source_disk]),
    # Quota
    Row("quota: a v3-8 uses 8 TensorCores", QUOTA_PAGE,
        lambda w: (w.limit_quota(8), two(w, v3(), V3_PARENT)), exceptions.ResourceExhausted,
        "TPUV3sPerProjectPerZone"),
    Row("quota: 16 TensorCores are two v3-8", QUOTA_PAGE,
        lambda w: (w.limit_quota(16), two(w, v3(), V3_PARENT))),
    Row("quota: pods of v3 have their own", QUOTA_PAGE,
        lambda w: (w.limit_quota(0), create(w, node=v3("v3-32"), parent=V3_PARENT)),
        exceptions.ResourceExhausted, "TPUV3sPodPerProjectPerZone"),
    Row("quota: v5litepod-8 needs that for serving", QUOTA_PAGE,
        lambda w: (w.limit_quota(0), create(w, node=node("v5litepod-8", spot=False))),
        exceptions.ResourceExhausted, "TPUV5sLitepodServingPerProjectPerZone"),
    Row("quota: spot nodes use that of preemptible ones", SPOT_PAGE,
        lambda w: (w.limit_quota(0), create(w, node=node("v5litepod-16"))),
        exceptions.ResourceExhausted, "TPUV5sPreemptibleLitepodPerProjectPerZone"),
    Row("quota: of a queued resource", QUOTA_PAGE,
        lambda w: (w.limit_quota(16), enqueue(w, gang(2))), exceptions.ResourceExhausted),
    Row("quota: a queued resource that waits uses it", QUEUE_QUOTA_REPORT,
        lambda w: (w.limit_quota(16), w.empty(), enqueue(w), w.advance(LONG),
                   create(w, "b", node=node("v5litepod-16"))),
        exceptions.ResourceExhausted, "TPUV5sPreemptibleLitepod"),
    Row("quota: a suspended queued resource uses it", QUEUE_QUOTA_REPORT,
        lambda w: (w.limit_quota(16), enqueue(w),
                   w.advance(LONG), w.preempt("a"), w.advance(LONG),
                   enqueue(w, queued("b"), "q2")),
        exceptions.ResourceExhausted, "TPUV5sPreemptibleLitepod"),
    Row("quota: a queued resource that was deleted uses none", QUEUE_QUOTA_REPORT,
        lambda w: (w.limit_quota(16), enqueue(w),
                   w.advance(LONG), w.preempt("a"), w.advance(LONG), delete_queued(w, force=True),
                   w.advance(LONG), enqueue(w, queued("b"), "q2"))),
    # Networks
    Row("network: does not exist", PROTO,
        lambda w: (w.remove("no-network"),
                   create(w, network_config={"network": "no-network"})),
        (Invalid, exceptions.NotFound), "no-network"),
    Row("subnetwork: does not exist", PROTO,
        lambda w: (w.remove("no-subnet"), create(w, network_config={"subnetwork": "no-subnet"})),
        (Invalid, exceptions.NotFound), "no-subnet"),
    # Lifecycle
    Row("a creation whose node is deleted ends", OPERATIONS_PAGE, deleted_while_creating,
        check=lambda operation: operation.done and operation.error.code),
    Row("an operation that is deleted goes on", OPERATIONS_PAGE,
        lambda w: (operation := create(w), w.client.delete_operation(
            {"name": operation.operation.name}), w.advance(LONG), w.state("a"))[-1],
        check=lambda state: state == "READY"),
    Row("an operation that was deleted", OPERATIONS_PAGE,
        lambda w: (operation := create(w), w.client.delete_operation(
            {"name": operation.operation.name}), w.client.get_operation(
            {"name": operation.operation.name})), exceptions.NotFound),
    Row("a stopped node is deleted", MANAGE_PAGE,
        lambda w: (created(w, spot=False), w.client.stop_node({"name": name()}), w.advance(LONG),
                   w.client.delete_node(name=name()), w.advance(LONG), names(w))[-1],
        check=lambda found: found == []),
    Row("a preempted node is deleted", SPOT_PAGE,
        lambda w: (created(w), w.preempt("a"), w.client.delete_node(name=name()),
                   w.advance(LONG), names(w))[-1], check=lambda found: found == []),
    Row("a node that is stopped is not billed", MANAGE_PAGE,
        lambda w: (created(w, spot=False), before := w.billed(),
                   w.client.stop_node({"name": name()}), w.advance(LONG), before, w.billed())[-2:],
        check=lambda billed: billed[0] == billed[1]),
    Row("a name that is used again is another node", PROTO,
        lambda w: (first := created(w), w.client.delete_node(name=name()), w.advance(LONG),
                   first.id, created(w).id)[-2:], check=lambda ids: ids[0] != ids[1]),
    Row("a symptom has its time, type and worker", PROTO,
        lambda w: (created(w, accelerator="v5litepod-16"), w.kill_host("a", 2),
                   w.client.get_node(name=name()).symptoms[0])[-1],
        check=lambda found: found.create_time and found.symptom_type and found.worker_id
        and found.details),
    Row("the health of a node that is being created is not known", PROTO,
        lambda w: (create(w), w.client.get_node(name=name()).health.name)[-1],
        check=lambda health: health == "HEALTH_UNSPECIFIED"),
    Row("all pages together have every node once", "AIP-158", lambda w: pages(w, 2),
        check=lambda found: sorted(found) == [f"n{index}" for index in range(5)]),
    # Queued resources
    Row("queue: the name of a node that exists", PROTO,
        lambda w: (created(w), enqueue(w, queued("a"))), exceptions.AlreadyExists),
)  # fmt: skip
