"""Reading consecutive rows of a file straight to where each belongs, with a single copy."""

from __future__ import annotations

import ctypes
import os

import numpy as np

# Parts of one preadv call: IOV_MAX of Linux and macOS.
VECTORS = 1024
_libc = ctypes.CDLL(None, use_errno=True)
_preadv = getattr(_libc, "preadv", None)
if _preadv is not None:
    _preadv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
    _preadv.restype = ctypes.c_ssize_t

AVAILABLE = _preadv is not None


def row_vectors(addresses: np.ndarray, row_bytes: int) -> np.ndarray:
    """What `read_rows` takes: an address and a size for each row."""
    vectors = np.empty((len(addresses), 2), np.uint64)
    vectors[:, 0] = addresses
    vectors[:, 1] = row_bytes
    return vectors


def read_rows(file: int, offset: int, row_bytes: int, vectors: np.ndarray) -> bool:
    """Read one row after the other, each to its address; False if the file ends before. The caller
    owns the memory there, and keeps it for the call. Other threads run meanwhile. Vectors may be
    changed."""
    for start in range(0, len(vectors), VECTORS):
        part = vectors[start : start + VECTORS]
        if not _read_all(file, offset + start * row_bytes, part, len(part) * row_bytes):
            return False
    return True


def _read_all(file: int, offset: int, vectors: np.ndarray, size: int) -> bool:
    assert _preadv is not None
    while size:
        done = _preadv(file, vectors.ctypes.data, len(vectors), offset)
        if done == size:
            return True
        if done < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        if done == 0:
            return False
        offset, size = offset + done, size - done
        ends = np.cumsum(vectors[:, 1])
        complete = int(np.searchsorted(ends, done, side="right"))
        rest = done - (int(ends[complete - 1]) if complete else 0)
        vectors = vectors[complete:]
        if rest:
            vectors[0] += np.array([rest, -rest], np.int64).view(np.uint64)
    return True
