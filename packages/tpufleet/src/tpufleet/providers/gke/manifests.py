"""The JobSet and Secret manifests of an order. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from tpufleet.errors import BadRequest, not_available
from tpufleet.model.tpu import type_lookup
from tpufleet.model.tpu.type_lookup import Accelerator
from tpufleet.providers.base import Order, find_type
from tpufleet.providers.gke import keys, kueue, pod_template, slice_slots
from tpufleet.providers.gke.settings import GkeSettings
from tpufleet.providers.gke.slice_slots import SliceSlots

Json = dict[str, Any]

# Room in a pod's name for its slice, host and random letters: 63 less `-slice-NNN-NNNN-xxxxx`.
MAX_NAME_LENGTH = 40
PLAIN_KEY = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
BAD_SETTINGS_EXIT_CODE = (
    2  # the agent's exit status when it was started wrongly: trying again is no use
)
# Kueue's priority class by the lowest job priority that maps to it.
PRIORITIES = (
    (100, "veryhigh"), (10, "high"), (0, "medium"), (-99, "low"), (-10**9, "verylow"),
)  # fmt: skip


def accelerator_of(order: Order) -> Accelerator:
    accelerator = find_type(order.accelerator)
    if accelerator.gke_accelerator is None or accelerator.machine_type is None:
        raise BadRequest(
            not_available(type_lookup.short_name(order.accelerator), "on GKE", "tpu-vm")
        )
    return accelerator


def jobset_name(order: Order) -> str:
    """After the job, so that `kubectl get jobsets` shows what `tpu jobs` shows."""
    return kubernetes_name(f"{order.job_id}-{order.id}" if order.job_id else order.id)


def kubernetes_name(name: str) -> str:
    """The name itself where it is valid in Kubernetes, else shortened and made unique."""
    letters = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")
    if not letters[:1].isalpha():
        letters = f"o-{letters}"
    if letters == name and len(letters) <= MAX_NAME_LENGTH:
        return letters
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{letters[: MAX_NAME_LENGTH - 9].rstrip('-')}-{digest}"


def priority_class(priority: int) -> str:
    return next(name for lowest, name in PRIORITIES if priority >= lowest)


def secret(order: Order, namespace: str, slots: SliceSlots) -> Json:
    """The bootstrap tokens by slot. Only pods of this order mount it."""
    tokens = {
        str(index): slot_entry(slot.slice_id, order.tokens[slot.slice_id])
        for index, slot in enumerate(slots.slots)
        if slot.slice_id is not None
    }
    return {
        "metadata": {
            "name": jobset_name(order),
            "namespace": namespace,
            "labels": {keys.FLEET: _label(order.fleet), "app": "tpu-worker"},
        },
        "type": "Opaque",
        "stringData": tokens,
    }


def slot_entry(slice_id: str, token: str) -> str:
    return json.dumps({"slice": slice_id, "token": token})


def jobset(order: Order, settings: GkeSettings) -> Json:
    accelerator = accelerator_of(order)
    settings = pod_template.with_job_settings(settings, order)
    name = jobset_name(order)
    labels = _labels(order)
    queue_labels: dict[str, str] = {}
    if settings.queue:
        queue_labels = {keys.QUEUE: settings.queue, keys.PRIORITY: priority_class(order.priority)}
    return {
        "metadata": {
            "name": name,
            "namespace": settings.namespace,
            "labels": {**labels, **queue_labels},
            "annotations": {
                **exclusive_placement(accelerator, accelerator.name in settings.dynamic_slices),
                keys.ORDER: order.id,
                keys.ZONE: order.zone,
                keys.ACCELERATOR: accelerator.name,
                **({keys.JOB: order.job_id} if order.job_id else {}),
                slice_slots.ANNOTATION: slice_slots.initial_slots(order.slices).to_json(),
            },
        },
        "spec": {
            "ttlSecondsAfterFinished": 3600,
            # The controller decides on restarts: a JobSet fails with its first failed Job.
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [
                {
                    "name": keys.REPLICATED_JOB,
                    "replicas": len(order.slices),
                    "template": {"spec": _job(order, settings, accelerator, labels)},
                }
            ],
        },
    }


def exclusive_placement(accelerator: Accelerator, dynamic: bool = False) -> dict[str, str]:
    """A multi-host slice is one node pool, or a dynamic one of several, and a Job has it to itself.
    Single-host slices share a pool, of which only one Job could use a node at a time:
    https://jobset.sigs.k8s.io/docs/overview/"""
    domain = keys.TPU_SLICE if dynamic else keys.POOL
    return {keys.EXCLUSIVE: domain} if accelerator.hosts > 1 else {}


def is_dynamic(jobset: Json) -> bool:
    return bool(jobset["metadata"]["annotations"].get(keys.EXCLUSIVE) == keys.TPU_SLICE)


def _job(order: Order, settings: GkeSettings, accelerator: Accelerator, labels: Json) -> Json:
    return {
        "parallelism": accelerator.hosts,
        "completions": accelerator.hosts,
        "completionMode": "Indexed",
        # A pod that ends is replaced, so that the other slices of the JobSet continue and the node
        # pool of this one is kept for its successor. The slot table tells which pods count.
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": keys.CONTAINER,
                        "operator": "In",
                        "values": [BAD_SETTINGS_EXIT_CODE],
                    },
                },
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
                {"action": "Ignore", "onExitCodes": {"operator": "NotIn", "values": [0]}},
            ]
        },
        "template": {
            "metadata": {
                "labels": {**order.pod.labels, **labels},
                **_pod_annotations(settings, accelerator),
            },
            "spec": pod_template.pod_template(jobset_name(order), order, settings, accelerator),
        },
    }  # fmt: skip


def _pod_annotations(settings: GkeSettings, accelerator: Accelerator) -> Json:
    # Where a pool is autoscaled, GKE takes nodes whose pods request less than half of them for
    # unneeded, and would evict a running job:
    # https://cloud.google.com/kubernetes-engine/docs/concepts/cluster-autoscaler
    annotations = {keys.SAFE_TO_EVICT: "false", **pod_template.fuse_annotations(settings)}
    if accelerator.name in settings.dynamic_slices:
        annotations[keys.SLICE_TOPOLOGY] = accelerator.topology
    if settings.queue and accelerator.name in settings.topology_aware:
        annotations |= kueue.topology_annotations(accelerator)
    return {"annotations": annotations}


def _labels(order: Order) -> dict[str, str]:
    """Labels of the JobSet and its pods. An order may set its own job-id (a job's number in another
    queue) and other unprefixed keys, but not the labels that tpufleet and Kubernetes rely on."""
    own = {
        key: _label(value)
        for key, value in order.labels.items()
        if PLAIN_KEY.fullmatch(key) and key != "app"
    }
    job_label = {"job-id": _label(order.job_id)} if order.job_id else {}
    return {**job_label, **own, "app": "tpu-worker", keys.FLEET: _label(order.fleet)}


def _label(value: str) -> str:
    """A valid label value: invalid characters replaced, cut at 63 characters."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", value)[:63].strip("-._")
