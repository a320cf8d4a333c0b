"""Causal attention for rows that hold several samples, on NVIDIA GPUs (Pallas, Triton).

Work is divided into tiles of queries that start at the samples' own positions, and a tile reads
only the keys of its sample. So the cost is that of the samples, whatever the length of the row, and
a sample's result does not depend on where in the row it is or on what is beside it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from tpufleet_activations.model import meshes
from tpufleet_activations.pipeline.batches import most_samples

HEAD_DIMS = (32, 64, 128, 256)  # tiles have powers of two
LOG2_E = math.log2(math.e)
MASKED = -1e30  # finite: a row without any key yet has no NaN


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionTiling:
    """Tile sizes, chosen by measurement on an H200."""

    queries: int = 64
    keys: int = 64
    warps: int = 4
    stages: int = 3  # loads in flight to shared memory


TILINGS = {256: AttentionTiling(queries=128, warps=8, stages=2)}


def tiling_for(head_dim: int) -> AttentionTiling:
    return TILINGS.get(head_dim, AttentionTiling())


def tile_table(positions: Any, head_dim: int, *, packed: bool) -> Any:
    """The first query of each tile [batch, tiles], from positions [batch, length] that start at 0
    with each sample; `length` for tiles that are not needed."""
    length, queries = positions.shape[1], tiling_for(head_dim).queries
    tiles = -(-length // queries) + (most_samples(length) if packed else 0)
    starts = functools.partial(jnp.nonzero, size=tiles, fill_value=length)
    return jax.vmap(lambda row: starts(row % queries == 0)[0].astype(jnp.int32))(positions)


def varlen_attention(
    query: Any,
    key: Any,
    value: Any,
    positions: Any,
    tiles: Any,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    mesh: Mesh | None = None,
) -> Any:
    """query [batch, length, heads, dim], key and value with kv_heads; `tiles` of `tile_table`.
    Interpreted, and slow, where there is no GPU."""
    run = functools.partial(_rows, scale=scale, window=window, softcap=softcap)
    if mesh is None or mesh.size == 1:
        return run(query, key, value, positions, tiles)
    heads = PartitionSpec(meshes.BATCH_AXES, None, "tensor", None)
    rows = PartitionSpec(meshes.BATCH_AXES, None)
    return jax.shard_map(
        run, mesh=mesh, in_specs=(heads, heads, heads, rows, rows), out_specs=heads, check_vma=False
    )(query, key, value, positions, tiles)


def _rows(
    query: Any,
    key: Any,
    value: Any,
    positions: Any,
    tiles: Any,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Any:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as gpu

    batch, length, heads, dim = query.shape
    shared = heads // key.shape[2]
    tiling = tiling_for(dim)
    whole = lambda index: pl.BlockSpec((None, length, None, dim), index)
    own = whole(lambda tile, head, row: (row, 0, head, 0))
    kept = whole(lambda tile, head, row: (row, 0, head // shared, 0))
    table = lambda size: pl.BlockSpec((None, size), lambda tile, head, row: (row, 0))
    kernel = functools.partial(
        _tile, tiling=tiling, scale=scale, window=window, softcap=softcap, length=length
    )
    return pl.pallas_call(
        kernel,
        grid=(tiles.shape[1], heads, batch),
        in_specs=[table(tiles.shape[1]), table(length), own, kept, kept],
        out_specs=own,
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        compiler_params=gpu.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=jax.default_backend() != "gpu",
        name="varlen_attention",
    )(tiles, positions, query, key, value)


def _tile(
    tiles: Any,
    positions: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    *,
    tiling: AttentionTiling,
    scale: float,
    window: int | None,
    softcap: float | None,
    length: int,
) -> None:
    """One tile of queries of one head."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as gpu

    high, wide = tiling.queries, tiling.keys
    # Scores are products * factor, in units of log2(e), so that weights are powers of two.
    factor = scale * LOG2_E if softcap is None else 1.0

    def run(first: Any) -> None:
        offset = positions[first]  # of the tile within its sample
        start = first - offset  # of the sample within the row
        asked = offset + jnp.arange(high)
        rows = pl.ds(first, high)
        inside = first + jnp.arange(high) < length
        valid = gpu.load(positions.at[rows], mask=inside, other=-1) == asked
        end = offset + jnp.sum(valid.astype(jnp.int32))  # keys of the sample that are needed
        queries = gpu.load(query.at[rows, :], mask=valid[:, None], other=0.0)

        def step(number: Any, carry: Any, *, masked: bool) -> Any:
            mixed, largest, total = carry
            span = pl.ds(start + number * wide, wide)
            seen = number * wide + jnp.arange(wide)
            # Keys behind the end belong to other samples, which may hold infinities.
            guard = {"mask": (seen < end)[:, None], "other": 0.0} if masked else {}
            products = _dot(queries, gpu.load(key.at[span, :], **guard).T)
            if softcap is not None:
                products = _capped(products, scale, softcap)
            if masked:
                distance = asked[:, None] - seen[None, :]
                allowed = distance >= 0
                if window is not None:
                    allowed = allowed & (distance < window)
                products = jnp.where(allowed, products, MASKED)
            highest = jnp.maximum(largest, jnp.max(products, axis=1))
            base = jnp.where(highest > 0.5 * MASKED, highest * factor, 0.0)
            weights = jnp.exp2(products * factor - base[:, None])
            shrink = jnp.exp2(largest * factor - base)
            values = gpu.load(value.at[span, :], **guard)
            mixed = mixed * shrink[:, None] + _dot(weights.astype(values.dtype), values)
            return mixed, highest, total * shrink + jnp.sum(weights, axis=1)

        carry = (
            jnp.zeros((high, query.shape[-1]), jnp.float32),
            jnp.full((high,), MASKED, jnp.float32),
            jnp.zeros((high,), jnp.float32),
        )
        last = jax.lax.div(end + wide - 1, wide)
        if window is None:
            # Every query of the tile sees all keys before it, so those need no mask.
            before = jax.lax.div(offset + 1, wide)
            carry = jax.lax.fori_loop(0, before, functools.partial(step, masked=False), carry)
        else:
            before = jax.lax.div(jnp.maximum(offset - window + 1, 0), wide)
        mixed, _, total = jax.lax.fori_loop(
            before, last, functools.partial(step, masked=True), carry
        )
        mixed = mixed / jnp.maximum(total, 1e-30)[:, None]
        gpu.store(out.at[rows, :], mixed.astype(out.dtype), mask=valid[:, None])

    first = tiles[pl.program_id(0)]

    @pl.when(first < length)
    def _run() -> None:
        run(first)


def _capped(products: Any, scale: float, softcap: float) -> Any:
    """softcap * tanh(products * scale / softcap), by way of a power of two; times log2(e)."""
    power = jnp.exp2(products * (2 * LOG2_E * scale / softcap))
    return softcap * LOG2_E - (2 * softcap * LOG2_E) / (1.0 + power)


def _dot(left: Any, right: Any) -> Any:
    return jax.lax.dot_general(
        left, right, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
