"""The JobSet and the Secret of an order, as Kubernetes is sent them. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from tpufleet.errors import BadInput, BadRequest
from tpufleet.model import topology
from tpufleet.model.topology import Accelerator
from tpufleet.providers.base import Order
from tpufleet.providers.gke import keys, pod_template, slice_slots
from tpufleet.providers.gke.settings import GkeSettings
from tpufleet.providers.gke.slice_slots import SliceSlots

Json = dict[str, Any]

# Room in a pod's name for its slice, host and random letters: 63 less `-slice-NNN-NNNN-xxxxx`.
MAX_NAME_LENGTH = 40
PLAIN_KEY = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
BAD_SETTINGS_EXIT_CODE = (
    2  # the agent's exit status when it was started wrongly: trying again is no use
)
# Ours, from the most to the least urgent, by the smallest priority that belongs to each.
PRIORITIES = (
    (100, "veryhigh"), (10, "high"), (0, "medium"), (-99, "low"), (-10**9, "verylow"),
)  # fmt: skip


def accelerator_of(order: Order) -> Accelerator:
    try:
        found = topology.find(order.accelerator)
    except BadInput as error:
        raise BadRequest(str(error)) from error
    if found.gke_accelerator is None or found.machine_type is None:
        raise BadRequest(f"GKE has no {found.name}; use the provider tpu-vm for it")
    return found


def jobset_name(order: Order) -> str:
    """After the job, so that `kubectl get jobsets` shows what `tpu jobs` shows."""
    return kubernetes_name(f"{order.job_id}-{order.id}" if order.job_id else order.id)


def kubernetes_name(wanted: str) -> str:
    """A name as it is wanted where Kubernetes takes it, else cut and made unique."""
    letters = re.sub(r"[^a-z0-9-]+", "-", wanted.lower()).strip("-")
    if not letters[:1].isalpha():
        letters = f"o-{letters}"
    if letters == wanted and len(letters) <= MAX_NAME_LENGTH:
        return letters
    mark = hashlib.sha256(wanted.encode()).hexdigest()[:8]
    return f"{letters[: MAX_NAME_LENGTH - 9].rstrip('-')}-{mark}"


def priority_class(priority: int) -> str:
    return next(name for least, name in PRIORITIES if priority >= least)


def secret(order: Order, settings: GkeSettings, slots: SliceSlots) -> Json:
    """What the pods of each seat prove themselves with. Only pods of this order mount it."""
    tokens = {
        str(index): slot_entry(seat.slice_id, order.tokens[seat.slice_id])
        for index, seat in enumerate(slots.slots)
        if seat.slice_id is not None
    }
    return {
        "metadata": {
            "name": jobset_name(order),
            "namespace": settings.namespace,
            "labels": {keys.FLEET: _label(order.fleet), "app": "tpu-worker"},
        },
        "type": "Opaque",
        "stringData": tokens,
    }


def slot_entry(slice_id: str, token: str) -> str:
    return json.dumps({"slice": slice_id, "token": token})


def jobset(order: Order, settings: GkeSettings) -> Json:
    found = accelerator_of(order)
    name = jobset_name(order)
    labels = _labels(order)
    kueue = {}
    if settings.queue:
        kueue = {keys.QUEUE: settings.queue, keys.PRIORITY: priority_class(order.priority)}
    return {
        "metadata": {
            "name": name,
            "namespace": settings.namespace,
            "labels": {**labels, **kueue},
            "annotations": {
                keys.EXCLUSIVE: keys.POOL,
                keys.ORDER: order.id,
                keys.ZONE: order.zone,
                keys.ACCELERATOR: found.name,
                **({keys.JOB: order.job_id} if order.job_id else {}),
                slice_slots.ANNOTATION: slice_slots.initial_slots(order.slices).to_json(),
            },
        },
        "spec": {
            "ttlSecondsAfterFinished": 3600,
            # Restarts are decided by us: a JobSet fails at the first Job that does.
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [
                {
                    "name": keys.REPLICATED_JOB,
                    "replicas": len(order.slices),
                    "template": {"spec": _job(order, settings, found, labels)},
                }
            ],
        },
    }


def _job(order: Order, settings: GkeSettings, found: Accelerator, labels: Json) -> Json:
    return {
        "parallelism": found.hosts,
        "completions": found.hosts,
        "completionMode": "Indexed",
        # A pod that goes is made again, so that the other slices of the JobSet go on and the node
        # pool of this one is kept for its successor. Seats tell which pods count.
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": keys.CONTAINER, "operator": "In", "values": [BAD_SETTINGS_EXIT_CODE],
                    },
                },
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
                {"action": "Ignore", "onExitCodes": {"operator": "NotIn", "values": [0]}},
            ]
        },
        "template": {
            "metadata": {"labels": labels},
            "spec": pod_template.pod_template(jobset_name(order), order, settings, found),
        },
    }  # fmt: skip


def _labels(order: Order) -> dict[str, str]:
    """Of the JobSet and its pods. An order may bring a job-id of its own (the number that a job has
    in another queue) and other plain names; those that we and Kubernetes go by it cannot change."""
    given = {
        key: _label(value)
        for key, value in order.labels.items()
        if PLAIN_KEY.fullmatch(key) and key != "app"
    }
    ours = {"job-id": _label(order.job_id)} if order.job_id else {}
    return {**ours, **given, "app": "tpu-worker", keys.FLEET: _label(order.fleet)}


def _label(value: str) -> str:
    """As Kubernetes takes label values; cut, for a label is to find things by, not to keep them."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", value)[:63].strip("-._")
