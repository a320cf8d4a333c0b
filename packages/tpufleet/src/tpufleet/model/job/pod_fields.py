"""The field `pod` of a job file."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.model.job.pod_settings import (
    BUCKET,
    LABEL_KEY,
    LABEL_VALUE,
    OBJECT_NAME,
    TOLERATION,
    PodSettings,
)
from tpufleet.model.values.field_types import FieldType, ParseErrors, quote_value

_QUANTITY = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,9})?(?:m|[kMGTP]|[KMGTP]i)?")
_IMAGE = re.compile(r"[a-z0-9](?:[a-zA-Z0-9._:/@-]{0,510}[a-zA-Z0-9])?")
_MOUNT_PATH = re.compile(r"(?:/[A-Za-z0-9_-][A-Za-z0-9._-]{0,254})+")
# Mounted by tpufleet, or needed by programs of the image.
_RESERVED_PATHS = ("/work", "/tmp", "/run", "/etc", "/proc", "/sys", "/dev", "/opt/tpufleet")
# Set by tpufleet, JobSet, Kueue and Kubernetes.
_RESERVED_LABELS = re.compile(r"app|job-id|(?:.*[.-])?(?:tpufleet\.dev|kubernetes\.io|k8s\.io)/.*")


def _parse(errors: ParseErrors, path: str, value: Any) -> PodSettings | None:
    if not isinstance(value, dict):
        return errors.add(path, f"must be a mapping, not {quote_value(value)}; write {{cpu: 8}}")
    document = {key: item for key, item in value.items() if item is not None}
    before = len(errors.lines)
    errors.add_unknown(document, [each.name for each in fields(PodSettings)], f"{path}.")
    parsed: dict[str, Any] = {}
    for name, (pattern, hint) in _TEXTS.items():
        if name in document:
            parsed[name] = _text(errors, f"{path}.{name}", document[name], pattern, hint)
    for name, check in (("volumes", _volume_error), ("labels", _label_error)):
        if name in document:
            parsed[name] = _mapping(errors, f"{path}.{name}", document[name], check)
    if "tolerations" in document:
        parsed["tolerations"] = _tolerations(errors, f"{path}.tolerations", document["tolerations"])
    return PodSettings(**parsed) if len(errors.lines) == before else None


_TEXTS = {
    "image": (_IMAGE, "an image, such as us-docker.pkg.dev/my-project/images/train:v1"),
    "cpu": (_QUANTITY, "an amount of CPU, such as 8 or 500m"),
    "memory": (_QUANTITY, "an amount of memory, such as 64Gi"),
    "service_account": (OBJECT_NAME, "the name of a Kubernetes service account"),
}


def _text(
    errors: ParseErrors, path: str, value: Any, pattern: re.Pattern[str], hint: str
) -> str | None:
    text = str(value) if isinstance(value, str | int | float) else ""
    if isinstance(value, bool) or not pattern.fullmatch(text):
        return errors.add(path, f"{quote_value(value)} is not {hint}")
    return text


def _mapping(errors: ParseErrors, path: str, value: Any, check: Any) -> dict[str, str] | None:
    if not isinstance(value, dict):
        return errors.add(path, f"must be a mapping, not {quote_value(value)}")
    parsed = {}
    for key, item in value.items():
        text = str(item) if isinstance(item, str | int) and not isinstance(item, bool) else None
        if not isinstance(key, str) or text is None:
            errors.add(path, f"{quote_value(key)}: {quote_value(item)} must be text")
        elif error := check(key, text):
            errors.add(f"{path}.{key}" if len(key) < 80 else path, error)
        else:
            parsed[key] = text
    return parsed


def _volume_error(path: str, source: str) -> str | None:
    if not _MOUNT_PATH.fullmatch(path):
        return "not an absolute path without `..`, such as /data"
    if any(path == each or path.startswith(f"{each}/") for each in _RESERVED_PATHS):
        return f"reserved; mount elsewhere than in {', '.join(_RESERVED_PATHS)}"
    if not BUCKET.fullmatch(source) and not OBJECT_NAME.fullmatch(source):
        return (
            f"{quote_value(source)} is neither the name of a PersistentVolumeClaim nor "
            "gs://bucket/folder"
        )
    return None


def _label_error(key: str, value: str) -> str | None:
    if _RESERVED_LABELS.fullmatch(key):
        return "reserved: set by tpufleet or Kubernetes; use another key"
    if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(value):
        return "not a Kubernetes label: letters, digits, `-`, `_` and `.`, at most 63"
    return None


def _tolerations(errors: ParseErrors, path: str, value: Any) -> tuple[str, ...]:
    items = value if isinstance(value, list | tuple) else [value]
    for index, item in enumerate(items):
        if not isinstance(item, str) or not TOLERATION.fullmatch(item):
            errors.add(
                f"{path}[{index}]",
                f"{quote_value(item)} is not a taint; write key=value:NoSchedule, key:NoSchedule "
                "or key",
            )
    return tuple(items)


def _to_document(pod: PodSettings) -> dict[str, Any]:
    values = {each.name: getattr(pod, each.name) for each in fields(PodSettings)}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value
    }


def parse_pod(document: Any) -> PodSettings:
    """As the field of a job file. BadInput has one line for each error."""
    errors = ParseErrors()
    parsed = _parse(errors, "pod", document)
    if parsed is None:
        raise BadInput("\n".join(errors.lines))
    return parsed


_STRING = {"type": "string"}
POD = FieldType(
    label="mapping",
    parse=_parse,
    schema={
        "type": "object",
        "properties": {
            "image": {"type": "string", "pattern": f"^{_IMAGE.pattern}$"},
            "cpu": {"type": ["string", "number"]},
            "memory": {"type": ["string", "number"]},
            "service_account": {"type": "string", "pattern": f"^{OBJECT_NAME.pattern}$"},
            "volumes": {"type": "object", "additionalProperties": _STRING},
            "labels": {"type": "object", "additionalProperties": {"type": ["string", "integer"]}},
            "tolerations": {"anyOf": [_STRING, {"type": "array", "items": _STRING}]},
        },
        "additionalProperties": False,
    },
    to_document=_to_document,
)
