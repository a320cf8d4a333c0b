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
# The same expressions as in startup.sh: values become lines of a systemd unit.
PROXY = re.compile(r"https?://[A-Za-z0-9._:@-]+/?")
NO_PROXY = re.compile(r"[A-Za-z0-9.,:*/_-]+")
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
    bundle: str = ""  # gs:// or https:// URL of what hosts install, made by `tpu bundle`
    bundle_sha256: str = ""
    https_proxy: str = ""  # egress proxy of the hosts
    no_proxy: str = ""  # hosts and domains that are reached without it, comma-separated
    containers: bool = False  # jobs may use images; such a job can become root on its hosts
    format_disks: bool = False  # format attached disks that have no file system
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
        if key in ("wheel", "wheel_sha256"):
            raise BadInput(f"tpu_vm: {key}: replaced by bundle; run `tpu bundle`")
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
    if bool(settings.bundle) != bool(settings.bundle_sha256):
        raise BadInput("set both bundle and bundle_sha256, or neither; `tpu bundle` prints both")
    if settings.bundle and not settings.bundle.startswith(("gs://", "https://")):
        raise BadInput(f"bundle: {settings.bundle!r} must start with gs:// or https://")
    if settings.bundle_sha256 and not SHA256.fullmatch(settings.bundle_sha256):
        raise BadInput("bundle_sha256: must be 64 hexadecimal digits; `tpu bundle` prints it")
    if settings.https_proxy and not PROXY.fullmatch(settings.https_proxy):
        raise BadInput(
            f"https_proxy: {settings.https_proxy!r} is not a proxy; for example "
            "http://proxy.example.com:3128"
        )
    if settings.no_proxy and not NO_PROXY.fullmatch(settings.no_proxy):
        raise BadInput(
            f"no_proxy: {settings.no_proxy!r} is not a list of hosts; for example "
            ".googleapis.com,10.0.0.0/8"
        )


def check_metadata(metadata: Mapping[str, str]) -> None:
    for key, value in metadata.items():
        if not METADATA_KEY.fullmatch(key):
            raise BadInput(f"metadata: {key!r} is not a valid key; use letters, digits, _ and -")
        if key in RESERVED_METADATA or key.startswith("tpufleet-"):
            raise BadInput(f"metadata: {key} is reserved; choose another key")
        if not isinstance(value, str) or len(value.encode()) > 256 * 1024:
            raise BadInput(f"metadata: {key}: must be a string of at most 256 KiB")
