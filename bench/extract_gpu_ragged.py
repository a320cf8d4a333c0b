"""Extraction of samples of many lengths, by the command with its default options, in a first run,
which compiles everything, and in a second one. And the forward pass of other models."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from extract_gpu_files import parallel_writing
from extract_gpu_ours import _TOKENIZER
from extract_gpu_shape import SHAPE, TOY, emit

MEDIAN, SIGMA, MAX_LENGTH = 266, 1.2, 2048
TOKENS = 20_000_000  # of a first run, as in the goal
GEMMA_2_2B = {
    "model_type": "gemma2",
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "vocab_size": 256000,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
if TOY:
    TOKENS, MAX_LENGTH, MEDIAN = 4_000, 64, 20


def write_inputs(folder: Path, tokens: int) -> list[int]:
    """A model of the benchmark's shape with random weights, and lognormal samples; returns the
    tokens of each."""
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    chance = np.random.default_rng(0)
    hidden, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    dim = hidden // SHAPE["num_attention_heads"]
    narrow = dim * SHAPE["num_key_value_heads"]

    def random(*shape: int):
        return (chance.standard_normal(shape, np.float32) * 0.02).astype(ml_dtypes.bfloat16)

    tensors = {"model.embed_tokens.weight": random(SHAPE["vocab_size"], hidden)}
    tensors["model.norm.weight"] = np.ones(hidden, ml_dtypes.bfloat16)
    for layer in range(SHAPE["num_hidden_layers"]):
        root = f"model.layers.{layer}."
        for name, out in (("q", hidden), ("k", narrow), ("v", narrow)):
            tensors[f"{root}self_attn.{name}_proj.weight"] = random(out, hidden)
            tensors[f"{root}self_attn.{name}_proj.bias"] = random(out)
        tensors[f"{root}self_attn.o_proj.weight"] = random(hidden, hidden)
        for name in ("gate", "up"):
            tensors[f"{root}mlp.{name}_proj.weight"] = random(inner, hidden)
        tensors[f"{root}mlp.down_proj.weight"] = random(hidden, inner)
        for name in ("input", "post_attention"):
            tensors[f"{root}{name}_layernorm.weight"] = np.ones(hidden, ml_dtypes.bfloat16)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    (folder / "tokenizer.json").write_text(_TOKENIZER)
    lengths: list[int] = []
    left = tokens
    with open(folder / "data.jsonl", "w") as file:
        while left > 0:
            length = int(np.clip(chance.lognormal(np.log(MEDIAN), SIGMA), 1, MAX_LENGTH))
            row = chance.integers(0, SHAPE["vocab_size"], length)
            file.write(json.dumps({"tokens": row.tolist()}) + "\n")
            lengths.append(length)
            left -= length
    return lengths


def command(inputs: Path, out: Path, layers: list[int], cache: Path, lengths: list[int]) -> dict:
    """`tpu extract plan` and `run` with default options, but for the folder of the cache, for the
    first samples, which have these lengths."""
    sites = [f"--site=resid_post.{layer}" for layer in layers]
    data = ["--model", str(inputs), "--data", str(inputs / "data.jsonl")]
    limit = ["--max-length", str(MAX_LENGTH), "--max-samples", str(len(lengths))]
    tpu = [sys.executable, "-m", "tpufleet", "extract"]
    # Not the settings of the other measurements, nor their cache: a first run compiles everything.
    others = ("JAX_COMPILATION", "XLA_PYTHON_CLIENT")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    subprocess.run(
        [*tpu, "plan", str(out), *data, *sites, *limit],
        check=True,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    began = time.perf_counter()
    started = [*tpu, "run", str(out), "--compile-cache", str(cache), "--json"]
    with (
        tempfile.TemporaryFile("w+") as summary,
        subprocess.Popen(
            started, env=environment, text=True, stdout=summary, stderr=subprocess.PIPE
        ) as process,
    ):
        timed = [(time.perf_counter() - began, line) for line in process.stderr if line.strip()]
        process.wait()
        seconds = time.perf_counter() - began
        summary.seek(0)
        report = json.loads(summary.read() or "{}")
    lines = [line.strip() for _, line in timed]
    if process.returncode:
        raise RuntimeError("\n".join(lines)[-400:])
    size = sum(path.stat().st_size for path in (out / "shards").iterdir())
    shutil.rmtree(out)
    return {
        # As the command says: from the first batch to the last commit.
        "tokens_per_second": report["tokens_per_second"],
        # Of full batches on the device, with their way to the host: no run can be faster.
        "device_rates": report["calibration"].get("rates", {}),
        "busy_seconds": report["busy_seconds"],
        "limit": report["limit"],
        "start_seconds": report["start_seconds"],
        "start": report["start"],
        # Of the whole command: start, loading, compiling, writing, committing.
        "tokens_per_second_command": sum(lengths) / seconds,
        "seconds": seconds,
        "gigabytes": size / 1e9,
        "bytes_per_second": size / seconds,
        # Until it speaks, which is after the imports; and from its last word to its end.
        "seconds_to_first_line": timed[0][0],
        "seconds_to_exit": seconds - timed[-1][0],
        "said": lines[-2:],
    }


def ragged() -> dict:
    """1 layer to disk in a first and a second run, then 4 layers to memory files."""
    results: dict = {"median": MEDIAN, "sigma": SIGMA}
    last = SHAPE["num_hidden_layers"] - 1
    root = Path(tempfile.mkdtemp())
    lengths = write_inputs(root / "inputs", TOKENS)
    half = lengths[: len(lengths) // 2]  # four layers of all would not fit 128 GiB
    results["tokens"], results["memory_tokens"] = sum(lengths), sum(half)
    emit(results)
    memory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    four = [last // 4, last // 2, 3 * last // 4, last]
    for name, layers, folder, samples in (
        ("first", [last], root, lengths),
        ("second", [last], root, lengths),
        ("memory_4", four, memory, half),
    ):
        if name == "memory_4":
            results["memory_limit"] = parallel_writing(memory)
        try:
            results[name] = command(root / "inputs", folder / name, layers, root / "cache", samples)
        except Exception as error:
            results[f"{name}_error"] = f"{type(error).__name__}: {error}"[:500]
        emit(results)
    shutil.rmtree(root)
    shutil.rmtree(memory, ignore_errors=True)
    return results


def packed_paces(engine) -> dict[str, float]:
    """Tokens per second of the whole model on the batch that PyTorch gets."""
    import jax
    import numpy as np

    from extract_gpu_shape import paces
    from extract_gpu_torch_packed import TOKENS as BATCH
    from extract_gpu_torch_packed import lognormal_lengths
    from tpufleet_activations.model import meshes
    from tpufleet_activations.pipeline import batches

    chance, size = np.random.default_rng(0), 512 if TOY else BATCH
    tokens = [
        chance.integers(0, SHAPE["vocab_size"], length, np.int32)
        for length in lognormal_lengths(size, median=MEDIAN)
    ]
    batch = next(
        batches.make_batches(tokens, batching="varlen", buckets=(MAX_LENGTH,), batch_tokens=size)
    )
    placed = [
        meshes.shard_array(np.ascontiguousarray(array), meshes.batch_sharding(engine.mesh))
        for array in (batch.tokens, batch.positions, batch.segments)
    ]
    results = paces(lambda: engine.step(engine.params, *placed), jax.block_until_ready)
    return {name: batch.real_tokens / seconds for name, seconds in results.items()}


def shapes() -> dict:
    """Forward passes at the shapes of Gemma 2 2B and Qwen2.5 7B, with sequences of 2,048; and of
    the benchmark's shape with packed samples of many lengths."""
    from extract_gpu_ours import build, forward_paces, matrix_paces
    from extract_gpu_shape import LENGTH, ROWS

    results: dict = {"matrix": matrix_paces()}
    last = SHAPE["num_hidden_layers"] - 1
    results["packed_ragged"] = packed_paces(build([f"resid_post.{last}"]))
    emit(results)
    for name, shape, sizes in (
        ("gemma-2-2b", GEMMA_2_2B, (ROWS,)),
        ("qwen2.5-7b", QWEN_7B, (ROWS, 3 * ROWS // 2)),  # of --batch-tokens
    ):
        if TOY:
            shape = {**shape, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
            shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99}
        last = shape["num_hidden_layers"] - 1
        try:
            engine = build([f"resid_post.{last}"], shape=shape)
            work = engine.forward.architecture.flops(LENGTH) / LENGTH
            runs = [forward_paces(engine, rows) for rows in sizes]
            rates = max(runs, key=lambda run: run["lasting"])
            results[name] = {
                pace: {"tokens_per_second": rate, "tflops": rate * work / 1e12}
                for pace, rate in rates.items()
            }
            del engine
        except Exception as error:
            results[f"{name}_error"] = f"{type(error).__name__}: {error}"[:500]
        emit(results)
    return results
