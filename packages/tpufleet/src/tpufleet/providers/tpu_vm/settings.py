"""Operator settings for TPU VMs: project, zones, network, service account, software."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tpufleet import schema
from tpufleet.errors import together, too_long
from tpufleet.model.fleet import fleets
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu import type_lookup
from tpufleet.model.values import durations
from tpufleet.schema import about

# Set by tpufleet, or changing how a host boots.
RESERVED_METADATA = ("startup-script", "startup-script-url", "shutdown-script")
# Of a section that does not have them yet.
REQUIRED_EXAMPLE: Mapping[str, Any] = {"project": "my-project", "zones": ["us-central1-a"]}
CLOUD_PLATFORM = "https://www.googleapis.com/auth/cloud-platform"


def _parse_metadata_value(value: Any) -> str:
    if not isinstance(value, str) or len(value.encode()) > 256 * 1024:
        raise too_long(256 * 1024, "bytes")
    return value


_Zone = Annotated[str, schema.text("zone", fleets.ZONE.pattern, example="us-central1-a")]
_Tag = Annotated[
    str, schema.text("network tag", r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", example="tpu-host")
]
_MetadataKey = Annotated[
    str,
    schema.text(
        "metadata key",
        rf"(?!tpufleet-|({'|'.join(RESERVED_METADATA)})$)[A-Za-z0-9_-]{{1,128}}",
        example="owner",
        rule="letters, digits, _ and -; not one that tpufleet sets",
    ),
]
_NAME = r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
_URL = r"(https://(www|compute)\.googleapis\.com/compute/[a-z0-9]+/)?(projects/[a-z0-9.:-]+/)?"
_Network = Annotated[
    str,
    schema.text(
        "network",
        rf"(({_URL}global/networks/)?{_NAME})?",
        example="projects/HOST/global/networks/N",
    ),
]
_Subnetwork = Annotated[
    str,
    schema.text(
        "subnetwork",
        rf"({_URL}regions/[a-z0-9-]+/subnetworks/)?{_NAME}",
        example="projects/HOST/regions/REGION/subnetworks/NAME",
    ),
]
_Duration = Annotated[timedelta, durations.within()]
# cloud.google.com/tpu/docs/request-using-flex-start and, for the shortest,
# cloud.google.com/compute/docs/instance-groups/about-resize-requests-mig
FLEX_START_LIMITS = timedelta(minutes=10), timedelta(days=7)


class DataDisk(msgspec.Struct, frozen=True, kw_only=True):
    source: Annotated[str, about("The disk.", example="projects/PROJECT/zones/ZONE/disks/NAME")]
    read_only: bool = True


class GoogleSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the sections of TPU VMs and of Compute Engine instances have in common."""

    project: Annotated[
        str, fleets.PROJECT_ID, about("Project of the slices.", example="my-project")
    ]
    zones: Annotated[
        tuple[_Zone, ...],
        Meta(min_length=1),
        about("Zones in order of preference.", example="[us-central1-a]"),
    ]
    # As Compute Engine takes them: a name, or a partial or full URL, of a shared VPC for instance.
    network: _Network = ""
    # A name is of the region of each slice; a URL names its own.
    subnetwork: tuple[_Subnetwork, ...] = ()
    external_ips: bool = True
    service_account: Annotated[
        str, schema.text("e-mail address", r"([^@\s/]+@[^@\s/]+|default)?", example="default")
    ] = ""
    tags: tuple[_Tag, ...] = ()
    metadata: dict[_MetadataKey, Annotated[str, schema.custom("text", _parse_metadata_value)]] = {}
    valid_for: _Duration = timedelta(hours=24)  # how long a request may wait in a queue
    gang_patience: _Duration = timedelta(minutes=3)  # the same for a gang of another capacity type
    # Of a slice of flex-start, which Google deletes then. For TPU VMs it makes `queued` capacity
    # flex-start; for Compute Engine, where it always is, 7 days are the default.
    max_run_duration: Annotated[
        timedelta | None,
        durations.within(int(FLEX_START_LIMITS[0].total_seconds()), FLEX_START_LIMITS[1]),
    ] = None
    reservation: str = ""  # a name, or projects/…/reservations/NAME
    # What hosts install, made by `tpu deploy bundle`.
    bundle: Annotated[
        str,
        schema.text("gs:// or https:// URL", r"((gs|https)://.*)?", example="gs://b/bundle.tar.gz"),
    ] = ""
    bundle_sha256: Annotated[
        str,
        schema.text(
            "SHA-256 checksum", "([0-9a-f]{64})?", example="what `tpu deploy bundle` prints"
        ),
    ] = ""
    # Both as in startup.sh: values become lines of a systemd unit.
    https_proxy: Annotated[
        str,
        schema.text(
            "proxy", r"(https?://[A-Za-z0-9._:@-]+/?)?", example="http://proxy.example.com:3128"
        ),
    ] = ""
    no_proxy: Annotated[
        str,
        schema.text(
            "comma-separated list of hosts and domains that are reached without the proxy",
            r"[A-Za-z0-9.,:*/_-]*",
            example=".googleapis.com,10.0.0.0/8",
        ),
    ] = ""
    containers: bool = False  # jobs may use images; such a job can become root on its hosts
    format_disks: bool = False  # format attached disks that have no file system

    def check(self) -> Iterator[tuple[str, str]]:
        if bool(self.bundle) != bool(self.bundle_sha256):
            yield "bundle", together("bundle (`tpu deploy bundle`)", "bundle_sha256")
        for zone in self.zones:
            if self.subnetwork and not self.subnetwork_path(zone):
                yield "subnetwork", f"none is in the region of {zone}; add it, or write names only"

    @property
    def network_project(self) -> str:
        """The host project of a shared VPC, or else that of the slices."""
        return _after("projects", self.network) or self.project

    @property
    def network_path(self) -> str:
        """Empty: Google's default."""
        name = self.network.rpartition("/")[2]
        return name and f"projects/{self.network_project}/global/networks/{name}"

    def subnetwork_path(self, zone: str) -> str:
        """For nodes of a zone. Empty: Google's default."""
        region = zone.rpartition("-")[0]
        for each in self.subnetwork:
            if _after("regions", each) in ("", region):
                project = _after("projects", each) or self.network_project
                return f"projects/{project}/regions/{region}/subnetworks/{each.rpartition('/')[2]}"
        return ""


class TpuVmSettings(GoogleSettings, frozen=True, kw_only=True):
    """The section `tpu_vm` of a config file."""

    data_disks: tuple[DataDisk, ...] = ()
    # By generation, overriding the defaults.
    runtimes: dict[type_lookup.Generation, str] = {}
    queue: tuple[Capacity, ...] = (Capacity.QUEUED,)  # capacity types requested as queued resources
    # host:port of an emulator; empty: Google's API.
    endpoint: Annotated[
        str,
        schema.text(
            "host:port", r"((\[[0-9a-fA-F:]+\]|[^\s:/]+):[0-9]{1,5})?", example="127.0.0.1:8490"
        ),
    ] = ""

    @property
    def emulated(self) -> bool:
        return bool(self.endpoint)


def _after(part: str, url: str) -> str:
    words = url.split("/")
    return words[words.index(part) + 1] if part in words else ""


def parse(config: Mapping[str, Any]) -> TpuVmSettings:
    """From a config file."""
    return schema.parse(TpuVmSettings, config, path="tpu_vm")
