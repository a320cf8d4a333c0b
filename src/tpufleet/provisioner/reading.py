"""From Kubernetes resources to what the plan looks at. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime

from tpufleet.errors import BadInput
from tpufleet.provisioner import families, fits, keys, pods, pools
from tpufleet.provisioner.families import Owner
from tpufleet.provisioner.pods import Json
from tpufleet.provisioner.seen import Demand, PodRef, Use
from tpufleet.provisioner.settings import Settings


def demands(
    found: Iterable[Json], owners: Mapping[tuple[str, str], Owner], given: Settings
) -> list[Demand]:
    return [
        _demand(pod, owners, given)
        for pod in found
        if pods.refusal(pod, given.pod_resource, given.served) is None
    ]


def _demand(pod: Json, owners: Mapping[tuple[str, str], Owner], given: Settings) -> Demand:
    metadata = pod["metadata"]
    ref = PodRef(namespace=metadata["namespace"], name=metadata["name"], uid=metadata["uid"])
    family = families.of(pod, given.served)
    assert family is not None
    owner = owners.get((ref.namespace, family.owner))
    try:
        wanted = pools.for_pod(pod, owner.uid if owner else "", given)
        fits.check(pod, wanted)
    except BadInput as error:
        return Demand(pod=ref, since=pods.created(pod), refusal=str(error))
    return Demand(pod=ref, since=pods.created(pod), wanted=wanted)


def youngest(nodes: Iterable[Json]) -> dict[str, datetime]:
    found: dict[str, datetime] = {}
    for node in nodes:
        pool = _pool(node)
        if pool:
            created = families.moment(node["metadata"]["creationTimestamp"])
            found[pool] = max(found.get(pool, created), created)
    return found


def used(
    found: Iterable[Json], nodes: Iterable[Json], given: Settings
) -> dict[str, frozenset[Use]]:
    """By pool: whose leaders are bound to it and have not ended."""
    pool_of = {node["metadata"]["name"]: _pool(node) for node in nodes}
    uses: dict[str, set[Use]] = {}
    for pod in found:
        pool = pool_of.get((pod.get("spec") or {}).get("nodeName", ""))
        use = _use(pod, given)
        if pool and use is not None:
            uses.setdefault(pool, set()).add(use)
    return {pool: frozenset(those) for pool, those in uses.items()}


def _use(pod: Json, given: Settings) -> Use | None:
    family = families.of(pod, given.served)
    ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    if family is None or ended or not family.leads:
        return None
    namespace = pod["metadata"]["namespace"]
    try:
        parent = families.parent(pod, family)
    except BadInput:
        return None  # its controller is gone, and so will it be
    return Use(owner=(namespace, family.owner), parent=(namespace, parent.name))


def ready(nodes: Iterable[Json]) -> dict[str, int]:
    return dict(Counter(_pool(node) for node in nodes if _pool(node) and _is_ready(node)))


def _pool(node: Json) -> str:
    return (node["metadata"].get("labels") or {}).get(keys.POOL, "")


def _is_ready(node: Json) -> bool:
    return any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in (node.get("status") or {}).get("conditions") or ()
    )
