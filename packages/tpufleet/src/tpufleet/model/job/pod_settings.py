"""What a job asks of its pods on Kubernetes: image, resources, identity, volumes, labels."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

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


@dataclass(frozen=True, kw_only=True, slots=True)
class PodSettings:
    """None or empty: as the server is configured."""

    image: str | None = None
    cpu: str | None = None  # of one host
    memory: str | None = None
    service_account: str | None = None
    volumes: dict[str, str] = field(default_factory=dict)  # mount path → claim, or gs://…
    labels: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[str, ...] = ()  # as kubectl writes taints: key=value:NoSchedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Toleration:
    key: str
    value: str | None = None  # None: any
    effect: str | None = None  # None: any


def parse_toleration(text: str) -> Toleration:
    """Of a text that `pod_fields.POD` has accepted."""
    match = TOLERATION.fullmatch(text)
    assert match is not None, text
    return Toleration(**match.groupdict())
