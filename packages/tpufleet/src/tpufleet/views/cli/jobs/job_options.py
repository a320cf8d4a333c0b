"""The options of `tpu run`, generated from the fields of a job file."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

from tpufleet.errors import BadInput
from tpufleet.model.job.job_file import FIELDS, JobField, OptionStyle
from tpufleet.model.job.jobs import Capacity
from tpufleet.views.cli.output import repeatable

_CAPACITY = "tpufleet.capacity"


def _record_capacity(context: click.Context, option: click.Parameter, value: bool) -> None:
    """click calls this in the order of the command line, which is the order of preference."""
    if value:
        context.meta.setdefault(_CAPACITY, []).append(str(option.name).replace("_", "-"))


def _options(field: JobField) -> list[Callable[[Any], Any]]:
    match field.style:
        case OptionStyle.ARGUMENT:
            return []
        case OptionStyle.FLAGS:
            return [_capacity_flag(kind) for kind in Capacity]
        case OptionStyle.VALUE:
            return [
                click.option(
                    field.option, field.name, metavar=field.metavar, help=field.option_help
                )
            ]
        case OptionStyle.SWITCH:
            return [click.option(field.option, field.name, is_flag=True, help=field.option_help)]
        case OptionStyle.REPEATED | OptionStyle.PAIRS:
            help_text = f"{field.option_help} Repeatable."
            return [repeatable(field.option, field.name, metavar=field.metavar, help=help_text)]


def _capacity_flag(kind: Capacity) -> Callable[[Any], Any]:
    default = " (default)" if kind is Capacity.SPOT else ""
    return click.option(
        f"--{kind}",
        is_flag=True,
        expose_value=False,
        callback=_record_capacity,
        help=f"Use {kind} capacity{default}; several: in order of preference.",
    )


OPTIONS = tuple(option for field in FIELDS for option in _options(field))


def spec_options(command: Any) -> Any:
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def plain_from(
    accelerator: str, command: tuple[str, ...], capacity: list[str], options: dict[str, Any]
) -> dict[str, Any]:
    """The job file that these options are equivalent to, without the options not given."""
    document: dict[str, Any] = {"accelerator": accelerator, "command": command_of(command)}
    values = {**options, "capacity": capacity}
    for field in FIELDS:
        if field.style is not OptionStyle.ARGUMENT:
            value = _document_value(field, values[field.name])
            if value not in (None, [], {}):
                document[field.name] = value
    return document


def _document_value(field: JobField, value: Any) -> Any:
    convert = field.type.from_option
    match field.style:
        case OptionStyle.PAIRS:
            return {name: convert(text) for name, text in _pairs(field.option, value).items()}
        case OptionStyle.REPEATED | OptionStyle.FLAGS:
            return list(value)
        case OptionStyle.SWITCH:
            return True if value else None
        case _:
            return None if value is None else convert(value)


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
            raise BadInput(f"{option} {name}: no value; write {option} {name or 'NAME'}=…")
        pairs[name] = value
    return pairs
