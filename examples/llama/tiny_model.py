"""Write a tiny random LLaMA in the format of Hugging Face, to try fine-tuning without a download.

python tiny_model.py FOLDER
"""

import json
import sys
from pathlib import Path

import numpy as np
import safetensors.numpy

LAYERS, WIDTH, HIDDEN, HEADS, KV_HEADS, VOCABULARY = 2, 64, 128, 4, 2, 128


def main(folder: Path) -> None:
    rng, narrow = np.random.default_rng(0), WIDTH // HEADS * KV_HEADS
    shapes = {"model.embed_tokens": (VOCABULARY, WIDTH), "lm_head": (VOCABULARY, WIDTH)}
    norms = ["model.norm"]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj": (WIDTH, WIDTH), f"{at}.self_attn.k_proj": (narrow, WIDTH),
            f"{at}.self_attn.v_proj": (narrow, WIDTH), f"{at}.self_attn.o_proj": (WIDTH, WIDTH),
            f"{at}.mlp.gate_proj": (HIDDEN, WIDTH), f"{at}.mlp.up_proj": (HIDDEN, WIDTH),
            f"{at}.mlp.down_proj": (WIDTH, HIDDEN),
        }  # fmt: skip
        norms += [f"{at}.input_layernorm", f"{at}.post_attention_layernorm"]
    weights = {
        f"{name}.weight": rng.normal(0, 0.1, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    weights |= {f"{name}.weight": np.ones(WIDTH, np.float32) for name in norms}
    config = {
        "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
