"""Whether the scheduler would place a pod on a node, by its node selector, its whole required node
affinity and its tolerations. What is not understood does not fit. Pure.

https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/
https://kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration/
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = Mapping[str, Any]

NODE_NAME = "metadata.name"  # the only field that affinity may match


@dataclass(frozen=True, slots=True)
class Taint:
    """With the effect NoSchedule."""

    key: str
    value: str


@dataclass(frozen=True, slots=True)
class Node:
    """What the scheduler sees of a node that does not exist yet, and so has no name."""

    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()


def misfit(pod_spec: Json, node: Node) -> str:
    """Why the scheduler would not place the pod there; empty when it would."""
    for key, value in (pod_spec.get("nodeSelector") or {}).items():
        if node.labels.get(key) != value:
            return f"the label {key}={value}"
    terms = affinity_terms(pod_spec)
    unmet = [_unmet_expression(term, node) for term in terms]
    if all(unmet):  # terms are alternatives
        return " or ".join(dict.fromkeys(unmet))
    for taint in node.taints:
        if not tolerates(pod_spec, taint):
            return f"no taint {taint.key}={taint.value}, which it does not tolerate"
    return ""


def affinity_terms(pod_spec: Json) -> Sequence[Json]:
    """Required terms, of which one must hold; one that always does, if nothing is required."""
    affinity = (pod_spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return [{"matchExpressions": [{"key": "", "operator": "DoesNotExist"}]}]
    return required.get("nodeSelectorTerms") or [{}]


def wanted_labels(pod_spec: Json, term: Json) -> dict[str, str]:
    """Labels by which a node would satisfy the selector and the equalities of this term."""
    labels = {
        rule["key"]: str(rule["values"][0])
        for rule in term.get("matchExpressions") or ()
        if rule.get("operator") == "In" and rule.get("values")
    }
    return labels | dict(pod_spec.get("nodeSelector") or {})


def allowed_values(pod_spec: Json, key: str) -> list[str] | None:
    """Of a label: those that the selector or any term names; None where one of them names none."""
    selected = (pod_spec.get("nodeSelector") or {}).get(key)
    if selected is not None:
        return [selected]
    values: dict[str, None] = {}
    for term in affinity_terms(pod_spec):
        of_term = [
            value
            for rule in term.get("matchExpressions") or ()
            if rule.get("key") == key and rule.get("operator") == "In"
            for value in rule.get("values") or ()
        ]
        if not of_term:
            return None
        values |= dict.fromkeys(of_term)
    return list(values)


def tolerates(pod_spec: Json, taint: Taint) -> bool:
    return any(_tolerates(one, taint) for one in pod_spec.get("tolerations") or ())


def _tolerates(toleration: Json, taint: Taint) -> bool:
    key, operator = toleration.get("key") or "", toleration.get("operator") or "Equal"
    if (toleration.get("effect") or "NoSchedule") != "NoSchedule" or key not in ("", taint.key):
        return False
    if operator == "Exists":
        return True
    return operator == "Equal" and bool(key) and (toleration.get("value") or "") == taint.value


def _unmet_expression(term: Json, node: Node) -> str:
    """The first of the term that does not hold; a term without any holds nowhere."""
    expressions, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not expressions and not fields:
        return "an empty term of node affinity"
    for rule in expressions:
        if not _holds(rule, node.labels.get(rule.get("key", ""))):
            return f"the label {_describe(rule)}"
    for rule in fields:
        # A new node is none of the existing ones that the pod names.
        if rule.get("key") != NODE_NAME or rule.get("operator") != "NotIn":
            return f"the field {_describe(rule)}"
    return ""


def _holds(rule: Json, value: str | None) -> bool:
    values = [str(one) for one in rule.get("values") or ()]
    match rule.get("operator"):
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            try:
                difference = int(value or "") - int(*values)
            except (TypeError, ValueError):
                return False
            return difference > 0 if operator == "Gt" else difference < 0
    return False


def _describe(rule: Json) -> str:
    key, operator = rule.get("key"), rule.get("operator")
    values = ", ".join(map(str, rule.get("values") or ()))
    return f"{key}={values}" if operator == "In" else f"{key} {operator} {values}".rstrip()
