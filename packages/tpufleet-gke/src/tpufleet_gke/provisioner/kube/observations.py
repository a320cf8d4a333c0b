"""Turns Kubernetes resources into the facts that planning uses. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from tpufleet.errors import BadInput
from tpufleet.kubernetes import quantities
from tpufleet_gke.provisioner.model import label_keys, pod_owners, pods, pool_specs
from tpufleet_gke.provisioner.model.cluster_state import PodRef, PoolDemand, PoolUser
from tpufleet_gke.provisioner.model.pod_owners import OwnerStatus, PodOwner
from tpufleet_gke.provisioner.model.pods import Json
from tpufleet_gke.provisioner.planning import left_to_gke, pod_fit
from tpufleet_gke.provisioner.settings import ProvisionerSettings


@dataclass(frozen=True, slots=True)
class OwnedPod:
    """A pod of a served kind, with the owner that was worked out for it once."""

    pod: Json
    owner: PodOwner


def owned_pods(resources: Iterable[Json], settings: ProvisionerSettings) -> list[OwnedPod]:
    with_owners = ((pod, pod_owners.owner_of_pod(pod, settings.served_kinds)) for pod in resources)
    return [OwnedPod(pod, owner) for pod, owner in with_owners if owner is not None]


def pool_demands(
    owned: Iterable[OwnedPod],
    owners: Mapping[tuple[str, str], OwnerStatus],
    settings: ProvisionerSettings,
    auto_provisioned: Collection[str] = (),
) -> list[PoolDemand]:
    """`auto_provisioned` are accelerators for which GKE creates node pools itself."""
    return [
        _demand(one.pod, one.owner, owners, settings, auto_provisioned)
        for one in owned
        if pods.waits_for_pool(one.pod, one.owner, settings.pod_resource)
    ]


def stranded_pods(owned: Iterable[OwnedPod], settings: ProvisionerSettings) -> list[PoolDemand]:
    """Unschedulable pods that lead no slice, and so get no pool of their own."""
    return [
        PoolDemand(
            pod=PodRef(
                namespace=one.pod["metadata"]["namespace"],
                name=one.pod["metadata"]["name"],
                uid=one.pod["metadata"]["uid"],
                owner_name=one.owner.name,
                job=pod_owners.parent_name(one.pod, one.owner),
            ),
            since=pods.created_at(one.pod),
            scheduler_message=pods.scheduler_message(one.pod),
        )
        for one in owned
        if not one.owner.is_leader
        and pods.waits_for_pool(one.pod, replace(one.owner, is_leader=True), settings.pod_resource)
    ]


def _demand(
    pod: Json,
    owner: PodOwner,
    owners: Mapping[tuple[str, str], OwnerStatus],
    settings: ProvisionerSettings,
    auto_provisioned: Collection[str],
) -> PoolDemand:
    metadata = pod["metadata"]
    status = owners.get((metadata["namespace"], owner.name))
    ref = PodRef(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        owner_name=owner.name,
        owner_uid=status.uid if status else "",
        job=pod_owners.parent_name(pod, owner),
    )
    reason = left_to_gke.left_to_gke(pod, auto_provisioned)
    if reason:
        return PoolDemand(pod=ref, since=pods.created_at(pod), left_to_gke=reason)
    try:
        spec = pool_specs.pool_spec_for_pod(pod, owner, status.uid if status else "", settings)
        pod_fit.check_pod_fits(pod, spec)
    except BadInput as error:
        return PoolDemand(pod=ref, since=pods.created_at(pod), rejection=str(error))
    return PoolDemand(
        pod=ref,
        since=pods.created_at(pod),
        pool_spec=spec,
        scheduler_message=pods.scheduler_message(pod),
    )


def youngest_nodes(nodes: Iterable[Json]) -> dict[str, datetime]:
    """By pool: when its newest node was created."""
    newest: dict[str, datetime] = {}
    for node in nodes:
        pool = pool_of(node)
        if pool:
            created = pod_owners.parse_time(node["metadata"]["creationTimestamp"])
            newest[pool] = max(newest.get(pool, created), created)
    return newest


def pool_users(owned: Iterable[OwnedPod], nodes: Iterable[Json]) -> dict[str, frozenset[PoolUser]]:
    """By pool: the Jobs whose leaders are bound to one of its nodes and have not ended."""
    pool_by_node = {node["metadata"]["name"]: pool_of(node) for node in nodes}
    users: dict[str, set[PoolUser]] = {}
    for one in owned:
        pool = pool_by_node.get((one.pod.get("spec") or {}).get("nodeName", ""))
        user = _pool_user(one.pod, one.owner) if pool else None
        if pool and user is not None:
            users.setdefault(pool, set()).add(user)
    return {pool: frozenset(of_pool) for pool, of_pool in users.items()}


def placed_jobs(owned: Iterable[OwnedPod]) -> frozenset[tuple[str, str]]:
    """Jobs whose leaders are bound to a node of any kind and have not ended."""
    bound = (one for one in owned if (one.pod.get("spec") or {}).get("nodeName"))
    users = (_pool_user(one.pod, one.owner) for one in bound)
    return frozenset(user.parent for user in users if user is not None)


def _pool_user(pod: Json, owner: PodOwner) -> PoolUser | None:
    ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    if ended or not owner.is_leader:
        return None
    namespace = pod["metadata"]["namespace"]
    parent = pod_owners.parent_name(pod, owner)
    if not parent:
        return None  # its controller is gone; the pod will be garbage-collected
    return PoolUser(owner=(namespace, owner.name), parent=(namespace, parent))


def cordoned_pools(nodes: Iterable[Json]) -> tuple[dict[str, datetime], frozenset[str]]:
    """Pools of which all nodes were cordoned by the provisioner, and since when; and those of which
    any was."""
    times: dict[str, list[datetime | None]] = {}
    for node in nodes:
        at = (node["metadata"].get("annotations") or {}).get(label_keys.CORDONED_AT)
        times.setdefault(pool_of(node), []).append(pod_owners.parse_time(at) if at else None)
    whole = {
        pool: max(at for at in of_pool if at is not None)
        for pool, of_pool in times.items()
        if all(at is not None for at in of_pool)
    }
    return whole, frozenset(pool for pool, of_pool in times.items() if any(of_pool))


def ready_nodes(nodes: Iterable[Json]) -> dict[str, int]:
    """By pool: how many of its nodes are ready."""
    return dict(Counter(pool_of(node) for node in nodes if pool_of(node) and pods.is_ready(node)))


def ready_chips(nodes: Iterable[Json], resource: str) -> dict[str, int]:
    """By pool: the chips that its ready nodes offer. Before the device plugin has started, a node
    is ready and offers none."""
    chips: Counter[str] = Counter()
    for node in nodes:
        if pool_of(node) and pods.is_ready(node):
            allocatable = (node.get("status") or {}).get("allocatable") or {}
            chips[pool_of(node)] += int(quantities.parse(allocatable.get(resource, 0)))
    return dict(chips)


def pool_of(node: Json) -> str:
    return str((node["metadata"].get("labels") or {}).get(label_keys.NODE_POOL, ""))
