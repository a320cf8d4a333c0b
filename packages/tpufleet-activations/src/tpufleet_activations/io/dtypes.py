"""Data types of stored tensors: their names in plans, in safetensors and in numpy."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from tpufleet_activations.input_errors import check_choice

NUMPY_DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "BOOL": np.dtype(np.bool_),
    # Only in checkpoints, where they are quantized weights: see `model.weights`.
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "U16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32),
    "U64": np.dtype(np.uint64),
}
DTYPE_NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}

# The dtypes of a plan. Sites whose values are numbers of something are integers in all.
INTEGER_SITES = ("experts", "top_tokens", "latent_ids")
STORED_DTYPES = {"bf16": "BF16", "f32": "F32"}


# The dtypes of a forward pass.
COMPUTE_DTYPES = ("bf16", "f32")


def check_compute_dtype(name: str) -> None:
    check_choice("compute", name, COMPUTE_DTYPES)


def stored_dtype(name: str) -> np.dtype:
    """The numpy dtype of activations on disk."""
    check_choice("dtype", name, STORED_DTYPES)
    return NUMPY_DTYPES[STORED_DTYPES[name]]


def as_float32(values: np.ndarray) -> np.ndarray:
    """As `astype(float32)`, which is slow for bfloat16."""
    if values.dtype.name != "bfloat16":
        return values.astype(np.float32, copy=False)
    wide = np.ascontiguousarray(values).view(np.uint16).astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def site_dtype(site: str, name: str) -> str:
    """The safetensors name of the type of a site's values."""
    check_choice("dtype", name, STORED_DTYPES)
    return "I32" if site.partition(".")[0] in INTEGER_SITES else STORED_DTYPES[name]


def bytes_per_token(widths: Mapping[str, int], name: str) -> int:
    """Bytes of one token's vectors."""
    return sum(
        width * NUMPY_DTYPES[site_dtype(site, name)].itemsize for site, width in widths.items()
    )
