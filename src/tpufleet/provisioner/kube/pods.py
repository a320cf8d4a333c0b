"""Reading pods: which of them are waiting for a node pool, and what they ask of its nodes. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.provisioner.kube import label_keys, pod_owners

Json = Mapping[str, Any]


def skip_reason(
    pod: Json, resource: str = label_keys.TPU, served_kinds: Collection[str] = (pod_owners.JOBSET,)
) -> str | None:
    """Why this pod is none of our business; None when it waits for a node pool."""
    metadata, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
    annotations = metadata.get("annotations") or {}
    labels = metadata.get("labels") or {}
    family = pod_owners.owner_of_pod(pod, served_kinds)
    if family is None:
        kinds = " or ".join(pod_owners.KINDS[kind] for kind in served_kinds)
        return f"it is not part of a {kinds}"
    if not family.is_leader:
        return "it is not the leader of its Job"
    if status.get("phase") != "Pending":
        return "it is not pending"
    if not _unschedulable(status):
        return "it has not been found unschedulable"
    if not _requests(spec, resource):
        return f"it asks for no {resource}"
    if label_keys.TOPOLOGY not in (spec.get("nodeSelector") or {}):
        return f"it does not select a {label_keys.TOPOLOGY}"
    if "true" in (labels.get(label_keys.DISABLE), annotations.get(label_keys.DISABLE)):
        return f"{label_keys.DISABLE} is set"
    if metadata.get("deletionTimestamp"):
        return "it is being deleted"
    return None


def _unschedulable(status: Json) -> bool:
    return any(
        condition.get("type") == "PodScheduled"
        and condition.get("status") == "False"
        and condition.get("reason") == "Unschedulable"
        for condition in status.get("conditions") or ()
    )


def _requests(spec: Json, resource: str) -> bool:
    return any(
        resource in ((container.get("resources") or {}).get("requests") or {})
        for container in spec.get("containers") or ()
    )


def requested_chips(pod: Json, resource: str = label_keys.TPU) -> int:
    """What the pod's containers ask for together; init containers run before them."""
    total = 0
    for container in pod["spec"].get("containers") or ():
        said = ((container.get("resources") or {}).get("requests") or {}).get(resource, 0)
        if not str(said).isdecimal():
            raise BadInput(f"{resource}: {said!r} is no whole number of chips")
        total += int(said)
    if total < 1:
        raise BadInput(f"the pod asks for no {resource}")
    return total


def required_zones(pod: Json) -> tuple[str, ...] | None:
    """The zones that the pod insists on; None: any."""
    chosen = (pod["spec"].get("nodeSelector") or {}).get(label_keys.ZONE)
    if chosen is not None:
        return (chosen,)
    terms = _required_terms(pod)
    found = [
        value
        for term in terms
        for rule in term.get("matchExpressions") or ()
        if rule.get("key") == label_keys.ZONE and rule.get("operator") == "In"
        for value in rule.get("values") or ()
    ]
    return tuple(dict.fromkeys(found)) or None


def required_labels(pod: Json) -> dict[str, str]:
    """What a node must carry: node selectors, and affinity that leaves no choice."""
    found: dict[str, str] = {}
    terms = _required_terms(pod)
    if len(terms) == 1:
        for rule in terms[0].get("matchExpressions") or ():
            values = rule.get("values") or ()
            if rule.get("operator") == "In" and len(values) == 1:
                found[rule["key"]] = values[0]
    return found | dict(pod["spec"].get("nodeSelector") or {})


def _required_terms(pod: Json) -> list[Json]:
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    return list(required.get("nodeSelectorTerms") or ())


def created_at(pod: Json) -> datetime:
    return pod_owners.parse_time(pod["metadata"]["creationTimestamp"])
