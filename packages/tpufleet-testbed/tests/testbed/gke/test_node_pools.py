"""The GKE emulator, through Google's client.

The multi-host shapes are among those that Google's xpk creates (core/system_characteristics.py).
"""

from __future__ import annotations

from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.container_v1", reason="pip install 'tpufleet[gke]'")

from google.api_core import exceptions
from google.cloud import container_v1 as api

from tests.testbed.gke.faulty_gke import FaultyGke
from tpufleet.clocks import ManualClock
from tpufleet_testbed.gke.grpc_server import GkeServer, client

PARENT = "projects/p/locations/us-central1/clusters/c"
ZONE = "us-central1-a"


class Cluster:
    """An emulator on a manual clock, with Google's client connected to it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.gke = FaultyGke(clock=self.clock)
        self.server = GkeServer(self.gke).start()
        self.client = client(self.server.address)

    def create(self, pool: api.NodePool) -> api.Operation:
        return self.client.create_node_pool(parent=PARENT, node_pool=pool, timeout=900)

    def get(self, name: str = "pool") -> api.NodePool:
        return self.client.get_node_pool(name=f"{PARENT}/nodePools/{name}", timeout=900)

    def operation(self, operation: api.Operation) -> api.Operation:
        name = f"projects/p/locations/us-central1/operations/{operation.name}"
        return self.client.get_operation(name=name, timeout=900)


def node_pool(machine="ct5lp-hightpu-4t", nodes=4, topology="4x4", name="pool", **config):
    policy = api.NodePool.PlacementPolicy(tpu_topology=topology) if topology else None
    return api.NodePool(
        name=name,
        initial_node_count=nodes,
        locations=[ZONE],
        config=api.NodeConfig(machine_type=machine, **config),
        placement_policy=policy,
    )


@pytest.mark.parametrize(
    ("machine", "nodes", "topology"),
    [
        pytest.param("ct5lp-hightpu-1t", 1, "", id="v5e single host, 1 chip"),
        pytest.param("ct5lp-hightpu-8t", 1, "", id="v5e single host, 8 chips"),
        pytest.param("ct5lp-hightpu-4t", 4, "4x4", id="v5e 4x4"),
        pytest.param("ct5lp-hightpu-4t", 64, "16x16", id="v5e 16x16"),
        pytest.param("ct4p-hightpu-4t", 4, "2x2x4", id="v4 2x2x4"),
        pytest.param("ct5p-hightpu-4t", 16, "4x4x4", id="v5p 4x4x4"),
        pytest.param("ct6e-standard-4t", 16, "8x8", id="v6e 8x8"),
    ],
)
def test_supported_shapes_are_accepted(cluster, machine, nodes, topology):
    cluster.create(node_pool(machine, nodes, topology))
    assert cluster.get().status.name == "PROVISIONING"


@pytest.mark.parametrize(
    "pool",
    [
        pytest.param(node_pool(machine="n2-hightpu-4t"), id="unknown machine type"),
        pytest.param(node_pool(nodes=3), id="node count does not match the topology"),
        pytest.param(node_pool(topology=""), id="multi-host without a topology"),
        pytest.param(node_pool(nodes=1, topology="2x2"), id="single host with a topology"),
        pytest.param(node_pool(name="Pool"), id="upper-case name"),
        pytest.param(node_pool(name="p" * 41), id="name over 40 characters"),
        pytest.param(node_pool(labels={"kubernetes.io/x": "y"}), id="reserved label"),
        pytest.param(node_pool(labels={"x": "y" * 64}), id="label value over 63 characters"),
    ],
)
def test_invalid_node_pools_are_rejected(cluster, pool):
    with pytest.raises(exceptions.InvalidArgument):
        cluster.create(pool)
    assert cluster.gke.pools == {}


def test_creation_and_deletion_are_long_running_operations(cluster):
    created = cluster.create(node_pool())
    assert cluster.operation(created).status.name == "RUNNING"
    cluster.clock.advance(cluster.gke.creation_time)
    assert cluster.operation(created).status.name == "DONE"
    assert cluster.get().status.name == "RUNNING"
    deleted = cluster.client.delete_node_pool(name=f"{PARENT}/nodePools/pool", timeout=900)
    assert cluster.get().status.name == "STOPPING"
    cluster.clock.advance(cluster.gke.deletion_time)
    assert cluster.operation(deleted).status.name == "DONE"
    with pytest.raises(exceptions.NotFound):
        cluster.get()


def test_a_stockout_fails_the_operation_and_leaves_the_pool_in_error(cluster):
    cluster.gke.stock[ZONE, "ct5lp-hightpu-4t"] = 3
    created = cluster.create(node_pool())
    cluster.clock.advance(cluster.gke.creation_time)
    assert cluster.operation(created).error.code == 8  # RESOURCE_EXHAUSTED
    pool = cluster.get()
    assert pool.status.name == "ERROR"
    assert [condition.code.name for condition in pool.conditions] == ["GCE_STOCKOUT"]


def test_a_name_can_be_used_once(cluster):
    cluster.create(node_pool())
    with pytest.raises(exceptions.AlreadyExists):
        cluster.create(node_pool())


def test_finished_operations_are_listed_for_a_while(cluster):
    cluster.create(node_pool())
    cluster.clock.advance(timedelta(hours=1))
    parent = "projects/p/locations/us-central1"
    assert len(cluster.client.list_operations(parent=parent, timeout=900).operations) == 1
    cluster.clock.advance(timedelta(hours=24))
    assert list(cluster.client.list_operations(parent=parent, timeout=900).operations) == []
