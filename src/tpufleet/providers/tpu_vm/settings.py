"""Operator settings for TPU VMs: project, zones, network, service account, software."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.model import durations, encoding
from tpufleet.model.fleets import check_zone
from tpufleet.model.jobs import Capacity

PROJECT = re.compile(r"([a-z][a-z0-9.-]{0,61}:)?[a-z][a-z0-9-]{4,28}[a-z0-9]")
TAG = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
METADATA_KEY = re.compile(r"[A-Za-z0-9_-]{1,128}")
SHA256 = re.compile(r"[0-9a-f]{64}")
EMAIL = re.compile(r"[^@\s/]+@[^@\s/]+|default")
# Set by tpufleet, or changing how a host boots.
RESERVED_METADATA = ("startup-script", "startup-script-url", "shutdown-script")
SPANS = ("valid_for", "gang_patience")
CLOUD_PLATFORM = "https://www.googleapis.com/auth/cloud-platform"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataDisk:
    source: str  # projects/…/zones/…/disks/…
    read_only: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class TpuVmSettings:
    project: str
    zones: tuple[str, ...]
    network: str = ""
    subnetwork: str = ""
    external_ips: bool = True
    service_account: str = ""
    tags: tuple[str, ...] = ()
    data_disks: tuple[DataDisk, ...] = ()
    metadata: dict[str, str] = field(default_factory=dict)
    runtimes: dict[str, str] = field(default_factory=dict)  # by generation, overriding the defaults
    queue: tuple[Capacity, ...] = (Capacity.QUEUED,)  # capacity types requested as queued resources
    valid_for: timedelta = timedelta(hours=24)  # how long a queued resource may wait
    gang_patience: timedelta = timedelta(minutes=3)  # the same for a gang of another capacity type
    reservation: str = ""  # projects/…/locations/…/reservations/…
    wheel: str = ""  # gs:// or https:// URL of the tpufleet wheel that hosts install
    wheel_sha256: str = ""
    endpoint: str = ""  # host:port of an emulator; empty: Google's API

    def __post_init__(self) -> None:
        _check(self)

    @property
    def emulated(self) -> bool:
        return bool(self.endpoint)


def parse(config: Mapping[str, Any]) -> TpuVmSettings:
    """From a config file. Durations are written like 24h."""
    known = {item.name for item in fields(TpuVmSettings)}
    for key in config:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(known))}"
            raise BadInput(f"tpu_vm: {key}: unknown field; {hint}")
    try:
        spans = {key: durations.parse(config[key]) for key in SPANS if key in config}
        return encoding.from_builtins({**config, **spans}, TpuVmSettings)
    except BadInput as error:
        raise BadInput(f"tpu_vm: {error}") from error


def _check(settings: TpuVmSettings) -> None:
    if not PROJECT.fullmatch(settings.project):
        raise BadInput(
            f"project: {settings.project!r} is not a project id; run `gcloud projects list`"
        )
    if not settings.zones:
        raise BadInput("zones: required; at least one, such as us-central1-a")
    for zone in settings.zones:
        check_zone(zone)
    for tag in settings.tags:
        if not TAG.fullmatch(tag):
            raise BadInput(
                f"tags: {tag!r} is not a network tag; use lower-case letters, digits and dashes"
            )
    if settings.service_account and not EMAIL.fullmatch(settings.service_account):
        raise BadInput(f"service_account: {settings.service_account!r} is not an e-mail address")
    check_metadata(settings.metadata)
    if bool(settings.wheel) != bool(settings.wheel_sha256):
        raise BadInput("set both wheel and wheel_sha256, or neither")
    if settings.wheel and not settings.wheel.startswith(("gs://", "https://")):
        raise BadInput(f"wheel: {settings.wheel!r} must start with gs:// or https://")
    if settings.wheel_sha256 and not SHA256.fullmatch(settings.wheel_sha256):
        raise BadInput("wheel_sha256: must be 64 hexadecimal digits; run `sha256sum FILE`")


def check_metadata(metadata: Mapping[str, str]) -> None:
    for key, value in metadata.items():
        if not METADATA_KEY.fullmatch(key):
            raise BadInput(f"metadata: {key!r} is not a valid key; use letters, digits, _ and -")
        if key in RESERVED_METADATA or key.startswith("tpufleet-"):
            raise BadInput(f"metadata: {key} is reserved; choose another key")
        if not isinstance(value, str) or len(value.encode()) > 256 * 1024:
            raise BadInput(f"metadata: {key}: must be a string of at most 256 KiB")
