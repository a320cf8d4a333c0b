"""List prices per hour of clusters and node pools. Pure; an unknown price is None, never zero."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpufleet.model.tpu import prices, type_lookup
from tpufleet.model.tpu.type_lookup import short_name
from tpufleet_gke.environment.config import capacity, names
from tpufleet_gke.environment.config.sections import Environment

# https://cloud.google.com/kubernetes-engine/pricing: flat, whatever the size of the cluster.
CLUSTER_USD = 0.10
# Per vCPU of the `standard` shapes, on demand in us-central1, of
# https://cloud.google.com/compute/vm-instance-pricing; other regions differ by up to 30 %.
STANDARD_VCPU_USD = {"e2": 0.0335, "n1": 0.0475, "n2": 0.0486}
_STANDARD = re.compile(r"([a-z0-9]+)-standard-([0-9]+)")
_CAPACITY = {"spot": "spot", "reserved": "reserved", "flex-start": "on-demand"}


@dataclass(frozen=True, kw_only=True, slots=True)
class CostLine:
    """One part of the environment: what it costs idle, and at its largest."""

    name: str
    what: str
    least_usd: float | None
    most_usd: float | None


def machine_usd(machine_type: str, spot: bool) -> float | None:
    """One machine for an hour; for a TPU machine, with its chips."""
    for kind in type_lookup.all_types().values():
        if kind.machine_type == machine_type:
            chip = _chip_usd(kind.name, "spot" if spot else "on-demand")
            return None if chip is None else chip * kind.chips_per_host
    match = _STANDARD.fullmatch(machine_type)
    if match is None or match[1] not in STANDARD_VCPU_USD:
        return None
    usd = STANDARD_VCPU_USD[match[1]] * int(match[2])
    return usd * prices.SPOT_SHARE if spot else usd


def node_pool_usd(values: Mapping[str, Any]) -> float | None:
    """Of a google_container_node_pool as planned: its nodes now, autoscaled ones at the fewest."""
    config = (values.get("node_config") or [{}])[0]
    if config.get("guest_accelerator"):
        return None
    scaling = (values.get("autoscaling") or [{}])[0]
    nodes = values.get("node_count")
    if nodes is None:
        nodes = scaling.get("total_min_node_count") or 0
    if not nodes:
        return 0.0
    usd = machine_usd(config.get("machine_type") or "", bool(config.get("spot")))
    return None if usd is None else usd * nodes


def estimate(environment: Environment) -> list[CostLine]:
    lines = [
        CostLine(
            name=names.cluster(environment), what="GKE cluster", least_usd=CLUSTER_USD,
            most_usd=CLUSTER_USD,
        )
    ]  # fmt: skip
    for name, pool in environment.cpu_pools.items():
        usd = machine_usd(pool.machine_type, pool.spot)
        lines.append(
            CostLine(
                name=name, what=f"{pool.min_nodes}–{pool.max_nodes} × {pool.machine_type}",
                least_usd=None if usd is None else usd * pool.min_nodes,
                most_usd=None if usd is None else usd * pool.max_nodes,
            )
        )  # fmt: skip
    for name, gpu in environment.gpu_pools.items():
        what = f"{gpu.min_nodes}–{gpu.max_nodes} × {gpu.machine_type} with {gpu.accelerator}"
        least = 0.0 if gpu.min_nodes == 0 else None
        lines.append(CostLine(name=name, what=what, least_usd=least, most_usd=None))
    for name, tpu in environment.tpu_pools.items():
        kind = capacity.shape(tpu)
        chip = _chip_usd(tpu.type, _CAPACITY.get(tpu.capacity, tpu.capacity))
        most = None if chip is None else chip * kind.chips * tpu.slices
        always = tpu.managed_by == "terraform" and not (
            tpu.autoscaling or tpu.capacity == "flex-start"
        )
        lines.append(
            CostLine(
                name=name,
                what=f"{tpu.slices} × {short_name(tpu.type)} {tpu.capacity}",
                least_usd=most if always else 0.0,
                most_usd=most,
            )
        )
    return lines


def _chip_usd(tpu_type: str, kind: str) -> float | None:
    return prices.chip_hour_price(tpu_type, kind, prices.price_table())
