"""Whether an existing pool still is what its pods need. Pure.

Compares what GKE lists, not the hash label: so a pool of another version of the provisioner, or of
other operator settings, is kept as long as its pods can use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tpufleet.errors import BadInput
from tpufleet.model.fleet import compute_reservations
from tpufleet_gke.provisioner.model.cluster_state import ObservedPool
from tpufleet_gke.provisioner.model.pool_specs import PoolCapacity, PoolSpec
from tpufleet_gke.provisioner.settings import NodeNetwork


def unmet_need(pool: ObservedPool, spec: PoolSpec) -> str:
    """What its pods require and the pool is not; empty when it serves them. Values that GKE does
    not list count as met."""
    location = replace(pool.location, zone=pool.zone or spec.locations[0].zone)
    return unmet_config(pool, spec) or spec.unfit_reason(location, pool.name, pool.labels)


def unmet_config(pool: ObservedPool, spec: PoolSpec) -> str:
    """Likewise, without what is decided by labels and taints."""
    shape, needs = spec.shape, spec.needs
    if pool.machine_type and pool.machine_type != shape.machine_type:
        return f"machine type {shape.machine_type}, not {pool.machine_type}"
    if pool.nodes and pool.nodes != shape.nodes:
        return f"{shape.nodes} nodes, not {pool.nodes}"
    if pool.topology and pool.topology != shape.topology:
        return f"topology {shape.topology}, not {pool.topology}"
    reserved = pool.capacity is PoolCapacity.RESERVED and spec.reservation
    if reserved and not _same_reservation(pool.reservation, spec.reservation):
        return f"reservation {spec.reservation}, not {pool.reservation}"
    if needs.service_account and pool.service_account != needs.service_account:
        return f"service account {needs.service_account}"
    if needs.networks is not None and not same_networks(pool.networks, needs.networks):
        return "other additional networks"
    return ""


def _same_reservation(listed: str, needed: str) -> bool:
    """GKE may list it with its project. A pool of one block serves a pod that needs any."""
    try:
        has = compute_reservations.parse(listed).without_project()
    except BadInput:
        return listed == needed
    needs = compute_reservations.parse(needed).without_project()
    return (
        has.name == needs.name
        and needs.block in ("", has.block)
        and needs.sub_block in ("", has.sub_block)
    )


def same_networks(listed: Iterable[NodeNetwork], needed: Iterable[NodeNetwork]) -> bool:
    return _names(listed) == _names(needed)


def _names(networks: Iterable[NodeNetwork]) -> list[tuple[str, str]]:
    return [(_short_name(one.network), _short_name(one.subnetwork)) for one in networks]


def _short_name(resource: str) -> str:
    """GKE may list `projects/p/global/networks/vpc` for `vpc`."""
    return resource.rpartition("/")[2]
