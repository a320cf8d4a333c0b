"""Checks over several fields of cluster.yaml. Each error names the field and a valid value."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from tpufleet.errors import suggest, unknown
from tpufleet.model.tpu import machine_types, tpu_zones, type_lookup
from tpufleet.model.tpu.type_lookup import short_name
from tpufleet.schema import Problem
from tpufleet_gke.environment.config import capacity, names
from tpufleet_gke.environment.config.sections import AddOns, CpuPool, Environment, Network, TpuPool

CONTROL_PLANE_PREFIX = 28
OLDEST_KUEUE = (0, 15)  # of the API of the queues
SYSTEM_NAMESPACE = re.compile(r"(kube|gke|gmp)-.*|default|cert-manager|.*-system")
MOST_NAMED = 4  # zones in a warning


def check(environment: Environment) -> Iterator[Problem]:
    yield from _zones(environment)
    yield from _pools(environment)
    if environment.network.existing is None:
        yield from _ranges(environment)
    else:
        for field in ("nodes", "pods", "services"):
            if getattr(environment.network, field) != getattr(Network(), field):
                yield (f"network.{field}", "is that of network.existing; remove it")
    logs = environment.cluster.logging
    if logs and "SYSTEM_COMPONENTS" not in logs:
        # https://cloud.google.com/kubernetes-engine/docs/how-to/config-logging-monitoring
        yield ("cluster.logging", f"{logs[0]} goes with SYSTEM_COMPONENTS; add that")
    kueue = environment.addons.kueue
    if kueue_version(environment) < OLDEST_KUEUE:
        yield ("addons.kueue", f"{kueue} has no API v1beta2; write {AddOns().kueue}")
    yield from _teams(environment)
    yield from _accounts(environment)
    yield from _buckets(environment)


def kueue_version(environment: Environment) -> tuple[int, ...]:
    """Major and minor."""
    return tuple(map(int, re.findall(r"[0-9]+", environment.addons.kueue)[:2]))


def _zones(environment: Environment) -> Iterator[Problem]:
    region = environment.region
    if not environment.zones:
        yield ("zones", f"empty; for example [{region}-a]")
    for index, zone in enumerate(environment.zones):
        if zone.rpartition("-")[0] != region:
            letter = zone.rpartition("-")[2]
            yield (
                f"zones[{index}]",
                f"{zone} is not in region {region}; for example {region}-{letter}",
            )
    for path, pool in _plain_pools(environment):
        for index, zone in enumerate(pool.zones):
            yield from _known_zone(environment, zone, f"{path}.zones[{index}]")
    for name, tpu in environment.tpu_pools.items():
        if tpu.zone:
            yield from _known_zone(environment, tpu.zone, f"tpu_pools.{name}.zone")


def _plain_pools(environment: Environment) -> Iterator[tuple[str, CpuPool]]:
    """Those of CPUs and GPUs, by path."""
    for name, pool in environment.cpu_pools.items():
        yield f"cpu_pools.{name}", pool
    for name, gpu_pool in environment.gpu_pools.items():
        yield f"gpu_pools.{name}", gpu_pool


def _known_zone(environment: Environment, zone: str, path: str) -> Iterator[Problem]:
    if zone not in environment.zones:
        listed = ", ".join(environment.zones)
        yield (path, f"{zone} is not listed in zones ({listed}); add it there, or use one")


def _pools(environment: Environment) -> Iterator[Problem]:
    if not environment.cpu_pools:
        yield ("cpu_pools", "empty; the server and add-ons need one; for example {cpu: {}}")
    for path, pool in _plain_pools(environment):
        if pool.min_nodes > pool.max_nodes:
            problem = f"{pool.min_nodes} is above max_nodes; write {pool.max_nodes}"
            yield (f"{path}.min_nodes", problem)
        if not machine_types.may_exist(pool.machine_type):
            yield (
                f"{path}.machine_type",
                f"Compute Engine has no {pool.machine_type}; for example n2-standard-8",
            )
        yield from _disk_type(path, pool.machine_type, pool.machine_type, pool.disk_type)
    for name, gpu in environment.gpu_pools.items():
        machines = machine_types.gpu_machines(gpu.accelerator)
        if machines and not gpu.machine_type.startswith(f"{machines}-"):
            yield (
                f"gpu_pools.{name}.machine_type",
                f"{gpu.accelerator} goes with {machines} machines, not {gpu.machine_type}",
            )
    for name, tpu in environment.tpu_pools.items():
        path = f"tpu_pools.{name}"
        if capacity.shape(tpu).gke_accelerator is None:
            yield (
                f"{path}.type",
                f"{short_name(tpu.type)} is not available on GKE; for example v5e-16",
            )
        if tpu.capacity == "flex-start" and capacity.shape(tpu).generation == "v4":
            # https://cloud.google.com/kubernetes-engine/docs/concepts/dws
            yield (f"{path}.capacity", "GKE has no flex-start for v4; for example reserved or spot")
        machine = capacity.shape(tpu).machine_type or ""
        yield from _disk_type(path, short_name(tpu.type), machine, tpu.disk_type)
        yield from _compute_class(environment, path, tpu)
        if ("reserved" in (tpu.capacity, *tpu.fallback)) != bool(tpu.reservation):
            hint = "set reservation: NAME" if not tpu.reservation else "write capacity: reserved"
            yield (f"{path}.reservation", f"goes with capacity reserved; {hint}")
        if tpu.autoscaling and tpu.managed_by != "terraform":
            yield (
                f"{path}.autoscaling", "such node pools come and go with jobs; remove it, or write "
                "managed_by: terraform",
            )  # fmt: skip
        if tpu.topology_aware and (tpu.managed_by != "terraform" or tpu.autoscaling):
            yield (
                f"{path}.topology_aware", "Kueue must see the nodes before it admits a job; write "
                "managed_by: terraform and autoscaling: false",
            )  # fmt: skip
        # Kueue asks GKE for the nodes of flex-start slices of Terraform before it admits a job.
        for field in ("topology_aware", *(["managed_by"] * (tpu.capacity == "flex-start"))):
            others = [
                other
                for other, pool in environment.tpu_pools.items()
                if capacity.flavor_key(pool) == capacity.flavor_key(tpu)
                and getattr(pool, field) < getattr(tpu, field)
            ]
            if others:
                yield (
                    f"{path}.{field}",
                    f"tpu_pools.{others[0]} has the same type and capacity; write the same in both",
                )
    named: dict[str, str] = {}
    for path, node_pool in _node_pools(environment):
        if node_pool in named:
            yield (path, f"{named[node_pool]} has a node pool {node_pool} too; rename one")
        named.setdefault(node_pool, path)
        if len(node_pool) > names.LONGEST_NODE_POOL:
            yield (path, f"its node pool {node_pool} has a name that is too long; shorten it")


def _disk_type(path: str, what: str, machine: str, disk_type: str | None) -> Iterator[Problem]:
    if disk_type and not machine_types.can_have_disk(machine, disk_type):
        default = machine_types.default_disk_type(machine)
        yield (f"{path}.disk_type", f"{what} cannot have {disk_type} disks; write {default}")


def _compute_class(environment: Environment, path: str, tpu: TpuPool) -> Iterator[Problem]:
    """https://cloud.google.com/kubernetes-engine/docs/concepts/about-custom-compute-classes"""
    if tpu.managed_by != "compute-class":
        if tpu.fallback:
            yield (f"{path}.fallback", "goes with managed_by: compute-class; write that")
        return
    kind = capacity.shape(tpu)
    # Their workload policy can be named in Autopilot clusters only. GKE may wait for flex-start for
    # hours, and jobs would give up.
    multi_host = kind.generation == "tpu7x" and kind.hosts > 1
    if multi_host or tpu.capacity == "flex-start":
        what = f"slices of {short_name(tpu.type)}" if multi_host else tpu.capacity
        problem = f"not available with {what}; write provisioner or terraform"
        yield (f"{path}.managed_by", problem)
    if sum(other.type == tpu.type for other in environment.tpu_pools.values()) > 1:
        yield (
            f"{path}.managed_by", f"another of tpu_pools has {short_name(tpu.type)} too, and its "
            "jobs select the ComputeClass; write one pool with more slices",
        )  # fmt: skip


def _node_pools(environment: Environment) -> Iterator[tuple[str, str]]:
    """Their names in GKE, by path."""
    for path, _ in _plain_pools(environment):
        yield path, path.partition(".")[2]
    for name, pool in environment.tpu_pools.items():
        for node_pool in capacity.node_pool_names(name, pool):
            yield f"tpu_pools.{name}", node_pool


def _ranges(environment: Environment) -> Iterator[Problem]:
    network = environment.network
    if network.private_endpoint and not network.private_nodes:
        yield ("network.private_endpoint", "goes with private_nodes: true; write false")
    for name, cidr in network.authorized_networks.items():
        # https://cloud.google.com/kubernetes-engine/docs/how-to/private-clusters
        if network.private_endpoint and not ipaddress.IPv4Network(cidr).is_private:
            problem = f"{cidr} cannot reach a private endpoint; write a range of the VPC"
            yield (f"network.authorized_networks.{name}", problem)
    control_plane = ipaddress.IPv4Network(network.control_plane)
    if control_plane.prefixlen != CONTROL_PLANE_PREFIX:
        address = control_plane.network_address
        yield ("network.control_plane", f"must be a /28; write {address}/28")
    yield from _overlaps(network, network.pods)
    nodes = capacity.max_nodes(environment)
    room = ipaddress.IPv4Network(network.nodes).num_addresses - capacity.RESERVED_ADDRESSES
    if nodes > room:
        nearest = capacity.smallest_range(nodes + capacity.RESERVED_ADDRESSES).partition("/")[2]
        yield (
            "network.nodes",
            f"{network.nodes} has room for {room} nodes, the pools need {nodes}; "
            f"write a /{nearest}",
        )
    addresses = capacity.pod_addresses(environment)
    room = ipaddress.IPv4Network(capacity.pods_range(environment)).num_addresses
    if addresses > room:
        nearest = capacity.smallest_range(addresses)
        yield (
            "network.pods",
            f"{capacity.pods_range(environment)} has {room} addresses, {nodes} nodes need "
            f"{addresses}; write {nearest}, or leave it out",
        )


def _overlaps(network: Network, pods: str) -> Iterator[Problem]:
    """Where cluster.yaml leaves out the range of pods, it is known only with a plan."""
    ranges = {
        "network.nodes": network.nodes,
        "network.pods": pods,
        "network.services": network.services,
        "network.control_plane": network.control_plane,
    }
    parsed = {path: ipaddress.IPv4Network(text) for path, text in ranges.items() if text}
    paths = list(parsed)
    for index, path in enumerate(paths):
        for other in paths[index + 1 :]:
            if parsed[path].overlaps(parsed[other]):
                yield (other, f"{ranges[other]} overlaps {path} ({ranges[path]})")


def live_range_problems(environment: Environment, live: Mapping[str, str]) -> Iterator[Problem]:
    """What a subnetwork with these ranges cannot become. `live` is by field of `network`."""
    network = environment.network
    if not network.pods:
        yield from _overlaps(network, live["pods"])
    wanted = {"nodes": network.nodes, "pods": network.pods, "services": network.services}
    for name, now in live.items():
        before = ipaddress.IPv4Network(now)
        after = ipaddress.IPv4Network(wanted.get(name) or now)
        grows = name == "nodes" and before.subnet_of(after)
        if after != before and not grows:
            hint = ", or leave it out" if name == "pods" else ""
            problem = f"is {now} in the cloud, and a range in use cannot become {after}"
            yield (f"network.{name}", f"{problem}; write {now}{hint}")
    room, needed = (
        ipaddress.IPv4Network(live["pods"]).num_addresses,
        capacity.pod_addresses(environment),
    )
    if needed > room:
        yield (
            "tpu_pools",
            f"need {needed} addresses for pods, the live range {live['pods']} has {room}; write "
            "fewer slices here, and others in the cluster.yaml of another cluster",
        )


def _teams(environment: Environment) -> Iterator[Problem]:
    slices = capacity.slices_by_type(environment)
    if not environment.teams:
        yield ("teams", "empty; jobs need a queue; for example {training: {}}")
    promised: Counter[str] = Counter()
    namespaces: dict[str, str] = {}
    for name, team in environment.teams.items():
        for kind, count in team.quota.items():
            spelled = short_name(kind)
            path = f"teams.{name}.quota.{spelled}"
            if kind not in slices:
                known = [short_name(each) for each in slices]
                yield (path, f"no pool in tpu_pools has this type{suggest(spelled, known)}")
                continue
            promised[kind] += count
            if promised[kind] > slices[kind]:
                yield (
                    path,
                    f"quotas promise {promised[kind]} slices of {spelled}, tpu_pools has "
                    f"{slices[kind]}; write {max(0, count - promised[kind] + slices[kind])}",
                )
        namespace = names.team_namespace(name, team)
        if SYSTEM_NAMESPACE.fullmatch(namespace):
            yield (
                f"teams.{name}.namespace", f"{namespace} is a system namespace; for example "
                f"{name}-jobs",
            )  # fmt: skip
        if namespace in namespaces:
            yield (
                f"teams.{name}.namespace", f"{namespace} is team {namespaces[namespace]}'s; "
                f"for example {name}",
            )  # fmt: skip
        namespaces[namespace] = name


def _accounts(environment: Environment) -> Iterator[Problem]:
    owners = [*names.ACCOUNTS, *environment.teams]
    for name in environment.service_accounts:
        if name not in owners:
            yield (f"service_accounts.{name}", f"neither a part nor a team{suggest(name, owners)}")
    accounts = [
        ("nodes.service_account", names.node_account(environment)),
        ("automation.service_account", environment.automation.service_account),
        *(("name", names.account(environment, part)) for part in names.ACCOUNTS),
        *((f"teams.{team}", names.team_service_account(environment, team))
          for team in environment.teams),
    ]  # fmt: skip
    for path, account in accounts:
        if len(account) > names.LONGEST_ACCOUNT:
            yield (path, f"too long for the service account {account}; shorten it")
    for account, count in Counter(account for _, account in accounts).items():
        if count > 1:
            yield ("service_accounts", f"{account} is of two parts; write another name for one")


def _buckets(environment: Environment) -> Iterator[Problem]:
    for name, bucket in environment.buckets.items():
        full = names.bucket(environment, name)
        if len(full) > names.LONGEST_BUCKET:
            yield (f"buckets.{name}", f"{full} is longer than 63 characters; shorten it")
        if "google" in full or full.startswith("goog"):
            # https://cloud.google.com/storage/docs/buckets#naming
            yield (f"buckets.{name}", f"Cloud Storage refuses google in {full}; rename it")
        if bucket.hierarchical and bucket.versioning:
            # https://cloud.google.com/storage/docs/hns-overview
            yield (
                f"buckets.{name}.versioning",
                "not available with hierarchical: true; write false",
            )
        for index, team in enumerate(bucket.teams):
            if team not in environment.teams:
                path = f"buckets.{name}.teams[{index}]"
                yield (path, str(unknown("team", team, environment.teams)))


def zone_warnings(environment: Environment) -> list[str]:
    """TPU pools in zones that Google's list does not have for their type. Not errors: Google adds
    zones, and grants single customers others."""
    found = []
    for name, pool in environment.tpu_pools.items():
        offered = tpu_zones.zones_of(type_lookup.find(pool.type).name)
        chosen = [pool.zone] if pool.zone else list(environment.zones)
        if offered and not set(chosen) & set(offered):
            kind = short_name(pool.type)
            near = [zone for zone in offered if zone.startswith(f"{environment.region}-")]
            named = ", ".join((near or list(offered))[:MOST_NAMED])
            found.append(
                f"tpu_pools.{name}: Google's list has no {kind} in {', '.join(chosen)}, but in "
                f"{named}: `tpu types --zones`"
            )
    return found
