"""Stock and quotas of the emulated GKE. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.cloud import container_v1 as api

from tpufleet.testbed.gke import error_texts, validation

_Status: Any = api.NodePool.Status
_WITHOUT_NODES = (_Status.PROVISIONING, _Status.ERROR)


def free_nodes(pool: Any, pools: Sequence[Any], stock: Mapping[tuple[str, ...], int]) -> int | None:
    """Nodes that other pools do not use; None for unlimited. `stock` is by zone and machine type,
    or by zone, machine type and kind of capacity."""
    key = (pool.locations[0], pool.config.machine_type)
    kind = _kind(pool)
    limit = stock.get((*key, kind), stock.get(key))
    if limit is None:
        return None
    by_kind = (*key, kind) in stock
    return limit - sum(
        validation.node_count(other)
        for other in pools
        if other.status not in _WITHOUT_NODES
        and (other.locations[0], other.config.machine_type) == key
        and (not by_kind or _kind(other) == kind)
    )


def exceeded_quota(
    project: str, pool: Any, pools: Sequence[Any], quotas: Mapping[tuple[str, ...], int]
) -> str:
    """GKE's message; empty when the pool is within its quota. `quotas` is in chips, by region and
    accelerator label, or by region, label and kind of capacity. Reservations need no quota:
    https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus"""
    kind = _kind(pool)
    if kind == "reserved":
        return ""
    region = pool.locations[0].rpartition("-")[0]
    label = _label(pool)
    by_kind = (region, label, kind) in quotas
    limit = quotas.get((region, label, kind) if by_kind else (region, label))
    if limit is None:
        return ""
    used = sum(
        _chips(other)
        for other in pools
        if other.status is not _Status.ERROR
        and other.locations[0].rpartition("-")[0] == region
        and _label(other) == label
        and (_kind(other) == kind if by_kind else _kind(other) != "reserved")
    )
    if used + _chips(pool) <= limit:
        return ""
    metric = error_texts.quota_metric(label, spot=kind == "spot")
    return error_texts.quota(project, metric, _chips(pool), limit, limit - used)


def _kind(pool: Any) -> str:
    if pool.config.reservation_affinity.values:
        return "reserved"
    return "spot" if pool.config.spot else "on-demand"


def _label(pool: Any) -> str:
    return validation.machine_types()[pool.config.machine_type][0]


def _chips(pool: Any) -> int:
    return validation.node_count(pool) * validation.machine_types()[pool.config.machine_type][1]
