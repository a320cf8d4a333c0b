"""Hello world of sharding: a chain of products, data parallel between slices and FSDP within.

How many ways each axis is split follows from the slices that the job got; nothing is typed.

python shardings.py           # standalone on a laptop
tpu submit job.yaml --follow  # on two slices
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpufleet import runtime

SETTINGS = {"batch_size": 256, "embedding_dimension": 128, "layers": 4, "steps": 5}


def main(*, batch_size: int, embedding_dimension: int, layers: int, steps: int) -> None:
    here = runtime.initialize()
    dcn, ici = here.num_slices, jax.device_count() // here.num_slices
    by_slice = np.array(jax.devices()).reshape(dcn, ici)  # processes are ordered by slice
    rows = [mesh_utils.create_device_mesh((ici,), list(row)) for row in by_slice]
    mesh = Mesh(np.stack(rows), ("dcn_data", "ici_fsdp"))
    if here.process_id == 0:
        print(f"dcn_data_parallelism={dcn} ici_fsdp_parallelism={ici}", flush=True)

    batch = NamedSharding(mesh, P(("dcn_data", "ici_fsdp")))
    weights = NamedSharding(mesh, P(None, "ici_fsdp"))
    width = embedding_dimension

    def init() -> tuple[jax.Array, jax.Array]:
        keys = jax.random.split(jax.random.key(0), 2)
        x = jax.random.normal(keys[0], (batch_size, width), jnp.bfloat16)
        return x, jax.random.normal(keys[1], (layers, width, width), jnp.bfloat16) / width**0.5

    x, w = jax.jit(init, out_shardings=(batch, weights))()

    @jax.jit
    def gradient_norm(w: jax.Array, x: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            y, _ = jax.lax.scan(lambda y, layer: (y @ layer, None), x, w)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        return jnp.sqrt(jnp.sum(jax.grad(loss)(w).astype(jnp.float32) ** 2))

    norm = float(gradient_norm(w, x))  # compiles
    began = time.perf_counter()
    for step in range(1, steps + 1):
        norm = float(gradient_norm(w, x))
        runtime.progress(step, total=steps)
    seconds = (time.perf_counter() - began) / steps
    flops = 6 * batch_size * width * width * layers
    if here.process_id == 0:
        rate = flops / seconds / 1e12 / jax.device_count()
        print(f"gradient norm {norm:.4g}; {rate:.3g} TFLOP/s per chip", flush=True)


if __name__ == "__main__":
    arguments = dict(argument.split("=", 1) for argument in sys.argv[1:])
    main(**{name: type(value)(arguments.get(name, value)) for name, value in SETTINGS.items()})
