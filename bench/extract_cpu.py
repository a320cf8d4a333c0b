"""Extraction on the CPU against transformers on the same small model, and against gzip-pickle.

    python bench/extract_cpu.py

So that a regression shows without an accelerator. Prints JSON lines; without transformers the first
line has no anchor.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import extract_gpu_files as files

SMALL = {
    "model_type": "qwen2",
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 704,
    "vocab_size": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 512,
}
ROWS, LENGTH, TURNS = 4, 256, 30


def ours(folder: Path) -> Callable[[], object]:
    """One batch, with every layer's output as numpy arrays, in float32."""
    import jax
    import numpy as np

    from tpufleet.workloads.activations import architectures, batches, engines, sites

    arch = architectures.from_config((folder / "config.json").read_text())
    names = sites.resolve(["resid_post.*"], arch)
    engine = engines.open_engine(
        folder, names, dtype="f32", compute="f32", devices=jax.devices()[:1]
    )
    tokens = list(np.random.default_rng(0).integers(0, 512, (ROWS, LENGTH)).astype(np.int32))
    batch = next(
        batches.cut(
            tokens, batching="bucket", buckets=(LENGTH,), batch_tokens=ROWS * LENGTH, multiple=1
        )
    )
    return lambda: engine.start(batch)()


def theirs(folder: Path) -> Callable[[], object]:
    import torch
    import transformers

    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.randint(0, 512, (ROWS, LENGTH))

    def action() -> None:
        with torch.inference_mode():
            states = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
            [state.numpy() for state in states.hidden_states]

    return action


def paces(*actions: Callable[[], object]) -> list[float]:
    """Tokens a second of each at its best. They take turns, so that whatever else this machine
    does in the meantime disturbs one as much as the other."""
    best = [float("inf")] * len(actions)
    for turn in range(TURNS + 2):
        for number, action in enumerate(actions):
            began = time.perf_counter()
            action()
            if turn >= 2:  # the first two warm up
                best[number] = min(best[number], time.perf_counter() - began)
    return [ROWS * LENGTH / seconds for seconds in best]


def write_model(folder: Path) -> None:
    """A random checkpoint under the names that Hugging Face uses."""
    import numpy as np
    from safetensors.numpy import save_file

    hidden, inner, chance = (
        SMALL["hidden_size"],
        SMALL["intermediate_size"],
        np.random.default_rng(0),
    )
    narrow = hidden // SMALL["num_attention_heads"] * SMALL["num_key_value_heads"]
    shapes = {"embed_tokens.weight": (SMALL["vocab_size"], hidden), "norm.weight": (hidden,)}
    for layer in range(SMALL["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (hidden, hidden),
            "self_attn.q_proj.bias": (hidden,),
            "self_attn.k_proj.weight": (narrow, hidden),
            "self_attn.k_proj.bias": (narrow,),
            "self_attn.v_proj.weight": (narrow, hidden),
            "self_attn.v_proj.bias": (narrow,),
            "self_attn.o_proj.weight": (hidden, hidden),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }.items():
            shapes[f"layers.{layer}.{name}"] = shape
    tensors = {
        f"model.{name}": (chance.normal(size=shape) * 0.05).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(
        json.dumps({**SMALL, "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True})
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_model(folder)
        mine, peer = ours(folder), None
        try:
            mine, peer = paces(mine, theirs(folder))
        except ImportError:
            (mine,) = paces(mine)
    pen = files.writers()
    rows = [
        ("all layers on the CPU, tokens/s against transformers", mine, peer, 1.0),
        (
            "write raw shards, bytes/s against gzip-pickle",
            pen["raw_bytes_per_second"],
            pen["gzip_pickle_bytes_per_second"],
            10.0,
        ),
        (
            "write zstd shards, bytes/s against gzip-pickle",
            pen.get("zstd_bytes_per_second"),
            pen["gzip_pickle_bytes_per_second"],
            4.0,
        ),
    ]
    for name, value, anchor, goal in rows:
        ratio = value / anchor if value and anchor else None
        met = None if ratio is None else ratio >= goal
        facts = {"ours": value, "anchor": anchor, "ratio": ratio, "goal": goal, "met": met}
        print(json.dumps({"name": name, **facts}))


if __name__ == "__main__":
    main()
