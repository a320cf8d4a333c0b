"""Kinds of values in cluster.yaml, and sections made of them.

A section is a dataclass whose fields are declared with `option`: the parser, the JSON schema, the
starter file and the table in the documentation all read that one declaration.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from typing import Any

from tpufleet.model.values import field_types
from tpufleet.model.values.field_types import FieldType, ParseErrors, quote_value

Parse = Callable[[ParseErrors, str, Any], Any]
TAINT_EFFECTS = ("NO_SCHEDULE", "PREFER_NO_SCHEDULE", "NO_EXECUTE")


def option(
    kind: FieldType, description: str, *, example: str = "", default: Any = MISSING,
    factory: Any = MISSING,
) -> Any:  # fmt: skip
    """A field of a section; required where it has neither default nor factory."""
    metadata = {"kind": kind, "description": description, "example": example}
    if factory is not MISSING:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def is_required(item: Field[Any]) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def default_of(item: Field[Any]) -> Any:
    if item.default_factory is not MISSING:
        return item.default_factory()
    return item.default


def section(cls: type) -> FieldType:
    """A mapping that becomes an instance of a dataclass."""

    def parse(errors: ParseErrors, path: str, value: Any) -> Any:
        if value is None:
            value = {}
        if not isinstance(value, dict):
            names = ", ".join(item.name for item in fields(cls)[:3])
            message = f"must be a mapping with {names} …, not {quote_value(value)}"
            return errors.add(path, message)
        before = len(errors.lines)
        prefix = f"{path}." if path else ""
        errors.add_unknown(value, [item.name for item in fields(cls)], prefix)
        parsed: dict[str, Any] = {}
        for item in fields(cls):
            kind: FieldType = item.metadata["kind"]
            if value.get(item.name) is not None:
                parsed[item.name] = kind.parse(errors, prefix + item.name, value[item.name])
            elif is_required(item):
                example = item.metadata["example"]
                errors.add(prefix + item.name, f"required; for example {example}")
        return cls(**parsed) if len(errors.lines) == before else None

    properties = {item.name: _property(item) for item in fields(cls)}
    schema: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
    if required := [item.name for item in fields(cls) if is_required(item)]:
        schema["required"] = required
    return FieldType(label="section", parse=parse, schema=schema)


def _property(item: Field[Any]) -> dict[str, Any]:
    kind: FieldType = item.metadata["kind"]
    return {**kind.schema, "description": item.metadata["description"]}


def mapping_of(keys: FieldType, values: FieldType, label: str = "mapping") -> FieldType:
    def parse(errors: ParseErrors, path: str, value: Any) -> Any:
        if not isinstance(value, dict):
            return errors.add(path, f"must be a mapping, not {quote_value(value)}")
        before = len(errors.lines)
        parsed = {}
        for key, item in value.items():
            name = keys.parse(errors, path, key)
            parsed[name] = values.parse(errors, f"{path}.{key}", item)
        return parsed if len(errors.lines) == before else None

    schema = {"type": "object", "additionalProperties": values.schema}
    return FieldType(label=label, parse=parse, schema=schema)


def list_of(items: FieldType) -> FieldType:
    def parse(errors: ParseErrors, path: str, value: Any) -> Any:
        if not isinstance(value, list):
            value = [value]
        before = len(errors.lines)
        parsed = tuple(
            items.parse(errors, f"{path}[{index}]", item) for index, item in enumerate(value)
        )
        return parsed if len(errors.lines) == before else None

    schema = {"anyOf": [items.schema, {"type": "array", "items": items.schema}]}
    return FieldType(label=f"list of {items.label}", parse=parse, schema=schema)


def choice(*values: str) -> FieldType:
    def parse(errors: ParseErrors, path: str, value: Any) -> str | None:
        for known in values:
            if isinstance(value, str) and value.strip().lower() == known.lower():
                return known
        folded = {known.lower(): known for known in values}
        text = value.strip().lower().replace("_", "-") if isinstance(value, str) else ""
        near = difflib.get_close_matches(text, folded, n=1, cutoff=0.5)
        hint = f"did you mean {folded[near[0]]}?" if near else f"write one of {', '.join(values)}"
        return errors.add(path, f"unknown value {quote_value(value)}; {hint}")

    return FieldType(label=" or ".join(values), parse=parse, schema={"enum": list(values)})


def matching(pattern: str, label: str, example: str, repair: Callable[[str], str]) -> FieldType:
    """Text of one form. `repair` turns an invalid text into its nearest valid form."""
    compiled = re.compile(pattern)

    def parse(errors: ParseErrors, path: str, value: Any) -> str | None:
        if isinstance(value, str) and compiled.fullmatch(value):
            return value
        near = repair(value) if isinstance(value, str) else ""
        nearest = near if near and compiled.fullmatch(near) else example
        return errors.add(path, f"{quote_value(value)} is not a {label}; for example {nearest}")

    return FieldType(label=label, parse=parse, schema={"type": "string", "pattern": f"^{pattern}$"})


def _parse_boolean(errors: ParseErrors, path: str, value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    guess = str(value).lower() in ("yes", "on", "1", "true", "enabled")
    return errors.add(
        path, f"must be true or false, not {quote_value(value)}; write {str(guess).lower()}"
    )


def _parse_network(errors: ParseErrors, path: str, value: Any) -> str | None:
    try:
        return str(ipaddress.IPv4Network(value))
    except (ValueError, TypeError):
        try:
            near = str(ipaddress.IPv4Network(value, strict=False))
        except (ValueError, TypeError):
            near = "10.0.0.0/18"
        return errors.add(path, f"{quote_value(value)} is not a CIDR range; for example {near}")


def _parse_zone(errors: ParseErrors, path: str, value: Any) -> str | None:
    error = (
        field_types.zone_error(value)
        if isinstance(value, str)
        else f"{quote_value(value)} is not a zone; for example us-central1-a"
    )
    return errors.add(path, error) if error else value


def _parse_number(errors: ParseErrors, path: str, value: Any) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
        return float(value)
    return errors.add(path, f"must be a number of zero or more, not {quote_value(value)}")


def _dashes(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def name(longest: int, example: str) -> FieldType:
    def repair(text: str) -> str:
        return re.sub(r"^[0-9-]+", "", _dashes(text))[:longest].strip("-")

    pattern = rf"[a-z]([a-z0-9-]{{0,{longest - 2}}}[a-z0-9])?"
    return matching(pattern, "name", example, repair)


def _region_of(text: str) -> str:
    return re.sub(r"([0-9])-?[a-z]$", r"\1", text.strip().lower())


BOOLEAN = FieldType(label="true or false", parse=_parse_boolean, schema={"type": "boolean"})
NUMBER = FieldType(label="number", parse=_parse_number, schema={"type": "number", "minimum": 0})
TEXT = field_types.TEXT
ACCELERATOR = field_types.ACCELERATOR
NETWORK_RANGE = FieldType(label="CIDR range", parse=_parse_network, schema={"type": "string"})
ZONE = FieldType(label="zone", parse=_parse_zone, schema={"type": "string"})
REGION = matching(r"[a-z]+(-[a-z]+)+[0-9]+", "region", "us-central1", _region_of)
LOCATION = matching(r"[a-z]+(-[a-z]+[0-9]+)?", "location", "us", lambda text: text.strip().lower())
# https://cloud.google.com/resource-manager/docs/creating-managing-projects: 6 to 30 characters.
PROJECT = matching(
    r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]", "project id", "my-project",
    lambda text: _dashes(text)[:30].strip("-"),
)  # fmt: skip
# https://cloud.google.com/storage/docs/buckets#naming
BUCKET = matching(
    r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]", "bucket name", "my-project-state",
    lambda text: _dashes(text.removeprefix("gs://"))[:63].strip("-"),
)  # fmt: skip
# https://cloud.google.com/iam/docs/service-accounts-create: 6 to 30 characters.
SERVICE_ACCOUNT = matching(
    r"[a-z][a-z0-9-]{4,28}[a-z0-9]", "service account name", "gke-nodes",
    lambda text: _dashes(text.partition("@")[0])[:30].strip("-"),
)  # fmt: skip
ROLE = matching(
    r"(projects/[a-z0-9:.-]+/|organizations/[0-9]+/)?roles/[A-Za-z0-9_.]+", "role",
    "roles/logging.logWriter", lambda text: f"roles/{text.removeprefix('role/').strip('/')}",
)  # fmt: skip
SERVICE = matching(
    r"[a-z0-9-]+\.googleapis\.com", "service", "container.googleapis.com",
    lambda text: f"{text.strip().lower()}.googleapis.com",
)  # fmt: skip
MACHINE_TYPE = matching(
    r"[a-z][a-z0-9]*(-[a-z0-9]+)+", "machine type", "n2-standard-8", lambda text: _dashes(text)
)
VERSION = matching(
    r"v?[0-9]+(\.[0-9]+){1,2}([-+.][A-Za-z0-9.-]+)?", "version", "1.33", lambda text: text.strip()
)
IMAGE = matching(
    r"[a-z0-9]([A-Za-z0-9._:/@-]*[A-Za-z0-9])?(:[A-Za-z0-9._-]+|@sha256:[0-9a-f]{64})",
    "pinned image", "us-docker.pkg.dev/my-project/ml-images/tpufleet:0.1.0",
    lambda text: f"{text}:0.1.0",
)  # fmt: skip
LABEL_KEY = matching(
    r"([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", "label", "team", _dashes
)
LABELS = mapping_of(LABEL_KEY, TEXT, "mapping of labels")
# https://cloud.google.com/resource-manager/docs/labels-overview#requirements
RESOURCE_LABELS = mapping_of(
    matching(r"[a-z][a-z0-9_-]{0,62}", "label of Google Cloud", "cost-center", _dashes),
    matching(r"[a-z0-9_-]{0,63}", "value of a label of Google Cloud", "lab-1", _dashes),
    "mapping of labels",
)
NAME = name(40, "train-1")
SHORT_NAME = name(20, "ml")


def counted(minimum: int, maximum: int) -> FieldType:
    return field_types.integer(minimum, maximum)


def names_of(cls: type) -> Sequence[str]:
    return [item.name for item in fields(cls)]


def schema_of(root: FieldType) -> Mapping[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "tpufleet GKE environment (cluster.yaml)",
        **root.schema,
    }
