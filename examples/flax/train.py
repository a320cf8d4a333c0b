"""A transformer in Flax NNX that continues bit for bit after a preemption.

Data parallel between slices, FSDP within. Orbax saves the parameters, the optimizer and the
position of the Grain input pipeline together, so that no batch is seen twice or left out. With
`emergency`, every host also keeps checkpoints on its own disk: hosts of a new slice get them from
the hosts of another one.

python train.py               # standalone on a laptop
tpu submit job.yaml --follow  # on every host of a slice
"""

import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpufleet import runtime

SETTINGS = {
    "steps": 40, "every": 10, "batch": 16, "lr": 3e-3, "seed": 0,
    "pause": 0.0,  # seconds after each step, to simulate more work
    "layers": 2, "width": 64, "heads": 4, "length": 32, "vocabulary": 64,
    "emergency": 0,  # steps between two checkpoints on the hosts; 0: none
    "data": "",  # a .npy file of tokens; empty: tokens made up from the seed
}  # fmt: skip


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    def __init__(self, *, layers, width, heads, length, vocabulary, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(vocabulary, width, rngs=rngs)
        self.positions = nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


class Windows:
    """Windows of a long array of tokens, by number: a random-access source for Grain."""

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, number: int) -> np.ndarray:
        start = number * self.length
        return np.asarray(self.tokens[start : start + self.length + 1], np.int32)


def made_up_tokens(seed: int, vocabulary: int, count: int = 100_000) -> np.ndarray:
    """Each token follows from the one before it, but for one in ten."""
    rng = np.random.default_rng(seed)
    follows, tokens = rng.permutation(vocabulary), rng.integers(vocabulary, size=count)
    for index in np.flatnonzero(rng.random(count - 1) < 0.9) + 1:
        tokens[index] = follows[tokens[index - 1]]
    return tokens


def batches(source: Windows, here: runtime.Context, batch: int, seed: int) -> Iterator[np.ndarray]:
    """What this process reads: every n-th window of each epoch, each epoch in another order."""
    windows = grain.MapDataset.source(source).shuffle(seed)[here.process_id :: here.num_processes]
    return iter(windows.repeat().batch(batch // here.num_processes).to_iter_dataset())


def make_mesh(slices: int) -> Mesh:
    """`data` runs between slices over the data center network, `fsdp` within one over ICI."""
    by_slice = np.array(jax.devices()).reshape(slices, -1)  # processes are ordered by slice
    rows = [mesh_utils.create_device_mesh((row.size,), list(row)) for row in by_slice]
    return Mesh(np.stack(rows), ("data", "fsdp"))


def fsdp(mesh: Mesh, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
    """Split the largest dimension that can be split; small leaves are replicated."""
    size = mesh.shape["fsdp"]
    able = [(length, axis) for axis, length in enumerate(leaf.shape) if length % size == 0]
    if not able or leaf.size < 1024:
        return NamedSharding(mesh, P())
    axis = max(able)[1]
    return NamedSharding(mesh, P(*[None] * axis, "fsdp"))


def loss_fn(model: Transformer, tokens: jax.Array) -> jax.Array:
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def open_checkpoints(here: runtime.Context, mesh: Mesh, every: int, emergency: int) -> Any:
    """Saves run in the background; on a stop request the last one is waited for."""
    if not emergency or here.local_dir is None:
        options = ocp.CheckpointManagerOptions(save_interval_steps=every, max_to_keep=2)
        return ocp.CheckpointManager(here.checkpoint_dir, options=options)
    # Two tiers: the disks of the hosts, and the checkpoint location. Experimental in Orbax.
    from orbax.checkpoint.experimental.emergency.p2p import checkpoint_manager
    from orbax.checkpoint.experimental.emergency.p2p import options as tiers

    on_host = epath.Path(here.local_dir, "emergency")  # the next attempt on this host finds it
    for folder in (on_host, epath.Path(here.checkpoint_dir)):
        folder.mkdir(parents=True, exist_ok=True)
    return checkpoint_manager.CheckpointManager(
        mesh, None, on_host, here.checkpoint_dir,
        options=tiers.CheckpointManagerOptions(
            local=tiers.LocalCheckpointOptions(save_interval_steps=emergency, max_to_keep=2),
            persistent=tiers.PersistentCheckpointOptions(save_interval_steps=every, max_to_keep=2),
            replica_axis_index=0,  # of the mesh: each slice has the whole state
        ),
    )  # fmt: skip


@jax.jit
def fingerprint(state: Any) -> jax.Array:
    """The sum of all bits: two runs that agree in it have the same state."""
    words = [jax.lax.bitcast_convert_type(leaf, jnp.uint32) for leaf in jax.tree.leaves(state)]
    return sum(jnp.sum(leaf, dtype=jnp.uint32) for leaf in words)


def main(*, steps, every, batch, lr, seed, pause, emergency, data, **shape) -> None:
    here = runtime.initialize()  # joins the other processes; handles SIGTERM
    mesh = make_mesh(here.num_slices)
    rows, replicated = NamedSharding(mesh, P(("data", "fsdp"))), NamedSharding(mesh, P())

    def build() -> tuple[Transformer, nnx.Optimizer]:
        model = Transformer(**shape, rngs=nnx.Rngs(seed))
        return model, nnx.Optimizer(model, optax.adamw(lr), wrt=nnx.Param)

    # No process ever holds the whole state: it is made, and read, in shards.
    graph, shapes = nnx.split(nnx.eval_shape(build))
    shardings = jax.tree.map(partial(fsdp, mesh), shapes)

    @partial(jax.jit, donate_argnums=0, out_shardings=(shardings, replicated))
    def train_step(state: nnx.State, tokens: jax.Array) -> tuple[nnx.State, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        loss, gradients = nnx.value_and_grad(loss_fn)(model, tokens)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    tokens = np.load(data, mmap_mode="r") if data else made_up_tokens(seed, shape["vocabulary"])
    reader = batches(Windows(tokens, shape["length"]), here, batch, seed)
    with open_checkpoints(here, mesh, every, emergency) as manager:
        start = manager.latest_step() or 0
        if start:
            target = jax.tree.map(
                lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at),
                shapes, shardings,
            )  # fmt: skip
            restored = manager.restore(
                start,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeRestore(
                        item=target,
                        restore_args=ocp.checkpoint_utils.construct_restore_args(target),
                    ),
                    data_iter=grain.checkpoint.CheckpointRestore(reader),
                ),
            )
            state = restored["state"]
        else:
            state = jax.jit(lambda: nnx.state(build()), out_shardings=shardings)()
        print(f"process {here.process_id}: {dict(mesh.shape)}, from step {start}", flush=True)

        loss = None
        for step in range(start + 1, steps + 1):
            global_batch = jax.make_array_from_process_local_data(rows, next(reader))
            state, loss = train_step(state, global_batch)
            loss = float(loss)  # waits for the step; see "Simulated slices" in docs/workloads.md
            runtime.progress(step, total=steps, loss=loss)
            time.sleep(pause)
            stop = runtime.should_stop_together()
            manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(state),
                    data_iter=grain.checkpoint.CheckpointSave(reader),
                ),
                force=stop or step == steps,
            )
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
    main(**{name: type(value)(arguments.get(name, value)) for name, value in SETTINGS.items()})
