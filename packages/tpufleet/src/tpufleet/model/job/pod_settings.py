"""What a job asks of its pods on Kubernetes: image, resources, identity, volumes, labels."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec

from tpufleet import schema
from tpufleet.schema import about

OBJECT_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
_LABEL_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
LABEL_KEY = re.compile(rf"(?:[a-z0-9](?:[a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_LABEL_PART}")
LABEL_VALUE = re.compile(rf"(?:{_LABEL_PART})?")
TOLERATION = re.compile(
    rf"(?P<key>{LABEL_KEY.pattern})(?:=(?P<value>{LABEL_VALUE.pattern}))?"
    r"(?::(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?"
)
BUCKET = re.compile(
    r"gs://(?P<bucket>[a-z0-9][a-z0-9._-]{1,220})(?:/(?P<folder>[A-Za-z0-9._/-]*))?"
)
_QUANTITY = r"[0-9]{1,12}(?:\.[0-9]{1,9})?(?:m|[kMGTP]|[KMGTP]i)?"
_MOUNT_PATH = r"(?:/[A-Za-z0-9_-][A-Za-z0-9._-]{0,254})+"
# Mounted by tpufleet, or needed by programs of the image.
_RESERVED_PATHS = r"/(?:work|tmp|run|etc|proc|sys|dev|opt/tpufleet)(?:/.*)?"
# Set by tpufleet, JobSet, Kueue and Kubernetes.
_RESERVED_LABELS = r"app|job-id|(?:.*[.-])?(?:tpufleet\.dev|kubernetes\.io|k8s\.io)/.*"


Quantity = Annotated[str, schema.text("amount", _QUANTITY, example="8, 500m or 64Gi", numbers=True)]
_LabelKey = Annotated[
    str,
    schema.text("Kubernetes label", LABEL_KEY.pattern, example="team", reserved=_RESERVED_LABELS),
]
_LabelValue = Annotated[
    str, schema.text("label value", LABEL_VALUE.pattern, example="vision", numbers=True)
]
_MountPath = Annotated[
    str,
    schema.text("absolute path", _MOUNT_PATH, example="/data", reserved=_RESERVED_PATHS),
]
ObjectName = Annotated[
    str, schema.text("name of a Kubernetes object", OBJECT_NAME.pattern, example="trainer")
]
VolumeSource = Annotated[
    str,
    schema.text(
        "PersistentVolumeClaim or gs://bucket/folder",
        f"{BUCKET.pattern}|{OBJECT_NAME.pattern}",
        example="gs://my-bucket/data",
    ),
]
Taint = Annotated[
    str,
    schema.text(
        "taint",
        TOLERATION.pattern,
        example="key=value:NoSchedule",
        rule="key=value:NoSchedule, key:NoSchedule or key",
    ),
]


class PodSettings(msgspec.Struct, frozen=True, kw_only=True):
    """None or empty: as the server is configured."""

    image: Annotated[
        str | None,
        schema.text(
            "image",
            r"[a-z0-9](?:[a-zA-Z0-9._:/@-]{0,510}[a-zA-Z0-9])?",
            example="us-docker.pkg.dev/my-project/images/train:v1",
        ),
        about("Container image."),
    ] = None
    cpu: Annotated[Quantity | None, about("CPUs of one host.")] = None
    memory: Annotated[Quantity | None, about("Memory of one host.")] = None
    team: Annotated[
        ObjectName | None,
        about("Team whose namespace, queue and service account its pods have."),
    ] = None
    service_account: Annotated[ObjectName | None, about("Kubernetes service account.")] = None
    volumes: Annotated[
        dict[_MountPath, VolumeSource],
        about("Claims and buckets, by the path at which they are mounted."),
    ] = {}
    labels: Annotated[dict[_LabelKey, _LabelValue], about("Labels of the pods.")] = {}
    tolerations: Annotated[tuple[Taint, ...], about("Taints that the pods tolerate.")] = ()


class Toleration(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    value: str | None = None  # None: any
    effect: str | None = None  # None: any


def parse_toleration(text: str) -> Toleration:
    """Of a text that `Taint` has accepted."""
    match = TOLERATION.fullmatch(text)
    assert match is not None, text
    return Toleration(**match.groupdict())


def check_pod(pod: PodSettings) -> None:
    """Of a request, whose fields were not checked one by one."""
    parse_pod(schema.to_document(pod))


def parse_pod(document: Any) -> PodSettings:
    """As the field of a job file. BadInput has one line for each error."""
    return schema.parse(PodSettings, document, path="pod")
