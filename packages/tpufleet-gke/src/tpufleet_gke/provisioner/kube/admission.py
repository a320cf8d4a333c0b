"""The node selectors that the admission webhook sets on Jobs of a JobSet. Pure.

A unique selector ties each Job to its own node pool, without JobSet's alpha annotation.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from tpufleet_gke.provisioner.model import dynamic_slices, label_keys
from tpufleet_gke.provisioner.settings import variable

Json = dict[str, Any]

JOB_KEY = "job-key"
NOT_ON_DEMAND = (
    label_keys.RESERVATION,
    label_keys.RESERVATION_PROJECT,
    label_keys.SPOT,
    label_keys.FLEX_START,
)


class AdmissionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Environment variables of the former webhook."""

    force_on_demand: bool = variable("FORCE_ON_DEMAND", False)
    location_hint: str = variable("RESERVATION_LOCATION_HINT", "")


def review_response(review: Json, settings: AdmissionSettings) -> Json:
    """The AdmissionReview to send back. Every request is allowed."""
    request = review["request"]
    response: Json = {"uid": request["uid"], "allowed": True}
    job = request.get("object") or {}
    metadata = job.get("metadata") or {}
    name = metadata.get("name") or request.get("name")
    namespace = request.get("namespace") or metadata.get("namespace") or "default"
    if not name:
        response["warnings"] = ["the Job has no name yet, so no job-key selector was set"]
    before = _selectors(job)
    after = mutate_selectors(before, namespace, name, settings, _wants_slice(job))
    if after != before:
        response["patchType"] = "JSONPatch"
        patch = [{"op": "add", "path": "/spec/template/spec/nodeSelector", "value": after}]
        response["patch"] = base64.b64encode(json.dumps(patch).encode()).decode()
    return {
        "apiVersion": review.get("apiVersion", "admission.k8s.io/v1"),
        "kind": "AdmissionReview",
        "response": response,
    }


def mutate_selectors(
    before: Mapping[str, str],
    namespace: str,
    name: str | None,
    settings: AdmissionSettings,
    wants_slice: bool = False,
) -> dict[str, str]:
    after = dict(before)
    if name and wants_slice:
        chosen = dynamic_slices.slice_name(name, job_key(namespace, name))
        after.setdefault(label_keys.TPU_SLICE, chosen)
    elif name:
        after[JOB_KEY] = job_key(namespace, name)
    if settings.force_on_demand:
        for key in NOT_ON_DEMAND:
            after.pop(key, None)
    if settings.location_hint:
        after[label_keys.LOCATION_HINT] = settings.location_hint
    return after


def job_key(namespace: str, name: str) -> str:
    return hashlib.sha1(f"{namespace}/{name}".encode()).hexdigest()


def _wants_slice(job: Json) -> bool:
    """Pods of a dynamic slice share nodes of several pools."""
    template = ((job.get("spec") or {}).get("template") or {}).get("metadata") or {}
    return label_keys.SLICE_TOPOLOGY in (template.get("annotations") or {})


def _selectors(job: Json) -> dict[str, str]:
    template = ((job.get("spec") or {}).get("template") or {}).get("spec") or {}
    return dict(template.get("nodeSelector") or {})
