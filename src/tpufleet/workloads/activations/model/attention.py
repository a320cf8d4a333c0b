"""Causal attention, by the fastest kernel that the platform and the shapes allow."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from tpufleet.errors import BadInput

KERNELS = ("plain", "stepped", "cudnn", "splash")
# Rows of the score matrix held at once by the plain kernel.
QUERY_BLOCK = 512
# And by the stepped one, which cuts a sequence into at most so many spans. Each span is compiled by
# itself, and several run at once, since a core works out the small products of one step alone.
STEP, SPANS = 32, 8
# Scores that the stepped kernel holds at once: 4 MB of them stay in the cache of two cores.
SCORES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """One way to attend. `window` and `softcap` are the layer's; both may be absent."""

    kernel: str
    scale: float
    window: int | None = None
    softcap: float | None = None
    mesh: Mesh | None = None

    def __call__(self, query: Any, key: Any, value: Any, segments: Any) -> Any:
        """query [batch, length, heads, dim], key and value with fewer heads; the same back."""
        if self.kernel == "cudnn":
            return jax.nn.dot_product_attention(
                query,
                key,
                value,
                scale=self.scale,
                is_causal=True,
                # cuDNN counts tokens back, not counting the token itself.
                local_window_size=None if self.window is None else (self.window - 1, 0),
                implementation="cudnn",
            )
        if self.kernel == "splash":
            return _splash(self, query, key, value, segments)
        if self.kernel == "stepped":
            return _stepped(self, query, key, value, segments)
        return _plain(self, query, key, value, segments)


def choose_kernel(
    *, platform: str, dtype: Any, head_dim: int, length: int, packed: bool, softcap: float | None
) -> str:
    """The kernel for these shapes."""
    half = jnp.dtype(dtype).itemsize == 2
    if platform in ("gpu", "cuda") and half and not packed and softcap is None and head_dim <= 128:
        return "cudnn"
    if platform == "tpu" and length % 128 == 0 and head_dim % 64 == 0:
        return "splash"
    return "stepped" if platform == "cpu" else "plain"


def check_kernel(kernel: str) -> str:
    if kernel not in KERNELS:
        raise BadInput(f"attention kernel {kernel!r} is not one of {', '.join(KERNELS)}")
    return kernel


def _plain(how: Attention, query: Any, key: Any, value: Any, segments: Any) -> Any:
    batch, length, heads, dim = query.shape
    kv_heads = key.shape[2]
    query = query.reshape(batch, length, kv_heads, heads // kv_heads, dim)

    def block(start: Any, size: int) -> Any:
        rows = jax.lax.dynamic_slice_in_dim(query, start, size, axis=1)
        scores = jnp.einsum("bskgd,btkd->bkgst", rows, key, preferred_element_type=jnp.float32)
        scores = _capped(how, scores)
        seen = _seen(how, start + jnp.arange(size), jnp.arange(length))
        seen = seen[None]
        if segments is not None:
            mine = jax.lax.dynamic_slice_in_dim(segments, start, size, axis=1)
            seen = seen & (mine[:, :, None] == segments[:, None, :])
        scores = jnp.where(seen[:, None, None], scores, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
        return jnp.einsum("bkgst,btkd->bskgd", weights, value)

    if length > 2 * QUERY_BLOCK and length % QUERY_BLOCK == 0:
        starts = jnp.arange(0, length, QUERY_BLOCK)
        blocks = jax.lax.map(functools.partial(block, size=QUERY_BLOCK), starts)
        mixed = jnp.moveaxis(blocks, 0, 1)
    else:
        mixed = block(0, length)
    return mixed.reshape(batch, length, heads, dim)


def _stepped(how: Attention, query: Any, key: Any, value: Any, segments: Any) -> Any:
    """For CPUs: a few sequences at a time, so that their scores stay in the cache."""
    batch, length, heads, _ = query.shape
    row, parts = functools.partial(_row, how), (query, key, value, segments)
    if how.mesh is not None and how.mesh.size > 1:  # rows lie on several devices
        return jax.vmap(row)(*parts)
    fitting = SCORES // (heads * STEP * length)
    together = max(size for size in range(1, max(fitting, 1) + 1) if batch % size == 0)
    return jax.lax.map(lambda parts: row(*parts), parts, batch_size=together)


def _row(how: Attention, query: Any, key: Any, value: Any, segments: Any) -> Any:
    """One sequence, [length, heads, dim], span by span: no span is compared with keys after it."""
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
            seen = _seen(how, start + jnp.arange(size), jnp.arange(oldest, end))
            if segments is not None:
                mine = jax.lax.dynamic_slice_in_dim(segments, start, size)
                seen = seen & (mine[:, None] == segments[None, oldest:end])
            scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
            raised = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
            total = jnp.sum(raised, axis=-1, keepdims=True)
            mixed = jnp.einsum(
                "kgst,ktd->kgsd",
                raised.astype(values.dtype),
                values,
                preferred_element_type=jnp.float32,
            )
            # Divided here, where rows are as long as a head is wide.
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


def _seen(how: Attention, queries: Any, keys: Any) -> Any:
    back = queries[:, None] - keys[None, :]
    seen = back >= 0
    return seen if how.window is None else seen & (back < how.window)


def _splash(how: Attention, query: Any, key: Any, value: Any, segments: Any) -> Any:
    """The TPU kernel. It takes one sequence with heads first, so it is mapped over the batch."""
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

    if how.mesh is None or how.mesh.size == 1:
        return attend(query, key, value, segments)
    rows = PartitionSpec(("data", "fsdp"), None, "tensor", None)
    marks = PartitionSpec(("data", "fsdp"), None)
    if segments is None:
        segments = jnp.zeros(query.shape[:2], np.int32)
    return jax.shard_map(
        attend,
        mesh=how.mesh,
        in_specs=(rows, rows, rows, marks),
        out_specs=rows,
        check_vma=False,
    )(query, key, value, segments)
