"""Types of numeric options of `tpu extract`."""

from __future__ import annotations

import math
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
