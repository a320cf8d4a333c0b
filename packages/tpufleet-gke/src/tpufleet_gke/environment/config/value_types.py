"""Types of values in cluster.yaml."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import Annotated, Any

from msgspec import Meta

from tpufleet import schema
from tpufleet.errors import BadInput, invalid
from tpufleet.model.tpu import type_lookup


def _dashes(text: str, longest: int = 63) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:longest].strip("-")


# https://cloud.google.com/vpc/docs/subnets#prohibited-ipv4-ranges
_PROHIBITED = tuple(
    map(ipaddress.IPv4Network, ("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4"))
)


def _subnet_range(value: Any) -> str:
    text = _network_range(value)
    if any(ipaddress.IPv4Network(text).overlaps(each) for each in _PROHIBITED):
        raise invalid(value, "a range that a VPC can have", "10.0.0.0/18")
    return text


def _network_range(value: Any) -> str:
    try:
        return str(ipaddress.IPv4Network(value))
    except (ValueError, TypeError):
        try:
            near = str(ipaddress.IPv4Network(value, strict=False))
        except (ValueError, TypeError):
            near = "10.0.0.0/18"
        message = str(invalid(value, "a CIDR range", near))
        raise BadInput(message) from None


def _tpu_type(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[ -~]{1,40}", value):
        raise invalid(value, "a TPU type", "v5e-16")
    return type_lookup.find(value).name


def _name(longest: int, example: str) -> Meta:
    return schema.text(
        "name", rf"[a-z]([a-z0-9-]{{0,{longest - 2}}}[a-z0-9])?", example=example,
        repair=lambda text: re.sub(r"^[0-9-]+", "", _dashes(text))[:longest].strip("-"),
    )  # fmt: skip


def _text(label: str, pattern: str, example: str, repair: Callable[[str], str] = _dashes) -> Meta:
    return schema.text(label, pattern, example=example, repair=repair)


Name = Annotated[str, _name(40, "train-1")]
ShortName = Annotated[str, _name(20, "ml")]
TpuType = Annotated[str, schema.custom("TPU type", _tpu_type, {"type": "string"})]
NetworkRange = Annotated[str, schema.custom("CIDR range", _network_range, {"type": "string"})]
SubnetRange = Annotated[str, schema.custom("CIDR range", _subnet_range, {"type": "string"})]
_REGION = r"[a-z]+-[a-z]+[0-9]+"
# https://cloud.google.com/storage/docs/locations
_PLACES = r"us|eu|asia|asia1|eur[4578]|nam4"
BucketLocation = Annotated[
    str, _text("location of buckets", f"{_PLACES}|{_REGION}", "us", str.lower)
]
# https://cloud.google.com/artifact-registry/docs/repositories/repo-locations
RegistryLocation = Annotated[
    str, _text("location of a registry", f"us|europe|asia|{_REGION}", "us", str.lower)
]
# https://cloud.google.com/resource-manager/docs/creating-managing-projects: 6 to 30 characters.
_PROJECT = r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]"
Project = Annotated[
    str, _text("project id", _PROJECT, "my-project", lambda text: _dashes(text, 30))
]
# https://cloud.google.com/storage/docs/buckets#naming
_BUCKET = r"(?!goog)(?!.*(google|\.\.))[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]"
BucketName = Annotated[
    str,
    _text(
        "bucket name", _BUCKET, "my-project-state", lambda text: _dashes(text.removeprefix("gs://"))
    ),
]  # fmt: skip
# https://cloud.google.com/iam/docs/service-accounts-create: 6 to 30 characters.
_ACCOUNT = r"[a-z][a-z0-9-]{4,28}[a-z0-9]"
ServiceAccount = Annotated[
    str,
    _text(
        "service account name", _ACCOUNT, "gke-nodes",
        lambda text: _dashes(text.partition("@")[0], 30),
    ),
]  # fmt: skip
_ROLE = r"(projects/[a-z0-9:.-]+/|organizations/[0-9]+/)?roles/[A-Za-z0-9_.]+"
IamRole = Annotated[
    str,
    _text(
        "role", _ROLE, "roles/logging.logWriter",
        lambda text: f"roles/{text.removeprefix('role/').strip('/')}",
    ),
]  # fmt: skip
_API = r"[a-z0-9-]+\.googleapis\.com"
GoogleApi = Annotated[
    str,
    _text(
        "service", _API, "container.googleapis.com",
        lambda text: f"{text.strip().lower()}.googleapis.com",
    ),
]  # fmt: skip
_MACHINE = r"[a-z][a-z0-9]*(-[a-z0-9]+)+"
MachineType = Annotated[str, _text("machine type", _MACHINE, "n2-standard-8")]
_VERSION = r"[0-9]+(\.[0-9]+){1,2}([-+.][A-Za-z0-9.-]+)?"
Version = Annotated[str, _text("version", _VERSION, "1.33", lambda text: text.strip().lstrip("v"))]
Release = Annotated[
    str, _text("release", f"v{_VERSION}", "v0.18.3", lambda text: f"v{text.strip().lstrip('v')}")
]
_IMAGE = r"[a-z0-9]([A-Za-z0-9._:/@-]*[A-Za-z0-9])?(:[A-Za-z0-9._-]+|@sha256:[0-9a-f]{64})"
PinnedImage = Annotated[
    str,
    _text(
        "pinned image", _IMAGE, "us-docker.pkg.dev/my-project/ml-images/tpufleet:0.1.0",
        lambda text: f"{text}:0.1.0",
    ),
]  # fmt: skip
_LABEL = r"([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
# Reserved: https://cloud.google.com/kubernetes-engine/docs/how-to/creating-managing-labels
NodeLabel = Annotated[
    str,
    schema.text(
        "label", _LABEL, example="team", repair=_dashes,
        reserved=r"([a-z0-9.-]+\.)?(kubernetes|k8s|gke)\.io/.*",
    ),
]  # fmt: skip
# https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#syntax-and-character-set
NodeLabelValue = Annotated[
    str, _text("label value", r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?", "gold")
]
_RESOURCE = r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
ResourceName = Annotated[str, _text("name of a resource", _RESOURCE, "shared-vpc")]
ReservationName = Annotated[
    str,
    _text(
        "reservation",
        rf"(projects/{_PROJECT}/reservations/)?{_RESOURCE}"
        rf"(/reservationBlocks/{_RESOURCE}(/reservationSubBlocks/{_RESOURCE})?)?",
        "my-reservation",
    ),
]  # fmt: skip
BillingAccount = Annotated[
    str, _text("billing account", r"[0-9A-F]{6}(-[0-9A-F]{6}){2}", "012345-567890-ABCDEF")
]
# https://cloud.google.com/resource-manager/docs/labels-overview#requirements
ResourceLabel = Annotated[
    str, _text("label of Google Cloud", r"(?!goog)[a-z][a-z0-9_-]{0,62}", "cost-center")
]
ResourceLabelValue = Annotated[str, _text("label value", r"[a-z0-9_-]{0,63}", "lab-1")]
