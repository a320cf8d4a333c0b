"""A LLaMA-class decoder in plain JAX: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

The parameters are a dict; those of all layers are stacked, and the layers run in one `lax.scan`, so
that compile time does not depend on depth.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Params = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Config:
    layers: int
    width: int
    hidden: int  # of the gated MLP
    heads: int
    kv_heads: int
    vocabulary: int
    length: int  # of training sequences
    head_size: int = 128
    rope_theta: float = 500_000.0
    norm_epsilon: float = 1e-5
    remat: str = "none"  # what the backward pass computes again: none, dots or full


MODELS = {
    "tiny": Config(layers=2, width=64, hidden=128, heads=4, kv_heads=2, head_size=16,
                   vocabulary=128, length=32),
    "1b": Config(layers=16, width=2048, hidden=8192, heads=16, kv_heads=8,
                 vocabulary=32_768, length=4096),
    "3b": Config(layers=28, width=3072, hidden=8192, heads=24, kv_heads=8,
                 vocabulary=32_768, length=4096),
    "8b": Config(layers=32, width=4096, hidden=14_336, heads=32, kv_heads=8,
                 vocabulary=128_256, length=8192, remat="full"),
}  # fmt: skip


def shapes(config: Config) -> Params:
    """Name → shape. The first axis of `layers` counts layers."""
    wide, narrow = config.heads * config.head_size, config.kv_heads * config.head_size
    width, hidden = config.width, config.hidden
    layer = {
        "attention_norm": (width,), "wq": (width, wide), "wk": (width, narrow),
        "wv": (width, narrow), "wo": (wide, width),
        "mlp_norm": (width,), "gate": (width, hidden), "up": (width, hidden),
        "down": (hidden, width),
    }  # fmt: skip
    return {
        "embed": (config.vocabulary, width),
        "layers": {name: (config.layers, *shape) for name, shape in layer.items()},
        "norm": (width,),
        "unembed": (width, config.vocabulary),
    }


def init(config: Config, seed: int) -> Params:
    """Normal with the usual deviation of 0.02; norms are 1."""
    names, tree = jax.tree.flatten(shapes(config), is_leaf=lambda leaf: isinstance(leaf, tuple))
    keys = jax.random.split(jax.random.key(seed), len(names))
    leaves = [0.02 * jax.random.normal(key, shape) for key, shape in zip(keys, names, strict=True)]
    params = jax.tree.unflatten(tree, leaves)
    for norms, name in (
        (params, "norm"), (params["layers"], "attention_norm"), (params["layers"], "mlp_norm"),
    ):  # fmt: skip
        norms[name] = jnp.ones_like(norms[name])
    return params


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + epsilon)
    return (wide * scale).astype(x.dtype)


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary positions, the two halves of a head paired (as in Hugging Face checkpoints)."""
    length, half = x.shape[1], x.shape[-1] // 2
    frequencies = theta ** (-np.arange(half, dtype=np.float32) / half)
    angles = np.arange(length, dtype=np.float32)[:, None, None] * frequencies
    cos, sin = jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles))
    left, right = x[..., :half], x[..., half:]
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x.dtype)


def layer(config: Config, x: jax.Array, weights: Params) -> jax.Array:
    batch, length, _ = x.shape
    dot = lambda x, name: x @ weights[name].astype(x.dtype)
    normed = rms_norm(x, weights["attention_norm"], config.norm_epsilon)
    q, k, v = (
        dot(normed, name).reshape(batch, length, -1, config.head_size)
        for name in ("wq", "wk", "wv")
    )
    q, k = rotate(q, config.rope_theta), rotate(k, config.rope_theta)
    # cuDNN's flash attention takes 16-bit inputs on GPUs only.
    fast = jax.default_backend() == "gpu" and x.dtype == jnp.bfloat16
    mixed = jax.nn.dot_product_attention(
        q, k, v, is_causal=True, implementation="cudnn" if fast else None
    )
    x = x + dot(mixed.reshape(batch, length, -1), "wo")
    normed = rms_norm(x, weights["mlp_norm"], config.norm_epsilon)
    return x + dot(jax.nn.silu(dot(normed, "gate")) * dot(normed, "up"), "down")


def hidden_states(config: Config, params: Params, tokens: jax.Array, dtype: Any) -> jax.Array:
    """After the last norm; `unembed` makes logits of them."""
    step = partial(layer, config)
    if config.remat == "full":
        step = jax.checkpoint(step)
    elif config.remat == "dots":
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        step = jax.checkpoint(step, policy=policy)
    x = params["embed"].astype(dtype)[tokens]
    x, _ = jax.lax.scan(lambda x, weights: (step(x, weights), None), x, params["layers"])
    return rms_norm(x, params["norm"], config.norm_epsilon)


def losses(params: Params, tokens: jax.Array, config: Config, dtype: Any) -> jax.Array:
    """Mean cross entropy of the next token, of each sequence."""
    x = hidden_states(config, params, tokens[:, :-1], dtype)
    logits = jnp.dot(x, params["unembed"].astype(dtype), preferred_element_type=jnp.float32)
    picked = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked, axis=-1)


def count(config: Config) -> int:
    leaves = jax.tree.leaves(shapes(config), is_leaf=lambda leaf: isinstance(leaf, tuple))
    return sum(int(np.prod(shape)) for shape in leaves)


def flops_per_token(config: Config) -> float:
    """Of one training step, without what is computed again: 6 for each parameter of a product, and
    attention over the half of the positions that a token can see."""
    products = count(config) - config.vocabulary * config.width  # looking up a row is none
    attention = 6 * config.layers * config.length * config.heads * config.head_size
    return 6.0 * products + attention


def make_mesh(slices: int = 1) -> Mesh:
    """`data` runs between slices over the data center network, `fsdp` within one over ICI."""
    by_slice = np.array(jax.devices()).reshape(slices, -1)  # processes are ordered by slice
    rows = [mesh_utils.create_device_mesh((row.size,), list(row)) for row in by_slice]
    return Mesh(np.stack(rows), ("data", "fsdp"))


def fsdp(mesh: Mesh, leaf: Any) -> NamedSharding:
    """Split the last dimension that can be split; of small leaves every chip has a copy."""
    size = mesh.shape["fsdp"]
    able = [axis for axis, length in enumerate(leaf.shape) if length % size == 0]
    if not able or np.prod(leaf.shape) < 1024:
        return NamedSharding(mesh, P())
    return NamedSharding(mesh, P(*[None] * able[-1], "fsdp"))
