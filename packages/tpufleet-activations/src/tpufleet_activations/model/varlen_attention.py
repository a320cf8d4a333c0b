"""Causal attention for rows that hold several samples, on NVIDIA GPUs (Pallas, Triton).

Flash attention for variable lengths: a program computes a block of `block_q` queries of one head
and iterates over blocks of `block_kv` keys with an online softmax. Blocks of queries start at the
samples' own positions (`q_starts`, in place of `cu_seqlens`), and read only the keys of their
sample. So the cost is that of the samples, whatever the length of the row, and a sample's result
does not depend on where in the row it is or on what is beside it.
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
from tpufleet_activations.model.batch import most_samples

HEAD_DIMS = (32, 64, 128, 256)  # blocks have powers of two
LOG2_E = math.log2(math.e)
MASK_VALUE = -1e30  # finite: a query without any key yet has no NaN


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSizes:
    """Chosen by measurement on an H200."""

    block_q: int = 64
    block_kv: int = 64
    num_warps: int = 4
    num_stages: int = 3  # loads in flight to shared memory


BLOCK_SIZES = {256: BlockSizes(block_q=128, num_warps=8, num_stages=2)}


def block_sizes(head_dim: int) -> BlockSizes:
    return BLOCK_SIZES.get(head_dim, BlockSizes())


def block_starts(positions: Any, head_dim: int, *, packed: bool) -> Any:
    """The first query of each block [batch, blocks], from positions [batch, length] that start at 0
    with each sample; `length` for blocks that are not needed."""
    length, block_q = positions.shape[1], block_sizes(head_dim).block_q
    blocks = -(-length // block_q) + (most_samples(length) if packed else 0)
    starts = functools.partial(jnp.nonzero, size=blocks, fill_value=length)
    return jax.vmap(lambda row: starts(row % block_q == 0)[0].astype(jnp.int32))(positions)


def varlen_attention(
    q: Any,
    k: Any,
    v: Any,
    positions: Any,
    q_starts: Any,
    sinks: Any | None = None,
    *,
    sm_scale: float,
    window: int | None = None,
    softcap: float | None = None,
    mesh: Mesh | None = None,
) -> Any:
    """q [batch, length, heads, head_dim], k and v with kv_heads; `q_starts` of `block_starts`.
    Interpreted, and slow, where there is no GPU."""
    run = functools.partial(_forward, sm_scale=sm_scale, window=window, softcap=softcap)
    heads = PartitionSpec(meshes.BATCH_AXES, None, "tensor", None)
    rows = PartitionSpec(meshes.BATCH_AXES, None)
    each = None if sinks is None else PartitionSpec("tensor")
    specs = (heads, heads, heads, rows, rows, each)
    return meshes.run_sharded(run, mesh, specs, heads)(q, k, v, positions, q_starts, sinks)


def _forward(
    q: Any,
    k: Any,
    v: Any,
    positions: Any,
    q_starts: Any,
    sinks: Any | None,
    *,
    sm_scale: float,
    window: int | None,
    softcap: float | None,
) -> Any:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    batch, length, heads, head_dim = q.shape
    group_size = heads // k.shape[2]  # query heads for each head of k and v
    sizes = block_sizes(head_dim)
    sequence = lambda index: pl.BlockSpec((None, length, None, head_dim), index)
    q_spec = sequence(lambda block, head, row: (row, 0, head, 0))
    kv_spec = sequence(lambda block, head, row: (row, 0, head // group_size, 0))
    table = lambda size: pl.BlockSpec((None, size), lambda block, head, row: (row, 0))
    kernel = functools.partial(
        _kernel,
        sizes=sizes,
        sm_scale=sm_scale,
        window=window,
        softcap=softcap,
        length=length,
        has_sinks=sinks is not None,
    )
    logits = jnp.zeros(heads, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    sink_spec = pl.BlockSpec((1,), lambda block, head, row: (head,))
    return pl.pallas_call(
        kernel,
        grid=(q_starts.shape[1], heads, batch),
        in_specs=[
            table(q_starts.shape[1]),
            table(length),
            sink_spec,
            q_spec,
            kv_spec,
            kv_spec,
        ],
        out_specs=q_spec,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(
            num_warps=sizes.num_warps, num_stages=sizes.num_stages
        ),
        interpret=jax.default_backend() != "gpu",
        name="varlen_attention",
    )(q_starts, positions, logits, q, k, v)


def _kernel(
    q_starts_ref: Any,
    positions_ref: Any,
    sink_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    o_ref: Any,
    *,
    sizes: BlockSizes,
    sm_scale: float,
    window: int | None,
    softcap: float | None,
    length: int,
    has_sinks: bool,
) -> None:
    """One block of queries of one head."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    block_q, block_kv = sizes.block_q, sizes.block_kv
    # Logits are qk * qk_scale, in units of log2(e), so that exp is exp2.
    qk_scale = sm_scale * LOG2_E if softcap is None else 1.0

    def run(q_start: Any) -> None:
        q_offset = positions_ref[q_start]  # of the block within its sample
        seq_start = q_start - q_offset  # of the sample within the row
        q_positions = q_offset + jnp.arange(block_q)
        q_slice = pl.ds(q_start, block_q)
        in_row = q_start + jnp.arange(block_q) < length
        q_mask = plgpu.load(positions_ref.at[q_slice], mask=in_row, other=-1) == q_positions
        kv_len = q_offset + jnp.sum(q_mask.astype(jnp.int32))  # keys of the sample that are needed
        q = plgpu.load(q_ref.at[q_slice, :], mask=q_mask[:, None], other=0.0)

        def body(kv_block: Any, carry: Any, *, masked: bool) -> Any:
            acc, m_prev, l_prev = carry
            kv_slice = pl.ds(seq_start + kv_block * block_kv, block_kv)
            kv_positions = kv_block * block_kv + jnp.arange(block_kv)
            # Keys behind the end belong to other samples, which may hold infinities.
            kv_mask = {"mask": (kv_positions < kv_len)[:, None], "other": 0.0} if masked else {}
            qk = _dot(q, plgpu.load(k_ref.at[kv_slice, :], **kv_mask).T)
            if softcap is not None:
                qk = _apply_softcap(qk, sm_scale, softcap)
            if masked:
                distance = q_positions[:, None] - kv_positions[None, :]
                causal = distance >= 0
                if window is not None:
                    causal = causal & (distance < window)
                qk = jnp.where(causal, qk, MASK_VALUE)
            m_i = jnp.maximum(m_prev, jnp.max(qk, axis=1))  # running max
            shift = jnp.where(m_i > 0.5 * MASK_VALUE, m_i * qk_scale, 0.0)
            p = jnp.exp2(qk * qk_scale - shift[:, None])
            alpha = jnp.exp2(m_prev * qk_scale - shift)
            v = plgpu.load(v_ref.at[kv_slice, :], **kv_mask)
            acc = acc * alpha[:, None] + _dot(p.astype(v.dtype), v)
            l_i = l_prev * alpha + jnp.sum(p, axis=1)  # running sum
            return acc, m_i, l_i

        carry = (
            jnp.zeros((block_q, q_ref.shape[-1]), jnp.float32),
            jnp.full((block_q,), MASK_VALUE, jnp.float32),
            jnp.zeros((block_q,), jnp.float32),
        )
        kv_blocks = jax.lax.div(kv_len + block_kv - 1, block_kv)
        if window is None:
            # Every query of the block sees all keys before it, so those need no mask.
            first_masked = jax.lax.div(q_offset + 1, block_kv)
            carry = jax.lax.fori_loop(0, first_masked, functools.partial(body, masked=False), carry)
        else:
            first_masked = jax.lax.div(jnp.maximum(q_offset - window + 1, 0), block_kv)
        acc, m_i, l_i = jax.lax.fori_loop(
            first_masked, kv_blocks, functools.partial(body, masked=True), carry
        )
        if has_sinks:
            l_i = l_i + jnp.exp2(sink_ref[0] * LOG2_E - m_i * qk_scale)
        out = acc / jnp.maximum(l_i, 1e-30)[:, None]
        plgpu.store(o_ref.at[q_slice, :], out.astype(o_ref.dtype), mask=q_mask[:, None])

    q_start = q_starts_ref[pl.program_id(0)]

    @pl.when(q_start < length)
    def _run() -> None:
        run(q_start)


def _apply_softcap(qk: Any, sm_scale: float, softcap: float) -> Any:
    """softcap * tanh(qk * sm_scale / softcap), by way of a power of two; times log2(e)."""
    power = jnp.exp2(qk * (2 * LOG2_E * sm_scale / softcap))
    return softcap * LOG2_E - (2 * softcap * LOG2_E) / (1.0 + power)


def _dot(a: Any, b: Any) -> Any:
    return jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
