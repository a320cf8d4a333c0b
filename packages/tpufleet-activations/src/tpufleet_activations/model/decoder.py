"""The forward pass: embedding and scanned layers up to the last one needed.

Adjacent layers with the same selected sites form one scan, so activations that are not selected
are never materialized, and compile time does not grow with depth.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tpufleet_activations.model import attention, encoders, experts, gated_mlp, meshes, sites
from tpufleet_activations.model.architectures import Architecture
from tpufleet_activations.model.biased_product import biased_product
from tpufleet_activations.model.sites import Point, Site

LOGIT_ROWS = 1024  # tokens whose logits are held at a time


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
    sites: tuple[Point, ...]  # without their layer


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
    longest: int = 0  # tokens of the longest sample: the width of attention patterns
    encoder: encoders.Encoder | None = None  # of the one site

    @property
    def output_sites(self) -> tuple[tuple[str, ...], ...]:
        """The site names of each output stack, in the order of the outputs."""
        if self.encoder is not None:
            return tuple((name,) for name in self.encoder.stored_sites)
        stacks = [
            tuple(str(site._replace(layer=group.first + n)) for n in range(group.count))
            for group in group_layers(self.sites, self.architecture)
            for site in group.sites
        ]
        return (*stacks, *((name,) for name in self._sites_outside_layers()))

    def _sites_outside_layers(self) -> list[str]:
        """Sites before the first layer, and after the last layer that runs."""
        depth = sites.layers_needed(self.sites, self.architecture)
        after_last = f"{Site.RESID_PRE}.{depth}"
        outside = (*sites.ONCE, *sites.TOP)
        return [
            name
            for name in self.sites
            if name == after_last or sites.split_name(name).site in outside
        ]

    def __call__(
        self, params: Mapping[str, Any], tokens: Any, positions: Any, segments: Any
    ) -> Any:
        """tokens, positions [batch, length]; segments the same, or None when rows are not packed.

        Each output is [layers, batch, length, width].
        """
        with matmul_precision(params["embed"].dtype):
            outputs = self._outputs(params, tokens, positions, segments)
            if self.encoder is None:
                return outputs
            [values] = outputs
            latents = encoders.encode(params["encoder"], values, self.encoder.k)
            return tuple(to_stored_dtype(one, self.dtype) for one in latents)

    def _outputs(
        self, params: Mapping[str, Any], tokens: Any, positions: Any, segments: Any
    ) -> Any:
        arch = self.architecture
        embedded = jnp.take(params["embed"], tokens, axis=0)
        embedded = embedded * jnp.asarray(arch.embedding_scale, embedded.dtype)
        stream = embedded
        if arch.learned_positions:
            stream = stream + jnp.take(params["positions"], positions, axis=0)
        tables = _rotations(positions, arch)
        full, _ = self._attentions(stream, packed=segments is not None)
        rows = full.layout(positions, segments, arch.head_dim)
        outputs: list[Any] = []
        for group in group_layers(self.sites, arch):
            stream, selected = self._layers(
                group, params["layers"], stream, tables, rows, positions
            )
            outputs += selected
        outside = self._sites_outside_layers()
        normed = stream
        if sites.final_norm_needed(self.sites):
            normed, _ = _norm(stream, params, "final_norm", arch)
        for name in outside:
            site, number, _ = sites.split_name(name)
            if site in sites.TOP:
                head = params["embed"] if params.get("head") is None else params["head"]
                value = _top_logits(arch, normed, head, number)[sites.TOP.index(site)]
            else:
                value = {Site.EMBED: embedded, Site.FINAL_NORM: normed}.get(site, stream)
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
            sinks=self.architecture.sinks,
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
        positions: Any,
    ) -> tuple[Any, tuple[Any, ...]]:
        arch, span = self.architecture, slice(group.first, group.first + group.count)
        local = arch.windowed[span]
        kinds = sorted(set(arch.rope))
        rope_kinds = jnp.asarray([kinds.index(rope) for rope in arch.rope[span]])
        full, windowed = self._attentions(stream, packed=rows.segments is not None)
        has_effect = arch.window is not None and arch.window < stream.shape[1] and any(local)

        def attend(is_local: Any, use: Callable[[attention.Attention], Any]) -> Any:
            """With the attention of a layer."""
            if not has_effect:
                return use(full)
            if all(local):
                return use(windowed)
            return jax.lax.cond(is_local, lambda: use(windowed), lambda: use(full))

        def step(carry: Any, layer: Any) -> Any:
            number, kind, is_local = layer
            # Indexed from the whole stacks: scanning over a slice of them would copy it.
            weight = {
                name: jax.lax.dynamic_index_in_dim(stack, number, keepdims=False)
                for name, stack in layers.items()
            }
            if self.mesh is not None:
                carry = jax.lax.with_sharding_constraint(carry, meshes.residual_sharding(self.mesh))
            part = _Layer(
                arch=arch,
                weight=weight,
                rotation=tables[0] if len(tables) == 1 else _choose(tables, kind),
                attend=functools.partial(attend, is_local),
                rows=rows,
                mlp=functools.partial(self._mlp, layers, number, group.sites),
            )
            carry, values = part(carry)
            pattern = functools.partial(part.pattern, values, positions, self.longest)
            selected = (
                pattern(site) if site.site is Site.ATTN_PATTERN else _part(arch, values, site)
                for site in group.sites
            )
            return carry, tuple(to_stored_dtype(value, self.dtype) for value in selected)

        numbers = jnp.arange(group.first, group.first + group.count)
        return jax.lax.scan(step, stream, (numbers, rope_kinds, jnp.asarray(local)))

    def _mlp(
        self,
        layers: Mapping[str, Any],
        layer: Any,
        selected: Sequence[Point],
        weight: Mapping[str, Any],
        normed: Any,
    ) -> tuple[Any, dict[Site, Any]]:
        """What the MLP or the experts of a layer add, and the sites within them."""
        arch = self.architecture
        if arch.experts:
            routes = experts.route(arch, normed, weight["router"], weight.get("router_bias"))
            names = ("gate_up", "down", "gate_up_bias", "down_bias")
            stacks = experts.Weights(*(layers.get(f"expert_{name}") for name in names))
            mixed = experts.mixture(
                arch, normed, routes, stacks, layer, kernel=self.gate_kernel, mesh=self.mesh
            )
            return mixed, dict(zip(sites.MIXTURE, routes, strict=True))
        values: dict[Site, Any] = {}
        bias = weight.get("gate_up_bias")
        if any(point.site in (Site.MLP_PRE, Site.MLP_UP) for point in selected):
            # Fused kernels keep the products out of memory.
            pair = gated_mlp.project(normed, layers["gate_up"], layer, bias)
            hidden = gated_mlp.combine(pair, arch.activation)
            values = {Site.MLP_PRE: pair[:, :, 0], Site.MLP_UP: pair[:, :, -1]}
        else:
            hidden = gated_mlp.gate_and_up(
                normed,
                layers["gate_up"],
                layer,
                bias,
                activation=arch.activation,
                kernel=self.gate_kernel,
                mesh=self.mesh,
            )
        values[Site.MLP_HIDDEN] = hidden
        return biased_product(
            "bsd,df->bsf", hidden, weight["down"], weight.get("down_bias")
        ), values


def group_layers(names: Sequence[str], arch: Architecture) -> list[LayerGroup]:
    """All layers that must run, grouped by their selected sites."""
    selected: dict[int, list[Point]] = {}
    for name in names:
        point = sites.split_name(name)
        if point.site not in (*sites.ONCE, *sites.TOP):
            selected.setdefault(point.layer, []).append(point._replace(layer=-1))
    depth = sites.layers_needed(names, arch)
    # Names are in the order of sites.
    wanted = [tuple(selected.get(layer, ())) for layer in range(depth)]
    groups = [list(group) for _, group in groupby(range(depth), key=wanted.__getitem__)]
    return [
        LayerGroup(first=group[0], count=len(group), sites=wanted[group[0]]) for group in groups
    ]


def to_stored_dtype(values: Any, dtype: str) -> Any:
    """Convert on the device, so that fewer bytes are transferred to the host."""
    if jnp.issubdtype(values.dtype, jnp.integer):
        return values.astype(jnp.int32)
    return values.astype({"bf16": jnp.bfloat16, "f32": jnp.float32}[dtype])


def _part(arch: Architecture, values: Mapping[Site, Any], point: Point) -> Any:
    """A site's values, or those of one of its heads."""
    value = values[point.site]
    if point.head is None:
        return value
    start = point.head * arch.head_dim
    return value[..., start : start + arch.head_dim]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    """One layer. `attend` calls a function with the attention of the layer; `mlp` takes the weights
    and the normalized stream."""

    arch: Architecture
    weight: Mapping[str, Any]
    rotation: Any
    attend: Callable[[Callable[[attention.Attention], Any]], Any]
    rows: attention.RowLayout
    mlp: Callable[[Mapping[str, Any], Any], tuple[Any, dict[Site, Any]]]

    def __call__(self, stream: Any) -> tuple[Any, dict[Site, Any]]:
        arch, weight = self.arch, self.weight
        before, flat = stream, (*stream.shape[:2], -1)
        normed, attention_scale = self._input("attention_norm", stream)
        query, key, value = _heads(arch, weight, normed)
        values = {Site.V: value.reshape(flat)}
        if arch.head_norm or arch.joint_norm:
            query = _head_norm(query, weight, "query_norm", arch)
            key = _head_norm(key, weight, "key_norm", arch)
        values |= {Site.Q: query.reshape(flat), Site.K: key.reshape(flat)}
        query, key = (_rotate(part, self.rotation) for part in (query, key))
        values |= {Site.ROT_Q: query.reshape(flat), Site.ROT_K: key.reshape(flat)}
        heads = self.attend(lambda how: how(query, key, value, self.rows, weight.get("sinks")))
        heads = heads.reshape(flat)
        attended = biased_product("bsd,df->bsf", heads, weight["out"], weight.get("out_bias"))
        if arch.post_norms:
            attended, _ = _norm(attended, weight, "attention_post_norm", arch)
        attended = _scaled(attended, arch)
        stream = stream + attended
        normed_mlp, mlp_scale = self._input("mlp_norm", before if arch.parallel else stream)
        mlp_out, inner = self.mlp(weight, normed_mlp)
        if arch.post_norms:
            mlp_out, _ = _norm(mlp_out, weight, "mlp_post_norm", arch)
        mlp_out = _scaled(mlp_out, arch)
        # In this order XLA fuses the addition into the matrix product; otherwise it adds a kernel.
        after = mlp_out + stream
        return after, {
            **values,
            **inner,
            Site.RESID_PRE: before,
            Site.RESID_MID: stream,
            Site.RESID_POST: after,
            Site.ATTN_OUT: attended,
            Site.MLP_OUT: mlp_out,
            Site.ATTN_HEADS: heads,
            Site.ATTN_INPUT: normed,
            Site.ATTN_SCALE: attention_scale,
            Site.MLP_INPUT: normed_mlp,
            Site.MLP_SCALE: mlp_scale,
        }

    def _input(self, name: str, stream: Any) -> tuple[Any, Any]:
        if not self.arch.pre_norms:
            return stream, None
        return _norm(stream, self.weight, name, self.arch)

    def pattern(
        self, values: Mapping[Site, Any], positions: Any, longest: int, point: Point
    ) -> Any:
        head = point.head or 0
        arch, sinks = self.arch, self.weight.get("sinks")
        query = _part(arch, values, Point(Site.ROT_Q, head=head))
        key = _part(arch, values, Point(Site.ROT_K, head=head // arch.queries_per_kv_head))
        sink = None if sinks is None else sinks[head]
        return self.attend(lambda how: how.pattern(query, key, self.rows, positions, longest, sink))


def _scaled(values: Any, arch: Architecture) -> Any:
    if arch.residual_scale == 1.0:
        return values
    return values * jnp.asarray(arch.residual_scale, values.dtype)


def _top_logits(arch: Architecture, normed: Any, head: Any, count: int) -> tuple[Any, Any]:
    """The largest logits and their tokens [batch, length, count]."""
    batch, length, width = normed.shape
    rows = normed.reshape(-1, width)
    size = math.gcd(len(rows), LOGIT_ROWS)

    def block(part: Any) -> Any:
        logits = jnp.einsum("td,vd->tv", part, head, preferred_element_type=jnp.float32)
        logits = logits / arch.logit_scale
        if arch.logit_softcap is not None:
            logits = jnp.tanh(logits / arch.logit_softcap) * arch.logit_softcap
        return jax.lax.top_k(logits, count)

    found = jax.lax.map(block, rows.reshape(-1, size, width))
    largest, chosen = (part.reshape(batch, length, count) for part in found)
    return largest, chosen


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


def _norm(
    values: Any, weights: Mapping[str, Any], name: str, arch: Architecture
) -> tuple[Any, Any]:
    """The normalized values, and what they were divided by [..., 1]."""
    wide = values.astype(jnp.float32)
    if arch.layer_norm:
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(wide * wide, axis=-1, keepdims=True) + arch.norm_epsilon
    scaled = wide * jax.lax.rsqrt(variance)
    scaled = scaled * (weights[name].astype(jnp.float32) + arch.norm_offset)
    if arch.layer_norm:
        scaled = scaled + weights[f"{name}_bias"].astype(jnp.float32)
    return scaled.astype(values.dtype), jnp.sqrt(variance)


def _head_norm(heads: Any, weight: Mapping[str, Any], name: str, arch: Architecture) -> Any:
    """Normalizes queries or keys [batch, length, heads, dim]: each head, or all together."""
    flat = heads.reshape(*heads.shape[:2], -1) if arch.joint_norm else heads
    return _norm(flat, weight, name, arch)[0].reshape(heads.shape)


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
    width = 2 * cosine.shape[-1]  # the rest of a head is not rotated
    left, right = jnp.split(values[..., :width].astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([left * cosine - right * sine, right * cosine + left * sine], axis=-1)
    rotated = rotated.astype(values.dtype)
    if width == values.shape[-1]:
        return rotated
    return jnp.concatenate([rotated, values[..., width:]], axis=-1)
