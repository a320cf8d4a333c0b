"""Operator settings for TPU VMs: project, zones, network, service account, software."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from tpufleet.errors import SettingErrors
from tpufleet.model.fleet.fleets import check_zone
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu import topology
from tpufleet.model.values import durations, setting_fields

PROJECT = re.compile(r"([a-z][a-z0-9.-]{0,61}:)?[a-z][a-z0-9-]{4,28}[a-z0-9]")
TAG = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
METADATA_KEY = re.compile(r"[A-Za-z0-9_-]{1,128}")
SHA256 = re.compile(r"[0-9a-f]{64}")
# The same expressions as in startup.sh: values become lines of a systemd unit.
PROXY = re.compile(r"https?://[A-Za-z0-9._:@-]+/?")
NO_PROXY = re.compile(r"[A-Za-z0-9.,:*/_-]+")
ENDPOINT = re.compile(r"(\[[0-9a-fA-F:]+\]|[^\s:/]+):[0-9]{1,5}")
EMAIL = re.compile(r"[^@\s/]+@[^@\s/]+|default")
# Set by tpufleet, or changing how a host boots.
RESERVED_METADATA = ("startup-script", "startup-script-url", "shutdown-script")
SPANS = ("valid_for", "gang_patience")
REPLACED = frozenset({"wheel", "wheel_sha256"})  # by `bundle`
# Of a section that does not have them yet.
REQUIRED_EXAMPLE: Mapping[str, Any] = {"project": "my-project", "zones": ["us-central1-a"]}
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
    bundle: str = ""  # gs:// or https:// URL of what hosts install, made by `tpu deploy bundle`
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
    errors = SettingErrors("tpu_vm")
    for key in REPLACED & config.keys():
        errors.add(key, "replaced by bundle; delete it and run `tpu deploy bundle`")
    document = {key: value for key, value in config.items() if key not in REPLACED}
    values = setting_fields.decode(document, TpuVmSettings, _normalize, errors)
    if "project" not in document:
        errors.add("project", "required; `gcloud projects list` shows yours")
    if "zones" not in document:
        errors.add("zones", "required; at least one, such as us-central1-a")
    with errors.collect(""):
        # An example in place of what is missing or invalid: the other fields are checked too.
        settings = TpuVmSettings(**{**REQUIRED_EXAMPLE, **values})
    errors.raise_all()
    return settings


def _normalize(key: str, value: Any) -> Any:
    return durations.parse(value) if key in SPANS else value


def _check(settings: TpuVmSettings) -> None:
    errors = SettingErrors()
    if not PROJECT.fullmatch(settings.project):
        errors.add(
            "project", f"{settings.project!r} is not a project id; run `gcloud projects list`"
        )
    if not settings.zones:
        errors.add("zones", "required; at least one, such as us-central1-a")
    for zone in settings.zones:
        with errors.collect("zones"):
            check_zone(zone)
    for tag in settings.tags:
        if not TAG.fullmatch(tag):
            errors.add(
                "tags", f"{tag!r} is not a network tag; use lower-case letters, digits and dashes"
            )
    if settings.service_account and not EMAIL.fullmatch(settings.service_account):
        errors.add("service_account", f"{settings.service_account!r} is not an e-mail address")
    with errors.collect("metadata"):
        check_metadata(settings.metadata)
    if bool(settings.bundle) != bool(settings.bundle_sha256):
        errors.add(
            "bundle",
            "set both bundle and bundle_sha256, or neither; `tpu deploy bundle` prints both",
        )
    if settings.bundle and not settings.bundle.startswith(("gs://", "https://")):
        errors.add("bundle", f"{settings.bundle!r} must start with gs:// or https://")
    if settings.bundle_sha256 and not SHA256.fullmatch(settings.bundle_sha256):
        errors.add("bundle_sha256", "must be 64 hexadecimal digits; `tpu deploy bundle` prints it")
    if settings.https_proxy and not PROXY.fullmatch(settings.https_proxy):
        errors.add(
            "https_proxy",
            f"{settings.https_proxy!r} is not a proxy; for example http://proxy.example.com:3128",
        )
    generations = sorted({kind.generation for kind in topology.all_types().values()})
    for generation in settings.runtimes:
        if generation not in generations:
            errors.add(
                f"runtimes.{generation}",
                f"unknown generation; write one of {', '.join(generations)}",
            )
    if settings.endpoint and not ENDPOINT.fullmatch(settings.endpoint):
        errors.add(
            "endpoint",
            f"{settings.endpoint!r} is not an address; write host:port, such as 127.0.0.1:8490",
        )
    if settings.no_proxy and not NO_PROXY.fullmatch(settings.no_proxy):
        errors.add(
            "no_proxy",
            f"{settings.no_proxy!r} is not a list of hosts; for example .googleapis.com,10.0.0.0/8",
        )
    errors.raise_all()


def check_metadata(metadata: Mapping[str, str]) -> None:
    errors = SettingErrors()
    for key, value in metadata.items():
        if not METADATA_KEY.fullmatch(key):
            errors.add(key, "not a valid key; use letters, digits, _ and -")
        elif key in RESERVED_METADATA or key.startswith("tpufleet-"):
            errors.add(key, "reserved; choose another key")
        elif not isinstance(value, str) or len(value.encode()) > 256 * 1024:
            errors.add(key, "must be a string of at most 256 KiB")
    errors.raise_all()
