"""What an operator decides about GKE: which image pods run, where, in which queue, how large."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.model import encoding, topology

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")  # of things of Kubernetes
ZONE = re.compile(r"[a-z]+(-[a-z]+)+[0-9]+-[a-z]")
IMAGE = re.compile(r"[a-z0-9]([a-zA-Z0-9._:/@-]*[a-zA-Z0-9])?")
VOLUME_PATH = re.compile(r"(/[A-Za-z0-9._-]+)+")
QUANTITY = re.compile(r"([0-9]+(\.[0-9]+)?)(m|k|Ki|[MGTP]i?)?")
SCALES = {
    "": 1, "m": 0.001, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class GkeSettings:
    image: str  # what pods run: tpufleet and JAX
    namespace: str = "tpu-training"  # where jobs run
    zones: tuple[str, ...] = ()  # that slices may be in
    queue: str = ""  # Kueue's LocalQueue; empty: without Kueue
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
    kubeconfig: str = ""  # empty: the pod's own service account

    def __post_init__(self) -> None:
        _check(self)


def parse(written: Mapping[str, Any]) -> GkeSettings:
    """From a config file: fields by their names. Lists may also be text with commas, and
    reservations TYPE=NAME with commas, as they come from variables."""
    known = {item.name for item in fields(GkeSettings)}
    for key in written:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            cure = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(known))}"
            raise BadInput(f"gke: {key}: unknown field; {cure}")
    try:
        if "image" not in written:
            raise BadInput("image: name the image that pods run")
        found = encoding.from_builtins(_plain(written), GkeSettings)
        if not found.zones:
            raise BadInput("zones: name at least one, say us-central1-a")
    except BadInput as error:
        raise BadInput(f"gke: {error}") from error
    return found


def parse_quantity(quantity: str) -> int:
    """What Kubernetes takes a quantity of memory or disk for."""
    match = QUANTITY.fullmatch(quantity)
    assert match is not None
    number, _, unit = match.groups()
    return int(float(number) * SCALES[unit or ""])


def _plain(written: Mapping[str, Any]) -> dict[str, Any]:
    plain = dict(written)
    for key in ("zones", "pull_secrets"):
        if isinstance(plain.get(key), str):
            plain[key] = _items(plain[key])
    for key in ("reservations", "extra_selector", "volumes"):
        if isinstance(plain.get(key), str):
            plain[key] = _pairs(key, plain[key])
    for key in ("most_slices", "user"):
        if isinstance(plain.get(key), str):
            if not plain[key].isdecimal():
                raise BadInput(f"{key}: {plain[key]!r} is no whole number")
            plain[key] = int(plain[key])
    if isinstance(plain.get("cpu"), int | float):
        plain["cpu"] = str(plain["cpu"])
    if isinstance(plain.get("reservations"), Mapping):
        plain["reservations"] = {
            topology.find(kind).name: name for kind, name in plain["reservations"].items()
        }
    return plain


def _items(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _pairs(key: str, text: str) -> dict[str, str]:
    found = {}
    for item in _items(text):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name and equals and value):
            raise BadInput(f"{key}: {item!r} is not NAME=VALUE")
        found[name] = value
    return found


def _check(given: GkeSettings) -> None:
    if not IMAGE.fullmatch(given.image):
        raise BadInput(f"image: {given.image!r} is no image; write registry/name:tag")
    for key in ("namespace", "queue"):
        name = getattr(given, key)
        if name and not NAME.fullmatch(name):
            raise BadInput(f"{key}: {name!r} is no name; use lower case, digits and dashes")
    for zone in given.zones:
        if not ZONE.fullmatch(zone):
            raise BadInput(f"zones: {zone!r} is no zone; zones look like us-central1-a")
    for key in ("cpu", "memory", "scratch"):
        if not QUANTITY.fullmatch(getattr(given, key)):
            raise BadInput(f"{key}: {getattr(given, key)!r} is no quantity; write 4 or 16Gi, say")
    if given.most_slices is not None and given.most_slices < 1:
        raise BadInput(f"most_slices: {given.most_slices} is too few; leave it out for no limit")
    for path, claim in given.volumes.items():
        if not VOLUME_PATH.fullmatch(path) or not NAME.fullmatch(claim):
            raise BadInput(f"volumes: {path}={claim} is not /PATH=CLAIM")
    if given.user < 1:
        raise BadInput("user: pods never run as root; choose a number of 1 or more")
