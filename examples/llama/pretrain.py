"""Pretrain a LLaMA-class model. A preempted run continues bit for bit; on other numbers of slices,
with the same batches.

python pretrain.py               # a tiny model, standalone on a laptop
tpu submit job.yaml --follow     # on every host of a slice
tpu submit elastic.yaml          # on 2 to 4 slices, as many as there are
tpu submit full.yaml             # 8 billion parameters, on real slices
"""

import json
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import model
import numpy as np
import optax
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tpufleet import runtime

SETTINGS = {
    "model": "tiny", "steps": 40, "every": 10, "batch": 16, "lr": 3e-3, "warmup": 10, "seed": 0,
    "pause": 0.0,  # seconds after each step, to simulate more work
    "length": 0,  # of sequences; 0: that of the model
    "data": "",  # a .npy file of tokens; empty: sequences made up from the seed and the step
}  # fmt: skip
# Dense bfloat16 FLOP/s of one chip, by the beginning of its name in JAX: from
# https://cloud.google.com/tpu/docs/system-architecture-tpu-vm and NVIDIA's data sheet of the H200.
PEAK_FLOPS = {
    "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5p": 459e12, "TPU v5": 459e12,
    "TPU v6 lite": 918e12, "TPU v6e": 918e12, "NVIDIA H200": 989e12, "NVIDIA H100": 989e12,
}  # fmt: skip


def optimizer(lr: float, warmup: int, steps: int) -> optax.GradientTransformation:
    rate = optax.warmup_cosine_decay_schedule(0.0, lr, min(warmup, steps // 2), steps, lr / 10)
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1)
    )


def tokens_of(step: int, config: model.Config, batch: int, seed: int, data: str) -> np.ndarray:
    """The batch of a step follows from the step alone, so a resumed run needs no other state."""
    rng = np.random.default_rng((seed, step))
    if data:
        tokens = np.load(data, mmap_mode="r")
        starts = rng.integers(len(tokens) - config.length, size=batch)
        return np.stack([tokens[start : start + config.length + 1] for start in starts]).astype(int)
    first, stride = rng.integers(config.vocabulary, size=(2, batch, 1))
    return (first + (stride % 7 + 1) * np.arange(config.length + 1)) % config.vocabulary


def make_train_step(
    config: model.Config, transform: optax.GradientTransformation, shardings: Any = None
) -> Any:
    """Computes in bfloat16 where chips are made for it; parameters stay in float32."""
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16

    def loss_fn(params: model.Params, tokens: jax.Array, weights: jax.Array) -> jax.Array:
        return weights @ model.losses(params, tokens, config, dtype)

    @partial(jax.jit, donate_argnums=0, out_shardings=(shardings, None))
    def train_step(state: Any, tokens: jax.Array, weights: jax.Array) -> tuple[Any, jax.Array]:
        """Adds up the rounds of the batch, of which there are several on fewer slices."""
        params, scaled = state["params"], weights / weights.sum()

        def add_round(total: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(params, *part)), None

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        (loss, gradients), _ = jax.lax.scan(add_round, zero, (tokens, scaled))
        updates, moments = transform.update(gradients, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss

    return train_step


def peak_flops() -> float | None:
    kind = jax.devices()[0].device_kind
    return next((peak for name, peak in PEAK_FLOPS.items() if kind.startswith(name)), None)


@jax.jit
def fingerprint(state: Any) -> jax.Array:
    """The sum of all bits: two runs that agree in it have the same state."""
    words = [jax.lax.bitcast_convert_type(leaf, jnp.uint32) for leaf in jax.tree.leaves(state)]
    return sum(jnp.sum(leaf, dtype=jnp.uint32) for leaf in words)


def main(*, model_name, steps, every, batch, lr, warmup, seed, pause, length, data) -> None:
    here = runtime.initialize()  # joins the other processes; handles SIGTERM
    config = model.MODELS[model_name]
    config = replace(config, length=length or config.length)
    transform = optimizer(lr, warmup, steps)
    mesh = model.make_mesh(here.num_slices)
    whole = runtime.global_batch(batch)  # the same on any number of slices
    rows = NamedSharding(mesh, P(None, ("data", "fsdp")))

    def init() -> dict[str, Any]:
        params = model.init(config, seed)
        return {"params": params, "moments": transform.init(params)}

    # No process ever holds the whole state: it is made, and read, in shards.
    shardings = jax.tree.map(partial(model.fsdp, mesh), jax.eval_shape(init))
    train_step = make_train_step(config, transform, shardings)
    # Saves run in the background; on a stop request the last one is waited for.
    options = ocp.CheckpointManagerOptions(save_interval_steps=every, max_to_keep=2)
    with ocp.CheckpointManager(here.checkpoint_dir, options=options) as manager:
        start = manager.latest_step() or 0
        if start:
            target = jax.tree.map(
                lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at),
                jax.eval_shape(init), shardings,
            )  # fmt: skip
            state = manager.restore(start, args=ocp.args.StandardRestore(target))
        else:
            state = jax.jit(init, out_shardings=shardings)()
        size = f"{model.count(config) / 1e6:.3g} million parameters"
        print(
            f"process {here.process_id}: {size} on {dict(mesh.shape)}, from step {start}",
            flush=True,
        )

        loss, ended = None, time.monotonic()
        for step in range(start + 1, steps + 1):
            tokens = tokens_of(step, config, batch, seed, data).astype(np.int32)
            parts = (
                jax.make_array_from_callback(part.shape, rows, part.__getitem__)
                for part in whole.split(tokens)
            )
            state, loss = train_step(state, *parts)
            loss = float(loss)  # waits for the step; see "Simulated slices" in docs/workloads.md
            began, ended = ended, time.monotonic()
            rate = batch * config.length / (ended - began)
            metrics = {"loss": loss, "tokens_per_second": rate}
            if peak := peak_flops():
                metrics["mfu"] = rate * model.flops_per_token(config) / (peak * mesh.size)
            runtime.progress(step, total=steps, **metrics)
            time.sleep(pause)
            stop = runtime.should_stop_together()
            manager.save(step, args=ocp.args.StandardSave(state), force=stop or step == steps)
            if stop and step < steps:
                manager.wait_until_finished()
                sys.exit(f"asked to stop; saved step {step}")  # not 0: the job is not complete
        if loss is not None:
            result = {"steps": steps, "loss": loss, "state": int(fingerprint(state))}
            if here.process_id == 0:
                epath.Path(here.checkpoint_dir, "result.json").write_text(json.dumps(result))
                print(f"done: {result}", flush=True)


if __name__ == "__main__":
    arguments = dict(argument.split("=", 1) for argument in sys.argv[1:])
    settings = {key: type(value)(arguments.get(key, value)) for key, value in SETTINGS.items()}
    main(model_name=settings.pop("model"), **settings)
