"""Device meshes with the axes data, fsdp and tensor, and the sharding of parameters and batches."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpufleet.errors import BadInput
from tpufleet_activations.model.architectures import Architecture

AXES = ("data", "fsdp", "tensor")
ALIGNMENT = 64  # bytes, of the buffers of JAX's CPU devices
BATCH_AXES = ("data", "fsdp")  # rows of a batch are sharded over both

_PARAMETERS = {
    "embed": (None, "fsdp"),
    "qkv": (None, "fsdp", "tensor"),
    "qkv_bias": (None, "tensor"),
    "out": (None, "tensor", "fsdp"),
    "gate_up": (None, "fsdp", None, "tensor"),
    "gate_up_bias": (None, None, "tensor"),
    "down": (None, "tensor", "fsdp"),
}


def parse_mesh(text: str) -> dict[str, int]:
    """Parse `data=2,tensor=4`. Omitted axes are 1, except data, which takes all other devices."""
    sizes = {}
    for piece in filter(None, text.split(",")):
        match = re.fullmatch(r"\s*(data|fsdp|tensor)\s*=\s*(\d+)\s*", piece)
        if not match or int(match[2]) < 1:
            raise BadInput(f"invalid mesh {text!r}; expected a form such as data=2,fsdp=1,tensor=4")
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


def batch_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES, None))


def residual_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES, None, None))


def output_sharding(mesh: Mesh, memory_kind: str | None = None) -> NamedSharding:
    """For stacks of activations [layers, batch, …]: rows are sharded like the batch."""
    return NamedSharding(mesh, PartitionSpec(None, BATCH_AXES), memory_kind=memory_kind)


def empty_shard(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array that starts where JAX's buffers may: CPU devices use its memory, without a copy."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def shard_array(values: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Put an array that every process has onto the mesh; each device gets its shard."""
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def shard_in_passes(
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: NamedSharding,
    read: Callable[[Sequence[tuple[slice, ...]], tuple[int, ...]], list[np.ndarray]],
    host_bytes: int,
) -> jax.Array:
    """An array whose shards are read when they are needed, so many at a time as `host_bytes` hold,
    or one. `read(indexes, shape)` returns the shards at these indexes. Devices that hold the same
    shard share it, and those of a CPU its memory: `read` returns arrays of `empty_shard`."""
    devices: dict[tuple[tuple[int | None, int | None], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        devices.setdefault(tuple((part.start, part.stop) for part in index or ()), []).append(
            device
        )
    local = sharding.shard_shape(shape)
    size = int(np.prod(local, dtype=np.int64)) * dtype.itemsize
    together = max(host_bytes // max(size, 1), 1)
    keys = list(devices)
    placed: dict[Any, jax.Array] = {}
    for first in range(0, len(keys), together):
        part = keys[first : first + together]
        shards = read([tuple(slice(*bounds) for bounds in key) for key in part], local)
        for key, values in zip(part, shards, strict=True):
            for device in devices[key]:
                shared = device.platform == "cpu"
                placed[device] = jax.device_put(values, device, may_alias=shared)
        jax.block_until_ready(list(placed.values()))
        del shards  # before the next pass
    arrays = [placed[device] for device in sharding.addressable_devices_indices_map(shape)]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)
