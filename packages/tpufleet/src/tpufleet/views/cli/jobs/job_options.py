"""The options of `tpu run`, generated from the fields of a job file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import click

from tpufleet.errors import no_value
from tpufleet.model.job.job_file import FIELDS
from tpufleet.model.job.jobs import Capacity
from tpufleet.schema import Row
from tpufleet.views.cli.output import options, repeatable

_CAPACITY = "tpufleet.capacity"


class OptionStyle(StrEnum):
    """How a field is written on the command line."""

    ARGUMENT = "argument"  # positional
    VALUE = "value"  # --pool lab
    REPEATED = "repeated"  # --zone a --zone b
    PAIRS = "pairs"  # --env A=1 --env B=2
    FLAGS = "flags"  # one flag for each choice: --spot
    SWITCH = "switch"  # --require-reservation
    SET = "set"  # rarely needed: --set grace=5m


def style_of(field: Row) -> OptionStyle:
    if "style" in field.extra:
        return OptionStyle(field.extra["style"])
    if "anyOf" in field.schema:
        return OptionStyle.REPEATED
    kinds = {"object": OptionStyle.PAIRS, "boolean": OptionStyle.SWITCH}
    return kinds.get(str(field.schema.get("type")), OptionStyle.VALUE)


def summary(field: Row) -> str:
    """One line for `tpu submit --help`."""
    default = "" if field.required else f"default: {field.default}; "
    return f"{field.description} ({field.label}; {default}e.g. {field.example})"


def _flag(field: Row) -> str:
    return str(field.extra.get("flag") or f"--{field.name.replace('_', '-')}")


def _help(field: Row) -> str:
    sentence = re.split(r"\.(?:\s|$)", field.description)[0]
    if field.default in ("none", "empty", "false"):
        return f"{sentence}."
    return f"{sentence} (default: {field.default})."


def _options(field: Row) -> list[Callable[[Any], Any]]:
    flag, style = _flag(field), style_of(field)
    unit = {"integer": "N", "mapping": "NAME=VALUE", "section": "NAME=VALUE"}
    metavar = field.extra.get("metavar") or unit.get(field.label, field.label.upper())
    match style:
        case OptionStyle.ARGUMENT | OptionStyle.SET:
            return []
        case OptionStyle.FLAGS:
            return [_capacity_flag(kind) for kind in Capacity]
        case OptionStyle.VALUE:
            return [click.option(flag, field.name, metavar=metavar, help=_help(field))]
        case OptionStyle.SWITCH:
            return [click.option(flag, field.name, is_flag=True, help=_help(field))]
        case OptionStyle.REPEATED | OptionStyle.PAIRS:
            help_text = f"{_help(field)} Repeatable."
            return [repeatable(flag, field.name, metavar=metavar, help=help_text)]


def _record_capacity(context: click.Context, option: click.Parameter, value: bool) -> None:
    """click calls this in the order of the command line, which is the order of preference."""
    if value:
        context.meta.setdefault(_CAPACITY, []).append(str(option.name).replace("_", "-"))


def _capacity_flag(kind: Capacity) -> Callable[[Any], Any]:
    default = " (default)" if kind is Capacity.SPOT else ""
    return click.option(
        f"--{kind}",
        is_flag=True,
        expose_value=False,
        callback=_record_capacity,
        help=f"Use {kind} capacity{default}; several: in order of preference.",
    )


spec_options = options(*(option for field in FIELDS for option in _options(field)))


def plain_from(
    accelerator: str, command: tuple[str, ...], capacity: list[str], given: dict[str, Any]
) -> dict[str, Any]:
    """The job file that these options are equivalent to, without the options not given."""
    document: dict[str, Any] = {"accelerator": accelerator, "command": command_of(command)}
    values = {**given, "capacity": capacity}
    for field in FIELDS:
        if field.name in values:
            value = _document_value(field, values[field.name])
            if value not in (None, [], {}):
                document[field.name] = value
    return document


def _document_value(field: Row, value: Any) -> Any:
    match style_of(field):
        case OptionStyle.PAIRS:
            inner = field.schema.get("properties", {})
            pairs = _pairs(_flag(field), value).items()
            return {name: _number_or_text(inner.get(name, {}), text) for name, text in pairs}
        case OptionStyle.REPEATED | OptionStyle.FLAGS:
            return list(value)
        case OptionStyle.SWITCH:
            return True if value else None
        case _:
            return None if value is None else _number_or_text(field.schema, value)


def _number_or_text(schema: Mapping[str, Any], text: str) -> int | float | str:
    """A number where the field is one; otherwise the text, for the parser to reject."""
    if schema.get("type") == "integer" and re.fullmatch(r"-?[0-9]{1,18}", text):
        return int(text)
    if schema.get("type") == "number":
        try:
            return float(text.removeprefix("$"))
        except ValueError:
            return text
    return text


def capacity_of(context: click.Context) -> list[str]:
    return list(context.meta.get(_CAPACITY, []))


def command_of(arguments: tuple[str, ...]) -> list[str] | str:
    """A single argument with spaces in it is a script, as text is in a job file."""
    script = len(arguments) == 1 and re.search(r"\s", arguments[0])
    return arguments[0] if script else list(arguments)


def _pairs(option: str, values: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for pair in values:
        name, equals, value = pair.partition("=")
        if not equals:
            raise no_value(f"{option} {name}", f"{option} {name or 'NAME'}=…")
        pairs[name] = value
    return pairs
