"""Mixtures of experts: each token goes through the experts that its router chooses.

Tokens are sorted by expert, and each expert's rows are padded to whole tiles, so that a tile has
weights of one expert. What a token costs does not depend on the number of experts.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from tpufleet_activations.model import gated_mlp, meshes
from tpufleet_activations.model.architectures import Architecture

SMALLEST_TILE, LARGEST_TILE = 8, 256


class Routes(NamedTuple):
    """The chosen experts of each token and their weights [batch, length, experts per token]."""

    logits: Any
    experts: Any
    weights: Any


def route(arch: Architecture, x: Any, weight: Any, bias: Any | None) -> Routes:
    logits = jnp.einsum("bsd,de->bse", x, weight, preferred_element_type=jnp.float32)
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)
    largest, chosen = lax.top_k(logits, arch.experts_per_token)
    total = jax.nn.logsumexp(largest if arch.experts_normalized else logits, axis=-1, keepdims=True)
    return Routes(logits, chosen, jnp.exp(largest - total))


class Weights(NamedTuple):
    """Of all layers and experts: [layers, experts, …]."""

    gate_up: Any  # [..., width, 2, intermediate]
    down: Any  # [..., intermediate, width]
    gate_up_bias: Any | None = None
    down_bias: Any | None = None


def mixture(
    arch: Architecture,
    x: Any,
    routes: Routes,
    stacks: Weights,
    layer: Any,
    *,
    kernel: str = "plain",
    mesh: Mesh | None = None,
) -> Any:
    """x [batch, length, width] through its experts, summed with their weights."""
    rows = PartitionSpec(meshes.BATCH_AXES, None, None)
    none = PartitionSpec()
    specs = (
        *(rows,) * 3,
        PartitionSpec(None, None, None, None, "tensor"),
        PartitionSpec(None, None, "tensor", None),
        None if stacks.gate_up_bias is None else PartitionSpec(None, None, None, "tensor"),
        None if stacks.down_bias is None else none,
        none,
    )

    def own_rows(x: Any, chosen: Any, shares: Any, *rest: Any) -> Any:
        run = functools.partial(_mixture, arch, kernel=kernel, mesh=mesh)
        *weights, layer = rest
        out = run(x, chosen, shares, Weights(*weights), layer)
        sharded = mesh is not None and mesh.shape["tensor"] > 1
        return lax.psum(out, "tensor") if sharded else out

    run = meshes.run_sharded(own_rows, mesh, specs, rows)
    return run(x, routes.experts, routes.weights, *stacks, jnp.asarray(layer, jnp.int32))


def _mixture(
    arch: Architecture,
    x: Any,
    chosen: Any,
    shares: Any,
    stacks: Weights,
    layer: Any,
    *,
    kernel: str,
    mesh: Mesh | None,
) -> Any:
    batch, length, width = x.shape
    count = arch.experts_per_token
    pairs = batch * length * count  # of a token and an expert
    inner = stacks.gate_up.shape[-1]
    hopper = kernel == "hopper" and gated_mlp.supports_experts(width, inner)
    tile = gated_mlp.TILING.cluster_tile_m if hopper else tile_size(pairs, arch.experts)
    place = sort(arch, chosen, tile)
    rows = x.reshape(-1, width)[place.source]
    if hopper:
        index = jnp.concatenate([layer * arch.experts + place.owner, place.used])
        up, down = stacks.gate_up.reshape(-1, 2 * inner), stacks.down.reshape(-1, width)
        run = functools.partial(gated_mlp.hopper_kernel, grouped=True)
        mixed = run(run(rows, up, index, activation=arch.activation), down, index)
    else:
        run = functools.partial(_tile, arch, stacks, layer)
        tiles = (rows.reshape(-1, tile, width), place.owner)
        mixed = lax.map(lambda part: run(*part), tiles).reshape(rows.shape)
    own = mixed[place.row]
    if stacks.down_bias is not None:
        bias = lax.dynamic_index_in_dim(stacks.down_bias, layer, keepdims=False)
        # Devices along the tensor axis have parts of the product, whose sum has the bias once.
        parts = 1 if mesh is None else mesh.shape["tensor"]
        own = own + bias[chosen.reshape(-1)].astype(own.dtype) / parts
    own = own.reshape(batch, length, count, width)
    return jnp.einsum("bskd,bsk->bsd", own, shares, preferred_element_type=jnp.float32).astype(
        x.dtype
    )


class Sorted(NamedTuple):
    """Tokens by expert. A pair is a token and one of its experts."""

    source: Any  # the token of each row
    row: Any  # the row of each pair
    owner: Any  # the expert of each tile
    used: Any  # [1], how many tiles are used


def sort(arch: Architecture, chosen: Any, tile: int) -> Sorted:
    """Rows for the chosen experts [batch, length, experts per token], in whole tiles of experts."""
    expert = chosen.reshape(-1)
    pairs = len(expert)
    tiles = -(-pairs // tile) + arch.experts
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=arch.experts)
    padded = (sizes + tile - 1) // tile * tile
    ends = jnp.cumsum(padded)
    # After those of earlier experts, in the order of the tokens.
    by_expert = expert[order]
    rank = jnp.arange(pairs) - (jnp.cumsum(sizes) - sizes)[by_expert]
    place = ((ends - padded)[by_expert] + rank).astype(jnp.int32)
    tokens = (order // arch.experts_per_token).astype(jnp.int32)
    owner = jnp.searchsorted(ends, jnp.arange(tiles) * tile, side="right")
    return Sorted(
        source=jnp.zeros(tiles * tile, jnp.int32).at[place].set(tokens),
        row=jnp.zeros(pairs, jnp.int32).at[order].set(place),
        owner=jnp.minimum(owner, arch.experts - 1).astype(jnp.int32),
        used=(ends[-1:] // tile).astype(jnp.int32),
    )


def tile_size(pairs: int, experts: int) -> int:
    """Rows of a tile: hardly more than an expert has, so that few are padding."""
    size = SMALLEST_TILE
    while size < min(LARGEST_TILE, pairs // experts):
        size *= 2
    return size


def _tile(arch: Architecture, stacks: Weights, layer: Any, rows: Any, expert: Any) -> Any:
    one = lambda stack: lax.dynamic_slice(
        stack, (layer, expert, *(0,) * (stack.ndim - 2)), (1, 1, *stack.shape[2:])
    )[0, 0]
    pair = jnp.einsum("td,dcf->tcf", rows, one(stacks.gate_up))
    if stacks.gate_up_bias is not None:
        pair = pair + one(stacks.gate_up_bias)
    hidden = gated_mlp.combine(pair, arch.activation, arch.clamp)
    return jnp.einsum("tf,fd->td", hidden, one(stacks.down))
