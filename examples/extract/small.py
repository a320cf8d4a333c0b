"""A complete extraction on one machine with a tiny random model and a few texts, then verified.

pip install 'tpufleet[extract]'
python examples/extract/small.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import safetensors.numpy
import tokenizers

from tpufleet_activations import plans
from tpufleet_activations.io import datasets, verification
from tpufleet_activations.io.storage import LocalFolder
from tpufleet_activations.pipeline import extraction, planning

HIDDEN, INNER, LAYERS, VOCABULARY = 32, 64, 2, ["the", "cat", "sat", "on", "a", "mat", "?"]


def write_model(folder: Path) -> None:
    """A 2-layer Llama with random weights, and a tokenizer with seven tokens."""
    rng = np.random.default_rng(0)
    shapes = {"embed_tokens": (len(VOCABULARY), HIDDEN), "norm": (HIDDEN,)}
    for layer in range(LAYERS):
        for name in ("q", "k", "v", "o"):
            shapes[f"layers.{layer}.self_attn.{name}_proj"] = (HIDDEN, HIDDEN)
        for name in ("gate", "up"):
            shapes[f"layers.{layer}.mlp.{name}_proj"] = (INNER, HIDDEN)
        shapes[f"layers.{layer}.mlp.down_proj"] = (HIDDEN, INNER)
        shapes[f"layers.{layer}.input_layernorm"] = (HIDDEN,)
        shapes[f"layers.{layer}.post_attention_layernorm"] = (HIDDEN,)
    weights = {
        f"model.{name}.weight": rng.normal(size=shape).astype(np.float32) * 0.1
        for name, shape in shapes.items()
    }
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "vocab_size": len(VOCABULARY),
    }
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    write_model(folder)
    texts = ["the cat sat", "on a mat", "the cat sat on the mat"] * 10
    data = folder / "texts.jsonl"
    data.write_text("\n".join(json.dumps({"text": text}) for text in texts))

    storage = LocalFolder(folder / "activations")
    plan = planning.make_plan(
        model=str(folder),
        data={"kind": "jsonl", "path": str(data)},
        choices=["resid_post.*", "mlp_out.1"],
        max_length=64,
        unit_samples=8,
        exact=True,
    )
    print(f"{plan.samples} samples, {plan.estimate['tokens']} tokens, {plan.units} units")
    plans.write(storage, plan)
    extraction.run(storage)

    report = verification.verify(storage)
    print("whole:", report.intact, "- tokens stored:", report.tokens)
    dataset = datasets.Dataset(storage)
    print("sample 2:", dataset.tokens(2).tolist(), dataset.read(2, "resid_post.1").shape)


if __name__ == "__main__":
    main()
