"""Create the committed fixtures: tiny random models of each family and what transformers computes.

Run by hand, with torch and transformers: `python -m tests.activations.make_fixtures`.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

HERE = Path(__file__).parent / "fixtures"
LENGTH = 14
COMMON = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
}
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
}
FAMILIES = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-untied": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen2-windowed": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN, "num_hidden_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 5, "head_dim": 4}),
    "gemma": ("Gemma", {"head_dim": 8, "num_key_value_heads": 1}),
    "olmo2": ("Olmo2", {}),
    "gemma2": ("Gemma2", {"head_dim": 8, "query_pre_attn_scalar": 16, "sliding_window": 5}),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 16,
            "sliding_window": 5,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
            ],
            "rope_parameters": GEMMA3_ROPE,
        },
    ),
}


def build(name: str, seed: int = 0):
    """A tiny model with random weights large enough for every part to matter."""
    kind, options = FAMILIES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(
        **{**COMMON, **options}, attn_implementation="eager"
    )
    head = {"Gemma3Text": "Gemma3"}.get(kind, kind)
    model = getattr(transformers, f"{head}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    return model


def tokens(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, COMMON["vocab_size"], (2, LENGTH))


def sites(model, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Every site of every layer, read with hooks on the modules."""
    seen: dict[str, np.ndarray] = {}
    hooks = []
    decoder = model.model
    normed = hasattr(decoder.layers[0], "post_feedforward_layernorm")

    def keep(name, which):
        def hook(module, arguments, keywords, output=None):
            value = which(arguments, keywords, output)
            seen[name] = value.detach().float().cpu().numpy().copy()

        return hook

    def first(output):
        return output[0] if isinstance(output, tuple) else output

    def after(module, name):
        hook = keep(name, lambda a, k, output: first(output))
        hooks.append(module.register_forward_hook(hook, with_kwargs=True))

    def before(module, name):
        hook = keep(name, lambda a, k, o: a[0] if a else k["hidden_states"])
        hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    for number, layer in enumerate(decoder.layers):
        before(layer, f"resid_pre.{number}")
        after(layer, f"resid_post.{number}")
        after(layer.post_attention_layernorm if normed else layer.self_attn, f"attn_out.{number}")
        after(layer.post_feedforward_layernorm if normed else layer.mlp, f"mlp_out.{number}")
        before(layer.mlp.down_proj, f"mlp_hidden.{number}")
        before(layer.self_attn.o_proj, f"attn_heads.{number}")
    after(decoder.norm, "final_norm")
    with torch.no_grad():
        model(input_ids=torch.tensor(ids, device=model.device))
    for hook in hooks:
        hook.remove()
    return seen


def main() -> None:
    for name in sys.argv[1:] or FAMILIES:
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        model = build(name)
        model.save_pretrained(folder)
        for extra in folder.glob("generation_config.json"):
            extra.unlink()
        ids = tokens()
        seen = sites(model, ids)
        save_file({"tokens": ids.astype(np.int32), **seen}, folder / "expected.st")
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(json.dumps({"name": name, "sites": len(seen), "kilobytes": size // 1024}))


if __name__ == "__main__":
    main()
