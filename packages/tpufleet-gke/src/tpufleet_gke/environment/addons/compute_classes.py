"""ComputeClasses: GKE itself creates the node pools of slices, and tries one kind of capacity after
another. Pure.

https://cloud.google.com/kubernetes-engine/docs/reference/crds/computeclass
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tpufleet.model.fleet import compute_reservations
from tpufleet.model.tpu import tpu_zones
from tpufleet_gke.environment.config import capacity, names
from tpufleet_gke.environment.config.sections import Environment, TpuPool

Json = dict[str, Any]

EFFECTS = {
    "NO_SCHEDULE": "NoSchedule",
    "PREFER_NO_SCHEDULE": "PreferNoSchedule",
    "NO_EXECUTE": "NoExecute",
}


def class_names(environment: Environment) -> dict[str, str]:
    """By TPU type."""
    return {pool.type: _name(environment, name) for name, pool in _pools(environment)}


def manifests(environment: Environment) -> list[Json]:
    return [
        {
            "apiVersion": "cloud.google.com/v1",
            "kind": "ComputeClass",
            "metadata": {"name": _name(environment, name)},
            "spec": {
                "priorities": [
                    _priority(environment, pool, kind) for kind in (pool.capacity, *pool.fallback)
                ],
                "nodePoolAutoCreation": {"enabled": True},
                "nodePoolConfig": _node_pool_config(environment, pool),
                # Pods wait for TPUs: no other machines. The default depends on the version.
                "whenUnsatisfiable": "DoNotScaleUp",
            },
        }
        for name, pool in _pools(environment)
    ]


def _pools(environment: Environment) -> Iterator[tuple[str, TpuPool]]:
    for name, pool in environment.tpu_pools.items():
        if pool.managed_by == "compute-class":
            yield name, pool


def _name(environment: Environment, pool: str) -> str:
    return f"{environment.name}-{pool}"


def _priority(environment: Environment, pool: TpuPool, kind: str) -> Json:
    shape = capacity.shape(pool)
    rule: Json = {
        "tpu": {
            "type": shape.gke_accelerator,
            "count": shape.chips_per_host,
            "topology": shape.topology,
        },
        "storage": {"bootDiskType": capacity.disk_type(pool), "bootDiskSize": pool.disk_gb},
    }
    if kind == "reserved":  # which is in a zone, and does not go with others
        return rule | {"reservations": _reservation(environment, pool)}
    if kind == "spot":
        rule["spot"] = True
    offered = tpu_zones.zones_of(shape.name)
    fitting = [zone for zone in environment.zones if zone in offered]
    zones = [pool.zone] if pool.zone else fitting or list(environment.zones)
    return rule | {"location": {"zones": zones}}


def _reservation(environment: Environment, pool: TpuPool) -> Json:
    found = compute_reservations.parse(pool.reservation)
    specific: Json = {"name": found.name, "project": found.project or environment.project}
    if found.block:
        specific["reservationBlock"] = {"name": found.block}
    return {"affinity": "Specific", "specific": [specific]}


def _node_pool_config(environment: Environment, pool: TpuPool) -> Json:
    config: Json = {
        "serviceAccount": names.account_email(environment, names.node_account(environment))
    }
    if pool.labels:
        config["nodeLabels"] = dict(pool.labels)
    if pool.taints:
        config["taints"] = [
            {"key": taint.key, "value": taint.value, "effect": EFFECTS[taint.effect]}
            for taint in pool.taints
        ]
    return config
