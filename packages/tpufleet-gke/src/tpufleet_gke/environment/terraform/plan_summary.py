"""A Terraform plan, as `tofu show -json` prints it, in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tpufleet_gke.environment.terraform.costs import CLUSTER_USD, node_pool_usd

MOST_DIFFERENCES = 6
LONGEST_VALUE = 60
# What people call a resource; the rest is derived from its type.
NOUNS = {
    "google_artifact_registry_repository": "image registry",
    "google_billing_budget": "budget",
    "google_compute_network": "network",
    "google_compute_resource_policy": "placement policy",
    "google_compute_router": "router",
    "google_compute_subnetwork_iam_member": "subnetwork role",
    "google_compute_router_nat": "Cloud NAT",
    "google_compute_subnetwork": "subnetwork",
    "google_container_cluster": "GKE cluster",
    "google_container_node_pool": "node pool",
    "google_project_iam_custom_role": "custom role",
    "google_project_iam_member": "project role",
    "google_project_service": "API",
    "google_compute_firewall": "firewall rule",
    "google_billing_account_iam_member": "billing role",
    "google_service_account": "service account",
    "google_service_account_iam_member": "service account role",
    "google_storage_bucket": "bucket",
    "google_storage_bucket_iam_member": "bucket role",
    "google_storage_bucket_object": "outputs file",
    "google_vertex_ai_tensorboard": "TensorBoard",
}
NAMES = ("account_id", "repository_id", "role_id", "service", "display_name", "name")
# Shown together.
COUNTED = ("API", "project role", "bucket role", "service account role", "subnetwork role")


class Action(StrEnum):
    CREATE = "create"
    UPDATE = "update"
    REPLACE = "replace"
    DELETE = "delete"


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    stage: str
    action: Action
    address: str
    noun: str
    name: str
    details: tuple[str, ...] = ()
    usd: float | None = 0.0  # difference per hour; None: not known
    protected: bool = False  # Google refuses to delete it as it is now


def changes(stage: str, plan: Mapping[str, Any]) -> list[Change]:
    """Of `resource_changes`; resources that stay as they are left out."""
    return [
        change
        for entry in plan.get("resource_changes", [])
        if (change := _change(stage, entry)) is not None
    ]


def drift(stage: str, plan: Mapping[str, Any]) -> list[Change]:
    """What was changed outside Terraform, of `resource_drift`."""
    return changes(stage, {"resource_changes": plan.get("resource_drift", [])})


def subnet_ranges(plan: Mapping[str, Any]) -> Mapping[str, str]:
    """Of the subnetwork as it is now, or as it will be made, by their fields in cluster.yaml."""
    for entry in plan.get("resource_changes", []):
        subnetwork = entry["change"].get("before") or entry["change"].get("after")
        if entry["type"] == "google_compute_subnetwork" and subnetwork:
            secondary = subnetwork.get("secondary_ip_range") or []
            found = {item["range_name"]: item["ip_cidr_range"] for item in secondary}
            return {"nodes": subnetwork["ip_cidr_range"], **found}
    return {}


def sentences(found: Sequence[Change]) -> list[tuple[str, float | None]]:
    """One line for each change and its cost; APIs and roles, of which there are many, in one."""
    lines: list[tuple[str, float | None]] = []
    groups: dict[tuple[str, Action, str], list[str]] = {}
    for change in found:
        if change.noun in COUNTED and change.action in (Action.CREATE, Action.DELETE):
            groups.setdefault((change.stage, change.action, change.noun), []).append(change.name)
        else:
            lines.append((f"{change.stage}: {sentence(change)}", change.usd))
    for (stage, action, noun), names in groups.items():
        listed = ", ".join(dict.fromkeys(name.removesuffix(".googleapis.com") for name in names))
        plural = f"{noun}s" if len(names) > 1 else noun
        lines.append((f"{stage}: {action} {len(names)} {plural}: {listed}", 0.0))
    return sorted(lines, key=lambda line: line[0].partition(":")[0])


def sentence(change: Change) -> str:
    details = f" ({'; '.join(change.details)})" if change.details else ""
    return f"{change.action} {change.noun} {change.name}{details}"


def _change(stage: str, entry: Mapping[str, Any]) -> Change | None:
    change = entry["change"]
    actions = list(change["actions"])
    before, after = change.get("before") or {}, change.get("after") or {}
    if actions in (["no-op"], ["read"]):
        return None
    action = Action.REPLACE if len(actions) == 2 else Action(actions[0])
    kind = entry["type"]
    return Change(
        stage=stage,
        action=action,
        address=entry["address"],
        noun=NOUNS.get(kind, kind.removeprefix("google_").replace("_", " ")),
        name=_name(kind, after or before) or entry["name"],
        details=_differences(before, after) if action in (Action.UPDATE, Action.REPLACE) else (),
        usd=_difference_usd(kind, before, after),
        protected=action in (Action.DELETE, Action.REPLACE)
        and bool(before.get("deletion_protection")),
    )


def _name(kind: str, values: Mapping[str, Any]) -> str:
    if kind.endswith("_iam_member"):
        role = str(values.get("role") or "").rpartition("/")[2]
        target = f"({values['bucket']})" if values.get("bucket") else ""
        return f"{role} {target}".strip()
    return next((str(values[key]) for key in NAMES if values.get(key)), "")


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    old, new = dict(_leaves(before)), dict(_leaves(after))
    changed = [
        f"{path}: {_shown(old.get(path))} → {_shown(new.get(path))}"
        for path in sorted({*old, *new})
        if old.get(path) != new.get(path)
    ]
    hidden = len(changed) - MOST_DIFFERENCES
    return (*changed[:MOST_DIFFERENCES], *([f"{hidden} more"] if hidden > 0 else []))


def _leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [leaf for key in value for leaf in _leaves(value[key], f"{path}.{key}".strip("."))]
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) == 1:
            return _leaves(value[0], path)
        return [
            leaf for index, item in enumerate(value) for leaf in _leaves(item, f"{path}[{index}]")
        ]
    return [(path, value)] if value is not None else []


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _difference_usd(kind: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> float | None:
    if kind == "google_container_cluster":
        return CLUSTER_USD * (bool(after) - bool(before))
    if kind != "google_container_node_pool":
        return 0.0
    old, new = (node_pool_usd(values) if values else 0.0 for values in (before, after))
    return None if old is None or new is None else new - old
