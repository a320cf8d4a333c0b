"""Adds numbers up over the chips of two slices: inside each slice, then between the slices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpufleet import runtime

here = runtime.initialize()
# The processes are numbered slice by slice, and so are the devices.
devices = np.array(jax.devices()).reshape(here.num_slices, -1)
mesh = Mesh(devices, ("slice", "chip"))  # traffic along "slice" leaves the fast network

numbers = np.arange(devices.size, dtype=np.float32).reshape(devices.shape)
spread = NamedSharding(mesh, PartitionSpec("slice", "chip"))
array = jax.make_array_from_callback(numbers.shape, spread, lambda index: numbers[index])


def total(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sum(x, axis=1), axis=0)


everywhere = NamedSharding(mesh, PartitionSpec())
answer = float(jax.jit(total, out_shardings=everywhere)(array))
print(
    f"slice {here.slice_index} of {here.num_slices}, process {here.process_id}: "
    f"{devices.size} chips add up to {answer:g}",
    flush=True,
)
