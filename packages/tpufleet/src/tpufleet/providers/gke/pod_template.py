"""The pod template of one host in the JobSet of an order. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from msgspec import structs

from tpufleet.errors import BadRequest, not_allowed
from tpufleet.model.fleet import compute_reservations
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.job.pod_settings import BUCKET, parse_toleration
from tpufleet.model.tpu.type_lookup import Accelerator
from tpufleet.providers.base import Order
from tpufleet.providers.gke import keys
from tpufleet.providers.gke.settings import GkeSettings, parse_quantity

Json = dict[str, Any]

SLOTS_DIR, PODINFO_DIR, WORK_DIR = "/etc/tpufleet/seats", "/etc/tpufleet/pod", "/work"
SLOT_DIR = "/run/tpufleet"
TPU_PORT, MEGASCALE_PORT, COORDINATOR_PORT = 8471, 8080, 8476
# For the agent to upload its last logs after the workload's grace period.
SHUTDOWN_MARGIN = timedelta(seconds=30)


# https://cloud.google.com/kubernetes-engine/docs/how-to/cloud-storage-fuse-csi-driver-ephemeral
GCS_FUSE_DRIVER = "gcsfuse.csi.storage.gke.io"
GCS_FUSE_ANNOTATION = "gke-gcsfuse/volumes"  # GKE adds the sidecar that mounts buckets


def with_job_settings(settings: GkeSettings, order: Order) -> GkeSettings:
    """What the job asks for, and for the rest the settings of its team and the operator."""
    settings, pod = _with_team(settings, order), order.pod
    account = pod.service_account
    if account and settings.service_accounts and account not in settings.service_accounts:
        allowed = settings.service_accounts
        raise BadRequest(str(not_allowed("pod.service_account", account, allowed)))
    return structs.replace(
        settings,
        image=pod.image or settings.image,
        cpu=pod.cpu or settings.cpu,
        memory=pod.memory or settings.memory,
        service_account=account or settings.service_account,
        volumes={**settings.volumes, **pod.volumes},
    )


def _with_team(settings: GkeSettings, order: Order) -> GkeSettings:
    """The team that the job names, else the only one that its owner belongs to, else the only one
    open to all. The slices of a pool have no owner."""
    own = [name for name, team in settings.teams.items() if order.owner in team.users]
    anyones = [name for name, team in settings.teams.items() if not team.users]
    allowed = [*own, *anyones] if order.owner else list(settings.teams)
    usual = own or allowed
    chosen = order.pod.team or (usual[0] if len(usual) == 1 else None)
    if chosen is None and not settings.teams:
        return settings
    if chosen not in allowed:
        problem = (
            f"{chosen} is not a team" if chosen else "more than one team" if allowed else "no team"
        )
        raise BadRequest(
            f"pod.team: {problem} of {order.owner or 'this server'}; "
            f"{'write one of ' + ', '.join(allowed) if allowed else 'ask an admin: gke.teams'}"
        )
    team = settings.teams[chosen]
    return structs.replace(
        settings,
        namespace=team.namespace or chosen,
        queue=team.queue,
        service_account=team.service_account,
    )


def fuse_annotations(settings: GkeSettings) -> dict[str, str]:
    """Of the pods."""
    if any(BUCKET.fullmatch(source) for source in settings.volumes.values()):
        return {GCS_FUSE_ANNOTATION: "true"}
    return {}


def pod_template(name: str, order: Order, settings: GkeSettings, accelerator: Accelerator) -> Json:
    """`settings` are those of `with_job_settings`."""
    grace = order.grace + SHUTDOWN_MARGIN
    pod: Json = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(grace.total_seconds()),
        # User code runs here: it must not reach the Kubernetes API.
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "nodeSelector": _selector(order, settings, accelerator),
        "tolerations": _tolerations(order, accelerator.name in settings.compute_classes),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": settings.user,
            "runAsGroup": settings.user,
            "fsGroup": settings.user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [_slot_container(settings)],
        "containers": [_container(name, order, settings, accelerator)],
        "volumes": [
            {"name": "work", "emptyDir": {"sizeLimit": settings.scratch}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "seats", "secret": {"secretName": name, "defaultMode": 0o440}},
            {"name": "seat", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            {
                "name": "pod",
                "downwardAPI": {
                    "items": [
                        {
                            "path": "notice",
                            "fieldRef": {"fieldPath": f"metadata.annotations['{keys.NOTICE}']"},
                        }
                    ]
                },
            },
            *(
                {"name": f"claim-{number}", **_volume(source, settings)}
                for number, source in enumerate(settings.volumes.values())
            ),
        ],
    }
    if settings.service_account:
        pod["serviceAccountName"] = settings.service_account
    if settings.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in settings.pull_secrets]
    return pod


def _volume(source: str, settings: GkeSettings) -> Json:
    match = BUCKET.fullmatch(source)
    if match is None:
        return {"persistentVolumeClaim": {"claimName": source}}
    # Objects have no owner: they belong to the user of the pod.
    options = ["implicit-dirs", f"uid={settings.user}", f"gid={settings.user}"]
    if folder := (match["folder"] or "").strip("/"):
        options.append(f"only-dir={folder}")
    attributes = {"bucketName": match["bucket"], "mountOptions": ",".join(options)}
    return {"csi": {"driver": GCS_FUSE_DRIVER, "volumeAttributes": attributes}}


def _selector(order: Order, settings: GkeSettings, accelerator: Accelerator) -> dict[str, str]:
    assert accelerator.gke_accelerator is not None
    chosen = {"topology.kubernetes.io/zone": order.zone, **settings.extra_selector}
    compute_class = settings.compute_classes.get(accelerator.name)
    if compute_class is not None:  # GKE refuses pods that select the kind of capacity too
        return chosen | {keys.COMPUTE_CLASS: compute_class}
    chosen["cloud.google.com/gke-tpu-accelerator"] = accelerator.gke_accelerator
    if accelerator.name in settings.dynamic_slices:  # of several pools, all of one reservation
        return chosen
    chosen["cloud.google.com/gke-tpu-topology"] = accelerator.topology
    match order.capacity:
        case Capacity.SPOT:
            chosen[keys.SPOT] = "true"
        case Capacity.RESERVED:
            reservation = settings.reservations.get(accelerator.name)
            if reservation is None:
                raise BadRequest(
                    f"no reservation for {accelerator.name}; set it in gke.reservations, or allow "
                    "another capacity type"
                )
            chosen |= compute_reservations.parse(reservation).node_labels
        case Capacity.QUEUED:
            chosen[keys.FLEX_START] = "true"
    return chosen


def capacity_of(selector: Mapping[str, str]) -> Capacity:
    """The capacity type that these node selectors ask for."""
    by_key = {
        keys.SPOT: Capacity.SPOT,
        keys.RESERVATION: Capacity.RESERVED,
        keys.FLEX_START: Capacity.QUEUED,
    }
    return next((kind for key, kind in by_key.items() if key in selector), Capacity.ON_DEMAND)


def _tolerations(order: Order, of_compute_class: bool) -> list[Json]:
    tolerations = [{"key": keys.TPU, "operator": "Exists", "effect": "NoSchedule"}]
    capacity = Capacity.SPOT if of_compute_class else order.capacity  # a class may choose spot
    tainted = {Capacity.SPOT: keys.SPOT, Capacity.QUEUED: keys.QUEUED}.get(capacity)
    if tainted:
        tolerations.append(
            {"key": tainted, "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        )
    for text in order.pod.tolerations:
        parsed = parse_toleration(text)
        toleration: Json = {"key": parsed.key, "operator": "Exists"}
        if parsed.value is not None:
            toleration |= {"operator": "Equal", "value": parsed.value}
        if parsed.effect is not None:
            toleration["effect"] = parsed.effect
        tolerations.append(toleration)
    return tolerations


def _container(name: str, order: Order, settings: GkeSettings, accelerator: Accelerator) -> Json:
    resources = {
        "cpu": settings.cpu,
        "memory": settings.memory,
        keys.TPU: str(accelerator.chips_per_host),
    }
    return {
        "name": keys.CONTAINER,
        "image": settings.image,
        "imagePullPolicy": settings.pull_policy,
        "command": ["python", "-m", "tpufleet.agent.pod_entrypoint"],
        "env": _environment(name, order, settings, accelerator),
        "ports": [
            {"name": "tpu", "containerPort": TPU_PORT},
            {"name": "megascale", "containerPort": MEGASCALE_PORT},
            {"name": "coordinator", "containerPort": COORDINATOR_PORT},
        ],
        "resources": {"requests": resources, "limits": resources},
        "securityContext": _restricted(),
        "volumeMounts": [
            {"name": "work", "mountPath": WORK_DIR},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "seat", "mountPath": SLOT_DIR},
            {"name": "pod", "mountPath": PODINFO_DIR, "readOnly": True},
            *(
                {"name": f"claim-{number}", "mountPath": path}
                for number, path in enumerate(settings.volumes)
            ),
        ],
    }


def _slot_container(settings: GkeSettings) -> Json:
    """Init container: waits until a slice is assigned to the pod's slot and copies its token for
    the agent, which deletes the copy before the workload starts. Only this container mounts the
    Secret with the tokens of the whole gang: user code runs in the other, as the agent's user."""
    resources = {"cpu": "100m", "memory": "128Mi"}
    return {
        "name": keys.SLOT_CONTAINER,
        "image": settings.image,
        "imagePullPolicy": settings.pull_policy,
        "command": ["python", "-m", "tpufleet.agent.pod_entrypoint", "wait"],
        "env": [
            {"name": "TPUFLEET_SEAT", "valueFrom": _annotation(keys.JOB_INDEX)},
            {"name": "TPUFLEET_SEATS", "value": SLOTS_DIR},
            {"name": "TPUFLEET_SEAT_FILE", "value": f"{SLOT_DIR}/seat"},
        ],
        "resources": {"requests": resources, "limits": resources},
        "securityContext": _restricted(),
        "volumeMounts": [
            {"name": "seats", "mountPath": SLOTS_DIR, "readOnly": True},
            {"name": "seat", "mountPath": SLOT_DIR},
        ],
    }


def _restricted() -> Json:
    return {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _environment(
    name: str, order: Order, settings: GkeSettings, accelerator: Accelerator
) -> list[Json]:
    plain = {
        "TPUFLEET_SERVER": order.server_url,
        "TPUFLEET_SEAT_FILE": f"{SLOT_DIR}/seat",
        "TPUFLEET_HOSTS": str(accelerator.hosts),
        "TPUFLEET_WORK": f"{WORK_DIR}/agent",
        # The DNS name that JobSet gives the pod.
        "TPUFLEET_ADDRESS": (
            f"{name}-{keys.REPLICATED_JOB}-$(TPUFLEET_SEAT)-$(TPUFLEET_HOST_INDEX).{name}"
        ),
        "TPUFLEET_COORDINATOR_PORT": str(COORDINATOR_PORT),
        "TPUFLEET_CHIPS": str(accelerator.chips_per_host),
        "TPUFLEET_NOTICE_FILE": f"{PODINFO_DIR}/notice",
        "TPUFLEET_SCRATCH": WORK_DIR,
        "TPUFLEET_SCRATCH_BYTES": str(parse_quantity(settings.scratch)),
        "TPUFLEET_ECHO": "1",  # for kubectl logs and Cloud Logging
        "HOME": f"{WORK_DIR}",
    }
    if order.ca_certificates:
        plain["TPUFLEET_CA_CERTIFICATES"] = order.ca_certificates
    if settings.https_proxy:
        plain |= {"HTTPS_PROXY": settings.https_proxy, "NO_PROXY": settings.no_proxy}
    if settings.platform:
        plain["TPUFLEET_PLATFORM"] = settings.platform
    return [
        {"name": "TPUFLEET_SEAT", "valueFrom": _annotation(keys.JOB_INDEX)},
        {"name": "TPUFLEET_HOST_INDEX", "valueFrom": _annotation(keys.COMPLETION_INDEX)},
        *({"name": key, "value": value} for key, value in plain.items()),
    ]


def _annotation(key: str) -> Json:
    return {"fieldRef": {"fieldPath": f"metadata.annotations['{key}']"}}
