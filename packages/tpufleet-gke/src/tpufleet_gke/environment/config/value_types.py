"""Types of values in cluster.yaml."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any

from msgspec import Meta

from tpufleet import schema
from tpufleet.errors import BadInput
from tpufleet.model.tpu import topology


def _dashes(text: str, longest: int = 63) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:longest].strip("-")


def _network_range(value: Any) -> str:
    try:
        return str(ipaddress.IPv4Network(value))
    except (ValueError, TypeError):
        try:
            near = str(ipaddress.IPv4Network(value, strict=False))
        except (ValueError, TypeError):
            near = "10.0.0.0/18"
        message = f"{schema.quote(value)} is not a CIDR range; for example {near}"
        raise BadInput(message) from None


def _tpu_type(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[ -~]{1,40}", value):
        raise BadInput(f"unknown TPU type {schema.quote(value)}; for example v5e-16")
    return topology.find(value).name


def _name(longest: int, example: str) -> Meta:
    return schema.text(
        "name", rf"[a-z]([a-z0-9-]{{0,{longest - 2}}}[a-z0-9])?", example=example,
        repair=lambda text: re.sub(r"^[0-9-]+", "", _dashes(text))[:longest].strip("-"),
    )  # fmt: skip


Name = Annotated[str, _name(40, "train-1")]
ShortName = Annotated[str, _name(20, "ml")]
TpuType = Annotated[str, schema.custom("TPU type", _tpu_type, {"type": "string"})]
NetworkRange = Annotated[str, schema.custom("CIDR range", _network_range, {"type": "string"})]
Location = Annotated[
    str,
    schema.text(
        "location", r"[a-z]+(-[a-z]+[0-9]+)?", example="us",
        repair=lambda text: text.strip().lower(),
    ),
]  # fmt: skip
# https://cloud.google.com/resource-manager/docs/creating-managing-projects: 6 to 30 characters.
Project = Annotated[
    str,
    schema.text(
        "project id", r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]", example="my-project",
        repair=lambda text: _dashes(text, 30),
    ),
]  # fmt: skip
# https://cloud.google.com/storage/docs/buckets#naming
BucketName = Annotated[
    str,
    schema.text(
        "bucket name", r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]", example="my-project-state",
        repair=lambda text: _dashes(text.removeprefix("gs://")),
    ),
]  # fmt: skip
# https://cloud.google.com/iam/docs/service-accounts-create: 6 to 30 characters.
ServiceAccount = Annotated[
    str,
    schema.text(
        "service account name", r"[a-z][a-z0-9-]{4,28}[a-z0-9]", example="gke-nodes",
        repair=lambda text: _dashes(text.partition("@")[0], 30),
    ),
]  # fmt: skip
IamRole = Annotated[
    str,
    schema.text(
        "role", r"(projects/[a-z0-9:.-]+/|organizations/[0-9]+/)?roles/[A-Za-z0-9_.]+",
        example="roles/logging.logWriter",
        repair=lambda text: f"roles/{text.removeprefix('role/').strip('/')}",
    ),
]  # fmt: skip
GoogleApi = Annotated[
    str,
    schema.text(
        "service", r"[a-z0-9-]+\.googleapis\.com", example="container.googleapis.com",
        repair=lambda text: f"{text.strip().lower()}.googleapis.com",
    ),
]  # fmt: skip
MachineType = Annotated[
    str,
    schema.text(
        "machine type", r"[a-z][a-z0-9]*(-[a-z0-9]+)+", example="n2-standard-8", repair=_dashes
    ),
]
Version = Annotated[
    str,
    schema.text(
        "version", r"v?[0-9]+(\.[0-9]+){1,2}([-+.][A-Za-z0-9.-]+)?", example="1.33",
        repair=str.strip,
    ),
]  # fmt: skip
PinnedImage = Annotated[
    str,
    schema.text(
        "pinned image",
        r"[a-z0-9]([A-Za-z0-9._:/@-]*[A-Za-z0-9])?(:[A-Za-z0-9._-]+|@sha256:[0-9a-f]{64})",
        example="us-docker.pkg.dev/my-project/ml-images/tpufleet:0.1.0",
        repair=lambda text: f"{text}:0.1.0",
    ),
]
NodeLabel = Annotated[
    str,
    schema.text(
        "label", r"([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", example="team",
        repair=_dashes,
    ),
]  # fmt: skip
# https://cloud.google.com/resource-manager/docs/labels-overview#requirements
ResourceLabel = Annotated[
    str,
    schema.text(
        "label of Google Cloud", r"[a-z][a-z0-9_-]{0,62}", example="cost-center", repair=_dashes
    ),
]
ResourceLabelValue = Annotated[
    str, schema.text("label value", r"[a-z0-9_-]{0,63}", example="lab-1", repair=_dashes)
]
