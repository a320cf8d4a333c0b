"""The emulated GKE behaves as Google documents, seen through Google's client.

Statuses are from the API reference,
https://cloud.google.com/kubernetes-engine/docs/reference/rest/v1/projects.locations.clusters.nodePools
(`Status`, `StatusCondition.Code`); error texts from the reports listed in `api_errors.yaml`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.container_v1", reason="pip install 'tpufleet[gke]'")

from google.api_core import exceptions
from google.cloud import container_v1 as api

from tests.provisioner.simulated_nodes import SimulatedNodes
from tests.testbed.gke.test_node_pools import PARENT, ZONE, Cluster, node_pool
from tpufleet_testbed.gke import kwok_backend

MACHINE, LABEL, REGION = "ct5lp-hightpu-4t", "tpu-v5-lite-podslice", "us-central1"


def create(cluster: Cluster, name: str = "pool", **options: object) -> None:
    cluster.create(node_pool(name=name, **options))


def running(cluster: Cluster, name: str = "pool", **options: object) -> None:
    create(cluster, name, **options)
    cluster.clock.advance(cluster.gke.creation_time)
    cluster.gke.advance()


def delete(cluster: Cluster, name: str = "pool") -> None:
    cluster.client.delete_node_pool(name=f"{PARENT}/nodePools/{name}", timeout=900)


def second_over_quota(cluster: Cluster) -> None:
    cluster.gke.quotas[REGION, LABEL] = 24
    create(cluster, "first")
    create(cluster)


def delete_while_creating(cluster: Cluster) -> None:
    create(cluster)
    delete(cluster)


def delete_twice(cluster: Cluster) -> None:
    running(cluster)
    delete(cluster)
    delete(cluster)


def delete_while_repairing(cluster: Cluster) -> None:
    running(cluster)
    cluster.gke.start_repair("pool")
    delete(cluster)


def delete_while_upgrading(cluster: Cluster) -> None:
    running(cluster)
    cluster.gke.start_upgrade("pool")
    delete(cluster)


def sixth_operation(cluster: Cluster) -> None:
    cluster.gke.max_operations = 5
    for number in range(6):
        create(cluster, f"pool-{number}")


def without_upgrades(cluster: Cluster) -> None:
    pool = node_pool()
    pool.management = api.NodeManagement(auto_repair=True, auto_upgrade=False)
    cluster.create(pool)


REFUSALS: dict[str, tuple[Callable[[Cluster], None], type, str]] = {
    "over quota": (
        second_over_quota,
        exceptions.PermissionDenied,
        r"Insufficient regional quota to satisfy request: resource \"TPU_LITE_PODSLICE_V5\": "
        r"request requires '16.0' and is short '8.0'. project has a quota of '24.0' with '8.0' "
        r"available. View and manage quotas at https://console.cloud.google.com/\S+project=p",
    ),
    "deleted while it is created": (
        delete_while_creating,
        exceptions.FailedPrecondition,
        "Operation operation-.* is currently creating a node pool for cluster c. Please wait and "
        "try again once it is done.",
    ),
    "deleted twice": (
        delete_twice,
        exceptions.FailedPrecondition,
        "Operation operation-.* is currently deleting a node pool",
    ),
    "deleted while it is upgraded": (
        delete_while_upgrading,
        exceptions.FailedPrecondition,
        "Operation operation-.* is currently upgrading a node pool",
    ),
    "deleted while it is repaired": (
        delete_while_repairing,
        exceptions.FailedPrecondition,
        "Operation operation-.* is currently repairing a node pool",
    ),
    "too many operations": (
        sixth_operation,
        exceptions.ResourceExhausted,
        'Too many operations: cluster "c" hits the concurrent operations quota 5, please try',
    ),
    # https://cloud.google.com/kubernetes-engine/docs/concepts/release-channels
    "no upgrades in a release channel": (
        without_upgrades,
        exceptions.InvalidArgument,
        "Auto_upgrade cannot be false when release_channel REGULAR is set.",
    ),
    "no such pool": (delete, exceptions.NotFound, "Not found"),
}


@pytest.mark.parametrize(("act", "error", "text"), REFUSALS.values(), ids=REFUSALS)
def test_a_refused_call(cluster, act, error, text):
    with pytest.raises(error, match=text):
        act(cluster)


def out_of_stock(cluster: Cluster) -> None:
    cluster.gke.stock[ZONE, MACHINE] = 7
    running(cluster, "first")
    running(cluster)


def out_of_spot(cluster: Cluster) -> None:
    cluster.gke.stock[ZONE, MACHINE, "spot"] = 0
    running(cluster, spot=True)


def lost_node(cluster: Cluster) -> None:
    cluster.gke.lose_nodes_of_next_creation(1)
    running(cluster)


def slow(cluster: Cluster) -> None:
    cluster.gke.slow_next_creation(timedelta(minutes=35))
    running(cluster)


def wrong_disk(cluster: Cluster) -> None:
    running(cluster, machine="ct6e-standard-4t", disk_type="pd-balanced")


def hyperdisk(cluster: Cluster) -> None:
    running(cluster, machine="ct6e-standard-4t")


def upgrading(cluster: Cluster) -> None:
    running(cluster)
    cluster.gke.start_upgrade("pool")


def upgraded(cluster: Cluster) -> None:
    upgrading(cluster)
    cluster.clock.advance(cluster.gke.upgrade_time)
    cluster.gke.advance()


def repairing(cluster: Cluster) -> None:
    running(cluster)
    cluster.gke.start_repair("pool")


def repaired(cluster: Cluster) -> None:
    repairing(cluster)
    cluster.clock.advance(cluster.gke.upgrade_time)
    cluster.gke.advance()


def undeletable(cluster: Cluster) -> None:
    running(cluster)
    cluster.gke.fail_next_deletion(13, "internal error")
    delete(cluster)
    cluster.clock.advance(cluster.gke.deletion_time)
    cluster.gke.advance()


STOCKOUT = (
    r"Google Compute Engine: Not all instances running in IGM after \S+s. Expected 4, running 0, "
    r"transitioning 4. Current errors: \[GCE_STOCKOUT\]: Instance 'gke-c-pool-\S+' creation "
    r"failed: The zone 'projects/p/zones/us-central1-a' does not have enough resources"
)
OUTCOMES: dict[str, tuple[Callable[[Cluster], None], str, list[str], str]] = {
    "created": (running, "RUNNING", [], ""),
    "out of stock": (out_of_stock, "ERROR", ["GCE_STOCKOUT"], STOCKOUT),
    "out of one kind of capacity": (out_of_spot, "ERROR", ["GCE_STOCKOUT"], STOCKOUT),
    "a node does not join": (
        lost_node,
        "RUNNING_WITH_ERROR",
        [],
        "Not all instances running in IGM. Expected 4, running 3",
    ),
    # https://cloud.google.com/tpu/docs/attach-durable-block-storage
    "a disk that the machines cannot have": (
        wrong_disk,
        "ERROR",
        [],
        "pd-balanced disk type cannot be used by ct6e-standard-4t machine type",
    ),
    "the disk of v6e": (hyperdisk, "RUNNING", [], ""),
    "a slow creation": (slow, "PROVISIONING", [], ""),
    "an upgrade": (upgrading, "RECONCILING", [], "upgrading"),
    "after an upgrade": (upgraded, "RUNNING", [], ""),
    "a repair": (repairing, "RECONCILING", [], "repairing"),
    "after a repair": (repaired, "RUNNING", [], ""),
    "a deletion that fails": (undeletable, "ERROR", [], "internal error"),
}


@pytest.mark.parametrize(("act", "status", "codes", "text"), OUTCOMES.values(), ids=OUTCOMES)
def test_the_status_of_a_pool(cluster, act, status, codes, text):
    act(cluster)
    pool = cluster.get()
    assert pool.status.name == status
    assert [condition.code.name for condition in pool.conditions] == codes
    if text:
        assert re.search(text, pool.status_message)


# Nodes. https://cloud.google.com/kubernetes-engine/docs/concepts/tpus


@pytest.fixture
def nodes(cluster: Cluster) -> SimulatedNodes:
    cluster.gke.nodes = SimulatedNodes(cluster.clock)
    return cluster.gke.nodes


def chips(nodes: SimulatedNodes) -> list[str | None]:
    return [node["status"]["allocatable"].get("google.com/tpu") for node in nodes.all()]


def test_a_slice_has_all_of_its_nodes_or_none(cluster, nodes):
    """Atomic: "If GKE is unable to deploy one node in the slice, no nodes are deployed"."""
    cluster.gke.stock[ZONE, MACHINE] = 3
    running(cluster)
    assert nodes.all() == []


def test_a_deleted_pool_is_drained_before_its_nodes_are_gone(cluster, nodes):
    """ "When you delete a node pool, GKE drains all the nodes in the node pool":
    https://cloud.google.com/sdk/gcloud/reference/container/node-pools/delete"""
    running(cluster)
    assert not any(node["spec"].get("unschedulable") for node in nodes.all())
    delete(cluster)
    assert [node["spec"].get("unschedulable") for node in nodes.all()] == [True] * 4


def test_a_repair_replaces_all_nodes_of_a_slice(cluster, nodes):
    running(cluster)
    assert len(nodes.all()) == 4
    cluster.gke.start_repair("pool")
    assert nodes.all() == []
    cluster.clock.advance(cluster.gke.upgrade_time)
    cluster.gke.advance()
    assert len(nodes.all()) == 4


def test_nodes_have_the_taint_and_the_labels_of_tpu_nodes(cluster, nodes):
    running(cluster, spot=True)
    node = nodes.all()[0]
    assert {"key": "google.com/tpu", "value": "present", "effect": "NoSchedule"} in (
        node["spec"]["taints"]
    )
    labels = node["metadata"]["labels"]
    assert labels["cloud.google.com/gke-tpu-accelerator"] == LABEL
    assert labels["cloud.google.com/gke-tpu-topology"] == "4x4"
    assert labels["cloud.google.com/gke-spot"] == "true"
    assert labels["cloud.google.com/gke-nodepool"] == "pool"


def test_nodes_of_queued_provisioning_have_its_taint():
    pool = node_pool()
    pool.queued_provisioning = api.NodePool.QueuedProvisioning(enabled=True)
    taint = {"key": "cloud.google.com/gke-queued", "value": "true", "effect": "NoSchedule"}
    assert taint in kwok_backend.kwok_node_pool(pool).taints


def test_the_device_plugin_registers_the_chips_of_a_ready_node_later(cluster, nodes):
    cluster.gke.device_plugin_delay = timedelta(minutes=1)
    running(cluster)
    assert cluster.get().status.name == "RUNNING" and chips(nodes) == [None] * 4
    cluster.clock.advance(timedelta(minutes=1))
    cluster.gke.advance()
    assert chips(nodes) == ["4"] * 4


def test_a_pool_can_be_deleted_before_its_chips_are_registered(cluster, nodes):
    cluster.gke.device_plugin_delay = timedelta(minutes=1)
    running(cluster)
    delete(cluster)
    cluster.clock.advance(timedelta(minutes=2))
    cluster.gke.advance()
    assert nodes.all() == [] and cluster.gke.pools == {}


def test_gke_reserves_some_of_each_node(cluster, nodes):
    """https://cloud.google.com/kubernetes-engine/docs/concepts/plan-node-sizes"""
    running(cluster)
    status = nodes.all()[0]["status"]
    assert status["allocatable"]["cpu"] == "111650m"
    assert status["allocatable"]["memory"] == "185654Mi"


def test_stock_returns_when_a_pool_is_deleted(cluster):
    out_of_stock(cluster)
    for name in ("first", "pool"):
        delete(cluster, name)
    cluster.clock.advance(cluster.gke.deletion_time)
    cluster.gke.advance()
    running(cluster)
    assert cluster.get().status.name == "RUNNING"


def test_reservations_need_no_quota(cluster):
    cluster.gke.quotas[REGION, LABEL] = 0
    affinity = api.ReservationAffinity(
        consume_reservation_type="SPECIFIC_RESERVATION",
        key="compute.googleapis.com/reservation-name",
        values=["r"],
    )
    running(cluster, reservation_affinity=affinity)
    assert cluster.get().status.name == "RUNNING"
