"""Decoder architectures, from a Hugging Face config.json (before and after transformers 5)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpufleet.errors import BadInput, unreadable
from tpufleet_activations.input_errors import check_choice
from tpufleet_activations.model import quantized
from tpufleet_activations.model.config_defaults import check_understood
from tpufleet_activations.model.families import FAMILIES, Family
from tpufleet_activations.model.rope import Rope, original_positions, parse_rope, rope_kind

NESTED = {"gemma3": "gemma3_text"}  # a text decoder inside a larger model
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A decoder with grouped-query attention, and an MLP or a mixture of experts. Defaults are
    Llama's."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    norm_epsilon: float
    activation: str  # "silu", "gelu_tanh", "gelu" or "swiglu_clamped" (that of gpt-oss)
    gated: bool = True  # the MLP has a gate
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False  # queries and keys are normalized per head
    joint_norm: bool = False  # queries and keys are normalized over all heads together
    pre_norms: bool = True  # attention and MLP inputs are normalized
    post_norms: bool = False  # attention and MLP outputs are normalized before they are added
    layer_norm: bool = False  # norms subtract the mean, and have a bias
    norm_offset: float = 0.0  # added to the weight of every norm
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    attention_scale: float = 1.0
    parallel: bool = False  # attention and MLP read the same residual stream
    learned_positions: bool = False
    input_first: bool = False  # weights are stored [input, output]
    interleaved_qkv: bool = False  # the joint weight has each head's query, key and value together
    sinks: bool = False  # each head has a logit that takes a share of the attention
    experts: int = 0  # of each layer, instead of one MLP; `intermediate` is that of an expert
    experts_per_token: int = 0
    experts_normalized: bool = True  # weights of the chosen experts sum to 1
    expert_bias: bool = False  # of experts and router
    clamp: float = 0.0  # of gate and up projection, for "swiglu_clamped"
    logit_softcap: float | None = None
    logit_scale: float = 1.0  # logits are divided by it
    tied: bool | None = None  # the output head is the embedding; None: if it has no weight
    softcap: float | None = None  # of attention logits
    window: int | None = None
    windowed: tuple[bool, ...] = ()  # layers with sliding-window attention
    rope: tuple[Rope, ...] = ()  # for each layer
    max_positions: int | None = None  # tokens that it was made for; None: unknown
    positions_end: bool = False  # longer samples are not computed

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.kv_heads

    def parameter_count(self, layers: int | None = None) -> int:
        """Parameters of the matrix products, without embedding and output head."""
        count = self.layers if layers is None else layers
        qkv = self.hidden * self.head_dim * (self.heads + 2 * self.kv_heads)
        out = self.heads * self.head_dim * self.hidden
        mlp = (3 if self.gated else 2) * self.hidden * self.intermediate
        return count * (qkv + out + (self.experts or 1) * mlp + self.hidden * self.experts)

    def active_parameter_count(self, layers: int | None = None) -> int:
        """Of the matrix products of one token: only of its experts."""
        count = self.layers if layers is None else layers
        idle = max(self.experts - self.experts_per_token, 0)
        return self.parameter_count(count) - count * 3 * self.hidden * self.intermediate * idle

    def flops(self, length: int, layers: int | None = None) -> float:
        """Floating-point operations for one sequence, counting the causal half of attention."""
        count = self.layers if layers is None else layers
        pairs = length * (length + 1) / 2
        attention = count * 4 * self.heads * self.head_dim * pairs
        return 2.0 * self.active_parameter_count(layers) * length + attention


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
    facts = FAMILIES[family]
    config = {facts.renamed.get(name, name): value for name, value in config.items()}
    check_understood(config, family)
    if config.get("quantization_config"):
        quantized.check_supported(config["quantization_config"])
    config = {**facts.defaults, **config, "model_type": family}
    heads, layers, hidden = (
        config[name] for name in ("num_attention_heads", "num_hidden_layers", "hidden_size")
    )
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config["num_key_value_heads"] or heads
    if heads % kv_heads:
        raise BadInput(f"{heads} heads are not divisible by {kv_heads} key-value heads")
    local = _local_layers(config, facts, layers)
    window = config.get("sliding_window")
    windowed = local if window is not None else (False,) * layers
    own_rope = local if facts.local_rope else (False,) * layers
    return Architecture(
        family=family,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=config.get("moe_intermediate_size")
        or config["intermediate_size"]
        or 4 * hidden,
        vocabulary=config["vocab_size"],
        norm_epsilon=config["rms_norm_eps"],
        activation="swiglu_clamped" if "swiglu_limit" in config else _activation(config, family),
        embedding_scale=_embedding_scale(config, facts),
        residual_scale=config.get("residual_multiplier", 1.0),
        attention_scale=_attention_scale(config, head_dim),
        softcap=config.get("attn_logit_softcapping"),
        window=window if any(windowed) else None,
        windowed=windowed,
        rope=_ropes(config, facts, own_rope, head_dim),
        max_positions=_max_positions(config, facts),
        positions_end=_positions_end(config, facts),
        parallel=config.get("use_parallel_residual", False),
        experts=config.get("num_experts") or config.get("num_local_experts") or 0,
        experts_per_token=config.get("num_experts_per_tok", 0),
        experts_normalized=config.get("norm_topk_prob", True),
        clamp=config.get("swiglu_limit", 0.0),
        logit_softcap=config.get("final_logit_softcapping"),
        logit_scale=config.get("logits_scaling", 1.0),
        tied=config.get("tie_word_embeddings"),
        **{**_biases(config), **facts.facts},
    )


def _biases(config: Mapping[str, Any]) -> dict[str, bool]:
    attention = bool(config.get("attention_bias"))
    mlp = bool(config.get("mlp_bias"))
    return {"qkv_bias": attention, "out_bias": attention, "mlp_bias": mlp}


def _embedding_scale(config: Mapping[str, Any], facts: Family) -> float:
    if facts.facts.get("norm_offset"):  # Gemma
        return float(config["hidden_size"] ** 0.5)
    return float(config.get("embedding_multiplier", 1.0))


def _attention_scale(config: Mapping[str, Any], head_dim: int) -> float:
    if "attention_multiplier" in config:
        return float(config["attention_multiplier"])
    return float((config.get("query_pre_attn_scalar") or head_dim) ** -0.5)


def _ropes(
    config: Mapping[str, Any], facts: Family, local: tuple[bool, ...], head_dim: int
) -> tuple[Rope, ...]:
    """That of each layer; one without rotary positions has frequencies of 0."""
    count = len(local)
    none = Rope(1.0, (0.0,) * (head_dim // 2))
    if facts.facts.get("learned_positions"):
        return (none,) * count
    kinds = {
        one: parse_rope(_rope_config(config, facts, one), head_dim, config) for one in set(local)
    }
    rotated = config.get("no_rope_layers")
    if rotated is None:
        every = config.get("no_rope_layer_interval") or 0
        rotated = [not every or (layer + 1) % every != 0 for layer in range(count)]
    return tuple(kinds[local[layer]] if rotated[layer] else none for layer in range(count))


def _max_positions(config: Mapping[str, Any], facts: Family) -> int | None:
    limit, rope = config.get("max_position_embeddings"), _rope_config(config, facts, local=False)
    kind = rope_kind(rope, config)
    if kind == "longrope":
        return original_positions(rope, config)
    if limit is None or kind != "yarn":
        return limit
    # YaRN is switched on without a change of max_position_embeddings.
    return max(limit, int((rope.get("original_max_position_embeddings") or limit) * rope["factor"]))


def _positions_end(config: Mapping[str, Any], facts: Family) -> bool:
    """Whether positions are learned, or change for samples that are longer."""
    rope = _rope_config(config, facts, local=False)
    return rope_kind(rope, config) == "longrope" or bool(facts.facts.get("learned_positions"))


def _activation(config: Mapping[str, Any], family: str) -> str:
    name = config.get("hidden_activation") or config["hidden_act"]
    if family == "gemma" and name == "gelu":
        # Its first configurations call the tanh approximation so; transformers reads it as such.
        name = "gelu_pytorch_tanh"
    check_choice("activation function", name, ACTIVATIONS)
    return ACTIVATIONS[name]


def _local_layers(config: Mapping[str, Any], facts: Family, layers: int) -> tuple[bool, ...]:
    """Layers with a sliding window."""
    if not config.get("use_sliding_window", True):
        return (False,) * layers
    kinds = config.get("layer_types")
    if kinds:
        for kind in kinds:
            check_choice("layer type", kind, ("sliding_attention", "full_attention"))
        if len(kinds) < layers:
            raise BadInput(f"layer_types has {len(kinds)} entries, expected {layers}")
        return tuple(kind == "sliding_attention" for kind in kinds[:layers])
    if "max_window_layers" in config:
        return tuple(layer >= config["max_window_layers"] for layer in range(layers))
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    every = every or facts.window_every
    return tuple(not every or bool((layer + 1) % every) for layer in range(layers))


def _rope_config(config: Mapping[str, Any], facts: Family, local: bool) -> Mapping[str, Any]:
    """The rope settings of a layer, from `rope_parameters` or the older separate keys."""
    theta = config.get("rope_theta") or facts.theta
    if local:
        theta = config.get("rope_local_base_freq") or (
            1e4 if "rope_local_base_freq" in config else theta
        )
    settings = config.get("rope_parameters") or {}
    kind = "sliding_attention" if local else "full_attention"
    if kind in settings or (facts.local_rope and settings and "rope_type" not in settings):
        settings = settings.get(kind) or {}
    if config.get("rope_scaling") and not local:
        settings = {**settings, **config["rope_scaling"]}
    return {"rope_theta": theta, **settings}
