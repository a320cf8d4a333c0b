"""Operator settings for GKE: image, namespace, zones, queue, pod resources."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.kubernetes import quantities
from tpufleet.model import compute_reservations, encoding, topology
from tpufleet.model.pod_settings import BUCKET, OBJECT_NAME

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")  # of a Kubernetes object
ZONE = re.compile(r"[a-z]+(-[a-z]+)+[0-9]+-(ai[0-9]+)?[a-z]")
IMAGE = re.compile(r"[a-z0-9]([a-zA-Z0-9._:/@-]*[a-zA-Z0-9])?")
VOLUME_PATH = re.compile(r"(/[A-Za-z0-9._-]+)+")


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
    known = {item.name for item in fields(GkeSettings)}
    for key in config:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(known))}"
            raise BadInput(f"gke: {key}: unknown field; {hint}")
    try:
        if "image" not in config:
            raise BadInput("image: required; the container image that pods run")
        settings = encoding.from_builtins(_normalize(config), GkeSettings)
        if not settings.zones:
            raise BadInput("zones: required; at least one, such as us-central1-a")
    except BadInput as error:
        raise BadInput(f"gke: {error}") from error
    return settings


def parse_quantity(quantity: str) -> int:
    """Bytes of a Kubernetes quantity such as 16Gi."""
    return int(quantities.parse(quantity))


def _normalize(config: Mapping[str, Any]) -> dict[str, Any]:
    plain = dict(config)
    for key in ("zones", "pull_secrets", "service_accounts", "topology_aware"):
        if isinstance(plain.get(key), str):
            plain[key] = _items(plain[key])
    for key in ("reservations", "extra_selector", "volumes"):
        if isinstance(plain.get(key), str):
            plain[key] = _pairs(key, plain[key])
    for key in ("most_slices", "user"):
        if isinstance(plain.get(key), str):
            if not plain[key].isdecimal():
                raise BadInput(f"{key}: {plain[key]!r} is not an integer")
            plain[key] = int(plain[key])
    if isinstance(plain.get("cpu"), int | float):
        plain["cpu"] = str(plain["cpu"])
    if "topology_aware" in plain:
        plain["topology_aware"] = [topology.find(kind).name for kind in plain["topology_aware"]]
    if isinstance(plain.get("reservations"), Mapping):
        plain["reservations"] = {
            topology.find(kind).name: name for kind, name in plain["reservations"].items()
        }
    return plain


def _items(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _pairs(key: str, text: str) -> dict[str, str]:
    pairs = {}
    for item in _items(text):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name and equals and value):
            raise BadInput(f"{key}: {item!r} is not NAME=VALUE")
        pairs[name] = value
    return pairs


def _check(settings: GkeSettings) -> None:
    if not IMAGE.fullmatch(settings.image):
        raise BadInput(
            f"image: {settings.image!r} is not an image reference; write registry/name:tag"
        )
    for key in ("namespace", "queue", "service_account"):
        name = getattr(settings, key)
        if name and not (OBJECT_NAME if key == "service_account" else NAME).fullmatch(name):
            raise BadInput(
                f"{key}: {name!r} is not a valid name; use lower-case letters, digits and dashes"
            )
    for zone in settings.zones:
        if not ZONE.fullmatch(zone):
            raise BadInput(f"zones: {zone!r} is not a zone; write a zone such as us-central1-a")
    for accelerator, reservation in settings.reservations.items():
        try:
            compute_reservations.parse(reservation)
        except BadInput as error:
            raise BadInput(f"reservations: {accelerator}: {error}") from error
    for key in ("cpu", "memory", "scratch"):
        if not quantities.PATTERN.fullmatch(getattr(settings, key)):
            raise BadInput(f"{key}: {getattr(settings, key)!r} is not a quantity; write 4 or 16Gi")
    if settings.most_slices is not None and settings.most_slices < 1:
        raise BadInput(f"most_slices: {settings.most_slices} is below 1; leave it out for no limit")
    for path, claim in settings.volumes.items():
        source = OBJECT_NAME.fullmatch(claim) or BUCKET.fullmatch(claim)
        if not VOLUME_PATH.fullmatch(path) or not source:
            raise BadInput(f"volumes: {path}={claim} is not /PATH=CLAIM or /PATH=gs://BUCKET")
    if settings.user < 1:
        raise BadInput("user: pods must not run as root; set a UID of 1 or more")
