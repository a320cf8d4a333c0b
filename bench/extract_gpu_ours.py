"""Throughput of tpufleet: forward pass, transfer to host memory, and the whole pipeline."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from extract_gpu_files import plain_writing
from extract_gpu_shape import BATCHES, LENGTH, ROWS, SHAPE, SIDE, WIDTH, emit, paces

LAYERS = {1: [23], 4: [5, 11, 17, 23]}
LARGEST_DIFFERENCE = 0.01  # of bf16; another sample's activations differ by more than 1


def random_parameters(
    arch: Any,
    *,
    depth: int,
    dtype: Any,
    mesh: Any,
    seed: int = 0,
    final_norm: bool = False,
) -> dict[str, Any]:
    """Of the right shapes, created on the devices."""
    import jax
    import jax.numpy as jnp

    from tpufleet_activations.model import meshes, weights

    wanted = weights.parameter_shapes(arch, depth, final_norm, grouped=mesh.shape["tensor"] > 1)

    def one(name: str, shape: tuple[int, ...], key: Any) -> Any:
        kind = weights.parameter_dtype(name, dtype)
        make = lambda key: (
            jnp.ones(shape, kind)
            if "norm" in name
            else (jax.random.normal(key, shape, jnp.float32) * 0.02).astype(kind)
        )
        return jax.jit(make, out_shardings=meshes.parameter_sharding(mesh, name))(key)

    keys = iter(jax.random.split(jax.random.key(seed), len(wanted) + len(wanted["layers"])))
    params: dict[str, Any] = {
        name: one(name, shape, next(keys)) for name, shape in wanted.items() if name != "layers"
    }
    params["layers"] = {
        name: one(name, shape, next(keys)) for name, shape in wanted["layers"].items()
    }
    return params


def build(
    sites: list[str], gate: str | None = None, memory: str = "auto", shape: dict | None = None
):
    import jax
    import jax.numpy as jnp

    from tpufleet_activations.model import (
        architectures,
        attention,
        decoder,
        engines,
        gated_mlp,
        meshes,
    )
    from tpufleet_activations.model import sites as site_names

    arch = architectures.from_config(json.dumps(shape or SHAPE))
    names = site_names.resolve(sites, arch)
    device = jax.devices()[0]
    mesh = meshes.build_mesh([device], {}, arch)
    params = random_parameters(
        arch,
        depth=site_names.layers_needed(names, arch),
        dtype=jnp.bfloat16,
        mesh=mesh,
        final_norm=False,
    )
    chosen = gate or gated_mlp.choose_kernel(
        device=device,
        dtype=jnp.bfloat16,
        activation=arch.activation,
        biased=arch.mlp_bias,
        width=arch.hidden,
        experts=bool(arch.experts),
        mesh=mesh,
    )
    forward = decoder.Forward(
        architecture=arch,
        sites=names,
        platform=device.platform,
        mesh=mesh,
        gate_kernel=chosen,
        unavailable=attention.unavailable_kernels(
            platform=device.platform,
            dtype=jnp.bfloat16,
            head_dim=arch.head_dim,
            softcap=arch.softcap,
            window=arch.window,
        ),
    )
    return engines.Engine(forward, params, mesh, memory=memory)


def tokens_of(rows: int):
    return tokens_of_shape(SHAPE, rows, LENGTH)


def batch_of(rows: int):
    from tpufleet_activations.pipeline import batches

    return next(
        batches.make_batches(
            list(tokens_of(rows)),
            batching="bucket",
            buckets=(LENGTH,),
            batch_tokens=rows * LENGTH,
        )
    )


def forward_paces(engine, rows: int) -> dict[str, float]:
    """Tokens per second of the whole model, with the output left on the device."""
    import jax
    import numpy as np

    from tpufleet_activations.model import meshes

    batch = batch_of(rows)
    placed = [
        meshes.shard_array(np.ascontiguousarray(array), meshes.batch_sharding(engine.mesh))
        for array in (batch.tokens, batch.positions)
    ]
    results = paces(lambda: engine.step(engine.params, *placed, None), jax.block_until_ready)
    return {name: rows * LENGTH / seconds for name, seconds in results.items()}


def forward_only() -> dict:
    import jax

    results: dict = {"device": jax.devices()[0].device_kind, "matrix": matrix_paces()}
    emit(results)
    work = 0.0
    for gate in (None, "plain"):
        engine = build(["resid_post.23"], gate)
        work = engine.forward.architecture.flops(LENGTH) / LENGTH
        for rows in (ROWS // 2, ROWS, 2 * ROWS) if gate is None else (ROWS,):
            name = f"{engine.forward.gate_kernel}_{rows}"
            results.setdefault("runs", {})[name] = forward_paces(engine, rows)
            emit(results)
    for pace in ("rested", "lasting"):
        best = max(run[pace] for run in results["runs"].values())
        results[pace] = {"tokens_per_second": best, "tflops": best * work / 1e12}
    return results


def matrix_paces() -> dict[str, float]:
    """TFLOP/s of the product of two large matrices."""
    import jax

    left, right = (
        jax.random.normal(jax.random.key(n), (SIDE, SIDE), jax.numpy.bfloat16) for n in range(2)
    )
    product = jax.jit(lambda a, b: a @ b)
    results = paces(lambda: product(left, right), jax.block_until_ready)
    return {name: 2 * SIDE**3 / seconds / 1e12 for name, seconds in results.items()}


def tokens_of_shape(shape: dict, rows: int, length: int):
    import numpy as np

    return np.random.default_rng(0).integers(0, shape["vocab_size"], (rows, length), np.int32)


def plan_of(
    engine, folder: Path, count: int, *, shape: dict = SHAPE, rows: int = ROWS, length: int = LENGTH
):
    """A plan of so many batches, written to a dataset in `folder`."""
    from tpufleet_activations import plans
    from tpufleet_activations.inputs import sources, tokenization
    from tpufleet_activations.io.storage import LocalFolder
    from tpufleet_activations.pipeline import locations

    data = folder / "data.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    tokens = tokens_of_shape(shape, rows, length).tolist()
    lines = [json.dumps({"tokens": row}) for row in tokens]
    data.write_text("\n".join(lines[n % rows] for n in range(count * rows)))
    (folder / "tokenizer.json").write_text(_TOKENIZER)
    (folder / "config.json").write_text(json.dumps(shape))
    storage = LocalFolder(folder / "out")
    source = {"kind": "jsonl", "path": str(data)}
    found = locations.resolve(model=str(folder), tokenizer=str(folder), data=source)
    sites = engine.forward.sites
    plan = plans.ExtractionPlan(
        model=str(folder),
        model_digest="random",
        tokenizer=str(folder),
        tokenizer_digest=tokenization.Tokenizer(folder).digest(),
        data=source,
        data_digest=sources.open_files(found.data).digest(),
        samples=count * rows,
        unit_samples=rows * max(8 // len(sites), 1),
        sites=sites,
        widths=dict.fromkeys(sites, shape["hidden_size"]),
        max_length=length,
        buckets=(length,),
        batch_tokens=rows * length,
        batching="auto",
        estimate=dict.fromkeys(("tokens", "stored_tokens"), count * rows * length),
    )
    return storage, plans.write(storage, plan)


def to_disk(layers: list[int], count: int, folder: Path) -> dict:
    """The real pipeline: units, tokens from a file, shards with digests, commit records."""
    from tpufleet.runtime.units import Units
    from tpufleet_activations.io import verification
    from tpufleet_activations.model import host_memory
    from tpufleet_activations.pipeline import gangs, locations, workers

    engine = build([f"resid_post.{layer}" for layer in layers])
    storage, plan = plan_of(engine, folder, count)
    options = workers.default_options(os.cpu_count() or 1)  # as the command
    host_memory.reserve(engine.mesh, "auto", workers.outputs_on_host(plan, options))
    for _ in range(4):  # compile before the clock starts
        engine.start(batch_of(ROWS))()
    alone = forward_paces(engine, ROWS)["lasting"]
    units = Units(storage, count=plan.units, worker="bench")
    coordinator = gangs.SoloCoordinator(units, lambda: False, poll=0.01)
    opened = workers.OpenedEngine(engine)
    worker = workers.Worker(
        storage, plan, locations.resolve_plan(plan), opened, coordinator, options=options
    )
    began = time.perf_counter()
    meter = worker.run()
    whole_run = time.perf_counter() - began
    rate, seconds = meter.tokens_per_second(), meter.seconds()  # before the checks below
    report = verification.verify(storage, deep=False)
    difference = largest_difference(storage, engine)
    facts = {
        # As the command says: from the first batch to the last commit.
        "tokens_per_second": rate,
        "tokens_per_second_whole_run": count * ROWS * LENGTH / whole_run,
        "forward_alone": alone,
        "gigabytes": report.bytes / 1e9,
        "bytes_per_second": report.bytes / seconds,
        "limit": meter.bottleneck(),
        "busy": {name: round(busy, 2) for name, busy in meter.stage_seconds().items()},
        "seconds": seconds,
        "whole": report.intact,
        "largest_difference": difference,
        "as_computed": difference < LARGEST_DIFFERENCE,
    }
    shutil.rmtree(folder)
    return facts


def largest_difference(storage, engine) -> float:
    """Of stored samples from a new forward pass of the same program, relative. On a GPU they need
    not be equal bit for bit: samples are at other places in their batches than in this pass."""
    import numpy as np

    from tpufleet_activations.io import datasets

    dataset = datasets.Dataset(storage)
    values = engine.start(batch_of(ROWS))()[0].values
    step = max(len(dataset) // 100, 1)

    def difference(sample: int, site: str) -> float:
        stored, computed = dataset.read(sample, site), values[site][sample % ROWS]
        ours, theirs = stored.astype(np.float32), computed.astype(np.float32)
        return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))

    return max(
        difference(sample, site)
        for sample in range(0, len(dataset), step)
        for site in dataset.sites
    )


def disk_1() -> dict:
    return _disk(1)


def disk_4() -> dict:
    return _disk(4)


def _disk(number: int) -> dict:
    """On disk and on memory-backed files, each with the rate of plain writes there."""
    results: dict = {}
    for place, root in (("disk", tempfile.gettempdir()), ("memory", "/dev/shm")):
        try:
            folder = Path(tempfile.mkdtemp(dir=root))
            results[f"{place}_limit"] = plain_writing(folder)
            results[place] = to_disk(LAYERS[number], BATCHES[number], folder / "run")
        except Exception as error:
            results[f"{place}_error"] = f"{type(error).__name__}: {error}"[:300]
        emit(results)
    return results


def host_24() -> dict:
    """All 24 layers to host memory as numpy arrays, as in the pipeline; for comparison without the
    transfer, and with plain copies."""
    import jax

    results: dict = {}
    batch = batch_of(ROWS)

    def rate(start: Callable, finish: Callable, steps: int) -> float:
        """With two batches in flight while waiting for a third."""
        waiting: list = []
        began = time.perf_counter()
        for _ in range(steps):
            waiting.append(start())
            if len(waiting) > 2:
                finish(waiting.pop(0))
        for item in waiting:
            finish(item)
        return steps * ROWS * LENGTH / (time.perf_counter() - began)

    engine = build(["resid_post.*"])
    plain = build(["resid_post.*"], memory="plain")
    for name, start, finish, steps in (
        ("computed", lambda: engine.compute(batch), jax.block_until_ready, 12),
        ("arrays", lambda: engine.start(batch), lambda fetch: fetch(), 12),
        ("arrays_by_plain_copies", lambda: plain.start(batch), lambda fetch: fetch(), 3),
    ):
        rate(start, finish, 4)
        results[name] = max(rate(start, finish, steps) for _ in range(2))
        emit(results)
    results["bytes_per_second"] = results["arrays"] * 24 * WIDTH * 2
    return results


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
