"""The JobSet and the Secret of an order, as Kubernetes is sent them. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from tpufleet.errors import BadInput, BadRequest
from tpufleet.model import topology
from tpufleet.model.jobs import Capacity
from tpufleet.model.topology import Accelerator
from tpufleet.providers.base import Order
from tpufleet.providers.gke import seats
from tpufleet.providers.gke.seats import Seats

Json = dict[str, Any]

REPLICATED_JOB = "slice"
CONTAINER = "agent"
FLEET = "tpufleet.dev/fleet"
ZONE = "tpufleet.dev/zone"
ORDER = "tpufleet.dev/order"
NOTICE = "tpufleet.dev/notice"  # on pods: preempted or maintenance
ACCELERATOR = "tpufleet.dev/accelerator"
JOB_INDEX = "jobset.sigs.k8s.io/job-index"
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
POOL = "cloud.google.com/gke-nodepool"
SPOT = "cloud.google.com/gke-spot"
TPU = "google.com/tpu"
SEATS_DIR, PODINFO_DIR, WORK_DIR = "/etc/tpufleet/seats", "/etc/tpufleet/pod", "/work"
# Room in a pod's name for its slice, host and random letters: 63 less `-slice-NNN-NNNN-xxxxx`.
LONGEST_NAME = 40
TPU_PORT, MEGASCALE_PORT, COORDINATOR_PORT = 8471, 8080, 8476
BAD_SETTINGS = 2  # the agent's exit status when it was started wrongly: trying again is no use
# For the agent to hand over its last logs after the workload has had its grace.
TIDY_UP = timedelta(seconds=30)
# Ours, from the most to the least urgent, by the smallest priority that belongs to each.
PRIORITIES = (
    (100, "veryhigh"), (10, "high"), (0, "medium"), (-99, "low"), (-10**9, "verylow"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class GkeSettings:
    namespace: str
    image: str
    queue: str = ""  # Kueue's LocalQueue; empty: without Kueue
    reservations: Mapping[str, str] = field(default_factory=dict)  # by accelerator
    cpu: str = "4"
    memory: str = "16Gi"
    scratch: str = "100Gi"
    user: int = 65532
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    platform: str = ""  # `cpu` where chips are simulated
    extra_selector: Mapping[str, str] = field(default_factory=dict)
    volumes: Mapping[str, str] = field(default_factory=dict)  # where in pods → claim


def accelerator_of(order: Order) -> Accelerator:
    try:
        found = topology.find(order.accelerator)
    except BadInput as error:
        raise BadRequest(str(error)) from error
    if found.gke_accelerator is None or found.machine_type is None:
        raise BadRequest(f"GKE has no {found.name}; use the provider tpu-vm for it")
    return found


def name_of(order_id: str) -> str:
    """A JobSet's name: the order's own where Kubernetes takes it, else cut and made unique."""
    letters = re.sub(r"[^a-z0-9-]+", "-", order_id.lower()).strip("-")
    if not letters[:1].isalpha():
        letters = f"o-{letters}"
    if letters == order_id and len(letters) <= LONGEST_NAME:
        return letters
    mark = hashlib.sha256(order_id.encode()).hexdigest()[:8]
    return f"{letters[: LONGEST_NAME - 9].rstrip('-')}-{mark}"


def priority_class(priority: int) -> str:
    return next(name for least, name in PRIORITIES if priority >= least)


def secret(order: Order, settings: GkeSettings, seated: Seats) -> Json:
    """What the pods of each seat prove themselves with. Only pods of this order mount it."""
    tokens = {
        str(index): seat_entry(seat.slice_id, order.tokens[seat.slice_id])
        for index, seat in enumerate(seated.all)
        if seat.slice_id is not None
    }
    return {
        "metadata": {
            "name": name_of(order.id),
            "namespace": settings.namespace,
            "labels": {FLEET: _label(order.fleet), "app": "tpu-worker"},
        },
        "type": "Opaque",
        "stringData": tokens,
    }


def seat_entry(slice_id: str, token: str) -> str:
    return json.dumps({"slice": slice_id, "token": token})


def jobset(order: Order, settings: GkeSettings) -> Json:
    found = accelerator_of(order)
    name = name_of(order.id)
    labels = {"app": "tpu-worker", FLEET: _label(order.fleet)}
    if order.job_id:
        labels["job-id"] = _label(order.job_id)
    labels |= {key: _label(value) for key, value in order.labels.items()}
    kueue = {}
    if settings.queue:
        kueue = {QUEUE: settings.queue, PRIORITY: priority_class(order.priority)}
    return {
        "metadata": {
            "name": name,
            "namespace": settings.namespace,
            "labels": {**labels, **kueue},
            "annotations": {
                EXCLUSIVE: POOL,
                ORDER: order.id,
                ZONE: order.zone,
                ACCELERATOR: found.name,
                seats.ANNOTATION: seats.fresh(order.slices).written(),
            },
        },
        "spec": {
            "ttlSecondsAfterFinished": 3600,
            # Restarts are decided by us: a JobSet fails at the first Job that does.
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [
                {
                    "name": REPLICATED_JOB,
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
                        "containerName": CONTAINER, "operator": "In", "values": [BAD_SETTINGS],
                    },
                },
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
                {"action": "Ignore", "onExitCodes": {"operator": "NotIn", "values": [0]}},
            ]
        },
        "template": {
            "metadata": {"labels": labels},
            "spec": _pod(order, settings, found),
        },
    }  # fmt: skip


def _pod(order: Order, settings: GkeSettings, found: Accelerator) -> Json:
    grace = order.grace + TIDY_UP
    pod: Json = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(grace.total_seconds()),
        # Users' code runs here: it must not be able to speak with Kubernetes.
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "nodeSelector": _selector(order, settings, found),
        "tolerations": _tolerations(order),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": settings.user,
            "runAsGroup": settings.user,
            "fsGroup": settings.user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(order, settings, found)],
        "volumes": [
            {"name": "work", "emptyDir": {"sizeLimit": settings.scratch}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "seats", "secret": {"secretName": name_of(order.id), "defaultMode": 0o440}},
            {
                "name": "pod",
                "downwardAPI": {
                    "items": [
                        {
                            "path": "notice",
                            "fieldRef": {"fieldPath": f"metadata.annotations['{NOTICE}']"},
                        }
                    ]
                },
            },
            *(
                {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}}
                for number, claim in enumerate(settings.volumes.values())
            ),
        ],
    }
    if settings.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in settings.pull_secrets]
    return pod


def _selector(order: Order, settings: GkeSettings, found: Accelerator) -> dict[str, str]:
    assert found.gke_accelerator is not None
    chosen = {
        "cloud.google.com/gke-tpu-accelerator": found.gke_accelerator,
        "cloud.google.com/gke-tpu-topology": found.topology,
        "topology.kubernetes.io/zone": order.zone,
        **settings.extra_selector,
    }
    match order.capacity:
        case Capacity.SPOT:
            chosen[SPOT] = "true"
        case Capacity.RESERVED:
            reservation = settings.reservations.get(found.name)
            if reservation is None:
                raise BadRequest(
                    f"no reservation is set for {found.name}; name it in the provider's "
                    "reservations, or allow another kind of capacity"
                )
            chosen["cloud.google.com/reservation-name"] = reservation
        case Capacity.QUEUED:
            chosen["cloud.google.com/gke-flex-start"] = "true"
    return chosen


def _tolerations(order: Order) -> list[Json]:
    found = [{"key": TPU, "operator": "Exists", "effect": "NoSchedule"}]
    if order.capacity is Capacity.SPOT:
        found.append(
            {"key": SPOT, "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        )
    return found


def _container(order: Order, settings: GkeSettings, found: Accelerator) -> Json:
    resources = {
        "cpu": settings.cpu,
        "memory": settings.memory,
        TPU: str(found.chips_per_host),
    }
    return {
        "name": CONTAINER,
        "image": settings.image,
        "imagePullPolicy": settings.pull_policy,
        "command": ["python", "-m", "tpufleet.agent.pods"],
        "env": _environment(order, settings, found),
        "ports": [
            {"name": "tpu", "containerPort": TPU_PORT},
            {"name": "megascale", "containerPort": MEGASCALE_PORT},
            {"name": "coordinator", "containerPort": COORDINATOR_PORT},
        ],
        "resources": {"requests": resources, "limits": resources},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "work", "mountPath": WORK_DIR},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "seats", "mountPath": SEATS_DIR, "readOnly": True},
            {"name": "pod", "mountPath": PODINFO_DIR, "readOnly": True},
            *(
                {"name": f"claim-{number}", "mountPath": path}
                for number, path in enumerate(settings.volumes)
            ),
        ],
    }


def _environment(order: Order, settings: GkeSettings, found: Accelerator) -> list[Json]:
    name = name_of(order.id)

    def annotation(key: str) -> Json:
        return {"fieldRef": {"fieldPath": f"metadata.annotations['{key}']"}}

    plain = {
        "TPUFLEET_SERVER": order.server_url,
        "TPUFLEET_SEATS": SEATS_DIR,
        "TPUFLEET_HOSTS": str(found.hosts),
        "TPUFLEET_WORK": f"{WORK_DIR}/agent",
        # JobSet gives every pod such a name, which all pods of the namespace find.
        "TPUFLEET_ADDRESS": (
            f"{name}-{REPLICATED_JOB}-$(TPUFLEET_SEAT)-$(TPUFLEET_HOST_INDEX).{name}"
        ),
        "TPUFLEET_COORDINATOR_PORT": str(COORDINATOR_PORT),
        "TPUFLEET_CHIPS": str(found.chips_per_host),
        "TPUFLEET_NOTICE_FILE": f"{PODINFO_DIR}/notice",
        "HOME": f"{WORK_DIR}",
    }
    if settings.platform:
        plain["TPUFLEET_PLATFORM"] = settings.platform
    return [
        {"name": "TPUFLEET_SEAT", "valueFrom": annotation(JOB_INDEX)},
        {"name": "TPUFLEET_HOST_INDEX", "valueFrom": annotation(COMPLETION_INDEX)},
        *({"name": key, "value": value} for key, value in plain.items()),
    ]


def _label(value: str) -> str:
    """As Kubernetes takes label values; cut, for a label is to find things by, not to keep them."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", value)[:63].strip("-._")
