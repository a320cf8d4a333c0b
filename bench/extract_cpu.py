"""Extraction on the CPU against transformers on the same small model, and against gzip-pickle.

    python bench/extract_cpu.py

So that a regression shows without an accelerator. Prints JSON lines; without transformers the first
two have no anchor.

The models are compared twice. On one core other programs slow both sides alike, and the ratio holds
on a busy machine. On all cores it holds only where nothing else runs: PyTorch's threads wait for
each other after every operation, so a core that is taken from one of them stops them all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import extract_gpu_files as files
import reporting

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
TOY = bool(os.environ.get("EXTRACT_BENCH_TOY"))  # to test the script itself
if TOY:
    SMALL |= {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    ROWS, LENGTH, TURNS = 2, 64, 1


def ours(folder: Path) -> Callable[[], object]:
    """One batch, with every layer's output as numpy arrays, in float32."""
    import numpy as np

    from tpufleet_activations.model import architectures, devices, engines, sites
    from tpufleet_activations.pipeline import batches

    arch = architectures.from_config((folder / "config.json").read_text())
    names = sites.resolve(["resid_post.*"], arch)
    devices.start()  # as the command does
    engine = engines.open_engine(folder, names, dtype="f32", compute="f32")
    tokens = list(np.random.default_rng(0).integers(0, 512, (ROWS, LENGTH)).astype(np.int32))
    batch = next(
        batches.make_batches(
            tokens,
            batching="bucket",
            buckets=(LENGTH,),
            batch_tokens=ROWS * LENGTH,
            row_multiple=engine.row_multiple,
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


def models(cores: str) -> list[float]:
    """Tokens a second of ours and, where transformers is installed, of theirs."""
    # JAX and PyTorch start as many threads as there are cores when they are first imported.
    if cores == "one" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_model(folder)
        mine = ours(folder)
        if TOY and cores == "all":  # importing transformers once is enough
            return paces(mine)
        try:
            return paces(mine, theirs(folder))
        except ImportError:
            return paces(mine)


def apart(cores: str) -> list[float]:
    """The same from a process of its own."""
    command = [sys.executable, __file__, "--models", cores]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", choices=["one", "all"], help=argparse.SUPPRESS)
    chosen = parser.parse_args().models
    if chosen:
        print(json.dumps(models(chosen)))
        return
    one, every = apart("one"), apart("all")
    pen = files.writers()
    rows = [
        ("all layers on one core, tokens/s against transformers", *one, 1.0),
        ("all layers on all cores, tokens/s against transformers", *every, 1.0),
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
    for name, value, *anchors, goal in rows:
        anchor = anchors[0] if anchors else None
        ratio = value / anchor if value and anchor else None
        met = None if ratio is None else ratio >= goal
        facts = {"ours": value, "anchor": anchor, "ratio": ratio, "goal": goal, "met": met}
        print(json.dumps({"name": name, **facts}))


if __name__ == "__main__":
    reporting.run_benchmark(main)
