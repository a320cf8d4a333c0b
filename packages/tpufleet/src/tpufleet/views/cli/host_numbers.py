"""`--host N|all`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

ALL_HOSTS = "all"


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
