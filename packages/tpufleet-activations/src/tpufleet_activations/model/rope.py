"""Rotary position embeddings: the frequencies of a layer, with linear, Llama 3, YaRN and LongRoPE
scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tpufleet_activations.input_errors import check_choice

KINDS = ("default", "linear", "llama3", "yarn", "longrope")
PARTIAL = ("phi3", "gpt_neox")  # families that may rotate a part of each head


class Rope(NamedTuple):
    """Frequencies of one layer: fewer than a head has pairs if a part of it is rotated. Rotated
    queries and keys are multiplied by `scale`."""

    scale: float
    frequencies: tuple[float, ...]


def parse_rope(rope: Mapping[str, Any], head_dim: int, config: Mapping[str, Any]) -> Rope:
    """From a layer's rope settings; `config` is the whole config.json."""
    kind = rope_kind(rope, config)
    check_choice("rope scaling", kind, KINDS)
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    if config["model_type"] not in PARTIAL:
        check_choice("partial_rotary_factor", partial, (1.0,))
    theta = rope.get("rope_theta") or config.get("rope_theta") or 1e4
    width = int(head_dim * partial)
    plain = 1.0 / theta ** (np.arange(0, width, 2, dtype=np.float64) / width)
    if kind == "default":
        return Rope(1.0, tuple(plain.tolist()))
    if kind == "linear":
        return Rope(1.0, tuple((plain / rope["factor"]).tolist()))
    if kind == "llama3":
        return Rope(1.0, tuple(_llama3(plain, rope).tolist()))
    if kind == "longrope":
        # Longer samples would have other frequencies: `original_positions` is the limit.
        length, longest = original_positions(rope, config), config["max_position_embeddings"]
        factor = longest / length
        scale = rope.get("attention_factor")
        if scale is None:
            scale = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
        return Rope(float(scale), tuple((plain / np.array(rope["short_factor"])).tolist()))
    length = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    return Rope(_yarn_scale(rope), tuple(_yarn(plain, rope, theta, length).tolist()))


def rope_kind(rope: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    # Phi's first configurations call LongRoPE so.
    return "longrope" if config["model_type"] == "phi3" and kind in ("su", "yarn") else kind


def original_positions(rope: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Tokens that a model was made for before LongRoPE."""
    name = "original_max_position_embeddings"
    return int(rope.get(name) or config.get(name) or config["max_position_embeddings"])


def _llama3(plain: np.ndarray, rope: Mapping[str, Any]) -> np.ndarray:
    """Low frequencies are divided by `factor`, high ones kept, those between interpolated."""
    length = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    waves = 2 * np.pi / plain
    blend = np.clip((length / waves - low) / (high - low), 0.0, 1.0)
    return (1 - blend) * plain / rope["factor"] + blend * plain


def _yarn(plain: np.ndarray, rope: Mapping[str, Any], theta: float, length: int) -> np.ndarray:
    """Like Llama 3, but interpolated linearly over the dimensions between `beta_fast` and
    `beta_slow` rotations within the original length."""
    width = 2 * len(plain)

    def dimension(rotations: float) -> float:
        return width * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(rope.get("beta_fast") or 32.0), dimension(rope.get("beta_slow") or 1.0)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    blend = np.clip((np.arange(len(plain)) - low) / max(high - low, 0.001), 0.0, 1.0)
    return blend * plain / rope["factor"] + (1 - blend) * plain


def _yarn_scale(rope: Mapping[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)
