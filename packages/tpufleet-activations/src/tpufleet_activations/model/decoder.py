"""The forward pass: embedding and scanned layers up to the last one needed, without output head.

Adjacent layers with the same selected sites form one scan, so activations that are not selected
are never materialized, and compile time does not grow with depth.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tpufleet_activations.model import attention, gated_mlp, meshes, sites
from tpufleet_activations.model.architectures import Architecture
from tpufleet_activations.model.biased_product import biased_product
from tpufleet_activations.model.sites import Site


def matmul_precision(dtype: Any) -> AbstractContextManager[Any]:
    """Full float32 products for float32 parameters. By default they run as TF32 on GPUs and as one
    bfloat16 pass on TPUs, with a relative error near 1e-3."""
    if jnp.dtype(dtype) == jnp.float32:
        return jax.default_matmul_precision("highest")
    return nullcontext()


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerGroup:
    """Consecutive layers with the same selected sites."""

    first: int
    count: int
    sites: tuple[Site, ...]


@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True)
class Forward:
    """A forward pass for given sites. Outputs are stacks, described by `output_sites`."""

    architecture: Architecture
    sites: tuple[str, ...]
    dtype: str = "bf16"  # of the stored activations
    kernel: str | None = None  # of attention; None: choose by platform and shape
    unavailable: frozenset[str] = frozenset()  # kernels of attention that do not work here
    gate_kernel: str = "plain"
    platform: str = "cpu"
    mesh: Mesh | None = None

    @property
    def output_sites(self) -> tuple[tuple[str, ...], ...]:
        """The site names of each output stack, in the order of the outputs."""
        stacks = [
            tuple(f"{site}.{layer}" for layer in range(group.first, group.first + group.count))
            for group in group_layers(self.sites, self.architecture)
            for site in group.sites
        ]
        return (*stacks, *((name,) for name in self._sites_after_layers()))

    def _sites_after_layers(self) -> list[str]:
        """Sites that are read after the last layer that runs."""
        depth = sites.layers_needed(self.sites, self.architecture)
        last = (f"{Site.RESID_PRE}.{depth}", str(Site.FINAL_NORM))
        return [name for name in last if name in self.sites]

    def __call__(
        self, params: Mapping[str, Any], tokens: Any, positions: Any, segments: Any
    ) -> Any:
        """tokens, positions [batch, length]; segments the same, or None when rows are not packed.

        Each output is [layers, batch, length, width].
        """
        with matmul_precision(params["embed"].dtype):
            return self._outputs(params, tokens, positions, segments)

    def _outputs(
        self, params: Mapping[str, Any], tokens: Any, positions: Any, segments: Any
    ) -> Any:
        arch = self.architecture
        stream = jnp.take(params["embed"], tokens, axis=0)
        stream = stream * jnp.asarray(arch.embedding_scale, stream.dtype)
        tables = _rotations(positions, arch)
        full, _ = self._attentions(stream, packed=segments is not None)
        rows = full.layout(positions, segments, arch.head_dim)
        outputs: list[Any] = []
        for group in group_layers(self.sites, arch):
            stream, selected = self._layers(group, params["layers"], stream, tables, rows)
            outputs += [selected[site] for site in group.sites]
        for name in self._sites_after_layers():
            final = name == Site.FINAL_NORM
            value = _norm(stream, params["final_norm"], arch) if final else stream
            outputs.append(to_stored_dtype(value[None], self.dtype))
        return tuple(outputs)

    def attention_kernel(self, dtype: Any, *, packed: bool, length: int = 0) -> str:
        return self.kernel or attention.choose_kernel(
            platform=self.platform,
            dtype=dtype,
            head_dim=self.architecture.head_dim,
            length=length,
            packed=packed,
            softcap=self.architecture.softcap,
            unavailable=self.unavailable,
        )

    def _attentions(
        self, stream: Any, *, packed: bool
    ) -> tuple[attention.Attention, attention.Attention]:
        """Attention without and with the window."""
        arch = self.architecture
        kernel = self.attention_kernel(stream.dtype, packed=packed, length=stream.shape[1])
        full = attention.Attention(
            kernel=kernel, scale=arch.attention_scale, softcap=arch.softcap, mesh=self.mesh
        )
        return full, replace(full, window=arch.window)

    def _layers(
        self,
        group: LayerGroup,
        layers: Mapping[str, Any],
        stream: Any,
        tables: Any,
        rows: attention.RowLayout,
    ) -> tuple[Any, dict[Site, Any]]:
        arch, span = self.architecture, slice(group.first, group.first + group.count)
        local = arch.windowed[span]
        kinds = sorted(set(arch.rope))
        rope_kinds = jnp.asarray([kinds.index(rope) for rope in arch.rope[span]])
        full, windowed = self._attentions(stream, packed=rows.segments is not None)
        gate = functools.partial(
            gated_mlp.gate_and_up,
            activation=arch.activation,
            kernel=self.gate_kernel,
            mesh=self.mesh,
        )

        def attend(is_local: Any, query: Any, key: Any, value: Any) -> Any:
            has_effect = arch.window is not None and arch.window < stream.shape[1]
            if not has_effect or not any(local):
                return full(query, key, value, rows)
            if all(local):
                return windowed(query, key, value, rows)
            return jax.lax.cond(
                is_local,
                lambda q, k, v: windowed(q, k, v, rows),
                lambda q, k, v: full(q, k, v, rows),
                query,
                key,
                value,
            )

        def step(carry: Any, layer: Any) -> Any:
            number, kind, is_local = layer
            # Indexed from the whole stacks: scanning over a slice of them would copy it.
            weight = {
                name: jax.lax.dynamic_index_in_dim(stack, number, keepdims=False)
                for name, stack in layers.items()
            }
            if self.mesh is not None:
                carry = jax.lax.with_sharding_constraint(carry, meshes.residual_sharding(self.mesh))
            carry, values = _layer(
                arch,
                weight,
                carry,
                tables[0] if len(tables) == 1 else _choose(tables, kind),
                lambda *parts: attend(is_local, *parts),
                functools.partial(gate, w_gate_up=layers["gate_up"], layer=number),
            )
            return carry, {site: to_stored_dtype(values[site], self.dtype) for site in group.sites}

        numbers = jnp.arange(group.first, group.first + group.count)
        return jax.lax.scan(step, stream, (numbers, rope_kinds, jnp.asarray(local)))


def group_layers(names: Sequence[str], arch: Architecture) -> list[LayerGroup]:
    """All layers that must run, grouped by their selected sites."""
    selected: dict[int, list[Site]] = {}
    for name in names:
        site, layer = sites.split_name(name)
        if layer >= 0:
            selected.setdefault(layer, []).append(site)
    depth = sites.layers_needed(names, arch)
    wanted = [
        tuple(sorted(selected.get(layer, ()), key=list(Site).index)) for layer in range(depth)
    ]
    groups = [list(group) for _, group in groupby(range(depth), key=wanted.__getitem__)]
    return [
        LayerGroup(first=group[0], count=len(group), sites=wanted[group[0]]) for group in groups
    ]


def to_stored_dtype(values: Any, dtype: str) -> Any:
    """Convert on the device, so that fewer bytes are transferred to the host."""
    return values.astype({"bf16": jnp.bfloat16, "f32": jnp.float32}[dtype])


def _layer(
    arch: Architecture,
    weight: Mapping[str, Any],
    stream: Any,
    rotation: Any,
    attend: Callable[..., Any],
    gate: Callable[..., Any],
) -> tuple[Any, dict[Site, Any]]:
    batch, length, _ = stream.shape
    before = stream
    normed = _norm(stream, weight["attention_norm"], arch) if arch.pre_norms else stream
    query, key, value = _heads(arch, weight, normed)
    if arch.head_norm or arch.joint_norm:
        query = _head_norm(query, weight["query_norm"], arch)
        key = _head_norm(key, weight["key_norm"], arch)
    heads = attend(_rotate(query, rotation), _rotate(key, rotation), value)
    heads = heads.reshape(batch, length, arch.heads * arch.head_dim)
    attended = biased_product("bsd,df->bsf", heads, weight["out"], weight.get("out_bias"))
    if arch.post_norms:
        attended = _norm(attended, weight["attention_post_norm"], arch)
    stream = stream + attended
    normed = _norm(stream, weight["mlp_norm"], arch) if arch.pre_norms else stream
    hidden = gate(normed, bias=weight.get("gate_up_bias"))
    mlp_out = biased_product("bsd,df->bsf", hidden, weight["down"], weight.get("down_bias"))
    if arch.post_norms:
        mlp_out = _norm(mlp_out, weight["mlp_post_norm"], arch)
    # In this order XLA fuses the addition into the matrix product; otherwise it adds a kernel.
    after = mlp_out + stream
    return after, {
        Site.RESID_PRE: before,
        Site.RESID_POST: after,
        Site.ATTN_OUT: attended,
        Site.MLP_OUT: mlp_out,
        Site.MLP_HIDDEN: hidden,
        Site.ATTN_HEADS: heads,
    }


def _heads(arch: Architecture, weight: Mapping[str, Any], normed: Any) -> tuple[Any, Any, Any]:
    """Queries, keys and values, from one product. Its columns are in that order; on a mesh with a
    tensor axis they are grouped by key-value head, so that they can be sharded by head."""
    batch, length, _ = normed.shape
    grouped = weight["qkv"].ndim == 4
    subscripts = "bsd,dkgh->bskgh" if grouped else "bsd,dnh->bsnh"
    mixed = biased_product(subscripts, normed, weight["qkv"], weight.get("qkv_bias"))
    if not grouped:
        query, key, value = jnp.split(mixed, [arch.heads, arch.heads + arch.kv_heads], axis=2)
        return query, key, value
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


def _head_norm(heads: Any, weight: Any, arch: Architecture) -> Any:
    """Normalizes queries or keys [batch, length, heads, dim]: each head, or all together."""
    if not arch.joint_norm:
        return _norm(heads, weight, arch)
    return _norm(heads.reshape(*heads.shape[:2], -1), weight, arch).reshape(heads.shape)


def _rotations(positions: Any, arch: Architecture) -> list[tuple[Any, Any]]:
    """Cosines and sines for each distinct rope, computed once for all layers."""
    tables = []
    for rope in sorted(set(arch.rope)):
        frequencies = jnp.asarray(rope.frequencies, jnp.float32)
        angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
        tables.append((jnp.cos(angles) * rope.scale, jnp.sin(angles) * rope.scale))
    return jax.lax.optimization_barrier(tables)


def _choose(tables: list[tuple[Any, Any]], kind: Any) -> tuple[Any, Any]:
    cosines, sines = (jnp.stack(parts) for parts in zip(*tables, strict=True))
    return cosines[kind], sines[kind]


def _rotate(values: Any, rotation: tuple[Any, Any]) -> Any:
    """Rotary embedding in Hugging Face's layout: the two halves of a head form the pairs."""
    cosine, sine = rotation
    left, right = jnp.split(values.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([left * cosine - right * sine, right * cosine + left * sine], axis=-1)
    return rotated.astype(values.dtype)
