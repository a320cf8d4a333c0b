"""A small JAX training program whose result is bit-identical after preemptions.

    python -m tpufleet.demo.train steps=60 checkpoint_every=10 seed=0 step_seconds=0

It runs on one process or many. The batch is sharded over hosts, the hidden layer over the chips of
each host. Every number depends only on the seed and the step, so a run that was killed and resumed
ends with the same parameters as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpufleet import runtime

INPUTS, HIDDEN, ROWS_PER_HOST = 16, 256, 64
LAYOUT = {
    "in": PartitionSpec(None, "chip"),
    "bias": PartitionSpec("chip"),
    "out": PartitionSpec("chip"),
}
ROWS = PartitionSpec("host")


def initial_state(seed: int) -> dict[str, Any]:
    """Parameters, and the first and second moments of Adam."""
    rng = np.random.default_rng(seed)
    params = {
        "in": rng.standard_normal((INPUTS, HIDDEN), np.float32) / np.float32(INPUTS**0.5),
        "bias": np.zeros(HIDDEN, np.float32),
        "out": rng.standard_normal(HIDDEN, np.float32) / np.float32(HIDDEN**0.5),
    }
    zeros = {name: np.zeros_like(value) for name, value in params.items()}
    return {"params": params, "mean": zeros, "square": zeros}


def batch(seed: int, step: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Derived from the step, so a resumed run needs no data iterator state."""
    x = np.random.default_rng((seed, step)).standard_normal((rows, INPUTS), np.float32)
    return x, np.sin(4 * x.mean(axis=1))


def loss_fn(params: dict[str, Any], x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["in"] + params["bias"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


def train_step(
    state: dict[str, Any], t: jax.Array, x: jax.Array, y: jax.Array
) -> tuple[dict[str, Any], jax.Array]:
    """One step of Adam."""
    loss, gradient = jax.value_and_grad(loss_fn)(state["params"], x, y)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], gradient)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, state["square"], gradient)

    def update(param: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
        return param - 0.01 * (m / (1 - 0.9**t)) / (jnp.sqrt(s / (1 - 0.999**t)) + 1e-8)

    params = jax.tree.map(update, state["params"], mean, square)
    return {"params": params, "mean": mean, "square": square}, loss


def to_device(value: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def gather_local(array: jax.Array) -> np.ndarray:
    """The whole array from the shards on this host, which together cover it."""
    value = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        value[shard.index] = np.asarray(shard.data)
    return value


def save(step: int, state: dict[str, Any], notes: dict[str, Any]) -> None:
    """Every process takes part; process 0 writes, since its shards cover the whole state."""

    def write(folder: Path) -> None:
        if jax.process_index() == 0:
            for group, values in state.items():
                arrays: dict[str, Any] = {
                    name: gather_local(value) for name, value in values.items()
                }
                np.savez(folder / f"{group}.npz", **arrays)
            (folder / "notes.json").write_text(json.dumps(notes))

    runtime.checkpoints.save(step, write)
    runtime.checkpoints.prune(keep=3)


def load(checkpoint: runtime.checkpoints.Checkpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    part = checkpoint.part(0)
    state = {}
    for group in ("params", "mean", "square"):
        with np.load(part / f"{group}.npz") as values:
            state[group] = {name: values[name] for name in LAYOUT}
    return state, json.loads((part / "notes.json").read_text())


def write_result(folder: Path, state: dict[str, Any], steps: int, notes: dict[str, Any]) -> None:
    digest = hashlib.sha256()
    for name, value in sorted(state["params"].items()):
        digest.update(name.encode() + gather_local(value).tobytes())
    result = {"steps": steps, "params_sha256": digest.hexdigest(), **notes}
    temporary = folder / ".result.json"
    temporary.write_text(json.dumps(result, indent=2))
    os.replace(temporary, folder / "result.json")
    loss, attempts = float.fromhex(notes["loss"]), len(notes["attempts"])
    print(f"done: loss {loss:.6f} after {steps} steps, attempts: {attempts}", flush=True)


def main(steps: int, checkpoint_every: int, seed: int, step_seconds: float) -> None:
    here = runtime.initialize()
    mesh = Mesh(np.array(jax.devices()).reshape(jax.process_count(), -1), ("host", "chip"))
    layout = {name: NamedSharding(mesh, spec) for name, spec in LAYOUT.items()}
    rows, everywhere = NamedSharding(mesh, ROWS), NamedSharding(mesh, PartitionSpec())

    state, start = initial_state(seed), 0
    notes: dict[str, Any] = {"attempts": [], "loss": ""}
    if checkpoint := runtime.checkpoints.latest():
        (state, notes), start = load(checkpoint), checkpoint.step
    notes["attempts"].append(here.attempt)
    state = {
        group: {name: to_device(value, layout[name]) for name, value in values.items()}
        for group, values in state.items()
    }
    train = jax.jit(train_step, out_shardings=(dict.fromkeys(state, layout), everywhere))
    print(f"{jax.device_count()} devices, {jax.process_count()} hosts, step {start}", flush=True)

    for step in range(start, steps):
        started = time.monotonic()
        data = batch(seed, step, ROWS_PER_HOST * jax.process_count())
        state, result = train(
            state, np.float32(step + 1), *(to_device(part, rows) for part in data)
        )
        loss = float(result)  # blocks: simulated chips deadlock with two steps in flight
        notes["loss"] = loss.hex()
        runtime.progress(step + 1, total=steps, loss=loss)
        stop = runtime.should_stop_together()
        if stop or (step + 1) % checkpoint_every == 0 or step + 1 == steps:
            save(step + 1, state, notes)
        if stop and step + 1 < steps:
            sys.exit(f"asked to stop; saved step {step + 1} of {steps}")
        time.sleep(max(0.0, started + step_seconds - time.monotonic()))
    if here.process_id == 0:
        write_result(Path(here.checkpoint_dir), state, steps, notes)


SETTINGS: dict[str, Any] = {"steps": 60, "checkpoint_every": 10, "seed": 0, "step_seconds": 0.0}

if __name__ == "__main__":
    arguments = dict(argument.split("=", 1) for argument in sys.argv[1:])
    if unknown := arguments.keys() - SETTINGS.keys():
        sys.exit(f"unknown setting: {', '.join(unknown)}; known settings: {', '.join(SETTINGS)}")
    main(
        **{name: type(default)(arguments.get(name, default)) for name, default in SETTINGS.items()}
    )
