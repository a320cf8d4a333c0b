"""The emulated GKE, sentence by sentence from Google's documentation, seen through Google's client.

The list was written from the documentation, without looking at the emulator. Sources:

- REST: https://cloud.google.com/kubernetes-engine/docs/reference/rest/v1, as in Google's discovery
  document of revision 20261027
- GCA: Google's cluster autoscaler for GKE, and that for Compute Engine
  (https://github.com/kubernetes/autoscaler), which read these fields and errors
- TPUS, PLAN, NODES: .../kubernetes-engine/docs/concepts/tpus, .../concepts/plan-tpus and
  .../troubleshooting/node-pools
- MODELS: https://cloud.google.com/compute/docs/instances/provisioning-models
- answers of GKE that public reports quote, which `api_errors` lists
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("google.cloud.container_v1", reason="pip install 'tpufleet[gke]'")

from google.api_core import exceptions
from google.cloud import container_v1 as api

from tests.provisioner.simulated_nodes import SimulatedNodes
from tests.testbed.gke.test_node_pools import PARENT, ZONE, Cluster, node_pool
from tpufleet_testbed.gke import api_errors

MACHINE, LABEL, REGION = "ct5lp-hightpu-4t", "tpu-v5-lite-podslice", "us-central1"
Placement = api.NodePool.PlacementPolicy
Act = Callable[[Cluster], Any]


def pool(cluster: Cluster, placement: Any = None, **options: Any) -> api.NodePool:
    """A pool after its creation, as GKE returns it."""
    request = node_pool(**options)
    if placement is not None:
        request.placement_policy = placement
    create(cluster, request)
    return cluster.get()


def create(cluster: Cluster, request: api.NodePool) -> api.Operation:
    operation = cluster.create(request)
    cluster.clock.advance(cluster.gke.creation_time)
    cluster.gke.advance()
    return cluster.operation(operation)


def node(cluster: Cluster, **options: Any) -> Any:
    cluster.gke.nodes = nodes = SimulatedNodes(cluster.clock)
    pool(cluster, **options)
    return nodes.all()[0]


def labels(cluster: Cluster, **options: Any) -> dict[str, str]:
    return dict(node(cluster, **options)["metadata"]["labels"])


def reserved(name: str) -> api.ReservationAffinity:
    return api.ReservationAffinity(
        consume_reservation_type="SPECIFIC_RESERVATION",
        key="compute.googleapis.com/reservation-name",
        values=[name],
    )


def flex_start(name: str = "pool", **config: Any) -> api.NodePool:
    request = node_pool(name=name, flex_start=True, **config)
    request.initial_node_count = 0
    request.autoscaling = api.NodePoolAutoscaling(enabled=True, max_node_count=4)
    return request


def flex_start_with(**fields: Any) -> Act:
    return pool_with(flex_start, **fields)


def pool_with(base: Callable[[], api.NodePool] = node_pool, **fields: Any) -> Act:
    def act(cluster: Cluster) -> None:
        request = base()
        for name, value in fields.items():
            setattr(request, name, value)
        cluster.create(request)

    return act


def flex_start_with_reservations(cluster: Cluster) -> None:
    request = flex_start()
    request.config.reservation_affinity.consume_reservation_type = "ANY_RESERVATION"
    cluster.create(request)


def deletion(cluster: Cluster) -> api.Operation:
    pool(cluster)
    return cluster.client.delete_node_pool(name=f"{PARENT}/nodePools/pool", timeout=900)


def out_of_stock(cluster: Cluster) -> api.NodePool:
    cluster.gke.stock[ZONE, MACHINE] = 3
    return pool(cluster)


def out_of_quota_later(cluster: Cluster) -> api.NodePool:
    text = api_errors.text(
        "late-quota", cluster="c", pool="pool", metric="TPU_LITE_PODSLICE_V5", nodes=4, limit=8
    )
    cluster.gke.fail_next_creation(8, text, "GCE_QUOTA_EXCEEDED")
    return pool(cluster)


def without_locations(cluster: Cluster) -> list[str]:
    cluster.gke.zones = ("us-central1-c",)
    request = node_pool()
    request.locations = []
    create(cluster, request)
    return list(cluster.get().locations)


def changed_etag(cluster: Cluster) -> bool:
    cluster.create(node_pool())
    before = cluster.get().etag
    cluster.gke.set_status("pool", "ERROR", "x", "GCE_STOCKOUT")
    return bool(before) and cluster.get().etag != before


def by_deprecated_fields(cluster: Cluster) -> str:
    names = {"project_id": "p", "zone": REGION, "cluster_id": "c"}
    cluster.client.create_node_pool(
        request=api.CreateNodePoolRequest(node_pool=node_pool(), **names), timeout=900
    )
    request = api.GetNodePoolRequest(node_pool_id="pool", **names)
    return str(cluster.client.get_node_pool(request=request, timeout=900).name)


def nodes_of_queued(cluster: Cluster) -> int:
    cluster.gke.nodes = nodes = SimulatedNodes(cluster.clock)
    request = flex_start()
    request.queued_provisioning = api.NodePool.QueuedProvisioning(enabled=True)
    create(cluster, request)
    return len(nodes.all())


def nodes_after_max_run_duration(cluster: Cluster) -> list[int]:
    cluster.gke.nodes = nodes = SimulatedNodes(cluster.clock)
    create(cluster, flex_start(max_run_duration=timedelta(hours=1)))
    cluster.gke.advance()
    before = len(nodes.all())
    cluster.clock.advance(timedelta(hours=1))
    cluster.gke.advance()
    return [before, len(nodes.all())]


def reservation_error(known: dict[str, int], *names: str) -> Act:
    def act(cluster: Cluster) -> str:
        cluster.gke.reservations = known
        for number, name in enumerate(names):
            created = create(
                cluster, node_pool(name=f"pool-{number}", reservation_affinity=reserved(name))
            )
        return str(created.error.message)

    return act


def flex_start_quota(spot: int, on_demand: int) -> Act:
    def act(cluster: Cluster) -> str:
        cluster.gke.quotas[REGION, LABEL, "spot"] = spot
        cluster.gke.quotas[REGION, LABEL, "on-demand"] = on_demand
        create(cluster, flex_start())
        return cluster.get().status.name

    return act


VALUES: dict[str, tuple[Act, object]] = {
    # REST, NodePool: output and defaults
    "selfLink: server-defined URL": (
        lambda c: pool(c).self_link,
        f"https://container.googleapis.com/v1/{PARENT}/nodePools/pool",
    ),
    "instanceGroupUrls: of the managed instance groups": (
        lambda c: ["/zones/us-central1-a/instanceGroupManagers/gke-c-pool-" in url
                   for url in pool(c).instance_group_urls],
        [True],
    ),
    "etag: a checksum that the server computes": (changed_etag, True),
    "version: has a default": (lambda c: bool(pool(c).version), True),
    "locations: those of the cluster if unspecified": (without_locations, ["us-central1-c"]),
    "diskSizeGb: 100 if unspecified": (lambda c: pool(c).config.disk_size_gb, 100),
    "diskSizeGb: as requested": (lambda c: pool(c, disk_size_gb=50).config.disk_size_gb, 50),
    "diskType: pd-standard if unspecified": (lambda c: pool(c).config.disk_type, "pd-standard"),
    "serviceAccount: default if unspecified": (
        lambda c: pool(c).config.service_account, "default",
    ),
    "upgrade strategy: SURGE if unspecified": (
        lambda c: pool(c).upgrade_settings.strategy.name, "SURGE",
    ),
    "upgrade strategy: SHORT_LIVED of flex-start": (
        lambda c: (create(c, flex_start()), c.get().upgrade_settings.strategy.name)[1],
        "SHORT_LIVED",
    ),
    "project, zone and cluster: deprecated fields": (by_deprecated_fields, "pool"),
    # REST, StatusCondition
    "GCE_STOCKOUT: resources are temporarily unavailable": (
        lambda c: [(one.code.name, int(one.canonical_code)) for one in out_of_stock(c).conditions],
        [("GCE_STOCKOUT", 8)],  # google.rpc.Code RESOURCE_EXHAUSTED
    ),
    "GCE_QUOTA_EXCEEDED: quota was exceeded": (
        lambda c: [one.code.name for one in out_of_quota_later(c).conditions],
        ["GCE_QUOTA_EXCEEDED"],
    ),
    "ERROR: details in statusMessage": (
        lambda c: "GCE_STOCKOUT" in out_of_stock(c).status_message, True,
    ),
    # REST, Operation
    "operationType of a creation": (
        lambda c: c.create(node_pool()).operation_type.name, "CREATE_NODE_POOL",
    ),
    "operationType of a deletion": (
        lambda c: deletion(c).operation_type.name, "DELETE_NODE_POOL",
    ),
    "location: of the cluster": (lambda c: c.create(node_pool()).location, REGION),
    "selfLink of an operation": (
        lambda c: c.create(node_pool()).self_link.partition("/operations/")[0],
        f"https://container.googleapis.com/v1/projects/p/locations/{REGION}",
    ),
    "targetLink: the resource being modified": (
        lambda c: c.create(node_pool()).target_link,
        f"https://container.googleapis.com/v1/{PARENT}/nodePools/pool",
    ),
    "startTime and endTime": (
        lambda c: (done := create(c, node_pool())).end_time > done.start_time > "2",
        True,
    ),
    "error: in case of failure": (
        lambda c: (out_of_stock(c), c.client.list_operations(
            parent="projects/p/locations/us-central1", timeout=900).operations[0].error.code)[1],
        8,
    ),
    "DONE: either cancelled or completed": (
        lambda c: create(c, node_pool()).status.name, "DONE",
    ),
    # TPUS, PLAN, and labels as in GCA
    "node label: accelerator": (
        lambda c: labels(c)["cloud.google.com/gke-tpu-accelerator"], LABEL,
    ),
    "node label: topology": (lambda c: labels(c)["cloud.google.com/gke-tpu-topology"], "4x4"),
    "node label: topology of a single host that no request names": (
        lambda c: labels(c, machine="ct5lp-hightpu-1t", nodes=1, topology="")[
            "cloud.google.com/gke-tpu-topology"],
        "1x1",
    ),
    "node label: chips of the machine": (
        lambda c: labels(c)["cloud.google.com/gke-accelerator-count"], "4",
    ),
    "node label: machine family": (lambda c: labels(c)["cloud.google.com/machine-family"], "ct5lp"),
    "node label: pool": (lambda c: labels(c)["cloud.google.com/gke-nodepool"], "pool"),
    "node label: machine type": (lambda c: labels(c)["node.kubernetes.io/instance-type"], MACHINE),
    "node label: zone": (lambda c: labels(c)["topology.kubernetes.io/zone"], ZONE),
    "node label: region": (lambda c: labels(c)["topology.kubernetes.io/region"], REGION),
    "node label: on demand": (lambda c: labels(c)["cloud.google.com/gke-provisioning"], "standard"),
    "node label: spot": (
        lambda c: labels(c, spot=True)["cloud.google.com/gke-provisioning"], "spot",
    ),
    "node label: of the request": (lambda c: labels(c, labels={"team": "a"})["team"], "a"),
    "node: chips are google.com/tpu": (
        lambda c: node(c)["status"]["allocatable"]["google.com/tpu"], "4",
    ),
    # REST, MODELS: flex-start
    "queuedProvisioning: nodes only through ProvisioningRequests": (nodes_of_queued, 0),
    "maxRunDuration: for which nodes exist": (nodes_after_max_run_duration, [4, 0]),
    "flex-start consumes preemptible quota": (flex_start_quota(16, 0), "RUNNING"),
    "flex-start consumes standard quota if there is no other": (
        flex_start_quota(0, 16), "RUNNING",
    ),
    # GCA: reservations
    "a reservation with room": (reservation_error({"r": 8}, "r", "r"), ""),
    "a reservation without room": (
        reservation_error({"r": 7}, "r", "r"), api_errors.text("full-reservation", name="r"),
    ),
    "a reservation that does not exist": (
        reservation_error({"r": 8}, "s"), api_errors.text("no-reservation", name="s"),
    ),
    "a block of a reservation": (
        reservation_error({"r": 8}, "projects/p/reservations/r/reservationBlocks/b"), "",
    ),
    "a compact policy of tpu7x": (
        lambda c: pool(
            c, machine="tpu7x-standard-4t", nodes=2, topology="",
            placement=Placement(type_="COMPACT", tpu_topology="2x2x2"),
        ).status_message,
        api_errors.text("workload-policy-required", machine="tpu7x-standard-4t"),
    ),
    "a workload policy of tpu7x": (
        lambda c: pool(
            c, machine="tpu7x-standard-4t", nodes=2, topology="",
            placement=Placement(policy_name="any", tpu_topology="2x2x2"),
        ).status.name,
        "RUNNING",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("act", "expected"), VALUES.values(), ids=VALUES)
def test_an_answer_is_as_documented(cluster, act, expected):
    assert act(cluster) == expected


def wrong_cluster(call: Callable[[Cluster, str], object]) -> Act:
    def act(cluster: Cluster) -> None:
        cluster.gke.cluster = PARENT
        call(cluster, "projects/p/locations/us-central1/clusters/other")

    return act


def without_machines(cluster: Cluster) -> None:
    cluster.gke.not_offered.add((ZONE, MACHINE))
    cluster.create(node_pool())


def missing_policy(cluster: Cluster) -> None:
    cluster.gke.policies = set()
    pool(cluster, machine="tpu7x-standard-4t", nodes=2, topology="",
         placement=Placement(policy_name="tpu-provisioner-2x2x2"))  # fmt: skip


INVALID = exceptions.InvalidArgument
REFUSALS: dict[str, tuple[Act, type, str]] = {
    "a cluster that does not exist: create": (
        wrong_cluster(lambda c, name: c.client.create_node_pool(
            parent=name, node_pool=node_pool(), timeout=900)),
        exceptions.NotFound, "Not found: projects/p/locations/us-central1/clusters/other",
    ),
    "a cluster that does not exist: list": (
        wrong_cluster(lambda c, name: c.client.list_node_pools(parent=name, timeout=900)),
        exceptions.NotFound, "Not found: projects/p",
    ),
    "a cluster that does not exist: delete": (
        wrong_cluster(lambda c, name: c.client.delete_node_pool(
            name=f"{name}/nodePools/pool", timeout=900)),
        exceptions.NotFound, "Not found: projects/p",
    ),
    "a pool that does not exist": (lambda c: c.get(), exceptions.NotFound, "Not found"),
    "an operation that does not exist": (
        lambda c: c.operation(api.Operation(name="operation-9")), exceptions.NotFound, "Not found",
    ),
    "a name that is in use": (
        lambda c: [c.create(node_pool()) for _ in range(2)],
        exceptions.AlreadyExists, "Already exists",
    ),
    "an invalid name": (
        lambda c: c.create(node_pool(name="Pool")), INVALID,
        'Invalid value for field "node_pool.name": "Pool". Must be a match of regex',
    ),
    "labels of more than 1,024 characters": (
        lambda c: c.create(node_pool(labels={f"{n:040}": "v" * 63 for n in range(10)})),
        INVALID, "1030 characters",
    ),
    "a machine type that the zone does not have": (
        without_machines, INVALID,
        f"Machine type with name '{MACHINE}' does not exist in zone '{ZONE}'",
    ),
    "a topology for a single host": (
        lambda c: c.create(node_pool(nodes=1, topology="2x2")), INVALID,
        "TPU topology can't be specified with single-host TPU slice pool",
    ),
    "a workload policy for a single host": (
        lambda c: pool(c, machine="tpu7x-standard-4t", nodes=1, topology="",
                       placement=Placement(policy_name="tpu-provisioner-2x2x1")),
        INVALID, "TPU topology can't be specified with single-host TPU slice pool",
    ),
    # https://cloud.google.com/kubernetes-engine/docs/how-to/flexible-pod-cidr
    "fewer than 8 pods per node": (
        pool_with(max_pods_constraint=api.MaxPodsConstraint(max_pods_per_node=7)),
        INVALID, "max_pods_per_node must be between 8 and 256",
    ),
    "more than 256 pods per node": (
        pool_with(max_pods_constraint=api.MaxPodsConstraint(max_pods_per_node=257)),
        INVALID, "max_pods_per_node must be between 8 and 256",
    ),
    # "Each tag within the list must comply with RFC1035."
    "a network tag that is no label of a host name": (
        lambda c: c.create(node_pool(tags=["Team_A"])), INVALID, "Team_A",
    ),
    # "This should be of the form projects/[KEY_PROJECT_ID]/locations/…"
    "a key that is not written as a resource": (
        lambda c: c.create(node_pool(boot_disk_kms_key="my-key")), INVALID, "my-key",
    ),
    # https://cloud.google.com/kubernetes-engine/docs/how-to/data-container-image-preloading
    "images on a secondary disk without image streaming": (
        lambda c: c.create(node_pool(secondary_boot_disks=[
            api.SecondaryBootDisk(disk_image="i", mode="CONTAINER_IMAGE_CACHE")])),
        INVALID, "image streaming",
    ),
    # https://cloud.google.com/compute/docs/instances/reservations-overview
    "spot in a reservation": (
        lambda c: c.create(node_pool(spot=True, reservation_affinity=api.ReservationAffinity(
            consume_reservation_type="SPECIFIC_RESERVATION",
            key="compute.googleapis.com/reservation-name", values=["r"]))),
        INVALID, "spot",
    ),
    # https://cloud.google.com/kubernetes-engine/docs/concepts/dws
    "flex-start that balances zones": (
        flex_start_with(autoscaling=api.NodePoolAutoscaling(
            enabled=True, max_node_count=4, location_policy="BALANCED")),
        INVALID, "location policy ANY",
    ),
    "flex-start that may use reservations": (
        flex_start_with_reservations, INVALID, "NO_RESERVATION",
    ),
    # The chips of a slice are in one place.
    "a slice of several hosts in two zones": (
        pool_with(locations=[ZONE, "us-central1-b"]), INVALID, "one zone",
    ),
    "a policy that is not found": (missing_policy, INVALID, "was not found"),
    "SPECIFIC_RESERVATION without a name": (
        lambda c: c.create(node_pool(reservation_affinity=api.ReservationAffinity(
            consume_reservation_type="SPECIFIC_RESERVATION"))),
        INVALID, "requires the key",
    ),
    "flex-start without autoscaling": (
        flex_start_with(autoscaling=api.NodePoolAutoscaling()), INVALID,
        "Flex start node pools require autoscaling enabled.",
    ),
    "flex-start with nodes": (
        flex_start_with(initial_node_count=4), INVALID,
        "Flex start node pools require initial node count to be set to 0.",
    ),
    "a slice of several hosts whose size is limited in all zones together": (
        flex_start_with(
            autoscaling=api.NodePoolAutoscaling(enabled=True, total_max_node_count=4)
        ),
        INVALID, 'Maximum node count 0 is not a valid size of TPU pod slice with topology "4x4"',
    ),
    "flex-start without any quota": (
        flex_start_quota(0, 0), exceptions.PermissionDenied, "PREEMPTIBLE_TPU_LITE_PODSLICE_V5",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("act", "error", "text"), REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_is_as_documented(cluster, act, error, text):
    with pytest.raises(error) as refused:
        act(cluster)
    assert text in str(refused.value)


# Quotas of Compute Engine: REST (regions, `Quota.metric`) for v4 and v5e, and the names that Cloud
# Quotas shows for the others.
QUOTAS = [
    ("ct4p-hightpu-4t", False, "TPU_PODSLICE_V4"),
    ("ct4p-hightpu-4t", True, "PREEMPTIBLE_TPU_PODSLICE_V4"),
    ("ct5lp-hightpu-4t", False, "TPU_LITE_PODSLICE_V5"),
    ("ct5lp-hightpu-4t", True, "PREEMPTIBLE_TPU_LITE_PODSLICE_V5"),
    ("ct5p-hightpu-4t", False, "TPU_V5P"),
    ("ct5p-hightpu-4t", True, "PREEMPTIBLE_TPU_V5P"),
    ("ct6e-standard-4t", False, "TPUS_PER_TPU_FAMILY"),
    ("ct6e-standard-4t", True, "PREEMPTIBLE_TPU_V6E"),
    ("tpu7x-standard-4t", False, "TPUS_PER_TPU_FAMILY"),
    ("tpu7x-standard-4t", True, "PREEMPTIBLE_TPU7X"),
]


@pytest.mark.parametrize(("machine", "spot", "metric"), QUOTAS)
def test_a_quota_has_the_name_that_users_see(cluster, machine, spot, metric):
    for label in api_errors.QUOTA_METRICS:
        cluster.gke.quotas[REGION, label] = 0
    with pytest.raises(exceptions.PermissionDenied, match=f'resource "{metric}"'):
        cluster.create(node_pool(machine=machine, nodes=1, topology="", spot=spot))
