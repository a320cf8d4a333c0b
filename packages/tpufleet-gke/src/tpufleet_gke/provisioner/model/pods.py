"""Which pods wait for a node pool, and what they require of its nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from tpufleet.errors import invalid
from tpufleet.kubernetes import quantities
from tpufleet_gke.provisioner.model import label_keys, pod_owners
from tpufleet_gke.provisioner.model.pod_owners import PodOwner

Json = Mapping[str, Any]


def waits_for_pool(pod: Json, owner: PodOwner | None, resource: str = label_keys.TPU) -> bool:
    selectors = (pod.get("spec") or {}).get("nodeSelector") or {}
    return label_keys.TOPOLOGY in selectors and waits_for_nodes(pod, owner, resource)


def waits_for_nodes(pod: Json, owner: PodOwner | None, resource: str = label_keys.TPU) -> bool:
    metadata, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
    disabled = (
        (metadata.get(kind) or {}).get(label_keys.DISABLE) for kind in ("labels", "annotations")
    )
    return (
        owner is not None
        and owner.is_leader
        and status.get("phase") == "Pending"
        and _unschedulable_condition(status) is not None
        and _requests(spec, resource)
        and "true" not in disabled
        and not metadata.get("deletionTimestamp")
    )


def scheduler_message(pod: Json) -> str:
    """Why the scheduler found no node; empty when it has not said."""
    condition = _unschedulable_condition(pod.get("status") or {})
    return str((condition or {}).get("message") or "")


def _unschedulable_condition(status: Json) -> Json | None:
    return next(
        (
            condition
            for condition in status.get("conditions") or ()
            if condition.get("type") == "PodScheduled"
            and condition.get("status") == "False"
            and condition.get("reason") == "Unschedulable"
        ),
        None,
    )


def uses(pod: Json, resource: str) -> bool:
    """Whether the pod holds some of this resource on its node."""
    ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    return not ended and _requests(pod.get("spec") or {}, resource)


def _requests(spec: Json, resource: str) -> bool:
    return any(
        resource in ((container.get("resources") or {}).get("requests") or {})
        for container in spec.get("containers") or ()
    )


def is_ready(node: Json) -> bool:
    return any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in (node.get("status") or {}).get("conditions") or ()
    )


def requested_chips(pod: Json, resource: str = label_keys.TPU) -> int:
    """Of all containers together. Init containers run before them and do not count."""
    total = 0
    for container in pod["spec"].get("containers") or ():
        amount = ((container.get("resources") or {}).get("requests") or {}).get(resource, 0)
        if not str(amount).isdecimal():
            raise invalid(amount, "a whole number of chips", "4", resource)
        total += int(amount)
    return total


def requested_resources(pod: Json) -> dict[str, float]:
    """Of all containers together, by resource; a lower bound, without init containers and overhead.
    BadInput for an invalid quantity."""
    total: dict[str, float] = {}
    for container in pod["spec"].get("containers") or ():
        requests = (container.get("resources") or {}).get("requests") or {}
        for resource, amount in requests.items():
            total[resource] = total.get(resource, 0) + quantities.parse(amount)
    return total


def created_at(pod: Json) -> datetime:
    return pod_owners.parse_time(pod["metadata"]["creationTimestamp"])
