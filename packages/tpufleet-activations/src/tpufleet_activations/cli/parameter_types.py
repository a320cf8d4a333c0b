"""Options that several commands of `tpu extract` have, and the types of numeric ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """Neither infinite nor NaN, which compares with no bound and so is in every range."""

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> Any:
        number = super().convert(value, param, context)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, context)
        return number


COUNT = click.IntRange(1)
POSITIVE = FiniteRange(0, min_open=True)
NOT_NEGATIVE = FiniteRange(0)
# At most some 30 years: longer ones cannot be added to a date.
SECONDS = FiniteRange(0, 1e9, min_open=True)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
watch_option = click.option(
    "--watch", type=SECONDS, help="Refresh every so many seconds, until all is complete."
)


def location_options(command: Callable[..., None]) -> Callable[..., None]:
    """`--model` and `--data` of commands that run a plan."""
    for name in ("data", "model"):
        command = click.option(
            f"--{name}", help=f"Location of the {name}, if it differs from the plan's."
        )(command)
    return command
