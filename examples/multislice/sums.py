"""Sum numbers over the chips of two slices: within each slice, then across slices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpufleet import runtime

here = runtime.initialize()
# Processes and devices are ordered by slice.
devices = np.array(jax.devices()).reshape(here.num_slices, -1)
mesh = Mesh(devices, ("slice", "chip"))  # the "slice" axis uses the data center network

numbers = np.arange(devices.size, dtype=np.float32).reshape(devices.shape)
sharding = NamedSharding(mesh, PartitionSpec("slice", "chip"))
array = jax.make_array_from_callback(numbers.shape, sharding, lambda index: numbers[index])


def total(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sum(x, axis=1), axis=0)


replicated = NamedSharding(mesh, PartitionSpec())
result = float(jax.jit(total, out_shardings=replicated)(array))
print(
    f"slice {here.slice_index} of {here.num_slices}, process {here.process_id}: "
    f"{devices.size} chips add up to {result:g}",
    flush=True,
)
