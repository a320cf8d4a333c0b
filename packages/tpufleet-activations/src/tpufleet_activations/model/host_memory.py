"""Host memory that outputs are copied to, on GPUs page-locked."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from tpufleet.errors import BadInput
from tpufleet_activations.input_errors import check_choice

MEMORY_CHOICES = ("auto", "pinned", "plain")
PAGE_LOCKED = "pinned_host"
GPUS = ("gpu", "cuda", "rocm")
ADDRESSABLE = (*GPUS, "cpu")  # where arrays in page-locked memory have an address: see `view`


def memory_kind(mesh: Mesh, memory: str) -> str | None:
    """The JAX memory kind that outputs are transferred to, or None for plain copies.

    Page-locked memory ("pinned") is filled by DMA while the next batch runs, and is read in place.
    On GPUs that is many times faster than a copy into pageable memory ("plain").
    """
    check_choice("memory", memory, MEMORY_CHOICES)
    device = mesh.devices.flat[0]
    available = PAGE_LOCKED in {space.kind for space in device.addressable_memories()}
    if memory == "pinned" and not available:
        raise BadInput(f"{device.device_kind} has no page-locked host memory; pass --memory plain")
    wanted = memory == "pinned" or (memory == "auto" and device.platform in GPUS)
    return PAGE_LOCKED if wanted and available else None


def view(array: jax.Array) -> np.ndarray:
    """An array on one device's host memory as NumPy's, without a copy, once it is computed.

    Not NumPy's conversion: JAX 0.11 counts such references wrongly at times, and ends the process
    or hangs when they are released. Here the memory belongs to the JAX array, which lives as long
    as any view.
    """
    array.block_until_ready()
    if not array.size:
        return np.empty(array.shape, array.dtype)
    whole = np.asarray(_HeldMemory(array))
    return whole.view(array.dtype).reshape(array.shape)


class _HeldMemory:
    """The bytes of an array; NumPy keeps this object with them."""

    def __init__(self, array: jax.Array):
        self._array = array
        self.__array_interface__ = {
            "version": 3,
            "shape": (array.nbytes,),
            "typestr": "|u1",
            "data": (array.unsafe_buffer_pointer(), True),  # read-only
        }


def reserve(mesh: Mesh, memory: str, sizes: Sequence[int]) -> None:
    """Let JAX allocate page-locked memory for arrays of so many bytes, which it keeps and uses
    again. The system takes half a second for a gigabyte, and devices wait for it."""
    kind = memory_kind(mesh, memory)
    if kind is None or not sizes:
        return
    place = SingleDeviceSharding(mesh.local_devices[0], memory_kind=kind)
    zeros = np.zeros(max(sizes), np.uint8)
    try:
        jax.block_until_ready([jax.device_put(zeros[:size], place) for size in sizes])
    except jax.errors.JaxRuntimeError:
        return  # it is allocated when it is needed
