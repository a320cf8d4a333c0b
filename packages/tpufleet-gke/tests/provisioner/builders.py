"""Pods and JobSets as the API server returns them."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from tpufleet_gke.provisioner.model import label_keys, pod_owners, pool_specs
from tpufleet_gke.provisioner.settings import ProvisionerSettings

NOW = datetime(2026, 1, 1, tzinfo=UTC)
V5E = {label_keys.ACCELERATOR: "tpu-v5-lite-podslice", label_keys.TOPOLOGY: "4x4"}
ZONES = ("us-central1-a",)


def settings(**overrides: Any) -> ProvisionerSettings:
    defaults = {
        "zones": ZONES, "project": "p", "cluster_location": "us-central1", "cluster": "c",
    }  # fmt: skip
    return ProvisionerSettings(**{**defaults, **overrides})


def job_key(namespace: str, job: str) -> str:
    return hashlib.sha1(f"{namespace}/{job}".encode()).hexdigest()


def pod(
    jobset: str = "train",
    *,
    namespace: str = "default",
    job: int = 0,
    node_selector: dict[str, str] | None = None,
    chips: int = 4,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    index: str = "0",
    since: datetime = NOW,
    **spec: Any,
) -> dict[str, Any]:
    """An unschedulable leader pod."""
    parent = f"{jobset}-slice-{job}"
    return {
        "metadata": {
            "name": f"{parent}-{index}-abcde",
            "namespace": namespace,
            "uid": f"uid-of-{namespace}-{parent}-{index}",
            "creationTimestamp": since.isoformat().replace("+00:00", "Z"),
            "annotations": {
                label_keys.JOBSET_NAME: jobset,
                label_keys.COMPLETION_INDEX: index,
                **(annotations or {}),
            },
            "labels": {
                label_keys.JOBSET_NAME: jobset,
                label_keys.JOB_KEY: job_key(namespace, parent),
                **(labels or {}),
            },
            "ownerReferences": [{"kind": "Job", "name": parent, "controller": True}],
        },
        "spec": {
            "nodeSelector": {**V5E, **(node_selector or {})},
            "containers": [{"resources": {"requests": {label_keys.TPU: str(chips)}}}],
            **spec,
        },
        "status": {
            "phase": "Pending",
            "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}],
        },
    }


def jobset(name: str = "train", *, namespace: str = "default", uid: str = "", **status: Any):
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": at.isoformat()}
        for kind, at in status.items()
    ]
    return {
        "metadata": {"name": name, "namespace": namespace, "uid": uid or f"uid-{namespace}-{name}"},
        "spec": {"suspend": "Suspended" in status},
        "status": {"conditions": conditions},
    }


def pool_spec(
    with_settings: ProvisionerSettings | None = None, **pod_options: Any
) -> pool_specs.PoolSpec:
    """For the leader pod that `pod` builds from the same options."""
    waiting = pod(**pod_options)
    namespace = waiting["metadata"]["namespace"]
    owner = pod_owners.owner_of_pod(waiting)
    assert owner is not None
    return pool_specs.pool_spec_for_pod(
        waiting, owner, f"uid-{namespace}-{owner.name}", with_settings or settings()
    )
