"""From Kubernetes resources to what the plan looks at. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime

from tpufleet.errors import BadInput
from tpufleet.provisioner.gke_api import pool_specs
from tpufleet.provisioner.kube import label_keys, pod_owners, pods
from tpufleet.provisioner.kube.pod_owners import OwnerStatus
from tpufleet.provisioner.kube.pods import Json
from tpufleet.provisioner.planning import pod_fit
from tpufleet.provisioner.planning.cluster_state import PodRef, PoolDemand, PoolUser
from tpufleet.provisioner.settings import ProvisionerSettings


def pool_demands(
    found: Iterable[Json], owners: Mapping[tuple[str, str], OwnerStatus], given: ProvisionerSettings
) -> list[PoolDemand]:
    return [
        _demand(pod, owners, given)
        for pod in found
        if pods.skip_reason(pod, given.pod_resource, given.served_kinds) is None
    ]


def _demand(
    pod: Json, owners: Mapping[tuple[str, str], OwnerStatus], given: ProvisionerSettings
) -> PoolDemand:
    metadata = pod["metadata"]
    ref = PodRef(namespace=metadata["namespace"], name=metadata["name"], uid=metadata["uid"])
    family = pod_owners.owner_of_pod(pod, given.served_kinds)
    assert family is not None
    owner = owners.get((ref.namespace, family.name))
    try:
        wanted = pool_specs.pool_spec_for_pod(pod, owner.uid if owner else "", given)
        pod_fit.check_pod_fits(pod, wanted)
    except BadInput as error:
        return PoolDemand(pod=ref, since=pods.created_at(pod), rejection=str(error))
    return PoolDemand(pod=ref, since=pods.created_at(pod), pool_spec=wanted)


def youngest_nodes(nodes: Iterable[Json]) -> dict[str, datetime]:
    found: dict[str, datetime] = {}
    for node in nodes:
        pool = _pool(node)
        if pool:
            created = pod_owners.parse_time(node["metadata"]["creationTimestamp"])
            found[pool] = max(found.get(pool, created), created)
    return found


def pool_users(
    found: Iterable[Json], nodes: Iterable[Json], given: ProvisionerSettings
) -> dict[str, frozenset[PoolUser]]:
    """By pool: whose leaders are bound to it and have not ended."""
    pool_of = {node["metadata"]["name"]: _pool(node) for node in nodes}
    uses: dict[str, set[PoolUser]] = {}
    for pod in found:
        pool = pool_of.get((pod.get("spec") or {}).get("nodeName", ""))
        use = _use(pod, given)
        if pool and use is not None:
            uses.setdefault(pool, set()).add(use)
    return {pool: frozenset(those) for pool, those in uses.items()}


def _use(pod: Json, given: ProvisionerSettings) -> PoolUser | None:
    family = pod_owners.owner_of_pod(pod, given.served_kinds)
    ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    if family is None or ended or not family.is_leader:
        return None
    namespace = pod["metadata"]["namespace"]
    try:
        parent = pod_owners.parent_of_pod(pod, family)
    except BadInput:
        return None  # its controller is gone, and so will it be
    return PoolUser(owner=(namespace, family.name), parent=(namespace, parent.name))


def ready_nodes(nodes: Iterable[Json]) -> dict[str, int]:
    return dict(Counter(_pool(node) for node in nodes if _pool(node) and _is_ready(node)))


def _pool(node: Json) -> str:
    return (node["metadata"].get("labels") or {}).get(label_keys.NODE_POOL, "")


def _is_ready(node: Json) -> bool:
    return any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in (node.get("status") or {}).get("conditions") or ()
    )
