"""Quantized weights, dequantized while they are read: fp8 with scales of blocks, mxfp4, GPTQ, AWQ
and bitsandbytes. Formats are recognized by the tensors that take a weight's place.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from tpufleet_activations.input_errors import check_choice, check_shape

METHODS = ("fp8", "mxfp4", "gptq", "awq", "bitsandbytes")

# The values of a code of mxfp4, whose sign is its highest bit.
FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
FP4 = np.concatenate([FP4, -FP4])
# AWQ stores the eight values of an integer in this order.
AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])
_COMPANION = re.compile(
    r"(_blocks|_scales|\.(weight_scale_inv|qweight|qzeros|scales|g_idx|SCB|weight_format"
    r"|weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..*)))$"
)
Read = Callable[[str], np.ndarray]


def check_supported(settings: Mapping[str, Any]) -> None:
    """Raise for a `quantization_config` that is not implemented."""
    method = settings.get("quant_method")
    check_choice("quant_method", method, METHODS)
    if method in ("gptq", "awq"):
        check_choice("bits", settings.get("bits"), (4,) if method == "awq" else (2, 4, 8))
    if method == "awq":
        check_choice("version", str(settings.get("version", "gemm")).lower(), ("gemm",))


def weight_of(name: str) -> str:
    """The weight that a tensor belongs to."""
    match = _COMPANION.search(name)
    if match is None:
        return name
    base = name[: match.start()]
    return base if match[1] in ("_blocks", "_scales") else f"{base}.weight"


def tensors_of(name: str, names: Mapping[str, Any]) -> list[str]:
    """The tensors that a weight is dequantized from; none if it is not quantized."""
    base = name.removesuffix(".weight")
    for parts in (
        (f"{name}_blocks", f"{name}_scales"),
        (name, f"{base}.weight_scale_inv"),
        (f"{base}.qweight", f"{base}.qzeros", f"{base}.scales"),
        (name, f"{base}.SCB"),
        (name, f"{name}.absmax", f"{name}.quant_map"),
    ):
        if all(part in names for part in parts):
            return list(parts)
    return []


def expected_shapes(
    name: str, names: Mapping[str, Any], shape: tuple[int, ...], settings: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    """Of tensors that a weight of this shape is dequantized from."""
    first, second, *_ = tensors_of(name, names)
    if first.endswith("_blocks"):
        count, into, out = shape
        return {first: (count, out, into // 32, 16), second: (count, out, into // 32)}
    if second.endswith("weight_scale_inv"):
        sides = _block(settings)
        scales = tuple(-(-size // side) for size, side in zip(shape, sides, strict=True))
        return {first: shape, second: scales}
    if second.endswith("SCB"):
        return {first: shape, second: shape[:1]}
    if second.endswith("absmax"):
        return {first: (-(-math.prod(shape) // 2), 1)}
    out, into = shape
    if settings.get("quant_method") == "awq":
        return {first: (into, out // 8)}
    return {first: (into * settings.get("bits", 4) // 32, out)}


def _block(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of a weight that share a scale of fp8."""
    height, width = settings.get("weight_block_size") or (128, 128)
    return height, width


def dequantize(
    name: str,
    names: Iterable[str],
    read: Read,
    shape: tuple[int, ...],
    settings: Mapping[str, Any],
) -> np.ndarray:
    """A weight of this shape, in float32. `settings` are the `quantization_config`."""
    base = name.removesuffix(".weight")
    first, second, *_ = tensors_of(name, dict.fromkeys(names))
    if first.endswith("_blocks"):
        values = _mxfp4(read(first), read(second))
    elif second.endswith("weight_scale_inv"):
        values = _fp8(read(first), read(second), _block(settings))
    elif second.endswith("SCB"):
        values = read(first).astype(np.float32) * (read(second)[:, None] / 127)
    elif second.endswith("absmax"):
        values = _bitsandbytes(name, names, read, shape)
    elif settings.get("quant_method") == "awq":
        values = _awq(read(first), read(second), read(f"{base}.scales"), settings)
    else:
        order = read(f"{base}.g_idx") if f"{base}.g_idx" in names else None
        values = _gptq(read(first), read(second), read(f"{base}.scales"), order, settings)
    return np.asarray(values, np.float32)


def _fp8(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    height, width = block
    values = codes.astype(np.float32)
    scales = scales.astype(np.float32)
    for row, line in enumerate(scales):  # in place: the whole of the scales would be as large
        part = values[row * height : (row + 1) * height]
        part *= np.repeat(line, width)[: part.shape[1]]
    return values


def _mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """blocks [experts, rows, groups, 16] with two codes a byte, the lower one first; transposed, as
    transformers has it: [experts, groups * 32, rows]."""
    pairs = np.stack([FP4[np.arange(256) & 15], FP4[np.arange(256) >> 4]], axis=-1)
    values = pairs[blocks] * np.ldexp(np.float32(1), scales.astype(np.int32) - 127)[..., None, None]
    return values.reshape(*blocks.shape[:2], -1).swapaxes(1, 2)


def _unpack(packed: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """The values of integers that hold 32 / bits each, the lowest first, along an axis."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    words = np.expand_dims(packed.view(np.uint32), axis + 1)
    shape = [1] * words.ndim
    shape[axis + 1] = len(shifts)
    values = (words >> shifts.reshape(shape)) & np.uint32(2**bits - 1)
    sizes = list(packed.shape)
    sizes[axis] *= len(shifts)
    return values.reshape(sizes).astype(np.int32)


def _gptq(
    weight: np.ndarray,
    zeros: np.ndarray,
    scales: np.ndarray,
    order: np.ndarray | None,
    settings: Mapping[str, Any],
) -> np.ndarray:
    bits = settings["bits"]
    codes, zero = _unpack(weight, bits, 0), _unpack(zeros, bits, 1)
    if settings.get("checkpoint_format", "gptq") == "gptq":
        zero = (zero + 1) & (2**bits - 1)
    if order is None:
        order = np.arange(len(codes)) // -(-len(codes) // len(scales))
    return ((codes - zero[order]) * scales.astype(np.float32)[order]).T


def _awq(
    weight: np.ndarray, zeros: np.ndarray, scales: np.ndarray, settings: Mapping[str, Any]
) -> np.ndarray:
    bits = settings["bits"]

    def unpack(packed: np.ndarray) -> np.ndarray:
        values = _unpack(packed, bits, 1)
        return values.reshape(len(values), -1, 8)[:, :, AWQ_ORDER].reshape(len(values), -1)

    codes, zero = unpack(weight), unpack(zeros)
    group = len(codes) // len(scales)
    wide = lambda table: np.repeat(table, group, axis=0)
    return ((codes - wide(zero)) * wide(scales.astype(np.float32))).T


def _bitsandbytes(
    name: str, names: Iterable[str], read: Read, shape: tuple[int, ...]
) -> np.ndarray:
    """Four bits: two codes a byte, the higher one first, with a scale for each block."""
    prefix = f"{name}.quant_state."
    state_name = next(one for one in names if one.startswith(prefix))
    state = json.loads(read(state_name).tobytes())
    check_shape(name, state["shape"], shape)
    table = read(f"{name}.quant_map").astype(np.float32)
    scales = read(f"{name}.absmax")
    if f"{name}.nested_absmax" in set(names):
        outer = read(f"{name}.nested_absmax").astype(np.float32)
        inner = read(f"{name}.nested_quant_map").astype(np.float32)[scales]
        size = state["nested_blocksize"]
        scales = inner * np.repeat(outer, size)[: len(inner)] + state["nested_offset"]
    codes = read(name).reshape(-1)
    pairs = np.stack([table[np.arange(256) >> 4], table[np.arange(256) & 15]], axis=-1)
    values = pairs[codes].reshape(-1)[: math.prod(shape)]
    blocks = np.repeat(scales.astype(np.float32), state["blocksize"])[: len(values)]
    return (values * blocks).reshape(shape)
