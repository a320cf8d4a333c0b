"""Device meshes with the axes data, fsdp and tensor, and the sharding of parameters and batches."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpufleet.errors import BadInput, invalid
from tpufleet_activations.model.architectures import Architecture

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")  # rows of a batch are sharded over both

_PARAMETERS = {
    "embed": (None, "fsdp"),
    "qkv": (None, "fsdp", "tensor"),
    "qkv_bias": (None, "tensor"),
    "out": (None, "tensor", "fsdp"),
    "gate_up": (None, "fsdp", None, "tensor"),
    "gate_up_bias": (None, None, "tensor"),
    "down": (None, "tensor", "fsdp"),
    "positions": (None, "fsdp"),
    "head": (None, "fsdp"),
    "sinks": (None, "tensor"),
    "router": (None, "fsdp", None),
    "expert_gate_up": (None, None, "fsdp", None, "tensor"),
    "expert_gate_up_bias": (None, None, None, "tensor"),
    "expert_down": (None, None, "tensor", "fsdp"),
}


def parse_mesh(text: str) -> dict[str, int]:
    """Parse `data=2,tensor=4`. Omitted axes are 1, except data, which takes all other devices."""
    sizes = {}
    for piece in filter(None, text.split(",")):
        match = re.fullmatch(r"\s*(data|fsdp|tensor)\s*=\s*(\d+)\s*", piece)
        if not match or int(match[2]) < 1:
            raise invalid(text, "a mesh", "data=2,fsdp=1,tensor=4")
        sizes[match[1]] = int(match[2])
    return sizes


def build_mesh(devices: Sequence[Any], sizes: dict[str, int], arch: Architecture) -> Mesh:
    """A mesh over all `devices`; raises if its size or the model's dimensions do not fit."""
    fsdp, tensor = sizes.get("fsdp", 1), sizes.get("tensor", 1)
    data = sizes.get("data", max(len(devices) // (fsdp * tensor), 1))
    if data * fsdp * tensor != len(devices):
        raise BadInput(
            f"mesh data={data}, fsdp={fsdp}, tensor={tensor} needs "
            f"{data * fsdp * tensor} devices; there are {len(devices)}"
        )
    for axis, size, name in (
        (fsdp, arch.hidden, "hidden size"),
        (tensor, arch.kv_heads, "number of key-value heads"),
        (tensor, arch.intermediate, "intermediate size"),
    ):
        if size % axis:
            raise BadInput(f"the model's {name} {size} is not divisible by the mesh axis {axis}")
    return Mesh(np.array(devices).reshape(data, fsdp, tensor), AXES)


def run_sharded(run: Callable[..., Any], mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Any:
    """A function that each device runs on its own shards."""
    if mesh is None or mesh.size == 1:
        return run
    return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def batch_shards(mesh: Mesh) -> int:
    """The number of shards of a batch."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def parameter_sharding(mesh: Mesh, name: str) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*_PARAMETERS.get(name, ())))


def stored_sharding(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Of a weight on its way into a parameter: each device gets a part, if the last axis can be
    divided so. The devices exchange the parts."""
    divided = AXES if shape[-1] % mesh.size == 0 else None
    return NamedSharding(mesh, PartitionSpec(*(None,) * (len(shape) - 1), divided))


def loading_mesh(mesh: Mesh) -> Mesh:
    """Where parameters are put together: on one of the devices of a CPU, if all have the same."""
    if mesh.devices.flat[0].platform != "cpu" or mesh.shape["fsdp"] * mesh.shape["tensor"] > 1:
        return mesh
    process = jax.process_index()
    own = next(device for device in mesh.devices.flat if device.process_index == process)
    return Mesh(np.array(own).reshape(1, 1, 1), AXES)


def share(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """A device's array on all devices of this CPU, which use its memory."""
    values = np.asarray(array)
    parts = [
        jax.device_put(values, device, may_alias=True) for device in sharding.addressable_devices
    ]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES, None))


def residual_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES, None, None))


def output_sharding(mesh: Mesh, memory_kind: str | None = None) -> NamedSharding:
    """For stacks of activations [layers, batch, …]: rows are sharded like the batch."""
    return NamedSharding(mesh, PartitionSpec(None, BATCH_AXES), memory_kind=memory_kind)


def shard_array(values: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Put an array that every process has onto the mesh; each device gets its shard."""
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])
