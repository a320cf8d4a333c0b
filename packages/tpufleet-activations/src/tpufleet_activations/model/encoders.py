"""TopK sparse autoencoders: the encoder, applied on the device to a site's activations.

A safetensors file has `W_enc` [width, latents] (or `encoder.weight`, transposed), `b_enc` (or
`encoder.bias`) and, if it has one, `b_dec`, which is subtracted before. Its metadata, or cfg.json
beside it, has `k`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpufleet.errors import BadInput, missing, quote, unreadable
from tpufleet_activations.io import dtypes, shards
from tpufleet_activations.io.file_digests import file_digest

VALUES, IDS = "latents", "latent_ids"  # names of the stored sites, before that of the site
BLOCK = 1024  # tokens whose latents are held at a time
# Settings of cfg.json, as SAELens and sparsify write it, that change latents, and what is computed.
COMPUTED = {
    "architecture": "topk",
    "activation": "topk",
    "activation_fn": "topk",
    "activation_fn_str": "topk",
    "normalize_activations": "none",
    "apply_b_dec_to_input": True,
    "rescale_acts_by_decoder_norm": False,
    "transcode": False,
    "gram_lookup": False,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """What a plan records of the file."""

    path: str
    digest: str
    site: str
    k: int
    latents: int

    @property
    def stored_sites(self) -> tuple[str, str]:
        """The k largest latents of each token, and their numbers."""
        return f"{VALUES}.{self.site}", f"{IDS}.{self.site}"


def describe(path: Path, site: str, width: int) -> Encoder:
    """Raise unless the file has a TopK encoder of activations of this width."""
    weights = load(path)
    own_width, latents = weights["W_enc"].shape
    k = _k(path)
    if own_width != width or not 0 < k <= latents:
        raise BadInput(
            f"{path} encodes activations of width {own_width} with {k} of {latents} latents; "
            f"{site} has width {width}"
        )
    return Encoder(path=str(path), digest=file_digest(path), site=site, k=k, latents=latents)


def load(path: Path) -> dict[str, np.ndarray]:
    """float32 weights by name."""
    tensors, _ = _read(path)
    if "encoder.weight" in tensors:
        tensors["W_enc"] = tensors["encoder.weight"].T
    if "encoder.bias" in tensors:
        tensors["b_enc"] = tensors["encoder.bias"]
    if not {"W_enc", "b_enc"} <= tensors.keys():
        raise _no_encoder(path, "it has no W_enc and b_enc")
    width = len(tensors["W_enc"])
    chosen = {"W_enc": tensors["W_enc"], "b_enc": tensors["b_enc"]}
    chosen["b_dec"] = tensors.get("b_dec", np.zeros(width, np.float32))
    return {name: dtypes.as_float32(values) for name, values in chosen.items()}


def weight_types(
    encoder: Encoder, width: int, dtype: Any
) -> Iterator[tuple[str, tuple[int, ...], Any]]:
    """Name, shape and dtype of each weight on the devices, where products are of `dtype`."""
    yield "W_enc", (width, encoder.latents), dtype
    yield "b_enc", (encoder.latents,), jnp.float32
    yield "b_dec", (width,), jnp.float32


def encode(params: Mapping[str, Any], values: Any, k: int) -> tuple[Any, Any]:
    """The k largest latents of values [..., width], of which those below 0 are 0, and their
    numbers; the largest first."""
    rows = values.reshape(-1, values.shape[-1])
    size = math.gcd(len(rows), BLOCK)
    weight = params["W_enc"]

    def block(part: Any) -> Any:
        centered = part.astype(jnp.float32) - params["b_dec"]
        product = jnp.einsum(
            "tw,wn->tn", centered.astype(weight.dtype), weight, preferred_element_type=jnp.float32
        )
        return jax.lax.top_k(product + params["b_enc"], k)

    found = jax.lax.map(block, rows.reshape(-1, size, rows.shape[-1]))
    largest, chosen = (part.reshape(*values.shape[:-1], k) for part in found)
    return jnp.maximum(largest, 0), chosen


def _k(path: Path) -> int:
    """Only TopK encoders have it."""
    _, metadata = _read(path)
    config = path.with_name("cfg.json")
    settings = json.loads(config.read_text()) if config.exists() else {}
    for name, computed in COMPUTED.items():
        if settings.get(name) not in (None, computed):
            raise _no_encoder(config, f"{name} is {quote(settings[name])}, not {quote(computed)}")
    k = str(metadata.get("k", settings.get("k")))
    if not k.isdigit():
        raise _no_encoder(path, "its metadata and cfg.json have no k")
    return int(k)


def _no_encoder(path: Path, reason: str) -> BadInput:
    return BadInput(f"{path} is of no TopK encoder that is supported: {reason}")


def _read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    if not path.exists():
        raise missing(path)
    try:
        data = np.memmap(path, np.uint8, mode="r")
        length = struct.unpack("<Q", data[:8].tobytes())[0]
        header = data[: 8 + length].tobytes()
        metadata = json.loads(header[8:]).get("__metadata__") or {}
        tensors = {
            one.name: np.array(data[one.offset : one.offset + one.nbytes])
            .view(dtypes.NUMPY_DTYPES[one.dtype])
            .reshape(one.shape)
            for one in shards.read_header(header)
        }
    except (ValueError, KeyError, struct.error) as error:
        raise unreadable(path, error) from error
    return tensors, metadata
