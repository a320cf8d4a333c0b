"""Create the committed fixtures: tiny random models of each family and what transformers computes.

Run by hand, with torch and transformers: `python -m tests.activations.make_fixtures`.
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

from tpufleet_activations.model import families

HERE = Path(__file__).parent / "fixtures"
LENGTH = 9
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
HALF = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.3],
    "long_factor": [4.0],
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
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt2": ("GPT2", {"n_inner": 24, "num_key_value_heads": 4}),
    "gpt-neox": ("GPTNeoX", {"rope_parameters": HALF, "num_key_value_heads": 4}),
    "gpt-neox-sequential": (
        "GPTNeoX",
        {"use_parallel_residual": False, "rope_parameters": HALF, "num_key_value_heads": 4},
    ),
    "phi3": (
        "Phi3",
        {
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 64,
            "pad_token_id": None,
            "sliding_window": 5,
        },
    ),
    "smollm3": (
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1], "pad_token_id": None, "tie_word_embeddings": False},
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 5.0,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "head_dim": 8,
            "norm_topk_prob": False,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
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
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    return model


def tokens(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, COMMON["vocab_size"], (2, LENGTH))


TOP = 5


def sites(model, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Every site of every layer, read with hooks on the modules."""
    seen: dict[str, np.ndarray] = {}
    restore: list[Any] = []
    config, decoder = model.config, model.base_model
    names = families.FAMILIES[config.model_type].names
    layers = decoder.h if config.model_type == "gpt2" else decoder.layers
    normed = "mlp_post_norm" in names
    pre_normed = not config.model_type.startswith("olmo")

    share = getattr(config, "residual_multiplier", 1.0)

    def first(output: Any) -> Any:
        return output[0] if isinstance(output, tuple) else output

    def keep(name: str, output: Any) -> None:
        seen[name] = first(output).detach().float().cpu().numpy().copy()

    def added(name: str, output: Any) -> None:
        keep(name, first(output) * share)

    def after(module: Any, use: Any) -> None:
        hook = module.register_forward_hook(lambda m, a, k, output: use(output), with_kwargs=True)
        restore.append(hook.remove)

    def before(module: Any, use: Any) -> None:
        hook = lambda m, a, k: use(a[0] if a else k["hidden_states"])
        restore.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def part(layer: Any, name: str) -> Any:
        return layer.get_submodule(names[name])

    def heads(name: str, value: Any) -> None:
        """[batch, heads, length, dim]"""
        keep(name, value.transpose(1, 2).flatten(2))
        for head in range(value.shape[1]):
            keep(f"{name}.{head}", value[:, head])

    modeling = sys.modules[type(model).__module__]
    unrotated: list[Any] = []

    def rotary(*arguments: Any, **more: Any) -> Any:
        unrotated.append(arguments[:2])
        return apply_rotary(*arguments, **more)

    def attention(module: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
        output, weights = eager(module, query, key, value, *rest, **more)
        layer = module.layer_idx
        plain = unrotated.pop() if unrotated else (query, key)
        for name, values in zip(
            ("q", "k", "rot_q", "rot_k", "v"), (*plain, query, key, value), strict=True
        ):
            heads(f"{name}.{layer}", values)
        heads(f"attn_heads.{layer}", output.transpose(1, 2))
        for head in range(weights.shape[1]):
            keep(f"attn_pattern.{layer}.{head}", weights[:, head])
        return output, weights

    eager, modeling.eager_attention_forward = modeling.eager_attention_forward, attention
    restore.append(lambda: setattr(modeling, "eager_attention_forward", eager))
    apply_rotary = getattr(modeling, "apply_rotary_pos_emb", None)
    if apply_rotary is not None:
        modeling.apply_rotary_pos_emb = rotary
        restore.append(lambda: setattr(modeling, "apply_rotary_pos_emb", apply_rotary))

    def mlp_sites(number: int, mlp: Any, layer: Any) -> None:
        router = getattr(mlp, "router", None) or getattr(mlp, "gate", None)
        if router is not None:

            def routed(output: Any) -> None:
                for name, value in zip(
                    ("router_logits", "expert_weights", "experts"), output, strict=True
                ):
                    keep(f"{name}.{number}", value.reshape(*ids.shape, -1))

            after(router, routed)
            return
        down = part(layer, "down")
        before(down, lambda value: keep(f"mlp_hidden.{number}", value))
        if "gate_up" in names:

            def both(output: Any) -> None:
                for name, value in zip(("mlp_pre", "mlp_up"), output.chunk(2, -1), strict=True):
                    keep(f"{name}.{number}", value)

            after(part(layer, "gate_up"), both)
        elif hasattr(mlp, "gate_proj"):
            after(mlp.gate_proj, lambda value: keep(f"mlp_pre.{number}", value))
            after(mlp.up_proj, lambda value: keep(f"mlp_up.{number}", value))
        else:
            after(part(layer, "up"), lambda value: keep(f"mlp_pre.{number}", value))

    for number, layer in enumerate(layers):
        own = part(layer, "out")
        attend = layer.get_submodule(names["out"].rpartition(".")[0])
        mlp = layer.mlp
        before(layer, functools.partial(keep, f"resid_pre.{number}"))
        after(layer, functools.partial(keep, f"resid_post.{number}"))
        attended = part(layer, "attention_post_norm") if normed else own
        after(attended, functools.partial(added, f"attn_out.{number}"))
        after(
            part(layer, "mlp_post_norm") if normed else mlp,
            functools.partial(added, f"mlp_out.{number}"),
        )
        before(attend, functools.partial(keep, f"attn_input.{number}"))
        before(mlp, functools.partial(keep, f"mlp_input.{number}"))
        mlp_sites(number, mlp, layer)
    after(decoder.get_submodule(names["final_norm"]), lambda value: keep("final_norm", value))
    if config.model_type == "gpt2":
        after(decoder.wte, lambda value: keep("embed", value))
    try:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(ids, device=model.device)).logits
    finally:
        for undo in restore:
            undo()
    largest = torch.topk(logits.float(), TOP)
    keep(f"top_logits.{TOP}", largest.values)
    keep(f"top_tokens.{TOP}", largest.indices)
    seen.setdefault("embed", seen["resid_pre.0"])
    for number in range(len(layers)):
        middle = seen[f"resid_pre.{number}"] + seen[f"attn_out.{number}"]
        parallel = getattr(config, "use_parallel_residual", False)
        if not parallel:
            seen[f"resid_mid.{number}"] = middle
        if pre_normed:
            read = seen[f"resid_pre.{number}"]
            seen[f"attn_scale.{number}"] = _scale(model, read)
            seen[f"mlp_scale.{number}"] = _scale(model, read if parallel else middle)
    return seen


def _scale(model: Any, values: np.ndarray) -> np.ndarray:
    """What the norm of a layer divides by."""
    config, names = model.config, ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
    epsilon = next(getattr(config, name) for name in names if hasattr(config, name))
    if not hasattr(config, "rms_norm_eps"):
        values = values - values.mean(-1, keepdims=True)
    return np.sqrt((values**2).mean(-1, keepdims=True) + epsilon)


def chosen(seen: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Few enough to be committed: of single heads only the patterns of two, and keys of one."""
    last = max(int(name.split(".")[2]) for name in seen if name.startswith("attn_pattern"))
    wanted = {"attn_pattern": ("0", str(last)), "k": ("0",), "attn_heads": ("1",)}

    def keeps(name: str) -> bool:
        site, _, head = [*name.split("."), "", ""][:3]
        return not head or head in wanted.get(site, ())

    return {name: values for name, values in seen.items() if keeps(name)}


def main() -> None:
    for name in sys.argv[1:] or FAMILIES:
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        model = build(name)
        model.save_pretrained(folder)
        for extra in folder.glob("generation_config.json"):
            extra.unlink()
        ids = tokens()
        seen = chosen(sites(model, ids))
        save_file({"tokens": ids.astype(np.int32), **seen}, folder / "expected.st")
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(json.dumps({"name": name, "sites": len(seen), "kilobytes": size // 1024}))


if __name__ == "__main__":
    main()
