"""`--host N|all`."""

from __future__ import annotations

from typing import Any

import click

ALL_HOSTS = "all"
HOST_METAVAR = "N|all"


class HostNumber(click.ParamType):
    """The number of a host; None for all of them."""

    name = HOST_METAVAR

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
