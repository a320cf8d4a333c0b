"""Decoder architectures, from a Hugging Face config.json (before and after transformers 5)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.workloads.activations.model.rope import Rope, parse_rope

FAMILIES = ("qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3_text")
NESTED = {"gemma3": "gemma3_text"}  # a text decoder inside a larger model


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A pre-norm decoder with rotary embeddings, grouped-query attention and a gated MLP."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    norm_epsilon: float
    activation: str  # "silu" or "gelu_tanh"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False  # queries and keys are normalized per head
    post_norms: bool = False  # attention and MLP outputs are normalized before they are added
    norm_offset: float = 0.0  # added to the weight of every norm
    embedding_scale: float = 1.0
    attention_scale: float = 1.0
    softcap: float | None = None  # of attention logits
    window: int | None = None
    windowed: tuple[bool, ...] = ()  # layers with sliding-window attention
    rope: tuple[Rope, ...] = ()  # for each layer

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.kv_heads

    def parameter_count(self, layers: int | None = None) -> int:
        """Parameters of the matrix products, without embedding and output head."""
        count = self.layers if layers is None else layers
        qkv = self.hidden * self.head_dim * (self.heads + 2 * self.kv_heads)
        out = self.heads * self.head_dim * self.hidden
        return count * (qkv + out + 3 * self.hidden * self.intermediate)

    def flops(self, length: int, layers: int | None = None) -> float:
        """Floating-point operations for one sequence, counting the causal half of attention."""
        count = self.layers if layers is None else layers
        pairs = length * (length + 1) / 2
        attention = count * 4 * self.heads * self.head_dim * pairs
        return 2.0 * self.parameter_count(layers) * length + attention


def from_folder(folder: Path) -> Architecture:
    path = folder / "config.json"
    try:
        return from_config(path.read_text())
    except KeyError as error:
        raise BadInput(f"{path} has no {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from error


def from_config(text: str | bytes) -> Architecture:
    config = json.loads(text)
    if config.get("model_type") in NESTED:
        config = {**config["text_config"], "model_type": NESTED[config["model_type"]]}
    family = config.get("model_type")
    if family not in FAMILIES:
        raise BadInput(f"unsupported model_type {family!r}; supported: {', '.join(FAMILIES)}")
    gemma = family.startswith("gemma")
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    hidden = config["hidden_size"]
    head_dim = config.get("head_dim") or (256 if gemma else hidden // heads)
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise BadInput(f"{heads} heads are not divisible by {kv_heads} key-value heads")
    bias = bool(config.get("attention_bias", False))
    windowed = _windowed(config, family, layers)
    return Architecture(
        family=family,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        activation=_activation(config),
        qkv_bias=bias or family == "qwen2",
        out_bias=bias and family != "qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)),
        head_norm=family in ("qwen3", "gemma3_text"),
        post_norms=gemma,
        norm_offset=1.0 if gemma else 0.0,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        attention_scale=(config.get("query_pre_attn_scalar", 256) if gemma else head_dim) ** -0.5,
        softcap=config.get("attn_logit_softcapping") if gemma else None,
        window=config.get("sliding_window") if any(windowed) else None,
        windowed=windowed,
        rope=tuple(parse_rope(_rope_config(config, local), head_dim, config) for local in windowed),
    )


def _activation(config: Mapping[str, Any]) -> str:
    name = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    known = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_tanh"}
    # Gemma's first configurations have "gelu" for the tanh approximation.
    if name not in known or (name == "gelu" and not config["model_type"].startswith("gemma")):
        raise BadInput(f"unsupported activation function {name!r}")
    return known[name]


def _windowed(config: Mapping[str, Any], family: str, layers: int) -> tuple[bool, ...]:
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        local: list[bool] = [False] * layers
        if family == "gemma3_text":  # the rope base still alternates
            local = [bool((layer + 1) % _pattern(config)) for layer in range(layers)]
    elif config.get("layer_types"):
        local = [kind == "sliding_attention" for kind in config["layer_types"]]
    elif family == "gemma2":
        local = [layer % 2 == 0 for layer in range(layers)]
    elif family == "gemma3_text":
        local = [bool((layer + 1) % _pattern(config)) for layer in range(layers)]
    elif family in ("qwen2", "qwen3"):
        first = config.get("max_window_layers", layers)
        local = [bool(config.get("use_sliding_window")) and n >= first for n in range(layers)]
    else:
        local = [family == "mistral"] * layers
    return tuple(local)


def _pattern(config: Mapping[str, Any]) -> int:
    return config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6


def _rope_config(config: Mapping[str, Any], local: bool) -> Mapping[str, Any]:
    """The rope settings of a layer, from `rope_parameters` or the older separate keys."""
    settings = config.get("rope_parameters")
    if settings:
        return settings.get("sliding_attention" if local else "full_attention", settings)
    if local and config["model_type"] == "gemma3_text":
        return {"rope_theta": config.get("rope_local_base_freq", 10_000.0)}
    theta = config.get("rope_theta", 1e6 if config["model_type"] == "gemma3_text" else 1e4)
    return {**(config.get("rope_scaling") or {}), "rope_theta": theta}
