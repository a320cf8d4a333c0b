"""Statistics of stored activations, from rows spread over the dataset: mean, norm, maximum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from tpufleet_activations.io import dtypes
from tpufleet_activations.io.dataset_reader import Dataset

# Enough for a mean within a hundredth of the spread of values.
SAMPLED_ROWS = 65_536
BLOCK = 64  # consecutive rows that are read together


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteStatistics:
    """Of rows of a site. Those with values that are not finite count for `rows` and `nonfinite`
    alone; without others, the rest is None."""

    rows: int
    nonfinite: int  # values that are infinite or not a number
    mean: float | None  # of all values
    norm: float | None  # mean over rows of the Euclidean norm
    max: float | None  # largest absolute value
    center: np.ndarray  # [width]: the mean of each dimension

    def to_json(self) -> dict[str, Any]:
        names = ("rows", "mean", "norm", "max", "nonfinite")
        return {name: getattr(self, name) for name in names}


def site_statistics(
    dataset: Dataset, site: str, *, most: int | None = SAMPLED_ROWS
) -> SiteStatistics:
    """From about `most` of the rows committed so far, or from all."""
    width = dataset.plan.widths[site]
    total = np.zeros(width)
    rows = finite_rows = nonfinite = 0
    norms, largest = 0.0, 0.0
    for stored in _blocks(dataset, site, most):
        values = dtypes.as_float32(stored)
        finite = np.isfinite(values)
        rows, nonfinite = rows + len(values), nonfinite + finite.size - int(finite.sum())
        exact = values[finite.all(axis=1)].astype(np.float64)
        finite_rows += len(exact)
        total += exact.sum(axis=0)
        norms += float(np.linalg.norm(exact, axis=1).sum())
        largest = max(largest, float(np.abs(exact).max(initial=0.0)))
    center = total / max(finite_rows, 1)
    return SiteStatistics(
        rows=rows,
        nonfinite=nonfinite,
        mean=float(center.mean()) if finite_rows else None,
        norm=norms / finite_rows if finite_rows else None,
        max=largest if finite_rows else None,
        center=center.astype(np.float32),
    )


def _blocks(dataset: Dataset, site: str, most: int | None) -> Iterator[np.ndarray]:
    if site not in dataset.sites:
        raise dataset.missing_site_error(site)
    dataset.check_records()
    every = 1 if most is None else -(-dataset.total_rows // most) or 1
    for unit, file, start, stop in islice(dataset.blocks(BLOCK), 0, None, every):
        yield dataset.rows(unit, file, site, start, stop)
