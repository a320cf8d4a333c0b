"""What options accept: durations, and hosts as `--host N|all`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from tpufleet.errors import BadInput
from tpufleet.model.values import durations

ALL_HOSTS = "all"


class Duration(click.ParamType):
    """A duration with a unit, such as 30m, and an end: not `none`."""

    name = "DURATION"

    def __init__(self, most: timedelta | None = None) -> None:
        self.most = most

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> timedelta:
        option = parameter.opts[0] if parameter is not None else self.name
        if isinstance(value, str) and value.strip().isdecimal():
            raise BadInput(f"{option}: {value} what? Write {value.strip()}d for days, h for hours")
        try:
            span = durations.parse(value)
        except BadInput as error:
            raise BadInput(f"{option}: {error}") from error
        if span is None or (self.most is not None and not span):
            raise BadInput(f"{option}: a limit is required, such as 30m, 2h or 14d")
        if self.most is not None and span > self.most:
            raise BadInput(f"{option}: at most {durations.to_builtin(self.most)}")
        return span


class PastMoment(Duration):
    """A date, or how long ago."""

    name = "WHEN"

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> Any:
        try:
            moment = datetime.fromisoformat(str(value))
        except ValueError:
            try:
                return datetime.now(UTC) - super().convert(value, parameter, context)
            except BadInput as error:
                raise durations.nor_a_date(error) from error
        return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def host_option(help_text: str, default: int | None = None) -> Callable[[Any], Any]:
    """`--host`; None for all hosts."""
    return click.option(
        "--host",
        type=_HostNumber(),
        metavar=_HostNumber.name,
        default=default,
        show_default=default is not None,
        help=help_text,
    )


class _HostNumber(click.ParamType):
    name = f"N|{ALL_HOSTS}"

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> int | None:
        if isinstance(value, int):
            return value
        if value == ALL_HOSTS:
            return None
        if not (value.isascii() and value.isdecimal() and len(value) < 10):
            self.fail(f"{value!r} is not a host; use a number such as 0, or all")
        return int(value)
