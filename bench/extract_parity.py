"""Activations against those of transformers: published configs x lengths x float32 and bf16.

    python bench/extract_parity.py [--models 'google/*'] [--processes 8] [--out results.json]

On JAX's default devices, with the kernels that a run chooses there, for samples padded in rows and
packed. A model has the keys, the head size and the window pattern of its published config, few and
narrow layers, and random weights; of models that are then alike, one is compared. PyTorch's float32
runs on the CPU, its bf16 on a GPU if there is one. The goals: float32 within 1e-5; bf16 no further
from float32 than that of transformers.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

import reporting

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "packages/tpufleet-activations"
sys.path.insert(0, str(PACKAGE))
PUBLISHED = PACKAGE / "tests/activations/published_configs.json"
LENGTHS = (1, 17, 64, 130, 300, 700)
WINDOW, VOCABULARY, HEADS, INNER = 96, 1000, 4, 768
WHOLE_PATTERNS = ("gemma3", "gemma3_text", "olmo3", "smollm3")  # need more layers
FLOAT32_ERROR = 1e-5
# In one part of a layer, chance decides which of two roundings is closer.
BF16_RATIO = {"resid_post": 1.05, "final_norm": 1.05, "attn_out": 1.5, "mlp_hidden": 1.5}
WAYS = {"rows": "bucket", "packed": "varlen"}


def reduce(config: dict[str, Any]) -> dict[str, Any]:
    """The same keys with fewer layers and heads of the same size; absent keys stay absent."""
    config = copy.deepcopy(config)
    text = config.get("text_config", config)
    heads = text.get("num_attention_heads")
    kv_heads = text.get("num_key_value_heads")
    head_dim = text.get("head_dim") or (text["hidden_size"] // heads if heads else 0)
    layers = 7 if config["model_type"] in WHOLE_PATTERNS else 3
    text.pop("quantization_config", None)  # weights are written as they are
    small = {
        # A head size that is not given is the width of one of the heads.
        "hidden_size": 512 if text.get("head_dim") or not heads else HEADS * head_dim,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS if kv_heads == heads else min(kv_heads or 2, 2),
        "vocab_size": VOCABULARY,
        "max_window_layers": layers,
        "num_local_experts": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "experts_per_token": 2,
        "moe_intermediate_size": INNER,
        "n_embd": HEADS * 64,
        "n_head": HEADS,
        "n_layer": layers,
        "layer_types": (text.get("layer_types") or [])[:layers],
        "no_rope_layers": (text.get("no_rope_layers") or [])[:layers],
        "sliding_window": WINDOW if text.get("sliding_window") else None,
    }
    text.update((key, small[key]) for key in set(text) & set(small))
    return config


def wanted_sites(folder: Path) -> tuple[str, ...]:
    """All of numbers that are not integers; attention patterns, which are as wide as a sample is
    long, are compared in the tests."""
    from tests.activations.make_fixtures import TOP
    from tpufleet_activations.io.dtypes import INTEGER_SITES
    from tpufleet_activations.model import architectures, sites

    arch = architectures.from_folder(folder)
    other = (*INTEGER_SITES, sites.Site.ATTN_PATTERN, sites.Site.TOP_LOGITS)
    every = [site for site in sites.Site if site not in other and not sites.missing(site, arch)]
    return sites.resolve([*every, f"top_logits.{TOP}"], arch)


def distinct(patterns: list[str]) -> list[list[str]]:
    """Published models by what is left of them when they are reduced: one of each is compared."""
    from tpufleet_activations.model import architectures

    alike: dict[Any, list[str]] = {}
    for name, config in json.loads(PUBLISHED.read_text()).items():
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            arch = architectures.from_config(json.dumps(reduce(config)))
            alike.setdefault(arch, []).append(name)
    return list(alike.values())


def write_model(config: dict[str, Any], folder: Path) -> Any:
    """A model of transformers with random weights, also written to a folder."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    body = copy.deepcopy(config)
    parsed = transformers.AutoConfig.for_model(body.pop("model_type"), **body)
    parsed = getattr(parsed, "text_config", None) or parsed
    parsed.dtype, parsed.pad_token_id, parsed.vocab_size = "float32", None, VOCABULARY
    written = copy.deepcopy(config)
    (written.get("text_config") or written)["vocab_size"] = VOCABULARY
    model = transformers.AutoModelForCausalLM.from_config(parsed, attn_implementation="eager")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            scale = 0.3 if weight.ndim == 1 else weight.shape[-1] ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(written))
    return model.eval()


def theirs(model: Any, samples: list[np.ndarray], wanted: set[str]) -> list[dict[str, np.ndarray]]:
    """{site: [length, width]} of each sample alone."""
    from tests.activations import make_fixtures

    found = [make_fixtures.sites(model, sample[None]) for sample in samples]
    return [{name: sites[name][0] for name in wanted} for sites in found]


def ours(folder: Path, samples: list[np.ndarray], compute: str) -> tuple[dict, dict]:
    """For each way of batching the sites of each sample; and the kernels."""
    from tpufleet_activations.model import engines
    from tpufleet_activations.pipeline import batches

    names = wanted_sites(folder)
    engine = engines.open_engine(folder, names, dtype="f32", compute=compute, packed=True)
    found: dict[str, list[dict[str, np.ndarray]]] = {}
    total = -(-sum(LENGTHS) // 256) * 256  # a multiple of the rows of the fused MLP
    for way, batching in WAYS.items():
        found[way] = [{} for _ in samples]
        length = total if batching == "varlen" else 768
        size = total if batching == "varlen" else length * len(samples)
        for batch in batches.make_batches(
            samples,
            batching=batching,
            buckets=(length,),
            batch_tokens=size,
            row_multiple=engine.row_multiple,
        ):
            for block in engine.start(batch)():
                for span in batch.spans:
                    row = span.row - block.first_row
                    cut = slice(span.start, span.start + span.length)
                    for name, values in block.values.items():
                        if 0 <= row < len(values):
                            found[way][span.sample][name] = np.array(values[row, cut])
    dtype = engine.params["embed"].dtype
    kernels = {
        way: engine.forward.attention_kernel(dtype, packed=way == "packed", length=768)
        for way in WAYS
    }
    return found, {**kernels, "mlp": engine.forward.gate_kernel}


def compare(name: str) -> dict[str, Any]:
    """Errors of one published model; the worst of its samples, sites and ways of batching."""
    import jax
    import torch

    began = time.perf_counter()
    torch.set_num_threads(max((os.cpu_count() or 1) // 8, 1))
    samples = [
        np.random.default_rng(length).integers(0, VOCABULARY, length).astype(np.int32)
        for length in LENGTHS
    ]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = write_model(reduce(json.loads(PUBLISHED.read_text())[name]), folder)
        wanted = set(wanted_sites(folder))
        exact = theirs(model, samples, wanted)
        model = model.to(torch.bfloat16)
        rounded = theirs(model.cuda() if torch.cuda.is_available() else model, samples, wanted)
        del model
        full, _ = ours(folder, samples, "f32")
        half, kernels = ours(folder, samples, "bf16")

    def distance(found: list[dict[str, np.ndarray]], site: str, numbers: Any) -> float:
        return math.hypot(*(np.linalg.norm(found[n][site] - exact[n][site]) for n in numbers))

    errors = [
        distance(full[way], site, [n]) / float(np.linalg.norm(exact[n][site]))
        for way in WAYS
        for site in wanted
        for n in range(len(samples))
    ]
    every = range(len(samples))
    ratios = {
        (way, site): distance(half[way], site, every) / distance(rounded, site, every)
        for way in WAYS
        for site in wanted
        # In a mixture of experts, another choice between two that hardly differ changes all after.
        if site.split(".")[0] in BF16_RATIO and not any(one.startswith("router") for one in wanted)
    }
    ratios = ratios or {("", "final_norm"): math.nan}
    within = max(ratio / BF16_RATIO[site.split(".")[0]] for (_, site), ratio in ratios.items())
    mean = float(np.exp(np.mean(np.log(list(ratios.values())))))
    return {
        "model": name,
        "float32_error": float(max(errors)),
        "bf16_ratio": mean,
        "bf16_ratio_worst": max(ratios.values()),
        "met": max(errors) <= FLOAT32_ERROR and not (mean > 1.0 or within > 1.0),
        "kernels": kernels,
        "device": jax.devices()[0].device_kind,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["*"], help="patterns of published names")
    parser.add_argument("--processes", type=int, default=max((os.cpu_count() or 2) // 2, 1))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    alike = distinct(arguments.models)
    if not alike:
        parser.error(f"no published model matches {' '.join(arguments.models)}")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # they share a GPU
    results: list[dict[str, Any]] = []
    print(f"{'':40}{'float32 error':>14}{'bf16 ratio':>12}{'worst':>8}  met  kernels")
    with ProcessPoolExecutor(
        min(arguments.processes, len(alike)), multiprocessing.get_context("spawn")
    ) as pool:
        for done in as_completed([pool.submit(compare, names[0]) for names in alike]):
            one = done.result()
            results.append(one)
            if arguments.out:
                arguments.out.write_text(json.dumps(results, indent=1))
            kernels = " ".join(one["kernels"].values())
            print(
                f"{one['model']:40}{one['float32_error']:>14.1e}{one['bf16_ratio']:>12.3f}"
                f"{one['bf16_ratio_worst']:>8.3f}  {'yes' if one['met'] else 'NO '}  {kernels}",
                flush=True,
            )
    reporting.report(
        "activations against transformers",
        [
            reporting.Measure(
                name="largest float32 error",
                ours=max(one["float32_error"] for one in results) * 1e6,
                unit="millionths",
                goal=FLOAT32_ERROR * 1e6,
            ),
            reporting.Measure(
                name="bf16 error against transformers', worst model",
                ours=float(np.nanmax([one["bf16_ratio"] for one in results])),
                unit="of theirs",
                goal=1.0,
            ),
            reporting.Measure(
                name="models outside a goal",
                ours=sum(not one["met"] for one in results),
                unit="models",
                goal=0,
            ),
        ],
        models=sum(map(len, alike)),
        compared=len(alike),
        device=results[0]["device"],
    )


if __name__ == "__main__":
    reporting.run_benchmark(main)
