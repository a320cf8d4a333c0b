"""What an operator decides about TPU VMs: where, on which network, as whom, with which software."""

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
# Ours, and those that change what a machine is.
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
    runtimes: dict[str, str] = field(default_factory=dict)  # by generation, instead of ours
    queue: tuple[Capacity, ...] = (Capacity.QUEUED,)  # kinds that are asked for by queue
    valid_for: timedelta = timedelta(hours=24)  # how long a queued request may wait
    gang_patience: timedelta = timedelta(minutes=3)  # the same for a gang of another kind
    reservation: str = ""  # projects/…/locations/…/reservations/…
    wheel: str = ""  # gs:// or https:// address of the tpufleet build that hosts install
    wheel_sha256: str = ""
    endpoint: str = ""  # host:port of an emulator; empty: Google's own

    def __post_init__(self) -> None:
        _check(self)

    @property
    def emulated(self) -> bool:
        return bool(self.endpoint)


def parse(written: Mapping[str, Any]) -> TpuVmSettings:
    """From a config file: fields by their names, spans like 24h."""
    known = {item.name for item in fields(TpuVmSettings)}
    for key in written:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            cure = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(known))}"
            raise BadInput(f"tpu_vm: {key}: unknown field; {cure}")
    try:
        spans = {key: durations.parse(written[key]) for key in SPANS if key in written}
        return encoding.from_builtins({**written, **spans}, TpuVmSettings)
    except BadInput as error:
        raise BadInput(f"tpu_vm: {error}") from error


def _check(given: TpuVmSettings) -> None:
    if not PROJECT.fullmatch(given.project):
        raise BadInput(f"project: {given.project!r} is no project id; `gcloud projects list`")
    if not given.zones:
        raise BadInput("zones: name at least one, say us-central1-a")
    for zone in given.zones:
        check_zone(zone)
    for tag in given.tags:
        if not TAG.fullmatch(tag):
            raise BadInput(f"tags: {tag!r} is no network tag; use lower case, digits and dashes")
    if given.service_account and not EMAIL.fullmatch(given.service_account):
        raise BadInput(f"service_account: {given.service_account!r} is no e-mail address")
    check_metadata(given.metadata)
    if bool(given.wheel) != bool(given.wheel_sha256):
        raise BadInput("wheel and wheel_sha256 belong together: a build is never taken on trust")
    if given.wheel and not given.wheel.startswith(("gs://", "https://")):
        raise BadInput(f"wheel: {given.wheel!r} is neither gs:// nor https://")
    if given.wheel_sha256 and not SHA256.fullmatch(given.wheel_sha256):
        raise BadInput("wheel_sha256: 64 hexadecimal digits are needed; `sha256sum FILE`")


def check_metadata(metadata: Mapping[str, str]) -> None:
    for key, value in metadata.items():
        if not METADATA_KEY.fullmatch(key):
            raise BadInput(f"metadata: {key!r} is no key; use letters, digits, _ and -")
        if key in RESERVED_METADATA or key.startswith("tpufleet-"):
            raise BadInput(f"metadata: {key} is set by tpufleet itself; choose another name")
        if not isinstance(value, str) or len(value.encode()) > 256 * 1024:
            raise BadInput(f"metadata: {key}: a text of at most 256 KiB is needed")
