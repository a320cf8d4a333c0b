"""The forward pass: embedding and scanned layers, up to the highest layer asked for, no head.

Only what was asked for leaves a layer. Neighbouring layers that are asked for the same sites form
one scan, so unasked activations are never kept and compile time does not grow with depth.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tpufleet.workloads.activations.model import attention, gated_mlp, meshes, sites
from tpufleet.workloads.activations.model.architectures import Architecture
from tpufleet.workloads.activations.model.sites import Site


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroup:
    """Consecutive layers from which the same sites are read."""

    first: int
    count: int
    sites: tuple[Site, ...]


@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True)
class Forward:
    """A forward pass for given sites. Outputs are stacks; `names` says what is in each."""

    architecture: Architecture
    sites: tuple[str, ...]
    dtype: str = "bf16"  # of the stored activations
    kernel: str | None = None  # of attention; None: choose by platform and shape
    gate_kernel: str = "plain"
    platform: str = "cpu"
    mesh: Mesh | None = None

    @property
    def output_sites(self) -> tuple[tuple[str, ...], ...]:
        """The sites of each output stack, in the order of `__call__`'s answer."""
        stacks = [
            tuple(f"{tap}.{layer}" for layer in range(run.first, run.first + run.count))
            for run in group_layers(self.sites, self.architecture)
            for tap in run.sites
        ]
        return (*stacks, *((name,) for name in self._leftover()))

    def _leftover(self) -> list[str]:
        """What is read after the last layer that is run, instead of inside a layer."""
        depth = sites.layers_needed(self.sites, self.architecture)
        last = (f"{Site.RESID_PRE}.{depth}", str(Site.FINAL_NORM))
        return [name for name in last if name in self.sites]

    def __call__(
        self, params: Mapping[str, Any], tokens: Any, positions: Any, segments: Any
    ) -> Any:
        """tokens, positions [batch, length]; segments the same, or None when rows are not packed.

        Each answer is [layers, batch, length, width], and for int8 a pair with its scales.
        """
        arch = self.architecture
        stream = jnp.take(params["embed"], tokens, axis=0)
        stream = stream * jnp.asarray(arch.embedding_scale, stream.dtype)
        tables = _rotations(positions, arch)
        outputs: list[Any] = []
        for run in group_layers(self.sites, arch):
            stream, tapped = self._layers(run, params["layers"], stream, tables, segments)
            outputs += [tapped[tap] for tap in run.sites]
        for name in self._leftover():
            final = name == Site.FINAL_NORM
            value = _norm(stream, params["final_norm"], arch) if final else stream
            outputs.append(to_stored_dtype(value[None], self.dtype))
        return tuple(outputs)

    def _layers(
        self, run: LayerGroup, layers: Mapping[str, Any], stream: Any, tables: Any, segments: Any
    ) -> tuple[Any, dict[Site, Any]]:
        arch, span = self.architecture, slice(run.first, run.first + run.count)
        local = arch.windowed[span]
        kinds = sorted(set(arch.rotary))
        rotary = jnp.asarray([kinds.index(row) for row in arch.rotary[span]])
        kernel = self.kernel or attention.choose_kernel(
            platform=self.platform,
            dtype=stream.dtype,
            head_dim=arch.head_dim,
            length=stream.shape[1],
            packed=segments is not None,
            softcap=arch.softcap,
        )
        wide, narrow = (
            attention.Attention(
                kernel=kernel,
                scale=arch.attention_scale,
                softcap=arch.softcap,
                window=window,
                mesh=self.mesh,
            )
            for window in (None, arch.window)
        )

        gate = functools.partial(
            gated_mlp.gated,
            activation=arch.activation,
            kernel=self.gate_kernel,
            mesh=self.mesh,
        )

        def attend(is_local: Any, query: Any, key: Any, value: Any) -> Any:
            matters = arch.window is not None and arch.window < stream.shape[1]
            if not matters or not any(local):
                return wide(query, key, value, segments)
            if all(local):
                return narrow(query, key, value, segments)
            return jax.lax.cond(
                is_local,
                lambda *parts: narrow(*parts, segments),
                lambda *parts: wide(*parts, segments),
                query,
                key,
                value,
            )

        def step(carry: Any, layer: Any) -> Any:
            number, kind, is_local = layer
            # Taken from the whole stacks: scanning over a part of them would copy that part.
            weight = {
                name: jax.lax.dynamic_index_in_dim(stack, number, keepdims=False)
                for name, stack in layers.items()
            }
            if self.mesh is not None:
                carry = jax.lax.with_sharding_constraint(carry, meshes.residual_sharding(self.mesh))
            carry, seen = _layer(
                arch,
                weight,
                carry,
                tables[0] if len(tables) == 1 else _choose(tables, kind),
                lambda *parts: attend(is_local, *parts),
                gate,
            )
            return carry, {tap: to_stored_dtype(seen[tap], self.dtype) for tap in run.sites}

        numbers = jnp.arange(run.first, run.first + run.count)
        return jax.lax.scan(step, stream, (numbers, rotary, jnp.asarray(local)))


def group_layers(names: Sequence[str], arch: Architecture) -> list[LayerGroup]:
    """Layers grouped by what is asked of them, down to the deepest that is needed."""
    asked: dict[int, list[Site]] = {}
    for name in names:
        site, layer = sites.split_name(name)
        if layer >= 0:
            asked.setdefault(layer, []).append(site)
    depth = sites.layers_needed(names, arch)
    wanted = [tuple(sorted(asked.get(layer, ()), key=list(Site).index)) for layer in range(depth)]
    groups = [list(group) for _, group in groupby(range(depth), key=wanted.__getitem__)]
    return [
        LayerGroup(first=group[0], count=len(group), sites=wanted[group[0]]) for group in groups
    ]


def to_stored_dtype(values: Any, dtype: str) -> Any:
    """Activations in their stored format, on the device, so that fewer bytes travel."""
    if dtype != "int8":
        wanted = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}[dtype]
        return values.astype(wanted)
    wide = values.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(wide), axis=-1), 1e-30) / 127.0
    return jnp.rint(wide / scale[..., None]).astype(jnp.int8), scale


def _layer(
    arch: Architecture,
    weight: Mapping[str, Any],
    stream: Any,
    rotation: Any,
    attend: Callable[..., Any],
    gate: Callable[[Any, Any, Any], Any],
) -> tuple[Any, dict[Site, Any]]:
    batch, length, _ = stream.shape
    before = stream
    normed = _norm(stream, weight["attention_norm"], arch)
    query, key, value = _heads(arch, weight, normed)
    if arch.head_norm:
        query, key = _norm(query, weight["query_norm"], arch), _norm(key, weight["key_norm"], arch)
    heads = attend(_rotate(query, rotation), _rotate(key, rotation), value)
    heads = heads.reshape(batch, length, arch.heads * arch.head_dim)
    attended = heads @ weight["out"]
    if arch.out_bias:
        attended = attended + weight["out_bias"]
    if arch.post_norms:
        attended = _norm(attended, weight["attention_post_norm"], arch)
    stream = stream + attended
    normed = _norm(stream, weight["mlp_norm"], arch)
    hidden = gate(normed, weight["gate_up"], weight.get("gate_up_bias"))
    moved = hidden @ weight["down"]
    if arch.mlp_bias:
        moved = moved + weight["down_bias"]
    if arch.post_norms:
        moved = _norm(moved, weight["mlp_post_norm"], arch)
    # In this order XLA adds inside the matrix product; in the other it takes a kernel more.
    after = moved + stream
    return after, {
        Site.RESID_PRE: before,
        Site.RESID_POST: after,
        Site.ATTN_OUT: attended,
        Site.MLP_OUT: moved,
        Site.MLP_HIDDEN: hidden,
        Site.ATTN_HEADS: heads,
    }


def _heads(arch: Architecture, weight: Mapping[str, Any], normed: Any) -> tuple[Any, Any, Any]:
    """Queries, keys and values, from one product. Its columns lie in that order; under a tensor
    mesh they are grouped by key-value head, so that the mesh can cut between the heads."""
    batch, length, _ = normed.shape
    grouped = weight["qkv"].ndim == 4
    mixed = jnp.einsum("bsd,dkgh->bskgh" if grouped else "bsd,dnh->bsnh", normed, weight["qkv"])
    if arch.qkv_bias:
        mixed = mixed + weight["qkv_bias"]
    if not grouped:
        return tuple(jnp.split(mixed, [arch.heads, arch.heads + arch.kv_heads], axis=2))
    query = mixed[:, :, :, : arch.queries_per_kv_head].reshape(
        batch, length, arch.heads, arch.head_dim
    )
    return (
        query,
        mixed[:, :, :, arch.queries_per_kv_head],
        mixed[:, :, :, arch.queries_per_kv_head + 1],
    )


def _norm(values: Any, weight: Any, arch: Architecture) -> Any:
    wide = values.astype(jnp.float32)
    spread = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + arch.norm_epsilon)
    return (wide * spread * (weight.astype(jnp.float32) + arch.norm_offset)).astype(values.dtype)


def _rotations(positions: Any, arch: Architecture) -> list[tuple[Any, Any]]:
    """Cosines and sines for each kind of layer, worked out once and not again in every layer."""
    tables = []
    for rotary in sorted(set(arch.rotary)):
        speeds = jnp.asarray(rotary.frequencies, jnp.float32)
        angles = positions[:, :, None, None].astype(jnp.float32) * speeds
        tables.append((jnp.cos(angles) * rotary.scale, jnp.sin(angles) * rotary.scale))
    return jax.lax.optimization_barrier(tables)


def _choose(tables: list[tuple[Any, Any]], kind: Any) -> tuple[Any, Any]:
    cosines, sines = (jnp.stack(parts) for parts in zip(*tables, strict=True))
    return cosines[kind], sines[kind]


def _rotate(values: Any, rotation: tuple[Any, Any]) -> Any:
    """Rotary positions as Hugging Face lays them out: the two halves of a head are the pairs."""
    cosine, sine = rotation
    left, right = jnp.split(values.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cosine - right * sine, right * cosine + left * sine], axis=-1)
    return turned.astype(values.dtype)
