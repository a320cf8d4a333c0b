"""Causal attention, with the fastest kernel for the platform and shapes."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from tpufleet_activations.model import meshes, varlen_attention
from tpufleet_activations.model.program_cache import warn_unused

KERNELS = ("plain", "stepped", "cudnn", "varlen", "splash")
GPUS = ("gpu", "cuda")
# Rows of the score matrix that the plain kernel materializes at a time.
QUERY_BLOCK = 512
# Rows per step of the stepped kernel, and the most spans it divides a sequence into. Spans are
# compiled separately and run concurrently: the small products of one step use a single core.
STEP, SPANS = 32, 8
# Scores that the stepped kernel materializes at a time: 4 MB fit the caches of two cores.
SCORES = 1 << 20
# Tokens of the example that a kernel is tested with.
EXAMPLE_LENGTH = 256


class RowLayout(NamedTuple):
    """Which samples the rows of a batch hold. Without segments each row holds one."""

    segments: Any = None  # [batch, length]: differs between the samples of a row
    positions: Any = None  # [batch, length]: within the sample; only for the varlen kernel
    q_starts: Any = None  # of `varlen_attention.block_starts`


ONE_SAMPLE = RowLayout()


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Attention with a given kernel. `window` and `softcap` are None for layers without them."""

    kernel: str
    scale: float
    window: int | None = None
    softcap: float | None = None
    mesh: Mesh | None = None

    def layout(self, positions: Any, segments: Any, head_dim: int) -> RowLayout:
        """What the kernel needs to know about the rows, computed once for all layers."""
        if self.kernel != "varlen":
            return RowLayout(segments)
        packed = segments is not None
        q_starts = varlen_attention.block_starts(positions, head_dim, packed=packed)
        return RowLayout(segments, positions, q_starts)

    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        rows: RowLayout = ONE_SAMPLE,
        sinks: Any | None = None,
    ) -> Any:
        """query [batch, length, heads, dim], key and value with kv_heads; returns query's shape.
        `sinks` [heads] are logits that take a share of the attention, and have no value."""
        if self.kernel == "cudnn":
            return jax.nn.dot_product_attention(
                query,
                key,
                value,
                scale=self.scale,
                is_causal=True,
                # cuDNN's window excludes the token itself.
                local_window_size=None if self.window is None else (self.window - 1, 0),
                implementation="cudnn",
            )
        if self.kernel == "varlen":
            return varlen_attention.varlen_attention(
                query,
                key,
                value,
                rows.positions,
                rows.q_starts,
                sinks,
                sm_scale=self.scale,
                window=self.window,
                softcap=self.softcap,
                mesh=self.mesh,
            )
        segments = rows.segments
        if self.kernel == "splash":
            return _splash(self, query, key, value, segments)
        if self.kernel == "stepped":
            return _stepped(self, query, key, value, segments, sinks)
        return _plain(self, query, key, value, segments, sinks)

    def pattern(
        self, query: Any, key: Any, rows: RowLayout, positions: Any, longest: int, sink: Any | None
    ) -> Any:
        """Attention of one head, query and key [batch, length, dim]: for each token the weights of
        the positions of its sample [batch, length, longest]."""
        length = query.shape[1]
        size = math.gcd(length, QUERY_BLOCK)

        def block(start: Any) -> Any:
            cut = functools.partial(jax.lax.dynamic_slice_in_dim, axis=1)
            scores = jnp.einsum(
                "bsd,btd->bst",
                cut(query, start, size),
                key,
                preferred_element_type=jnp.float32,
            )
            scores = _capped(self, scores)
            numbers = start + jnp.arange(size)
            mask = _mask(self, numbers, jnp.arange(length))[None]
            if rows.segments is not None:
                mask = mask & (
                    cut(rows.segments, start, size)[:, :, None] == rows.segments[:, None]
                )
            scores = jnp.where(mask, scores, -jnp.inf)
            total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
            if sink is not None:
                total = jnp.logaddexp(total, sink.astype(jnp.float32))
            weights = jnp.exp(scores - total)
            first = numbers - cut(positions, start, size)  # of the token's sample
            columns = first[:, :, None] + jnp.arange(longest)
            weights = jnp.take_along_axis(weights, jnp.minimum(columns, length - 1), axis=2)
            return jnp.where(columns <= numbers[None, :, None], weights, 0.0)

        blocks = jax.lax.map(block, jnp.arange(0, length, size))
        return jnp.moveaxis(blocks, 0, 1).reshape(*query.shape[:2], longest)


def choose_kernel(
    *,
    platform: str,
    dtype: Any,
    head_dim: int,
    length: int,
    packed: bool,
    softcap: float | None,
    sinks: bool = False,
    unavailable: Collection[str] = (),
) -> str:
    """The kernel for these shapes. `unavailable` ones failed their test on this machine."""
    half = jnp.dtype(dtype).itemsize == 2
    fused = half and not packed and softcap is None and not sinks
    fused = fused and head_dim <= 256 and head_dim % 8 == 0
    if platform in GPUS and fused and "cudnn" not in unavailable:
        return "cudnn"
    tiled = half and head_dim in varlen_attention.HEAD_DIMS
    if platform in GPUS and tiled and "varlen" not in unavailable:
        return "varlen"
    # The TPU kernel has no full float32 products.
    tiled = half and length % 128 == 0 and head_dim % 64 == 0 and not sinks
    if platform == "tpu" and tiled and "splash" not in unavailable:
        return "splash"
    return "stepped" if platform == "cpu" else "plain"


def unavailable_kernels(
    *,
    platform: str,
    dtype: Any,
    head_dim: int,
    softcap: float | None,
    window: int | None,
    packed: bool = False,
    sinks: bool = False,
) -> frozenset[str]:
    """Kernels that would be chosen for a model, but that do not run here or disagree with NumPy on
    a small example. What libraries support depends on their version and the chip: cuDNN's head_dim
    is at most 128 before Hopper, and splash's was a multiple of 128."""
    unavailable: frozenset[str] = frozenset()
    while True:
        kernel = choose_kernel(
            platform=platform,
            dtype=dtype,
            head_dim=head_dim,
            length=EXAMPLE_LENGTH,
            packed=packed,
            softcap=softcap,
            sinks=sinks,
            unavailable=unavailable,
        )
        if kernel in ("plain", "stepped"):
            if not (packed and unavailable):
                return unavailable
            packed = False  # rows will hold one sample each
            continue
        how = Attention(kernel=kernel, scale=head_dim**-0.5, window=None, softcap=softcap)
        windows = {None} if window is None else {None, min(window, EXAMPLE_LENGTH // 3)}
        try:
            for size in windows:
                gap = example_gap(
                    replace(how, window=size), head_dim, dtype, packed=packed, sinks=sinks
                )
                if not gap <= 0.02:
                    raise ArithmeticError(f"it differs from plain attention by {gap:.1%}")
            return unavailable
        except Exception as error:
            # Any error: the plain kernel gives the same results, only slower.
            warn_unused(f"{kernel} attention for head_dim {head_dim}", error)
            unavailable |= {kernel}


def example_gap(
    how: Attention, head_dim: int, dtype: Any, *, packed: bool, sinks: bool = False
) -> float:
    """The relative difference from NumPy on a small example. Only the kernel is compiled."""
    random = np.random.default_rng(0)
    query, key, value = (
        random.standard_normal((1, EXAMPLE_LENGTH, heads, head_dim)).astype(dtype)
        for heads in (4, 2, 2)
    )
    starts = [0, EXAMPLE_LENGTH // 3, EXAMPLE_LENGTH // 2 + 1] if packed else [0]
    segments = np.searchsorted(starts, np.arange(EXAMPLE_LENGTH), side="right")[None] - 1
    positions = (np.arange(EXAMPLE_LENGTH) - np.array(starts)[segments]).astype(np.int32)

    def attend(query: Any, key: Any, value: Any, positions: Any, segments: Any) -> Any:
        layout = how.layout(positions, segments if packed else None, head_dim)
        return how(query, key, value, layout, logits if sinks else None)

    logits = np.linspace(-1, 2, query.shape[2], dtype=np.float32)
    tried = np.float32(jax.jit(attend)(query, key, value, positions, segments.astype(np.int32)))
    scores = np.einsum(
        "sngd,tnd->ngst",
        np.float32(query[0]).reshape(EXAMPLE_LENGTH, 2, 2, head_dim),
        np.float32(key[0]),
    )
    scores = scores * how.scale
    if how.softcap is not None:
        scores = np.tanh(scores / how.softcap) * how.softcap
    distance = np.arange(EXAMPLE_LENGTH)[:, None] - np.arange(EXAMPLE_LENGTH)
    allowed = (distance >= 0) & (distance < (how.window or EXAMPLE_LENGTH))
    allowed &= segments[0][:, None] == segments[0]
    weights = np.exp(np.where(allowed, scores, -np.inf))
    sunk = np.exp(logits).reshape(2, 2, 1, 1) if sinks else 0.0
    weights /= weights.sum(axis=-1, keepdims=True) + sunk
    plain = np.einsum("ngst,tnd->sngd", weights, np.float32(value[0])).reshape(tried.shape)
    return float(np.linalg.norm(tried - plain) / np.linalg.norm(plain))


def _plain(
    how: Attention, query: Any, key: Any, value: Any, segments: Any, sinks: Any | None
) -> Any:
    batch, length, heads, dim = query.shape
    kv_heads = key.shape[2]
    query = query.reshape(batch, length, kv_heads, heads // kv_heads, dim)

    def block(start: Any, size: int) -> Any:
        rows = jax.lax.dynamic_slice_in_dim(query, start, size, axis=1)
        scores = jnp.einsum("bskgd,btkd->bkgst", rows, key, preferred_element_type=jnp.float32)
        scores = _capped(how, scores)
        mask = _mask(how, start + jnp.arange(size), jnp.arange(length))
        mask = mask[None]
        if segments is not None:
            own = jax.lax.dynamic_slice_in_dim(segments, start, size, axis=1)
            mask = mask & (own[:, :, None] == segments[:, None, :])
        scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
        if sinks is not None:
            logits = sinks.astype(jnp.float32).reshape(1, kv_heads, -1, 1, 1)
            logits = jnp.broadcast_to(logits, (*scores.shape[:-1], 1))
            scores = jnp.concatenate([scores, logits], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., :length].astype(value.dtype)
        return jnp.einsum("bkgst,btkd->bskgd", weights, value)

    if length > 2 * QUERY_BLOCK and length % QUERY_BLOCK == 0:
        starts = jnp.arange(0, length, QUERY_BLOCK)
        blocks = jax.lax.map(functools.partial(block, size=QUERY_BLOCK), starts)
        mixed = jnp.moveaxis(blocks, 0, 1)
    else:
        mixed = block(0, length)
    return mixed.reshape(batch, length, heads, dim)


def _stepped(
    how: Attention, query: Any, key: Any, value: Any, segments: Any, sinks: Any | None
) -> Any:
    """For CPUs: a few sequences at a time, so that their scores fit the cache."""

    def own_rows(sinks: Any, *parts: Any) -> Any:
        row = functools.partial(_row, how, sinks)
        batch, length, heads, _ = parts[0].shape
        fitting = SCORES // (heads * STEP * length)
        together = max(size for size in range(1, max(fitting, 1) + 1) if batch % size == 0)
        return jax.lax.map(lambda parts: row(*parts), parts, batch_size=together)

    heads = PartitionSpec(meshes.BATCH_AXES, None, "tensor", None)
    marks = None if segments is None else PartitionSpec(meshes.BATCH_AXES, None)
    specs = (None if sinks is None else PartitionSpec("tensor"), heads, heads, heads, marks)
    return meshes.run_sharded(own_rows, how.mesh, specs, heads)(sinks, query, key, value, segments)


def _row(how: Attention, sinks: Any, query: Any, key: Any, value: Any, segments: Any) -> Any:
    """One sequence [length, heads, dim] in spans, each of which skips the keys after it."""
    length, heads, dim = query.shape
    kv_heads = key.shape[1]
    query = query.reshape(length, kv_heads, heads // kv_heads, dim).transpose(1, 2, 0, 3)
    key, value = (part.swapaxes(0, 1) for part in (key, value))

    def span(first: int, end: int) -> list[Any]:
        oldest = 0 if how.window is None else max(first - how.window + 1, 0)
        keys, values = (part[:, oldest:end] for part in (key, value))

        def step(start: Any, size: int) -> Any:
            rows = jax.lax.dynamic_slice_in_dim(query, start, size, axis=2)
            scores = _capped(
                how, jnp.einsum("kgsd,ktd->kgst", rows, keys, preferred_element_type=jnp.float32)
            )
            mask = _mask(how, start + jnp.arange(size), jnp.arange(oldest, end))
            if segments is not None:
                own = jax.lax.dynamic_slice_in_dim(segments, start, size)
                mask = mask & (own[:, None] == segments[None, oldest:end])
            scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
            largest = jnp.max(scores, axis=-1, keepdims=True)
            weights = jnp.exp(scores - largest)
            total = jnp.sum(weights, axis=-1, keepdims=True)
            if sinks is not None:
                logits = sinks.astype(jnp.float32).reshape(kv_heads, -1, 1, 1)
                total = total + jnp.exp(logits - largest)
            mixed = jnp.einsum(
                "kgst,ktd->kgsd",
                weights.astype(values.dtype),
                values,
                preferred_element_type=jnp.float32,
            )
            # Normalized after the product: head_dim divisions per row instead of one per key.
            mixed = (mixed / total).astype(values.dtype)
            return mixed.transpose(2, 0, 1, 3).reshape(size, heads, dim)

        rest = (end - first) % STEP
        starts = jnp.arange(first, end - rest, STEP)
        last = [step(end - rest, rest)] if rest else []
        if not len(starts):
            return last
        whole = jax.lax.map(functools.partial(step, size=STEP), starts)
        return [whole.reshape(-1, heads, dim), *last]

    size = STEP * -(-length // (STEP * SPANS))
    spans = [span(first, min(first + size, length)) for first in range(0, length, size)]
    return jnp.concatenate([part for span in spans for part in span])


def _capped(how: Attention, scores: Any) -> Any:
    scores = scores * how.scale
    return scores if how.softcap is None else jnp.tanh(scores / how.softcap) * how.softcap


def _mask(how: Attention, queries: Any, keys: Any) -> Any:
    """Which keys (by position) each query may attend to: causal, within the window."""
    distance = queries[:, None] - keys[None, :]
    mask = distance >= 0
    return mask if how.window is None else mask & (distance < how.window)


def _splash(how: Attention, query: Any, key: Any, value: Any, segments: Any) -> Any:
    """The TPU kernel. It takes one sequence with heads first, so it is vmapped over the batch."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernels,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    length, heads = query.shape[1], query.shape[2]
    tensor = 1 if how.mesh is None else how.mesh.shape["tensor"]
    shape = (length, length)
    mask: Any = masks.CausalMask(shape)
    if how.window is not None:
        mask = masks.LocalMask(shape, window_size=(how.window - 1, 0), offset=0)
    side = next(size for size in (512, 256, 128) if length % size == 0)
    sizes = kernels.BlockSizes(block_q=side, block_kv=side, block_kv_compute=side)

    def attend(query: Any, key: Any, value: Any, segments: Any) -> Any:
        kernel = kernels.make_splash_mha(
            mask=masks.MultiHeadMask([mask] * (heads // tensor)),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=how.softcap,
            interpret=jax.default_backend() != "tpu",
        )
        arguments = [jnp.swapaxes(part, 1, 2) for part in (query * how.scale, key, value)]
        if segments is None:
            mixed = jax.vmap(kernel)(*arguments)
        else:
            pairs = kernels.SegmentIds(q=segments, kv=segments)
            mixed = jax.vmap(kernel)(*arguments, pairs)
        return jnp.swapaxes(mixed, 1, 2).astype(query.dtype)

    rows = PartitionSpec(meshes.BATCH_AXES, None, "tensor", None)
    marks = None if segments is None else PartitionSpec(meshes.BATCH_AXES, None)
    specs = (rows, rows, rows, marks)
    return meshes.run_sharded(attend, how.mesh, specs, rows)(query, key, value, segments)
