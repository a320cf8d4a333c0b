"""A small JAX training program that resumes: a linear model with the batch sharded over all chips.

python train.py lr=0.1        # standalone on a laptop
tpu submit job.yaml --follow  # on every host of a slice
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpufleet import runtime

SETTINGS = {"lr": 0.1, "steps": 60, "every": 10}
FEATURES, ROWS = 8, 1024
TRUTH = np.linspace(-1, 1, FEATURES, dtype=np.float32)


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Derived from the step, so that a resumed run sees the same data."""
    x = np.random.default_rng(step).standard_normal((ROWS, FEATURES), np.float32)
    return x, x @ TRUTH


def loss_fn(weights: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((x @ weights - y) ** 2)


def main(lr: float, steps: int, every: int) -> None:
    here = runtime.initialize()  # joins the other processes; handles SIGTERM
    mesh = Mesh(np.array(jax.devices()), ("chip",))
    rows, replicated = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["chip"], []))

    weights, start = np.zeros(FEATURES, np.float32), 0
    if newest := runtime.checkpoints.latest():
        weights, start = np.load(newest.part(0) / "weights.npy"), newest.step
    weights = jax.device_put(weights, replicated)
    print(f"process {here.process_id}: {jax.device_count()} chips, from step {start}", flush=True)

    @jax.jit
    def update(weights: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(loss_fn)(weights, x, y)
        return weights - lr * gradient, loss

    def write(folder: Path) -> None:  # every process writes its part; only process 0 has data
        if here.process_id == 0:
            np.save(folder / "weights.npy", np.asarray(weights))

    loss = None  # stays so if it was already complete
    for step in range(start + 1, steps + 1):
        x, y = batch(step)
        shards = (jax.make_array_from_callback(a.shape, rows, a.__getitem__) for a in (x, y))
        weights, loss = update(weights, *shards)
        loss = float(loss)  # waits for the step; see "Simulated slices" in docs/workloads.md
        runtime.progress(step, total=steps, loss=loss)
        stop = runtime.should_stop_together()
        if stop or step % every == 0 or step == steps:
            runtime.checkpoints.save(step, write)
            runtime.checkpoints.prune(keep=2)
        if stop and step < steps:
            sys.exit(f"asked to stop; saved step {step}")  # not 0: the job is not complete
    if here.process_id == 0:
        error = float(np.max(np.abs(np.asarray(weights) - TRUTH)))
        if loss is not None:
            result = {"steps": steps, "loss": loss, "error": error}
            Path(here.checkpoint_dir, "result.json").write_text(json.dumps(result))
        print(f"done: step {max(start, steps)}, largest error {error:.3g}", flush=True)


if __name__ == "__main__":
    arguments = dict(argument.split("=", 1) for argument in sys.argv[1:])
    main(**{name: type(value)(arguments.get(name, value)) for name, value in SETTINGS.items()})
