"""Extraction on one GPU against PyTorch and the chip's matrix limit, in one call of a few minutes.

    python bench/extract_gpu.py [--seconds 460] [--out results.json]

Qwen2.5-0.5B shape, random weights, sequences of 2,048. Every measurement is a process of its own
with a time limit, so one that fails costs one line. Prints a table, then JSON lines.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHAPE = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
}
LENGTH = 2048
ROWS = 16
SIDE = 8192  # of the square matrices whose product is the limit
LAYERS_4 = [5, 11, 17, 23]
if os.environ.get("EXTRACT_BENCH_TOY"):  # to try the script itself, on any machine
    SHAPE |= {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "vocab_size": 99,
    }
    LENGTH, ROWS, SIDE = 64, 4, 128
WIDTH = SHAPE["hidden_size"]
# Tried for the forward pass, beside XLA's own choice, when time is left.
FLAGS = {
    "triton-any": "--xla_gpu_triton_gemm_any=true",
    "no-triton": "--xla_gpu_enable_triton_gemm=false",
}
# Seconds that each measurement may take, in the order of their worth.
LIMITS = {"forward": 100, "disk_1": 80, "host_24": 80, "torch": 100, "writers": 40, "disk_4": 70}


def median_seconds(action: Callable[[], None], *, warm: int = 3, repeat: int = 10) -> float:
    for _ in range(warm):
        action()
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


# -- PyTorch ------------------------------------------------------------------------------------


def torch_matrix_tflops() -> float:
    import torch

    left, right = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def product() -> None:
        torch.matmul(left, right)
        torch.cuda.synchronize()

    return 2 * SIDE**3 / median_seconds(product) / 1e12


def torch_lines() -> dict:
    import torch
    import transformers

    found: dict = {}
    found["matrix_tflops"] = torch_matrix_tflops()
    emit(found)
    options = {key: value for key, value in SHAPE.items() if key != "model_type"}
    config = transformers.Qwen2Config(**options, use_cache=False, attn_implementation="sdpa")
    with torch.device("cuda"):
        model = transformers.Qwen2Model(config).to(torch.bfloat16).eval()
    tokens = torch.randint(0, SHAPE["vocab_size"], (ROWS, LENGTH), device="cuda")

    def forward(run: Callable) -> Callable[[], None]:
        def action() -> None:
            with torch.inference_mode():
                run(input_ids=tokens, use_cache=False)
            torch.cuda.synchronize()

        return action

    found["torch_eager"] = ROWS * LENGTH / median_seconds(forward(model), repeat=6)
    emit(found)
    buffers = [
        torch.empty(24, ROWS, LENGTH, WIDTH, dtype=torch.bfloat16, pin_memory=True)
        for _ in range(2)
    ]
    side, turn = torch.cuda.Stream(), [0]

    def pinned(run: Callable, steps: int = 6) -> float:
        def action() -> None:
            with torch.inference_mode():
                for _ in range(steps):
                    states = run(
                        input_ids=tokens, use_cache=False, output_hidden_states=True
                    ).hidden_states
                    side.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(side):
                        for layer in range(24):
                            states[layer + 1].record_stream(side)
                            buffers[turn[0]][layer].copy_(states[layer + 1], non_blocking=True)
                    turn[0] ^= 1
            torch.cuda.synchronize()

        return steps * ROWS * LENGTH / median_seconds(action, warm=1, repeat=2)

    found["torch_24_layers_pinned"] = pinned(model)
    emit(found)
    compiled = torch.compile(model)
    found["torch_compiled"] = ROWS * LENGTH / median_seconds(forward(compiled), repeat=6)
    return found


# -- ours ---------------------------------------------------------------------------------------


def build(sites: list[str], memory: str | None = None):
    import jax
    import jax.numpy as jnp

    from tpufleet.workloads.activations import architectures, decoders, engines, meshes, weights
    from tpufleet.workloads.activations import sites as places

    arch = architectures.from_config(json.dumps(SHAPE))
    names = places.resolve(sites, arch)
    device = jax.devices()[0]
    mesh = meshes.build([device], {}, arch)
    params = weights.invent(
        arch, depth=places.depth(names, arch), dtype=jnp.bfloat16, mesh=mesh, final_norm=False
    )
    forward = decoders.Forward(
        architecture=arch, sites=names, dtype="bf16", platform=device.platform, mesh=mesh
    )
    return engines.Engine(forward, params, mesh, memory=memory)


def batch_of(rows: int):
    import numpy as np

    from tpufleet.workloads.activations import batches

    tokens = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (rows, LENGTH))
    return next(
        batches.cut(
            list(tokens.astype(np.int32)),
            batching="bucket",
            buckets=(LENGTH,),
            batch_tokens=rows * LENGTH,
        )
    )


def forward_only() -> dict:
    """The whole model, the last layer's output left on the device."""
    import jax
    import numpy as np

    from tpufleet.workloads.activations import meshes

    found: dict = {"device": jax.devices()[0].device_kind}
    engine = build(["resid_post.23"])
    for rows in (8, ROWS, 32):
        batch = batch_of(rows)
        placed = [
            meshes.place(np.ascontiguousarray(array), meshes.batch(engine.mesh))
            for array in (batch.tokens, batch.positions)
        ]
        step = engine.step

        def action(step=step, placed=placed) -> None:
            answers = [step(engine.params, *placed, None) for _ in range(4)]
            jax.block_until_ready(answers[-1])

        found[f"forward_{rows}"] = 4 * rows * LENGTH / median_seconds(action, warm=2, repeat=5)
        emit(found)
    best = max(found[f"forward_{rows}"] for rows in (8, ROWS, 32))
    arch = engine.forward.architecture
    found["forward"] = best
    found["tflops"] = best / LENGTH * arch.flops(LENGTH) / 1e12
    emit(found)
    left, right = (
        jax.random.normal(jax.random.key(n), (SIDE, SIDE), jax.numpy.bfloat16) for n in range(2)
    )
    product = jax.jit(lambda a, b: a @ b)
    seconds = median_seconds(lambda: jax.block_until_ready(product(left, right)))
    found["matrix_tflops_jax"] = 2 * SIDE**3 / seconds / 1e12
    return found


def to_disk(layers: list[int], batches_wanted: int, folder: Path) -> dict:
    """The real pipeline: units, tokens from a file, shards with digests, commit records."""
    import numpy as np

    from tpufleet.runtime.units import Units
    from tpufleet.workloads.activations import gangs, plans, verifying, workers
    from tpufleet.workloads.activations.storage import LocalFolder

    engine = build([f"resid_post.{layer}" for layer in layers])
    data = folder / "data.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    samples = batches_wanted * ROWS
    tokens = np.random.default_rng(1).integers(0, SHAPE["vocab_size"], (ROWS, LENGTH)).tolist()
    lines = [json.dumps({"tokens": row}) for row in tokens]
    data.write_text("\n".join(lines[n % ROWS] for n in range(samples)))
    (folder / "tokenizer.json").write_text(_TOKENIZER)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    storage = LocalFolder(folder / "out")
    plan = plans.adopt(
        storage,
        plans.Plan(
            model=str(folder),
            model_digest="random",
            tokenizer=str(folder),
            tokenizer_digest="random",
            data={"kind": "jsonl", "path": str(data)},
            data_digest="random",
            samples=samples,
            unit_samples=ROWS * max(4, batches_wanted // 6),
            sites=engine.forward.sites,
            widths=dict.fromkeys(engine.forward.sites, WIDTH),
            max_length=LENGTH,
            buckets=(LENGTH,),
            batch_tokens=ROWS * LENGTH,
        ),
    )
    engine.start(batch_of(ROWS))()  # compile before the clock starts
    units = Units(storage, count=plan.units, worker="bench")
    crew = gangs.Alone(units, lambda: False, poll=0.01)
    options = workers.Options(preparers=2, ahead=3, in_flight=3, fetched=3, writers=8)
    worker = workers.Worker(storage, plan, engine, crew, options=options)
    began = time.perf_counter()
    meter = worker.run()
    whole_run = time.perf_counter() - began
    report = verifying.verify(storage, deep=False)
    facts = {
        # From the second batch on, to the last commit; starting the tokenising processes is not in.
        "tokens_per_second": meter.tokens / meter.seconds(),
        "tokens_per_second_whole_run": samples * LENGTH / whole_run,
        "gigabytes": report.bytes / 1e9,
        "limit": meter.limit(),
        "busy": {stage.name: round(stage.busy, 2) for stage in meter._line.stages},
        "seconds": meter.seconds(),
        "whole": report.whole,
    }
    shutil.rmtree(folder)
    return facts


def disk_1() -> dict:
    return _disk("disk_1", [23], 100)


def disk_4() -> dict:
    return _disk("disk_4", LAYERS_4, 30)


def _disk(name: str, layers: list[int], count: int) -> dict:
    """On the disk, and on memory-backed files: the difference is the disk's."""
    found: dict = {}
    for place, root in (("disk", tempfile.gettempdir()), ("memory", "/dev/shm")):
        try:
            folder = Path(tempfile.mkdtemp(dir=root))
            found[f"{name}_{place}"] = to_disk(layers, count, folder / "run")
        except Exception as error:
            found[f"{name}_{place}_error"] = f"{type(error).__name__}: {error}"[:300]
        emit(found)
    return found


def host_24() -> dict:
    """All 24 layers into host memory by the ways that JAX has: numpy arrays by plain copies or by
    way of page-locked memory, and page-locked memory alone, which is what PyTorch's line does."""
    import jax

    from tpufleet.workloads.activations import meshes

    found: dict = {}
    steps, batch = 8, batch_of(ROWS)

    def rate(start: Callable, finish: Callable) -> float:
        """Two batches are in flight while a third is waited for."""
        waiting: list = []
        began = time.perf_counter()
        for _ in range(steps):
            waiting.append(start())
            if len(waiting) > 2:
                finish(waiting.pop(0))
        for item in waiting:
            finish(item)
        return steps * ROWS * LENGTH / (time.perf_counter() - began)

    def measure(name: str, start: Callable, finish: Callable) -> None:
        try:
            finish(start())
            found[name] = max(rate(start, finish) for _ in range(2))
        except Exception as error:
            found[f"{name}_error"] = f"{type(error).__name__}: {error}"[:300]
        emit(found)

    engine = build(["resid_post.*"])
    pinned = meshes.output(engine.mesh, "pinned_host")
    inside = jax.jit(engine.forward, out_shardings=pinned)
    tokens, positions = (
        meshes.place(array.copy(), meshes.batch(engine.mesh))
        for array in (batch.tokens, batch.positions)
    )
    wait = jax.block_until_ready
    measure("computed", lambda: engine.compute(batch), wait)
    measure("pinned_after", lambda: jax.device_put(engine.compute(batch), pinned), wait)
    measure("pinned_inside", lambda: inside(engine.params, tokens, positions, None), wait)
    measure("copy_arrays", lambda: engine.start(batch), lambda fetch: fetch())
    engine._host = pinned
    measure("pinned_arrays", lambda: engine.start(batch), lambda fetch: fetch())
    return found


def writers() -> dict:
    """Encoding and writing alone, beside the former gzip-pickle writer."""
    import ml_dtypes
    import numpy as np

    from tpufleet.workloads.activations import compression, shards

    chance = np.random.default_rng(0)
    rows = chance.normal(size=(32768, 896)).astype(ml_dtypes.bfloat16)
    found: dict = {"megabytes": rows.nbytes / 1e6}
    part = rows[:2048]
    began = time.perf_counter()
    gzip.compress(pickle.dumps({23: [{"sample_idx": 0, "activation": np.array(part)}]}), 9)
    found["gzip_pickle_bytes_per_second"] = part.nbytes / (time.perf_counter() - began)
    emit(found)
    folder = Path(tempfile.mkdtemp())
    for name, count in (("raw", 16), ("zstd", 2)):
        tensor = shards.Tensor(name="x", dtype="BF16", shape=(32768 * count, 896))
        draft = folder / f"{name}.safetensors"
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(2) as pool:
            began = time.perf_counter()
            writer = (
                shards.RawShardWriter(draft, name, [tensor], pool)
                if name == "raw"
                else compression.ZstdShardWriter(draft, name, [tensor], fold=["x"])
            )
            for _ in range(count):
                writer.append("x", rows)
            appended = time.perf_counter() - began
            file = writer.finish()
            seconds = time.perf_counter() - began
        found[f"{name}_bytes_per_second"] = count * rows.nbytes / seconds
        found[f"{name}_bytes_per_second_before_fsync"] = count * rows.nbytes / appended
        found[f"{name}_share"] = file.size / (count * rows.nbytes)
        emit(found)
    shutil.rmtree(folder)
    return found


_TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"},
    }
)
CHILDREN = {
    "torch": torch_lines,
    "forward": forward_only,
    "disk_1": disk_1,
    "disk_4": disk_4,
    "host_24": host_24,
    "writers": writers,
}


def emit(facts: dict) -> None:
    """The latest word counts, so that a killed child has still said something."""
    print("FACTS " + json.dumps(facts), flush=True)


# -- the parent ---------------------------------------------------------------------------------


def child(name: str, seconds: float, flags: str = "") -> dict:
    cache = Path(tempfile.gettempdir()) / "tpufleet-bench-cache"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    began = time.monotonic()
    try:
        result = subprocess.run(
            [sys.executable, __file__, "--child", name],
            env=environment,
            capture_output=True,
            text=True,
            timeout=max(seconds, 5),
        )
        text, fault = result.stdout, result.stderr if result.returncode else ""
    except subprocess.TimeoutExpired as late:
        text = (late.stdout or b"").decode(errors="replace")
        fault = f"stopped after {seconds:.0f} s"
    facts = [line[6:] for line in text.splitlines() if line.startswith("FACTS ")]
    found = json.loads(facts[-1]) if facts else {}
    if fault:
        found["fault"] = fault.strip()[-1200:]
    found["took"] = round(time.monotonic() - began, 1)
    print(f"# {name} {flags}: {json.dumps(found)}", flush=True)
    return found


def lines(found: dict) -> list[dict]:
    """What was reached, beside what it is compared with."""
    torch, best = found.get("torch", {}), found.get("forward", {})
    peers = [torch.get(name) for name in ("torch_eager", "torch_compiled")]
    peer = max(filter(None, peers), default=None)
    limits = [torch.get("matrix_tflops"), best.get("matrix_tflops_jax")]
    limit = max(filter(None, limits), default=None)
    forward = best.get("forward")
    other = [found.get(f"forward {name}", {}) for name in FLAGS]
    fastest = max([best, *other], key=lambda facts: facts.get("tflops") or 0.0)
    disk = {
        (count, place): found.get(f"disk_{count}", {}).get(f"disk_{count}_{place}", {})
        for count in (1, 4)
        for place in ("disk", "memory")
    }
    rates = {key: facts.get("tokens_per_second") for key, facts in disk.items()}
    host = found.get("host_24", {})
    ways = ("copy_arrays", "pinned_arrays", "pinned_after", "pinned_inside")
    landed = max(filter(None, (host.get(name) for name in ways)), default=None)
    pen = found.get("writers", {})
    table = [
        ("forward tokens/s against PyTorch's best", forward, peer, 1.0, "ratio"),
        ("forward TFLOP/s against the matrix limit", best.get("tflops"), limit, 0.75, "ratio"),
        ("the same with the best XLA flags", fastest.get("tflops"), limit, 0.75, "ratio"),
        ("1 layer to disk, tokens/s", rates[1, "disk"], peer, 600_000, "ours"),
        ("1 layer to disk against our forward", rates[1, "disk"], forward, 0.9, "ratio"),
        ("1 layer to memory files against forward", rates[1, "memory"], forward, 0.9, "ratio"),
        ("4 layers to disk, tokens/s", rates[4, "disk"], peer, 1.0, "ratio"),
        ("4 layers to memory files, tokens/s", rates[4, "memory"], peer, 1.0, "ratio"),
        (
            "24 layers to host memory, tokens/s",
            landed,
            torch.get("torch_24_layers_pinned"),
            500_000,
            "ours",
        ),
        (
            "write raw shards, bytes/s against gzip-pickle",
            pen.get("raw_bytes_per_second_before_fsync"),
            pen.get("gzip_pickle_bytes_per_second"),
            1e9,
            "ours",
        ),
        (
            "write zstd shards, bytes/s against gzip-pickle",
            pen.get("zstd_bytes_per_second"),
            pen.get("gzip_pickle_bytes_per_second"),
            10.0,
            "ratio",
        ),
    ]
    rows = []
    for name, ours, anchor, goal, judged in table:
        ratio = ours / anchor if ours and anchor else None
        value = ours if judged == "ours" else ratio
        met = None if value is None else value >= goal
        rows.append(
            {"name": name, "ours": ours, "anchor": anchor, "ratio": ratio, "goal": goal, "met": met}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", choices=sorted(CHILDREN))
    parser.add_argument("--seconds", type=float, default=460.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.child:
        emit(CHILDREN[arguments.child]())
        return
    deadline = time.monotonic() + arguments.seconds
    left = lambda: deadline - time.monotonic()
    found: dict = {}
    for name, limit in LIMITS.items():
        if left() > 15:
            found[name] = child(name, min(limit, left() - 5))
    # With the time that is left: does another choice of matrix kernels run faster?
    for name, flags in FLAGS.items():
        if left() > 50:
            found[f"forward {name}"] = child("forward", left() - 5, flags)
    rows = lines(found)
    print(f"\n{'':48}{'ours':>14}{'anchor':>14}{'ratio':>8}{'goal':>10}  met")
    for row in rows:
        cells = [
            f"{row[key]:>{width},.2f}" if row[key] is not None else f"{'-':>{width}}"
            for key, width in (("ours", 14), ("anchor", 14), ("ratio", 8), ("goal", 10))
        ]
        print(f"{row['name']:48}{''.join(cells)}  {row['met']}")
    for row in rows:
        print(json.dumps(row))
    if arguments.out:
        arguments.out.write_text(json.dumps({"lines": rows, "facts": found}))


if __name__ == "__main__":
    main()
