"""Operator settings for GKE: image, namespace, zones, queue, pod resources."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tpufleet.errors import BadInput, SettingErrors
from tpufleet.kubernetes import quantities
from tpufleet.model.fleet import compute_reservations
from tpufleet.model.job.pod_settings import BUCKET, OBJECT_NAME
from tpufleet.model.tpu import topology
from tpufleet.model.values import setting_fields

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")  # of a Kubernetes object
ZONE = re.compile(r"[a-z]+(-[a-z]+)+[0-9]+-(ai[0-9]+)?[a-z]")
IMAGE = re.compile(r"[a-z0-9]([a-zA-Z0-9._:/@-]*[a-zA-Z0-9])?")
VOLUME_PATH = re.compile(r"(/[A-Za-z0-9._-]+)+")
PULL_POLICIES = ("Always", "IfNotPresent", "Never")
# Of a section that does not have them yet.
REQUIRED_EXAMPLE: Mapping[str, Any] = {"image": "registry/tpufleet:1", "zones": ["us-central1-a"]}


@dataclass(frozen=True, kw_only=True, slots=True)
class GkeSettings:
    image: str  # what pods run: tpufleet and JAX
    namespace: str = "tpu-training"  # where jobs run
    zones: tuple[str, ...] = ()  # that slices may be in
    queue: str = ""  # Kueue's LocalQueue; empty: without Kueue
    topology_aware: tuple[str, ...] = ()  # accelerators whose Kueue flavor has a topology
    reservations: Mapping[str, str] = field(default_factory=dict)  # by accelerator
    cpu: str = "4"  # of one host's pod
    memory: str = "16Gi"
    scratch: str = "100Gi"  # disk
    most_slices: int | None = None  # that this fleet holds at a time
    user: int = 65532
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    platform: str = ""  # `cpu` where chips are simulated
    extra_selector: Mapping[str, str] = field(default_factory=dict)
    volumes: Mapping[str, str] = field(default_factory=dict)  # where in pods → its claim
    https_proxy: str = ""  # egress proxy of pods
    no_proxy: str = ""  # what they reach without it, comma-separated
    service_account: str = ""  # of pods; empty: `default` of the namespace
    service_accounts: tuple[str, ...] = ()  # that jobs may name; empty: any
    kubeconfig: str = ""  # empty: the pod's own service account

    def __post_init__(self) -> None:
        _check(self)


def parse(config: Mapping[str, Any]) -> GkeSettings:
    """From a config file or environment variables, where lists are comma-separated and reservations
    are TYPE=NAME pairs."""
    errors = SettingErrors("gke")
    values = setting_fields.decode(config, GkeSettings, _normalize, errors)
    if "image" not in config:
        errors.add("image", "required; the container image that pods run")
    if "zones" not in config or values.get("zones") == ():
        errors.add("zones", "required; at least one, such as us-central1-a")
    with errors.collect(""):
        # An example in place of what is missing or invalid: the other fields are checked too.
        settings = GkeSettings(**{**REQUIRED_EXAMPLE, **values})
    errors.raise_all()
    return settings


def parse_quantity(quantity: str) -> int:
    """Bytes of a Kubernetes quantity such as 16Gi."""
    return int(quantities.parse(quantity))


def _normalize(key: str, value: Any) -> Any:
    if key in ("zones", "pull_secrets", "service_accounts", "topology_aware"):
        value = _items(value) if isinstance(value, str) else value
    elif key in ("reservations", "extra_selector", "volumes"):
        value = _pairs(value) if isinstance(value, str) else value
    elif key in ("most_slices", "user") and isinstance(value, str):
        if not value.isdecimal():
            raise BadInput(f"{value!r} is not an integer")
        value = int(value)
    elif key == "cpu" and isinstance(value, int | float):
        value = str(value)
    if key == "topology_aware" and isinstance(value, list):
        value = [topology.find(str(kind)).name for kind in value]
    elif key == "reservations" and isinstance(value, Mapping):
        value = {topology.find(str(kind)).name: name for kind, name in value.items()}
    return value


def _items(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _pairs(text: str) -> dict[str, str]:
    pairs = {}
    for item in _items(text):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name and equals and value):
            raise BadInput(f"{item!r} is not NAME=VALUE")
        pairs[name] = value
    return pairs


def _check(settings: GkeSettings) -> None:
    errors = SettingErrors()
    if not IMAGE.fullmatch(settings.image):
        errors.add(
            "image", f"{settings.image!r} is not an image reference; write registry/name:tag"
        )
    for key in ("namespace", "queue", "service_account"):
        name = getattr(settings, key)
        if name and not (OBJECT_NAME if key == "service_account" else NAME).fullmatch(name):
            errors.add(
                key, f"{name!r} is not a valid name; use lower-case letters, digits and dashes"
            )
    for zone in settings.zones:
        if not ZONE.fullmatch(zone):
            errors.add("zones", f"{zone!r} is not a zone; write a zone such as us-central1-a")
    for accelerator, reservation in settings.reservations.items():
        with errors.collect(f"reservations.{accelerator}"):
            compute_reservations.parse(reservation)
    for key in ("cpu", "memory", "scratch"):
        if not quantities.PATTERN.fullmatch(getattr(settings, key)):
            errors.add(key, f"{getattr(settings, key)!r} is not a quantity; write 4 or 16Gi")
    if settings.most_slices is not None and settings.most_slices < 1:
        errors.add("most_slices", f"{settings.most_slices} is below 1; leave it out for no limit")
    for path, claim in settings.volumes.items():
        source = OBJECT_NAME.fullmatch(claim) or BUCKET.fullmatch(claim)
        if not VOLUME_PATH.fullmatch(path) or not source:
            errors.add("volumes", f"{path}={claim} is not /PATH=CLAIM or /PATH=gs://BUCKET")
    if settings.pull_policy not in PULL_POLICIES:
        known = ", ".join(PULL_POLICIES)
        errors.add("pull_policy", f"{settings.pull_policy!r} is not one of {known}")
    if settings.platform not in ("", "cpu"):
        errors.add(
            "platform",
            f"{settings.platform!r} is not a platform; write cpu where chips are simulated, or "
            "leave it out",
        )
    if settings.user < 1:
        errors.add("user", "pods must not run as root; set a UID of 1 or more")
    errors.raise_all()
