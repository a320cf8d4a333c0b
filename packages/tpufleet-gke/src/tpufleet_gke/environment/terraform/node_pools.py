"""Stage 1, node pools. A multi-host slice is one node pool; single-host slices share one."""

from __future__ import annotations

import math
from typing import Any

from tpufleet.model.tpu.type_lookup import Accelerator
from tpufleet_gke.environment.config import capacity
from tpufleet_gke.environment.config.sections import CpuPool, Environment, Taint, TpuPool
from tpufleet_gke.environment.terraform.gke_cluster import node_account_email
from tpufleet_gke.environment.terraform.hcl import Block, Expression, Nested, reference, resource

# GKE refuses anything else in a cluster that is in a release channel.
# https://cloud.google.com/kubernetes-engine/docs/concepts/release-channels
AUTO_UPGRADE = True
SCOPES = ["https://www.googleapis.com/auth/cloud-platform"]
RESERVATION_KEY = "compute.googleapis.com/reservation-name"
# Its slices are placed by a workload policy of their topology.
# https://cloud.google.com/kubernetes-engine/docs/how-to/tpus
WORKLOAD_POLICY_GENERATION = "tpu7x"


def cpu_pools(environment: Environment) -> list[Block]:
    return [_plain_pool(environment, name, pool) for name, pool in environment.cpu_pools.items()]


def gpu_pools(environment: Environment) -> list[Block]:
    blocks = []
    for name, pool in environment.gpu_pools.items():
        accelerator = Nested(
            type=pool.accelerator,
            count=pool.accelerator_count,
            gpu_driver_installation_config=Nested(gpu_driver_version="LATEST"),
        )
        extra: dict[str, Any] = {"guest_accelerator": accelerator}
        if pool.local_ssds:
            extra["ephemeral_storage_local_ssd_config"] = Nested(local_ssd_count=pool.local_ssds)
        blocks.append(_plain_pool(environment, name, pool, **extra))
    return blocks


def tpu_pools(environment: Environment) -> list[Block]:
    """Those that Terraform manages. The provisioner creates the others when a job needs them."""
    static = {
        name: pool
        for name, pool in environment.tpu_pools.items()
        if pool.managed_by == "terraform" and pool.slices
    }
    policies: dict[str, Block] = {}
    blocks: list[Block] = []
    for name, pool in static.items():
        kind = capacity.shape(pool)
        if has_workload_policy(pool):
            policies.setdefault(kind.topology, _workload_policy(environment, kind))
        if kind.hosts == 1:
            blocks.append(_tpu_pool(environment, name, pool, nodes=pool.slices))
            continue
        for each in capacity.node_pool_names(name, pool):
            blocks.append(_tpu_pool(environment, each, pool, nodes=kind.hosts))
    return [*policies.values(), *blocks]


def has_workload_policy(pool: TpuPool) -> bool:
    """That Terraform creates."""
    kind = capacity.shape(pool)
    several = kind.generation == WORKLOAD_POLICY_GENERATION and kind.hosts > 1
    return several and pool.managed_by == "terraform"


def _plain_pool(environment: Environment, name: str, pool: CpuPool, **extra: Any) -> Block:
    zones = list(pool.zones or environment.zones)
    return _pool(
        environment, name,
        node_locations=zones,
        # In each zone. A later change would replace the pool, hence `lifecycle`.
        initial_node_count=math.ceil(pool.min_nodes / len(zones)),
        max_pods_per_node=capacity.PODS_PER_CPU_NODE,
        autoscaling=Nested(
            total_min_node_count=pool.min_nodes, total_max_node_count=pool.max_nodes,
            location_policy="ANY" if pool.spot else "BALANCED",
        ),
        management=Nested(auto_repair=pool.auto_repair, auto_upgrade=AUTO_UPGRADE),
        upgrade_settings=Nested(max_surge=capacity.SURGE_NODES, max_unavailable=0),
        node_config=_node_config(pool, image_type=pool.image_type, spot=pool.spot, **extra),
        lifecycle=Nested(ignore_changes=[Expression("initial_node_count")]),
    )  # fmt: skip


def _tpu_pool(environment: Environment, name: str, pool: TpuPool, nodes: int) -> Block:
    kind = capacity.shape(pool)
    flexible = pool.capacity == "flex-start"
    scaled = pool.autoscaling or flexible
    body: dict[str, Any] = {
        "node_locations": [capacity.zone(environment, pool)],
        "max_pods_per_node": capacity.PODS_PER_TPU_NODE,
        # GKE replaces flex-start nodes instead of repairing them.
        "management": Nested(
            auto_repair=pool.auto_repair and not flexible,
            auto_upgrade=AUTO_UPGRADE,
        ),
        "upgrade_settings": Nested(max_surge=0, max_unavailable=1),
        "node_config": _node_config(
            pool,
            machine_type=kind.machine_type,
            disk_type=capacity.disk_type(pool),
            **_capacity(pool),
        ),
    }
    if scaled:
        # A multi-host slice scales from zero to all of its hosts at once. GKE checks its size by
        # the limit per zone (https://github.com/vllm-project/ci-infra/pull/545).
        body["initial_node_count"] = 0
        body["autoscaling"] = Nested(min_node_count=0, max_node_count=nodes, location_policy="ANY")
    else:
        body["node_count"] = nodes
    if flexible:
        body["queued_provisioning"] = Nested(enabled=True)
    if kind.hosts > 1:
        body["placement_policy"] = _placement(kind)
    return _pool(environment, name, **body)


def _placement(kind: Accelerator) -> Nested:
    if kind.generation == WORKLOAD_POLICY_GENERATION:
        policy = reference("google_compute_resource_policy", f"tpu_{kind.topology}", "name")
        # As Google's own clients: no type, else GKE makes a compact policy, which tpu7x rejects
        # (https://github.com/vllm-project/ci-infra/pull/547).
        return Nested(type="", policy_name=policy, tpu_topology=kind.topology)
    return Nested(type="COMPACT", tpu_topology=kind.topology)


def _workload_policy(environment: Environment, kind: Accelerator) -> Block:
    return resource(
        "google_compute_resource_policy", f"tpu_{kind.topology}", project=environment.project,
        name=f"{environment.name}-tpu-{kind.topology}", region=environment.region,
        workload_policy=Nested(type="HIGH_THROUGHPUT", accelerator_topology=kind.topology),
    )  # fmt: skip


def _capacity(pool: TpuPool) -> dict[str, Any]:
    match pool.capacity:
        case "spot":
            return {"spot": True}
        case "reserved":
            return {
                "reservation_affinity": Nested(
                    consume_reservation_type="SPECIFIC_RESERVATION",
                    key=RESERVATION_KEY,
                    values=[pool.reservation],
                )
            }
        case "flex-start":
            affinity = Nested(consume_reservation_type="NO_RESERVATION")
            return {"flex_start": True, "reservation_affinity": affinity}
        case _:
            return {}


def _pool(environment: Environment, name: str, **body: Any) -> Block:
    return resource(
        "google_container_node_pool", name, project=environment.project, name=name,
        location=environment.region,
        cluster=reference("google_container_cluster", "cluster", "name"),
        **body,
        timeouts=Nested(create="120m", update="60m", delete="60m"),
    )  # fmt: skip


def _node_config(pool: CpuPool | TpuPool, **body: Any) -> Nested:
    config: dict[str, Any] = {
        "machine_type": getattr(pool, "machine_type", None),
        "disk_type": pool.disk_type,
        "disk_size_gb": pool.disk_gb,
        "service_account": node_account_email(),
        "oauth_scopes": SCOPES,
        "labels": dict(pool.labels) or None,
        **body,
        "gcfs_config": Nested(enabled=pool.image_streaming),
        "gvnic": Nested(enabled=pool.gvnic),
        "workload_metadata_config": Nested(mode="GKE_METADATA"),
        "shielded_instance_config": Nested(enable_integrity_monitoring=True),
        "taint": [_taint(taint) for taint in pool.taints] or None,
    }
    return Nested({key: value for key, value in config.items() if value is not None})


def _taint(taint: Taint) -> Nested:
    return Nested(key=taint.key, value=taint.value, effect=taint.effect)
