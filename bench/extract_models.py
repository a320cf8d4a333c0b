"""Extraction of models that people study, on one GPU, by the command at its defaults.

    python bench/extract_models.py [--seconds 540] [--only qwen3-4b moe] [--out results.json]

Chat-like samples (70 % around 120 tokens, 30 % around 1,400), random weights in memory files, one
site of the last layer into memory files. Beside the product of two large matrices, and PyTorch's
compiled model on sequences of 2,048. A second command shows what is remembered: how long it takes
until its first batch. Last, a mixture of experts at the shape of Qwen3-30B-A3B.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import reporting
from extract_gpu_shape import LENGTH, TOY, emit, paces

ROOT = Path(__file__).resolve().parent.parent
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128_256,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "rope_theta": 5e5,
        "rope_scaling": LLAMA3_ROPE,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "rope_theta": 1e6,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": True,
    },
    "gemma-3-4b": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "sliding_window": 1024,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    },
    "olmo-3-7b": {
        "model_type": "olmo3",
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 100_278,
        "sliding_window": 4096,
        "rope_theta": 5e5,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
    },
}
EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 6,  # of 48, which are alike
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151_936,
    "rope_theta": 1e6,
    "max_position_embeddings": 40_960,
}
TOKENS = {"llama-3.2-1b": 10e6, "qwen3-4b": 3e6, "gemma-3-4b": 3e6, "olmo-3-7b": 1.5e6}
SECOND = 0.1  # of them in the second command
SHORT, LONG, SHARE_SHORT = 120, 1400, 0.7
ROWS = 8  # of PyTorch's batches
EXPERT_BATCHES = (16_384, 32_768, 65_536)
FORWARD_TOKENS, FORWARD_BATCHES, FORWARD_SECONDS = 1e6, (32_768, 65_536), (2, 10)
SECONDS = {"matrix": 40, "command": 130, "torch": 75, "moe": 120, "forward": 100}
if TOY:
    TOKENS = dict.fromkeys(TOKENS, 3000.0)
    SHORT, LONG, ROWS, EXPERT_BATCHES = 12, 48, 2, (512,)
    FORWARD_TOKENS, FORWARD_BATCHES, FORWARD_SECONDS = 3000.0, (256,), (1,)
    SECONDS = dict.fromkeys(SECONDS, 110)
COMMAND = "from tpufleet_activations.cli.group import extract; extract(prog_name='tpu extract')"


def shape_of(name: str) -> dict[str, Any]:
    shape = dict(EXPERTS if name == "moe" else SHAPES[name])
    if TOY:
        shape |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99}
        shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        known = {**EXPERTS, "num_experts": 0} if name == "moe" else {**SHAPES[name], "head_dim": 0}
        shape = {key: value for key, value in shape.items() if key in known}
    return shape


def lengths_of(tokens: float) -> list[int]:
    """Of chat-like samples."""
    import numpy as np

    chance, lengths = np.random.default_rng(0), []
    while tokens > 0:
        middle = SHORT if chance.random() < SHARE_SHORT else LONG
        lengths.append(int(np.clip(chance.normal(middle, middle / 4), 4, LENGTH)))
        tokens -= lengths[-1]
    return lengths


def write_model(shape: dict[str, Any], folder: Path) -> int:
    """A checkpoint with random weights; returns its bytes."""
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    from extract_gpu_ours import _TOKENIZER
    from tpufleet_activations.model import architectures, weights

    arch = architectures.from_config(json.dumps(shape))
    chance = np.random.default_rng(0)
    block = (chance.standard_normal(1 << 22, np.float32) * 0.02).astype(ml_dtypes.bfloat16)
    tensors: dict[str, Any] = {}
    for name, size in weights.checkpoint_weights(arch, arch.layers, final_norm=True, head=False):
        count = int(np.prod(size))
        flat = np.resize(np.roll(block, len(tensors)), count).reshape(size)
        tensors[f"model.{name}"] = np.ones(size, flat.dtype) if len(size) == 1 else flat
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "tokenizer.json").write_text(_TOKENIZER)
    return (folder / "model.safetensors").stat().st_size


def write_data(path: Path, vocabulary: int, lengths: list[int]) -> Path:
    """A Parquet file where pyarrow is installed."""
    import numpy as np

    chance = np.random.default_rng(1)
    rows = [chance.integers(0, vocabulary, length, np.int32) for length in lengths]
    try:
        import pyarrow.parquet
    except ImportError:
        path = path.with_suffix(".jsonl")
        path.write_text("".join(json.dumps({"tokens": row.tolist()}) + "\n" for row in rows))
    else:
        table = pyarrow.table({"tokens": [row.tolist() for row in rows]})
        pyarrow.parquet.write_table(table, path, row_group_size=1024)
    return path


def extract(arguments: list[str], environment: dict[str, str]) -> tuple[float, str]:
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-1500:])
    return time.perf_counter() - began, done.stdout


def command(name: str, more: tuple[str, ...] = (), runs: tuple[str, ...] = ("first", "second")):
    """`tpu extract plan` and `run`: a first command, and a second one for another dataset."""
    from tpufleet_activations.model import architectures

    shape = shape_of(name)
    arch = architectures.from_config(json.dumps(shape))
    place = Path(tempfile.mkdtemp(dir="/dev/shm"))
    others = ("JAX_COMPILATION", "XLA_PYTHON_CLIENT")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    # Digests and programs that an earlier run has kept are not used.
    environment |= {"HOME": str(place), "XDG_CACHE_HOME": str(place / "cache")}
    results: dict[str, Any] = {}
    try:
        results["model_gigabytes"] = write_model(shape, place / "model") / 1e9
        for run, share in zip(runs, (1.0, SECOND), strict=False):
            lengths = lengths_of(TOKENS[name] * share)
            data = write_data(place / f"{run}.parquet", arch.vocabulary, lengths)
            site = f"resid_post.{arch.layers - 1}"
            plan = ["plan", str(place / run), "--model", str(place / "model"), "--data", str(data)]
            planned, _ = extract([*plan, "--site", site], environment)
            seconds, output = extract(["run", str(place / run), "--json", *more], environment)
            report = json.loads(output)
            work = sum(arch.flops(length) for length in lengths) / sum(lengths)
            rate = report["tokens_per_second"] or 0.0  # of a run that is too short for one
            results[run] = {
                "tokens": sum(lengths),
                "tokens_per_second": rate,
                "tflops": rate * work / 1e12,
                "tokens_per_second_command": sum(lengths) / seconds,
                "seconds": seconds,
                "plan_seconds": planned,
                "padding": report.get("padding"),
                "calibration": report["calibration"],
                "limit": report["limit"],
                "start_seconds": report["start_seconds"],
                "start": report["start"],
            }
            loading = report["start"].get("weights")
            if loading:
                results[run]["load_gigabytes_per_second"] = results["model_gigabytes"] / loading
            shutil.rmtree(place / run)
            emit(results)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return results


def torch_line(name: str) -> dict[str, Any]:
    """The compiled model of transformers on sequences of 2,048."""
    import copy

    import torch
    import transformers

    body = copy.deepcopy(shape_of(name))
    config = transformers.AutoConfig.for_model(body.pop("model_type"), **body)
    config.pad_token_id, config.use_cache = None, False
    with torch.device("cuda"):
        model = transformers.AutoModel.from_config(config, attn_implementation="sdpa")
    model = torch.compile(model.to(torch.bfloat16).eval())
    tokens = torch.randint(0, body["vocab_size"], (ROWS, LENGTH), device="cuda")

    def step() -> None:
        with torch.inference_mode():
            model(input_ids=tokens, use_cache=False)

    seconds = paces(step, lambda _: torch.cuda.synchronize())["lasting"]
    return {"tokens_per_second": ROWS * LENGTH / seconds}


def matrix() -> dict[str, Any]:
    from extract_gpu_ours import matrix_paces

    return {"tflops": matrix_paces()["lasting"]}


def moe() -> dict[str, Any]:
    """The forward pass of a few layers, and the expert products of one alone."""
    from extract_gpu_ours import build, matrix_paces

    shape = shape_of("moe")
    engine = build([f"resid_post.{shape['num_hidden_layers'] - 1}"], shape=shape)
    results: dict[str, Any] = {"matrix_tflops": matrix_paces()["lasting"]}
    results["kernel"] = engine.forward.gate_kernel
    for size in EXPERT_BATCHES:
        results[str(size)] = facts = {}
        try:
            for name, value in expert_rates(engine, size):
                facts[name] = value
                emit(results)
        except Exception as error:
            facts["error"] = f"{type(error).__name__}: {error}"[:800]
    return results


def expert_rates(engine: Any, size: int) -> Iterator[tuple[str, Any]]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from tpufleet_activations.model import experts

    arch, params = engine.forward.architecture, engine.params
    layers = params["layers"]
    stacks = experts.Weights(layers["expert_gate_up"], layers["expert_down"])
    chance = np.random.default_rng(0)
    rows = jnp.asarray(chance.standard_normal((1, size, arch.hidden)), jnp.bfloat16)
    timed = lambda run: paces(run, jax.block_until_ready)["lasting"]

    @jax.jit
    def route(rows: Any, router: Any) -> Any:
        return experts.route(arch, rows, router[0], None)

    @jax.jit
    def mixed(rows: Any, routes: Any, stacks: Any) -> Any:
        kernel = engine.forward.gate_kernel
        return experts.mixture(arch, rows, routes, stacks, 0, kernel=kernel)

    routes = route(rows, layers["router"])
    products = size * arch.experts_per_token * 6 * arch.hidden * arch.intermediate
    yield "experts_tflops", products / timed(lambda: mixed(rows, routes, stacks)) / 1e12
    yield "products", grouped_products(arch, routes, stacks, size)
    tokens = jnp.asarray(chance.integers(0, arch.vocabulary, (1, size)), jnp.int32)
    length = min(LENGTH, size)
    numbers = jnp.arange(size, dtype=jnp.int32)[None]
    positions, segments = numbers % length, numbers // length
    seconds = timed(lambda: engine.step(params, tokens, positions, segments))
    yield "tokens_per_second", size / seconds
    yield "tflops", arch.flops(length) / length * size / seconds / 1e12


def grouped_products(arch: Any, routes: Any, stacks: Any, size: int) -> dict[str, float]:
    """TFLOP/s of the kernel alone, of real rows: up and down projection."""
    import functools

    import jax
    import jax.numpy as jnp

    from tpufleet_activations.model import experts, gated_mlp

    if not gated_mlp.grouped_kernel_works(arch.activation):
        return {}
    pairs, inner = size * arch.experts_per_token, arch.intermediate
    place = jax.jit(functools.partial(experts.sort, arch, tile=gated_mlp.TILING.cluster_tile_m))
    sorted_rows = place(routes.experts)
    rows = jnp.zeros((len(sorted_rows.source), arch.hidden), jnp.bfloat16) + 0.01
    hidden = jnp.zeros((len(sorted_rows.source), inner), jnp.bfloat16) + 0.01
    index = jnp.concatenate([sorted_rows.owner, sorted_rows.used])
    run = lambda activation: jax.jit(
        functools.partial(gated_mlp.hopper_kernel, activation=activation, grouped=True)
    )
    up, down = run(arch.activation), run(None)
    flat_up = jax.jit(lambda stack: stack.reshape(-1, 2 * inner))(stacks.gate_up)
    flat_down = jax.jit(lambda stack: stack.reshape(-1, arch.hidden))(stacks.down)
    work = 2 * pairs * arch.hidden * inner / 1e12
    each = {
        "up": (2 * work, lambda: up(rows, flat_up, index)),
        "down": (work, lambda: down(hidden, flat_down, index)),
    }
    return {
        name: operations / paces(step, jax.block_until_ready)["lasting"]
        for name, (operations, step) in each.items()
    }


def forward(name: str) -> dict[str, Any]:
    """The forward pass alone, of packed chat-like samples in batches of several sizes: for two
    seconds, and for as long as a run."""
    import jax
    import numpy as np

    from extract_gpu_ours import build
    from tpufleet_activations.pipeline import batches

    shape = shape_of(name)
    engine = build([f"resid_post.{shape['num_hidden_layers'] - 1}"], shape=shape)
    arch, lengths = engine.forward.architecture, lengths_of(FORWARD_TOKENS)
    chance = np.random.default_rng(1)
    tokens = [chance.integers(0, arch.vocabulary, length, np.int32) for length in lengths]
    work = sum(arch.flops(length) for length in lengths) / sum(lengths)
    results: dict[str, Any] = {}
    for size in FORWARD_BATCHES:
        made = batches.make_batches(tokens, batching="varlen", buckets=(LENGTH,), batch_tokens=size)
        cut = [batch for batch in made if batch.real_tokens > 0.9 * size]
        jax.block_until_ready(engine.compute(cut[0]))
        for what, start in (("computed", engine.compute), ("fetched", engine.start)):
            finish = jax.block_until_ready if what == "computed" else lambda fetch: fetch()
            for seconds in FORWARD_SECONDS:
                rate = steady(start, finish, cut, seconds)
                key = f"{size} {what} {seconds} s"
                results[key] = {"tokens_per_second": rate, "tflops": rate * work / 1e12}
                emit(results)
    return results


def steady(
    start: Callable[..., Any], finish: Callable[..., Any], cut: Any, seconds: float
) -> float:
    """Real tokens per second with two batches in flight."""
    waiting: list[Any] = []
    done, began = 0, time.perf_counter()
    for batch in itertools.cycle(cut):
        waiting.append(start(batch))
        if len(waiting) > 2:
            finish(waiting.pop(0))
        done += batch.real_tokens
        if time.perf_counter() - began > seconds:
            break
    for one in waiting:
        finish(one)
    return done / (time.perf_counter() - began)


CHILDREN: dict[str, Callable[[], dict[str, Any]]] = {"matrix": matrix}
for _name in SHAPES:
    CHILDREN[f"{_name} command"] = lambda name=_name: command(name)
for _name in list(SHAPES)[:3]:
    CHILDREN[f"{_name} torch"] = lambda name=_name: torch_line(name)
CHILDREN |= {"moe": moe, "qwen3-4b forward": lambda: forward("qwen3-4b")}
ORDER = [
    "matrix",
    "moe",
    "qwen3-4b command",
    "llama-3.2-1b command",
    "gemma-3-4b command",
    "qwen3-4b forward",
    "qwen3-4b torch",
    "llama-3.2-1b torch",
    "gemma-3-4b torch",
    "olmo-3-7b command",
]


def child(name: str, seconds: float) -> dict[str, Any]:
    sources = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    path = os.pathsep.join([*sources, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
    if name in ("matrix", "moe"):
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--child", name],
            env=environment,
            capture_output=True,
            text=True,
            timeout=max(seconds, 5),
        )
        unused = "is not used" in done.stderr  # a kernel
        text, fault = done.stdout, done.stderr if done.returncode or unused else ""
    except subprocess.TimeoutExpired as late:
        text = (late.stdout or b"").decode(errors="replace")
        fault = f"stopped after {seconds:.0f} s"
    facts = [line[6:] for line in text.splitlines() if line.startswith("FACTS ")]
    results: dict[str, Any] = json.loads(facts[-1]) if facts else {}
    if fault:
        results["error"] = fault.strip()[-2000:]
    results["took"] = round(time.monotonic() - began, 1)
    print(f"# {name}: {json.dumps(results)}", flush=True)
    return results


def report(results: dict[str, Any]) -> None:
    limit = results.get("matrix", {}).get("tflops", 0.0)
    measures = []

    def add(
        name: str, ours: float | None, unit: str, goal: float | None, more: bool = True
    ) -> None:
        if ours is not None:
            measure = reporting.Measure(
                name=name, ours=ours, unit=unit, goal=goal, more_is_better=more
            )
            measures.append(measure)

    for name in SHAPES:
        facts, torch = results.get(f"{name} command", {}), results.get(f"{name} torch", {})
        first, second = facts.get("first", {}), facts.get("second", {})
        if first and limit:
            add(f"{name}, chat", 100 * first["tflops"] / limit, "% of the limit", 90)
            peer = torch.get("tokens_per_second")
            add(f"{name}, chat", first["tokens_per_second"], "tokens/s", peer)
        add(f"{name}, loading", second.get("load_gigabytes_per_second"), "GB/s", 5)
        add(f"{name}, start of a second command", second.get("start_seconds"), "s", 6, more=False)
    for size, facts in results.get("moe", {}).items():
        products = facts.get("products", {}) if isinstance(facts, dict) else {}
        for part, rate in products.items():
            if limit:
                add(f"experts, {part}, {size} tokens", 100 * rate / limit, "% of the limit", 75)
    if measures:
        reporting.report("extraction of several models", measures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", choices=sorted(CHILDREN))
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names of measurements")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.child:
        emit(CHILDREN[arguments.child]())
        return
    deadline = time.monotonic() + arguments.seconds
    results: dict[str, Any] = {}
    for name in ORDER:
        left = deadline - time.monotonic()
        if left > 20 and any(part in name for part in arguments.only):
            limit = SECONDS[name.split()[-1]]
            results[name] = child(name, min(limit, left - 5))
            if arguments.out:
                arguments.out.write_text(json.dumps(results, indent=1))
    report(results)


if __name__ == "__main__":
    reporting.run_benchmark(main)
