"""Sums over the stored rows of a batch, taken on the devices, for the statistics of sites.

The host would read every activation once more for them, which at several GB/s is more work than
hashing and writing. Rows are summed in tiles that begin with a sample, so that the sums of a sample
do not depend on the samples beside it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class DeviceSums(NamedTuple):
    """As `site_statistics.TileSums`; on the devices of all layers and parts of a batch, [layers,
    parts, tiles, …]."""

    totals: Any
    figures: Any


def sum_tiles(stack: Any, scales: Any, tiles: Any) -> DeviceSums:
    """`stack` is [layers, batch, length, width]; `scales` the factors of int8 rows, or None.
    `tiles` [parts, tiles, rows] are places within each part of the batch, negative where a tile has
    fewer rows."""
    layers, parts, width = stack.shape[0], tiles.shape[0], stack.shape[-1]
    rows = stack.reshape(layers, parts, -1, width)
    factors = None if scales is None else scales.reshape(layers, parts, -1)
    values = _as_float32(rows, factors)
    nonfinite = jnp.sum(~jnp.isfinite(values), axis=-1, dtype=jnp.float32)
    norms = jnp.sqrt(jnp.sum(values * values, axis=-1))
    largest = jnp.max(jnp.abs(values), axis=-1)
    present, at = tiles >= 0, jnp.maximum(tiles, 0)
    finite = (_take(nonfinite, at) == 0) & present
    taken = _as_float32(_take(rows, at), None if factors is None else _take(factors, at))
    figures = (
        jnp.sum(jnp.where(finite, _take(norms, at), 0), axis=-1),
        jnp.max(jnp.where(finite, _take(largest, at), 0), axis=-1),
        jnp.sum(finite, axis=-1, dtype=jnp.float32),
        jnp.sum(jnp.where(present, _take(nonfinite, at), 0), axis=-1),
    )
    return DeviceSums(
        totals=jnp.sum(jnp.where(finite[..., None], taken, 0), axis=3),
        figures=jnp.stack(figures, axis=-1),
    )


def _as_float32(rows: Any, factors: Any) -> Any:
    values = rows.astype(jnp.float32)
    return values if factors is None else values * factors[..., None]


def _take(values: Any, at: Any) -> Any:
    """[layers, parts, rows, …] at [parts, tiles, rows of a tile]."""
    return jax.vmap(lambda part, places: part[:, places], in_axes=(1, 0), out_axes=1)(values, at)


def of_layer(sums: DeviceSums, layer: int) -> DeviceSums:
    """On the host: of one layer and one part."""
    return DeviceSums(sums.totals[layer, 0], sums.figures[layer, 0])
