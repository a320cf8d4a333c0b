"""The provider from settings: what `compose` calls when GKE is set up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tpufleet.clocks import Clock
from tpufleet.errors import BadInput
from tpufleet.kubernetes.connections import Connection
from tpufleet.model import topology
from tpufleet.providers.gke.manifests import GkeSettings
from tpufleet.providers.gke.provider import GkeProvider

PREFIX = "TPUFLEET_GKE_"


def wanted(environ: Mapping[str, str]) -> bool:
    return bool(environ.get(f"{PREFIX}IMAGE"))


def settings_of(environ: Mapping[str, str]) -> GkeSettings:
    """Read from variables that begin with TPUFLEET_GKE_. BadInput names the one at fault."""
    read = {key.removeprefix(PREFIX): value.strip() for key, value in environ.items()
            if key.startswith(PREFIX) and value.strip()}  # fmt: skip
    if "IMAGE" not in read:
        raise BadInput(f"{PREFIX}IMAGE is not set; it names the image that pods run")
    plain = {"QUEUE": "queue", "CPU": "cpu", "MEMORY": "memory", "SCRATCH": "scratch",
             "PLATFORM": "platform"}  # fmt: skip
    return GkeSettings(
        namespace=read.get("NAMESPACE", "tpu-training"),
        image=read["IMAGE"],
        reservations=_reservations(read.get("RESERVATIONS", "")),
        pull_secrets=tuple(_items(read.get("PULL_SECRETS", ""))),
        volumes=_volumes(read.get("VOLUMES", "")),
        **{field: read[key] for key, field in plain.items() if key in read},
    )


def open_provider(environ: Mapping[str, str], *, fleet: str, clock: Clock) -> GkeProvider:
    settings = settings_of(environ)
    zones = tuple(_items(environ.get(f"{PREFIX}ZONES", "")))
    if not zones:
        raise BadInput(f"{PREFIX}ZONES is not set; it lists the zones that slices may be in")
    most = environ.get(f"{PREFIX}MOST_SLICES", "").strip()
    if most and not most.isdecimal():
        raise BadInput(f"{PREFIX}MOST_SLICES must be a whole number, not {most!r}")
    file = environ.get(f"{PREFIX}KUBECONFIG", "").strip()
    connection = Connection(Path(file) if file else None)
    provider = GkeProvider(
        connection,
        settings,
        fleet=fleet,
        zones=zones,
        clock=clock,
        most_slices=int(most) if most else None,
    )
    provider.start()
    return provider


def _items(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _volumes(text: str) -> dict[str, str]:
    found = {}
    for item in _items(text):
        path, equals, claim = (part.strip() for part in item.partition("="))
        if not (path.startswith("/") and equals and claim):
            raise BadInput(f"{PREFIX}VOLUMES: {item!r} is not /PATH=CLAIM")
        found[path] = claim
    return found


def _reservations(text: str) -> dict[str, str]:
    found = {}
    for item in _items(text):
        accelerator, equals, reservation = (part.strip() for part in item.partition("="))
        if not (accelerator and equals and reservation):
            raise BadInput(f"{PREFIX}RESERVATIONS: {item!r} is not TYPE=RESERVATION")
        found[topology.find(accelerator).name] = reservation
    return found
