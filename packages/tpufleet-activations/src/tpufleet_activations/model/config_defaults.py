"""What a config.json may contain: the settings of each family, and those that do not matter for
activations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tpufleet.errors import BadInput
from tpufleet_activations.input_errors import check_choice
from tpufleet_activations.model.families import FAMILIES

# Keys that may be null in a config.json; a null elsewhere is an error.
_NULLABLE = {
    "num_key_value_heads", "head_dim", "hidden_act", "hidden_activation", "sliding_window",
    "max_window_layers", "use_sliding_window", "attention_bias", "mlp_bias",
    "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
    "tie_word_embeddings", "partial_rotary_factor", "intermediate_size",
}  # fmt: skip
# Settings of training, generation and bookkeeping, which hidden states do not depend on.
_IRRELEVANT = {
    "model_type", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version",
    "use_cache", "cache_implementation", "initializer_range", "attention_dropout",
    "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "pretraining_tp", "n_ctx",
    "router_aux_loss_coef", "output_router_logits", "router_jitter_noise", "gradient_checkpointing",
    "reorder_and_upcast_attn", "quantization_config", "initial_context_length", "experts_per_token",
    "max_length", "min_length", "attn_implementation", "mlp_dropout",
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
    "tokenizer_model_max_length",
}  # fmt: skip
_IRRELEVANT_PATTERN = re.compile(
    r"summary_.*|_(name_or_path|attn_implementation.*|commit_hash|from_auto.*)$"
)
_TOKEN_IDS = re.compile(r".*_token(_id|_index|_ids)?$|unsloth_.*")
_ONLY_VALUE: dict[str, Any] = {
    "is_causal": True,
    "use_bidirectional_attention": False,
}


def check_understood(config: Mapping[str, Any], family: str) -> None:
    """Raise if a setting may change the activations in a way that is not implemented."""
    only_values = {**_ONLY_VALUE, **FAMILIES[family].only}
    for name, only in only_values.items():
        if config.get(name) is not None:
            check_choice(name, config[name], (only,))
    known = FAMILIES[family].defaults
    for name in sorted(set(config) & set(known) - _NULLABLE):
        if config[name] is None and known[name] is not None:
            raise BadInput(f"{name} is null; expected a value such as {known[name]!r}")
    unknown = sorted(
        name
        for name, value in config.items()
        if name not in known
        and name not in _IRRELEVANT
        and name not in only_values
        and value not in (None, False, [], {})
        and not _IRRELEVANT_PATTERN.fullmatch(name)
        and not _TOKEN_IDS.fullmatch(name)
    )
    if unknown:
        raise BadInput(
            f"settings that are not supported for {family}: {', '.join(unknown)}; if the model "
            "does not use them, remove them from a copy of its config.json"
        )
