"""Line plots in plain text, one letter per curve."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

Curve = Sequence[tuple[float, float]]
LETTERS = "ABCDEFGHIJKLMNOPQRST"


def line_plot(
    title: str, curves: Mapping[str, Curve], width: int = 64, height: int = 12
) -> list[str]:
    """The lines of a plot with axes and a legend. Where curves meet, the first one is drawn."""
    finite = {
        name: [(x, y) for x, y in curve if math.isfinite(x) and math.isfinite(y)]
        for name, curve in curves.items()
    }
    points = [point for curve in finite.values() for point in curve]
    if not points:
        return [f"{title}: no values"]
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    grid = [[" "] * width for _ in range(height)]
    for letter, curve in reversed(list(zip(LETTERS, finite.values(), strict=False))):
        for x, y in _dense(sorted(curve), left, right, width):
            column = round(_share(x, left, right) * (width - 1))
            row = round((1 - _share(y, low, high)) * (height - 1))
            grid[row][column] = letter
    labels = [f"{high:.4g}", *[""] * (height - 2), f"{low:.4g}"]
    margin = max(len(label) for label in labels)
    lines = [title]
    lines += [
        f"{label:>{margin}} │{''.join(row).rstrip()}"
        for label, row in zip(labels, grid, strict=True)
    ]
    lines.append(f"{'':>{margin}} └{'─' * width}")
    first, last = f"{left:g}", f"{right:g}"
    lines.append(f"{'':>{margin}}  {first}{last:>{width - len(first)}}")
    lines += [
        f"{'':>{margin}}  {letter} {name}{_last(curve)}"
        for letter, (name, curve) in zip(LETTERS, finite.items(), strict=False)
    ]
    return lines


def _last(curve: Curve) -> str:
    return f": {sorted(curve)[-1][1]:.6g}" if curve else ": no values"


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5


def _dense(curve: Curve, left: float, right: float, width: int) -> list[tuple[float, float]]:
    """With points between, so that the line has no gaps."""
    dense = list(curve)
    for (x, y), (next_x, next_y) in itertools.pairwise(curve):
        columns = round((_share(next_x, left, right) - _share(x, left, right)) * (width - 1))
        for column in range(1, columns):
            part = column / columns
            dense.append((x + (next_x - x) * part, y + (next_y - y) * part))
    return dense
