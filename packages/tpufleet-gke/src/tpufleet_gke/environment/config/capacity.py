"""Numbers that follow from the node pools: nodes, addresses, slices per TPU type. Pure."""

from __future__ import annotations

import ipaddress
import math
from collections import Counter
from collections.abc import Mapping

from tpufleet.model.tpu import machine_types, tpu_zones, type_lookup
from tpufleet.model.tpu.type_lookup import Accelerator
from tpufleet_gke.environment.config.sections import Environment, TpuPool

PODS_PER_CPU_NODE = 110  # GKE's default
PODS_PER_TPU_NODE = 15  # what the provisioner sets too: one job's pod and system pods
SURGE_NODES = 1  # of each pool, during an upgrade
POOL_OF_RANGES = ipaddress.IPv4Network("10.128.0.0/9")
SMALLEST_PODS_PREFIX, LARGEST_PODS_PREFIX = 21, 9
RESERVED_ADDRESSES = 4  # of a subnetwork's primary range


def shape(pool: TpuPool) -> Accelerator:
    return type_lookup.find(pool.type)


def zone(environment: Environment, pool: TpuPool) -> str:
    """Of its nodes, where Terraform creates them."""
    offered = tpu_zones.zones_of(shape(pool).name)
    fitting = [each for each in environment.zones if each in offered]
    return pool.zone or (fitting or environment.zones)[0]


def node_pool_names(name: str, pool: TpuPool) -> list[str]:
    """Those that Terraform creates. A multi-host slice is one node pool; single-host slices share
    one."""
    if pool.managed_by != "terraform" or shape(pool).hosts == 1:
        return [name]
    return [f"{name}-{index}" for index in range(pool.slices)]


def disk_type(pool: TpuPool) -> str:
    """Of the boot disks."""
    return pool.disk_type or machine_types.default_disk_type(str(shape(pool).machine_type))


def addresses_per_node(pods: int) -> int:
    """GKE gives a node at least twice as many addresses as pods, as a whole range.

    https://cloud.google.com/kubernetes-engine/docs/how-to/flexible-pod-cidr
    """
    return int(2 ** math.ceil(math.log2(pods * 2)))


def max_nodes(environment: Environment) -> int:
    return _other_nodes(environment) + _tpu_nodes(environment)


def pod_addresses(environment: Environment) -> int:
    """Addresses of pods when every pool is at its largest."""
    others = _other_nodes(environment) * addresses_per_node(PODS_PER_CPU_NODE)
    return others + _tpu_nodes(environment) * addresses_per_node(PODS_PER_TPU_NODE)


def pods_range(environment: Environment) -> str:
    """The configured range, or one with room for twice what the pools need. Of a new network: that
    of a live one stays as it was made."""
    return environment.network.pods or smallest_range(2 * pod_addresses(environment))


def smallest_range(addresses: int) -> str:
    prefix = 32 - math.ceil(math.log2(max(addresses, 1)))
    prefix = min(max(prefix, LARGEST_PODS_PREFIX), SMALLEST_PODS_PREFIX)
    return str(ipaddress.IPv4Network((POOL_OF_RANGES.network_address, prefix)))


def slices_by_type(environment: Environment) -> Mapping[str, int]:
    """All slices that the pools may hold, by TPU type."""
    slices: Counter[str] = Counter()
    for pool in environment.tpu_pools.values():
        slices[pool.type] += pool.slices
    return slices


def _other_nodes(environment: Environment) -> int:
    pools = [*environment.cpu_pools.values(), *environment.gpu_pools.values()]
    return sum(pool.max_nodes + SURGE_NODES for pool in pools)


def _tpu_nodes(environment: Environment) -> int:
    return sum(shape(pool).hosts * pool.slices for pool in environment.tpu_pools.values())


def flavor_key(pool: TpuPool) -> tuple[str, str]:
    """Pools that agree in it are one ResourceFlavor: type and kind of capacity. Reserved slices
    have the node labels of those on demand. A ComputeClass may bring any kind."""
    if pool.managed_by == "compute-class":
        return (pool.type, pool.managed_by)
    return (pool.type, "on-demand" if pool.capacity == "reserved" else pool.capacity)
