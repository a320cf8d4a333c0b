"""Families of decoders: a row each, with the defaults that it publishes for absent settings (those
of transformers' configuration classes), what differs from Llama, and the names of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The parts of a layer, in its weights' names. A joint part (`qkv`, `gate_up`, `experts`) replaces
# the single ones. "{}" is the number of an expert.
LLAMA: dict[str, str] = {
    "embed": "embed_tokens",
    "final_norm": "norm",
    "layer": "layers.{}.",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "head": "lm_head",
}
# Norms after attention and MLP as well (Gemma), or only there (OLMo).
POST_NORMED = {
    **LLAMA,
    "mlp_norm": "pre_feedforward_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
GPT2: dict[str, str] = {
    "embed": "wte",
    "positions": "wpe",
    "final_norm": "ln_f",
    "layer": "h.{}.",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    "head": "lm_head",
}
NEOX: dict[str, str] = {
    "embed": "embed_in",
    "final_norm": "final_layer_norm",
    "layer": "layers.{}.",
    "qkv": "attention.query_key_value",
    "out": "attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "head": "embed_out",
}
PHI3 = {**LLAMA, "qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}
QWEN_EXPERTS = {
    **LLAMA,
    "router": "mlp.gate",
    "gate": "mlp.experts.{}.gate_proj",
    "up": "mlp.experts.{}.up_proj",
    "down": "mlp.experts.{}.down_proj",
}
MIXTRAL = {
    **LLAMA,
    "router": "block_sparse_moe.gate",
    "gate": "block_sparse_moe.experts.{}.w1",
    "up": "block_sparse_moe.experts.{}.w3",
    "down": "block_sparse_moe.experts.{}.w2",
}
GPT_OSS = {
    **LLAMA,
    "sinks": "self_attn.sinks",
    "router": "mlp.router",
    "experts": "mlp.experts",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """`facts` are fields of `Architecture`; `renamed` has its names of settings that have others
    elsewhere; `only` has settings of which other values are not implemented."""

    defaults: Mapping[str, Any]
    names: Mapping[str, str] = field(default_factory=lambda: LLAMA)
    facts: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    theta: float = 1e4  # of the rotary embedding, if the configuration names none
    window_every: int = 0  # every so many layers one has no window; 0: all layers have it
    local_rope: bool = False  # layers with a window have rotary positions of their own


# Settings of every family. The defaults are those of most of them.
_COMMON: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,  # as many as query heads
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": None,
    "rope_scaling": None,
    "rope_parameters": None,
    "tie_word_embeddings": None,
    "partial_rotary_factor": None,
}
_QWEN: dict[str, Any] = {
    **_COMMON,
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_LLAMA: dict[str, Any] = {
    **_COMMON,
    "vocab_size": 32_000,
    "intermediate_size": 11_008,
    "head_dim": None,
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 2048,
}
_MISTRAL: dict[str, Any] = {
    **_COMMON,
    "vocab_size": 32_000,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "head_dim": None,
    "sliding_window": 4096,
    "max_position_embeddings": 131_072,
}
_GEMMA: dict[str, Any] = {
    **_COMMON,
    "vocab_size": 256_000,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": None,
    "attention_bias": False,
    "max_position_embeddings": 8192,
    "final_logit_softcapping": None,
    "tie_word_embeddings": True,
}
_GEMMA2: dict[str, Any] = {
    **_GEMMA,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_size": None,  # in the first releases, beside sliding_window
    "layer_types": None,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_OLMO: dict[str, Any] = {
    **_COMMON,
    "vocab_size": 50_304,
    "intermediate_size": 11_008,
    "head_dim": None,
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
}
_GEMMA_FACTS = {"norm_offset": 1.0}
_OLMO_FACTS = {"joint_norm": True, "pre_norms": False, "post_norms": True}
_LAYER_NORM_FACTS = {"layer_norm": True, "gated": False, "mlp_bias": True}
_ONE_WINDOW = {"use_sliding_window": False}  # which layers have windows is defined otherwise

FAMILIES: dict[str, Family] = {
    "qwen2": Family(defaults={**_QWEN, "head_dim": None}, facts={"qkv_bias": True}),
    "qwen3": Family(
        defaults={**_QWEN, "head_dim": 128, "attention_bias": False}, facts={"head_norm": True}
    ),
    "qwen3_moe": Family(
        defaults={
            **_QWEN,
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "intermediate_size": 6144,  # of layers without experts, which are refused
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "head_dim": None,
            "attention_bias": False,
        },
        only={**_ONE_WINDOW, "decoder_sparse_step": 1, "mlp_only_layers": []},
        names=QWEN_EXPERTS,
        facts={"head_norm": True},
        renamed={"num_local_experts": "num_experts"},
    ),
    "llama": Family(defaults=_LLAMA),
    "smollm3": Family(
        defaults={
            **_LLAMA,
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": 0,
            "layer_types": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
        only=_ONE_WINDOW,
        theta=2e6,
    ),
    "granite": Family(
        defaults={
            **_LLAMA,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        }
    ),
    "mistral": Family(defaults=_MISTRAL),
    "mixtral": Family(
        defaults={
            **_MISTRAL,
            "sliding_window": None,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        names=MIXTRAL,
        theta=1e6,
    ),
    "phi3": Family(
        defaults={
            **_COMMON,
            "vocab_size": 32_064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "head_dim": None,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "sliding_window": None,
        },
        names=PHI3,
    ),
    "gemma": Family(
        defaults={
            **_GEMMA,
            "hidden_size": 3072,
            "intermediate_size": 24_576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
        },
        facts=_GEMMA_FACTS,
    ),
    "gemma2": Family(
        defaults=_GEMMA2,
        names=POST_NORMED,
        facts={**_GEMMA_FACTS, "post_norms": True},
        window_every=2,
    ),
    "gemma3_text": Family(
        defaults={
            **_GEMMA2,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window_pattern": None,
            "_sliding_window_pattern": None,
            "rope_local_base_freq": None,
        },
        names=POST_NORMED,
        facts={**_GEMMA_FACTS, "post_norms": True, "head_norm": True},
        theta=1e6,
        window_every=6,
        local_rope=True,
    ),
    "olmo2": Family(defaults=_OLMO, names=POST_NORMED, facts=_OLMO_FACTS),
    "olmo3": Family(
        defaults={**_OLMO, "sliding_window": 4096, "layer_types": None},
        names=POST_NORMED,
        facts=_OLMO_FACTS,
        theta=5e5,
        window_every=4,
        local_rope=True,
    ),
    "gpt2": Family(
        defaults={
            "vocab_size": 50_257,
            "max_position_embeddings": 1024,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": None,
            "intermediate_size": None,  # four times the hidden size
            "hidden_act": "gelu_new",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        names=GPT2,
        only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
        facts={
            **_LAYER_NORM_FACTS,
            "qkv_bias": True,
            "out_bias": True,
            "learned_positions": True,
            "input_first": True,
        },
        renamed={
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
            "n_inner": "intermediate_size",
            "activation_function": "hidden_act",
            "layer_norm_epsilon": "rms_norm_eps",
        },
    ),
    "gpt_neox": Family(
        defaults={
            **_COMMON,
            "vocab_size": 50_432,
            "hidden_size": 6144,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
            "intermediate_size": 24_576,
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "use_parallel_residual": True,
            "attention_bias": True,
            "partial_rotary_factor": 0.25,
        },
        names=NEOX,
        facts={**_LAYER_NORM_FACTS, "interleaved_qkv": True},
        renamed={
            "layer_norm_eps": "rms_norm_eps",
            "rotary_emb_base": "rope_theta",
            "rotary_pct": "partial_rotary_factor",
        },
    ),
    "gpt_oss": Family(
        defaults={
            **_COMMON,
            "vocab_size": 201_088,
            "hidden_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "intermediate_size": 2880,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131_072,
            "attention_bias": True,
            "sliding_window": 128,
            "layer_types": None,
            "num_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_limit": 7.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        names=GPT_OSS,
        only={"swiglu_alpha": 1.702},
        facts={"sinks": True, "expert_bias": True},
        renamed={"num_local_experts": "num_experts"},
        theta=150_000.0,
        window_every=2,
    ),
}
