"""The GPU kernel for rows with several samples, in JAX's interpreter."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpufleet_activations.model import attention, varlen_attention
from tpufleet_activations.model.attention import Attention

DIM = 32


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks for each sample of a short row."""
    sizes = varlen_attention.BlockSizes(block_q=32, block_kv=16)
    monkeypatch.setitem(varlen_attention.BLOCK_SIZES, DIM, sizes)


def attend(how: Attention, lengths: list[int], seed: int = 0, *, others: float = 1.0):
    """The result for the second sample of a row, whose inputs depend on `seed` alone."""
    positions = np.concatenate([np.arange(length) for length in lengths])[None].astype(np.int32)
    segments = np.repeat(np.arange(len(lengths)), lengths)[None].astype(np.int32)
    start, size = lengths[0], lengths[1]
    inputs = []
    for number, heads in enumerate((4, 2, 2)):
        values = np.full((1, sum(lengths), heads, DIM), others, np.float32)
        values[0, start : start + size] = np.random.default_rng(seed + number).normal(
            size=(size, heads, DIM)
        )
        inputs.append(jnp.asarray(values))
    return np.asarray(run(how, *inputs, positions, segments))[0, start : start + size]


@functools.partial(jax.jit, static_argnums=0)
def run(how: Attention, query, key, value, positions, segments):
    return how(query, key, value, how.layout(positions, segments, DIM))


@pytest.mark.parametrize(
    "softcap, window, packed",
    [
        (None, None, True),
        (3.0, None, True),
        (None, 20, True),
        (3.0, 20, False),
        (None, 500, True),
    ],
    ids=["causal", "capped", "windowed", "capped and windowed, alone", "wide window"],
)
def test_the_kernel_agrees_with_numpy(softcap, window, packed):
    how = Attention(kernel="varlen", scale=0.3, window=window, softcap=softcap)
    assert attention.example_gap(how, DIM, np.float32, packed=packed) < 1e-5


def test_a_sample_has_the_same_bits_wherever_it_is():
    how = Attention(kernel="varlen", scale=0.3)
    alone = attend(how, [0, 75, 85])
    for lengths in ([1, 75, 84], [33, 75, 52], [85, 75, 0], [50, 75, 35]):
        np.testing.assert_array_equal(attend(how, lengths), alone)


def test_infinities_in_other_samples_do_not_spread():
    how = Attention(kernel="varlen", scale=0.3, softcap=5.0)
    for others in (np.inf, np.nan):
        np.testing.assert_array_equal(
            attend(how, [40, 75, 45], others=others), attend(how, [40, 75, 45])
        )
