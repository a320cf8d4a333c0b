"""What a config.json may contain: the defaults that each family publishes for absent keys (those of
transformers' configuration classes), and the keys that do not matter for activations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tpufleet.errors import BadInput
from tpufleet_activations.input_errors import check_choice

# Keys of every family. The defaults are those of most of them.
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
_GEMMA: dict[str, Any] = {
    **_COMMON,
    "vocab_size": 256_000,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": None,
    "attention_bias": False,
    "max_position_embeddings": 8192,
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
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2": {**_QWEN, "head_dim": None},
    "qwen3": {**_QWEN, "head_dim": 128, "attention_bias": False},
    "llama": {
        **_COMMON,
        "vocab_size": 32_000,
        "intermediate_size": 11_008,
        "head_dim": None,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        **_COMMON,
        "vocab_size": 32_000,
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "head_dim": None,
        "sliding_window": 4096,
        "max_position_embeddings": 131_072,
    },
    "gemma": {
        **_GEMMA,
        "hidden_size": 3072,
        "intermediate_size": 24_576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    "gemma2": _GEMMA2,
    "gemma3_text": {
        **_GEMMA2,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "attn_logit_softcapping": None,
        "sliding_window_pattern": None,
        "_sliding_window_pattern": None,
        "rope_local_base_freq": None,
    },
    "olmo2": {
        **_COMMON,
        "vocab_size": 50_304,
        "intermediate_size": 11_008,
        "head_dim": None,
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
    },
}
FAMILIES = tuple(DEFAULTS)
# Keys that may be null in a config.json; a null elsewhere is an error.
_NULLABLE = {
    "num_key_value_heads", "head_dim", "hidden_act", "hidden_activation", "sliding_window",
    "max_window_layers", "use_sliding_window", "attention_bias", "mlp_bias",
    "query_pre_attn_scalar", "attn_logit_softcapping",
}  # fmt: skip
# Settings of training, generation and bookkeeping, which hidden states do not depend on.
_IRRELEVANT = {
    "model_type", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version",
    "use_cache", "cache_implementation", "initializer_range", "attention_dropout",
    "hidden_dropout", "resid_pdrop", "embd_pdrop", "tie_word_embeddings", "pretraining_tp",
    "final_logit_softcapping", "max_length", "min_length", "attn_implementation", "mlp_dropout",
    "classifier_dropout", "output_hidden_states", "output_attentions", "return_dict",
    "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "id2label", "label2id",
    "num_labels", "problem_type", "finetuning_task", "task_specific_params", "torchscript",
    "pruned_heads", "tokenizer_class", "prefix", "do_sample", "temperature", "top_p", "top_k",
    "typical_p", "num_beams", "num_beam_groups", "num_return_sequences", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "diversity_penalty",
    "early_stopping", "remove_invalid_values", "exponential_decay_length_penalty", "bad_words_ids",
    "suppress_tokens", "begin_suppress_tokens", "use_bfloat16", "tf_legacy_loss",
    "cross_attention_hidden_size", "add_cross_attention", "tie_encoder_decoder", "output_scores",
    "return_dict_in_generate", "mm_tokens_per_image", "model_max_length",
    "tokenizer_model_max_length", "partial_rotary_factor",
}  # fmt: skip
_IRRELEVANT_PATTERN = re.compile(r"_(name_or_path|attn_implementation.*|commit_hash|from_auto.*)$")
_TOKEN_IDS = re.compile(r".*_token(_id|_index|_ids)?$|unsloth_.*")
_ONLY_VALUE = {"is_causal": True, "use_bidirectional_attention": False}


def check_understood(config: Mapping[str, Any], family: str) -> None:
    """Raise if a setting may change the activations in a way that is not implemented."""
    if config.get("quantization_config"):
        raise BadInput(
            "quantized weights (quantization_config) are not supported; use the unquantized model"
        )
    for name, only in _ONLY_VALUE.items():
        if config.get(name) is not None:
            check_choice(name, config[name], (only,))
    known = DEFAULTS[family]
    for name in sorted(set(config) & set(known) - _NULLABLE):
        if config[name] is None and known[name] is not None:
            raise BadInput(f"{name} is null; expected a value such as {known[name]!r}")
    unknown = sorted(
        name
        for name, value in config.items()
        if name not in known
        and name not in _IRRELEVANT
        and name not in _ONLY_VALUE
        and value not in (None, False, [], {})
        and not _IRRELEVANT_PATTERN.fullmatch(name)
        and not _TOKEN_IDS.fullmatch(name)
    )
    if unknown:
        raise BadInput(
            f"settings that are not supported for {family}: {', '.join(unknown)}; if the model "
            "does not use them, remove them from a copy of its config.json"
        )
