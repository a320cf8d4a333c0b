"""Stock and quotas of the emulated GKE. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.cloud import container_v1 as api

from tpufleet_testbed.gke import api_errors, validation

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
    https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus. For a flex-start pool
    "preemptible quota is consumed. If your project lacks preemptible quota, then standard quota is
    consumed": https://cloud.google.com/compute/docs/instances/provisioning-models"""
    if _kind(pool) == "reserved":
        return ""
    chips, label = _chips(pool), _label(pool)
    region = pool.locations[0].rpartition("-")[0]
    message = ""
    for kind in ("spot", "on-demand") if pool.config.flex_start else (_kind(pool),):
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
            and (_quota_kind(other) == kind if by_kind else _kind(other) != "reserved")
        )
        if used + chips <= limit:
            return ""
        metric = api_errors.QUOTA_METRICS[label][kind == "spot"]
        message = message or api_errors.quota(project, metric, chips, limit, limit - used)
    return message


def exceeded_reservation(
    pool: Any, pools: Sequence[Any], reservations: Mapping[str, int] | None
) -> str:
    """GKE's message; empty when the reservation has room, or the pool needs none."""
    names = pool.config.reservation_affinity.values
    if not names or reservations is None:
        return ""
    name = _reservation(pool)
    if name not in reservations:
        return api_errors.text("no-reservation", name=name)
    used = sum(
        validation.node_count(other)
        for other in pools
        if other.status not in _WITHOUT_NODES and _reservation(other) == name
    )
    fits = used + validation.node_count(pool) <= reservations[name]
    return "" if fits else api_errors.text("full-reservation", name=name)


def _reservation(pool: Any) -> str:
    """Its name, without project and blocks."""
    names = pool.config.reservation_affinity.values
    return names[0].partition("/reservationBlocks/")[0].rpartition("/")[2] if names else ""


def _quota_kind(pool: Any) -> str:
    return "spot" if pool.config.flex_start else _kind(pool)


def _kind(pool: Any) -> str:
    if pool.config.reservation_affinity.values:
        return "reserved"
    return "spot" if pool.config.spot else "on-demand"


def _label(pool: Any) -> str:
    return validation.machine_types()[pool.config.machine_type][0]


def _chips(pool: Any) -> int:
    return validation.node_count(pool) * validation.machine_types()[pool.config.machine_type][1]
