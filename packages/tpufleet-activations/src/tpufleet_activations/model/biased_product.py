"""Matrix products with a bias."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def biased_product(subscripts: str, values: Any, weight: Any, bias: Any | None) -> Any:
    """`einsum`, then the bias, rounded to the type of `values` once: to round the product too would
    put bfloat16 further from float32 than transformers is."""
    if bias is None:
        return jnp.einsum(subscripts, values, weight)
    # On CUDA, XLA makes the bias a part of cuBLAS's product, which rounds once by itself.
    return jax.lax.platform_dependent(
        values,
        weight,
        bias,
        cuda=lambda values, weight, bias: jnp.einsum(subscripts, values, weight) + bias,
        default=lambda values, weight, bias: _add_before_rounding(subscripts, values, weight, bias),
    )


def _add_before_rounding(subscripts: str, values: Any, weight: Any, bias: Any) -> Any:
    product = jnp.einsum(subscripts, values, weight, preferred_element_type=jnp.float32)
    return (product + bias.astype(jnp.float32)).astype(values.dtype)
