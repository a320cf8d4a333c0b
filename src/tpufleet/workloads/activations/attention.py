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

KERNELS = ("plain", "cudnn", "splash")
# Rows of the score matrix held at once by the plain kernel.
QUERY_BLOCK = 512


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
        return _plain(self, query, key, value, segments)


def choose(
    *, platform: str, dtype: Any, head_dim: int, length: int, packed: bool, softcap: float | None
) -> str:
    """The kernel for these shapes."""
    half = jnp.dtype(dtype).itemsize == 2
    if platform in ("gpu", "cuda") and half and not packed and softcap is None and head_dim <= 128:
        return "cudnn"
    if platform == "tpu" and length % 128 == 0 and head_dim % 64 == 0:
        return "splash"
    return "plain"


def check(kernel: str) -> str:
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
        scores = scores * how.scale
        if how.softcap is not None:
            scores = jnp.tanh(scores / how.softcap) * how.softcap
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
