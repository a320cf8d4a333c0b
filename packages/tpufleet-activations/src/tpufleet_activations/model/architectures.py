"""Decoder architectures, from a Hugging Face config.json (before and after transformers 5)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpufleet.errors import BadInput
from tpufleet_activations.input_errors import check_choice, unreadable
from tpufleet_activations.model.config_defaults import DEFAULTS, FAMILIES, check_understood
from tpufleet_activations.model.rope import Rope, parse_rope

NESTED = {"gemma3": "gemma3_text"}  # a text decoder inside a larger model
GEMMAS = ("gemma", "gemma2", "gemma3_text")


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A decoder with rotary embeddings, grouped-query attention and a gated MLP."""

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
    joint_norm: bool = False  # queries and keys are normalized over all heads together
    pre_norms: bool = True  # attention and MLP inputs are normalized
    post_norms: bool = False  # attention and MLP outputs are normalized before they are added
    norm_offset: float = 0.0  # added to the weight of every norm
    embedding_scale: float = 1.0
    attention_scale: float = 1.0
    softcap: float | None = None  # of attention logits
    window: int | None = None
    windowed: tuple[bool, ...] = ()  # layers with sliding-window attention
    rope: tuple[Rope, ...] = ()  # for each layer
    max_positions: int | None = None  # tokens that it was made for; None: unknown

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
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise unreadable(path, error) from error


def from_config(text: str | bytes) -> Architecture:
    """Absent keys have the defaults of the family; settings that are not supported are errors."""
    config = json.loads(text)
    family = config.get("model_type")
    if family in NESTED:
        outer, family = config, NESTED[family]
        config = outer.get("text_config") or {}
        if outer.get("quantization_config"):
            config = {**config, "quantization_config": outer["quantization_config"]}
    if family not in FAMILIES:
        check_choice("model_type", family, (*FAMILIES, *NESTED))
    check_understood(config, family)
    config = {**DEFAULTS[family], **config, "model_type": family}
    gemma = family in GEMMAS
    heads, layers, hidden = (
        config[name] for name in ("num_attention_heads", "num_hidden_layers", "hidden_size")
    )
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config["num_key_value_heads"] or heads
    if heads % kv_heads:
        raise BadInput(f"{heads} heads are not divisible by {kv_heads} key-value heads")
    bias = bool(config.get("attention_bias"))
    local = _local_layers(config, family, layers)
    window = config.get("sliding_window")
    windowed = local if window is not None else (False,) * layers
    scaled = config.get("query_pre_attn_scalar") or head_dim
    return Architecture(
        family=family,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        norm_epsilon=config["rms_norm_eps"],
        activation=_activation(config, family),
        qkv_bias=bias or family == "qwen2",
        out_bias=bias and family != "qwen2",
        mlp_bias=bool(config.get("mlp_bias")),
        head_norm=family in ("qwen3", "gemma3_text"),
        joint_norm=family == "olmo2",
        pre_norms=family != "olmo2",
        post_norms=family in ("gemma2", "gemma3_text", "olmo2"),
        norm_offset=1.0 if gemma else 0.0,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        attention_scale=scaled**-0.5,
        softcap=config.get("attn_logit_softcapping"),
        window=window if any(windowed) else None,
        windowed=windowed,
        rope=tuple(parse_rope(_rope_config(config, one), head_dim, config) for one in local),
        max_positions=_max_positions(config),
    )


def _max_positions(config: Mapping[str, Any]) -> int | None:
    limit, rope = config.get("max_position_embeddings"), _rope_config(config, local=False)
    if limit is None or (rope.get("rope_type") or rope.get("type")) != "yarn":
        return limit
    # YaRN is switched on without a change of max_position_embeddings.
    return max(limit, int((rope.get("original_max_position_embeddings") or limit) * rope["factor"]))


def _activation(config: Mapping[str, Any], family: str) -> str:
    name = config.get("hidden_activation") or config["hidden_act"]
    if family == "gemma" and name == "gelu":
        # Its first configurations call the tanh approximation so; transformers reads it as such.
        name = "gelu_pytorch_tanh"
    known = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
    check_choice("activation function", name, known)
    return known[name]


def _local_layers(config: Mapping[str, Any], family: str, layers: int) -> tuple[bool, ...]:
    """Layers with a sliding window; in Gemma 3 they also have a rope of their own."""
    if family in ("qwen2", "qwen3") and not config["use_sliding_window"]:
        return (False,) * layers
    kinds = config.get("layer_types")
    if kinds:
        for kind in kinds:
            check_choice("layer type", kind, ("sliding_attention", "full_attention"))
        if len(kinds) < layers:
            raise BadInput(f"layer_types has {len(kinds)} entries, expected {layers}")
        return tuple(kind == "sliding_attention" for kind in kinds[:layers])
    if family == "gemma2":
        return tuple(layer % 2 == 0 for layer in range(layers))
    if family == "gemma3_text":
        every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
        return tuple(bool((layer + 1) % every) for layer in range(layers))
    if family in ("qwen2", "qwen3"):
        return tuple(layer >= config["max_window_layers"] for layer in range(layers))
    return (family == "mistral",) * layers


def _rope_config(config: Mapping[str, Any], local: bool) -> Mapping[str, Any]:
    """The rope settings of a layer, from `rope_parameters` or the older separate keys."""
    gemma3 = config["model_type"] == "gemma3_text"
    theta = config.get("rope_theta") or (1e6 if gemma3 else 1e4)
    if gemma3 and local:
        theta = config.get("rope_local_base_freq") or 1e4
    settings = config.get("rope_parameters") or {}
    kind = "sliding_attention" if local else "full_attention"
    if kind in settings or (gemma3 and settings and "rope_type" not in settings):
        settings = settings.get(kind) or {}
    if config.get("rope_scaling") and not (gemma3 and local):
        settings = {**settings, **config["rope_scaling"]}
    return {"rope_theta": theta, **settings}
