"""Terraform configuration as data, and its text in the style of `tofu fmt`. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

INDENT = "  "
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class Expression:
    """Written as it is: google_service_account.nodes.email."""

    text: str

    def __str__(self) -> str:
        return f"${{{self.text}}}"


@dataclass(frozen=True, slots=True)
class Call:
    """A function of one argument: jsonencode({ … })."""

    function: str
    argument: Any


class Nested(dict[str, Any]):
    """A nested block, in contrast to a mapping, which is a value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    kind: str  # resource, output, terraform …
    labels: tuple[str, ...] = ()
    body: Mapping[str, Any] = field(default_factory=dict)
    comment: str = ""

    @property
    def address(self) -> str:
        return ".".join(self.labels)


def resource(kind: str, label: str, /, comment: str = "", **body: Any) -> Block:
    """Arguments that are None are left out."""
    kept = {key: value for key, value in body.items() if value is not None}
    return Block(kind="resource", labels=(kind, identifier(label)), body=kept, comment=comment)


# With the credentials of a person, APIs of billing need a project whose quota they use:
# https://docs.cloud.google.com/docs/authentication/adc-troubleshooting/user-creds
BILLING = Expression("google.billing")


def project_roles(
    project: str, key: str, member: object, roles: Iterable[str], **body: Any
) -> list[Block]:
    return [
        resource(
            "google_project_iam_member", f"{key}_{role.rpartition('/')[2]}", project=project,
            role=role, member=member, **body,
        )
        for role in roles
    ]  # fmt: skip


def output(name: str, value: Any, description: str) -> Block:
    body = {"description": description, "value": value}
    return Block(kind="output", labels=(name,), body=body)


def reference(kind: str, name: str, attribute: str) -> Expression:
    return Expression(f"{kind}.{identifier(name)}.{attribute}")


def identifier(name: str) -> str:
    """Two names have two labels: a dash stays."""
    return re.sub(r"[^a-z0-9_-]+", "_", name.lower())


def write(blocks: Sequence[Block], header: str = "") -> str:
    parts = ["\n".join(_block(block)) for block in blocks]
    comment = "".join(f"# {line}\n" for line in header.splitlines())
    return (f"{comment}\n" if comment else "") + "\n\n".join(parts) + "\n"


def _block(block: Block) -> Iterator[str]:
    for line in block.comment.splitlines():
        yield f"# {line}"
    opening = " ".join([block.kind, *(f'"{label}"' for label in block.labels)])
    if not block.body:
        yield f"{opening} {{}}"
        return
    yield f"{opening} {{"
    yield from _body(block.body, INDENT)
    yield "}"


def _body(body: Mapping[str, Any], pad: str) -> Iterator[str]:
    """Attributes first, aligned as `tofu fmt` does; then nested blocks."""
    values = {key: value for key, value in body.items() if not _is_nested(value)}
    yield from _aligned([(key, _value(value, pad)) for key, value in values.items()], pad)
    started = bool(values)
    for key, value in body.items():
        if not _is_nested(value):
            continue
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if started:
                yield ""
            started = True
            yield f"{pad}{key} {{"
            yield from _body(each, pad + INDENT)
            yield f"{pad}}}"


def _is_nested(value: Any) -> bool:
    if isinstance(value, Nested):
        return True
    several = isinstance(value, (list, tuple)) and bool(value)
    return several and all(isinstance(each, Nested) for each in value)


def _aligned(pairs: Sequence[tuple[str, str]], pad: str) -> Iterator[str]:
    """Neighbours on one line each are aligned; a value over several lines starts a new group."""
    group: list[tuple[str, str]] = []

    def flush() -> Iterator[str]:
        width = max((len(key) for key, _ in group), default=0)
        for key, text in group:
            yield f"{pad}{key:<{width}} = {text}"
        group.clear()

    for key, text in pairs:
        if "\n" in text:
            yield from flush()
            yield f"{pad}{key} = {text}"
        else:
            group.append((key, text))
    yield from flush()


def _value(value: Any, pad: str) -> str:
    if isinstance(value, Expression):
        return value.text
    if isinstance(value, Call):
        return f"{value.function}({_value(value.argument, pad)})"
    if isinstance(value, Mapping):
        if not value:
            return "{}"
        inner = pad + INDENT
        pairs = [(_key(key), _value(item, inner)) for key, item in value.items()]
        return "\n".join(["{", *_aligned(pairs, inner), f"{pad}}}"])
    if isinstance(value, (list, tuple)):
        if not value:
            return "[]"
        items = [_value(item, pad + INDENT) for item in value]
        line = f"[{', '.join(items)}]"
        if len(line) <= 70 and "\n" not in line:
            return line
        inner = pad + INDENT
        return "\n".join(["[", *(f"{inner}{item}," for item in items), f"{pad}]"])
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    return _string(str(value))


def _key(key: Any) -> str:
    return str(key) if _IDENTIFIER.fullmatch(str(key)) else _string(str(key))


def _string(text: str) -> str:
    """JSON's escapes are HCL's. References of Expressions within text are kept."""
    return json.dumps(text, ensure_ascii=False)
