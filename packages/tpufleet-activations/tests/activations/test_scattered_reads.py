"""Rows that are read from a file each to a place of its own."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np
import pytest

from tpufleet_activations.io import scattered_reads

pytestmark = pytest.mark.skipif(not scattered_reads.AVAILABLE, reason="requires preadv in the libc")
ROWS, ROW_BYTES = 40, 24


@pytest.fixture
def content() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (ROWS, ROW_BYTES), np.uint8)


@pytest.fixture
def path(tmp_path: Path, content: np.ndarray) -> Path:
    path = tmp_path / "rows"
    path.write_bytes(content.tobytes())
    return path


def read_shuffled(path: Path, rows: int = ROWS) -> tuple[bool, np.ndarray]:
    """Whether all rows were there, and the rows in the order of the file."""
    places = np.random.default_rng(1).permutation(rows)
    target = np.zeros((rows, ROW_BYTES), np.uint8)
    vectors = scattered_reads.row_vectors(target.ctypes.data + places * ROW_BYTES, ROW_BYTES)
    file = os.open(path, os.O_RDONLY)
    try:
        complete = scattered_reads.read_rows(file, 0, ROW_BYTES, vectors)
    finally:
        os.close(file)
    return complete, target[places]


def test_each_row_is_read_to_its_place(path, content):
    complete, rows = read_shuffled(path)
    assert complete and np.array_equal(rows, content)


@pytest.mark.parametrize("at_once", [1, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 5, 7 * ROW_BYTES + 3])
def test_a_read_that_returns_less_goes_on_where_it_ended(monkeypatch, path, content, at_once):
    """As on network file systems, and when a signal arrives."""

    def short(file: int, vectors: int, count: int, offset: int) -> int:
        address, size = np.ctypeslib.as_array(
            ctypes.cast(vectors, ctypes.POINTER(ctypes.c_uint64)),
            (count, 2),
        ).T
        done = 0
        for to, room in zip(address.tolist(), size.tolist(), strict=True):
            part = os.pread(file, min(room, at_once - done), offset + done)
            ctypes.memmove(to, part, len(part))
            done += len(part)
        return done

    monkeypatch.setattr(scattered_reads, "_preadv", short)
    complete, rows = read_shuffled(path)
    assert complete and np.array_equal(rows, content)


def test_a_file_that_ends_early_is_told(path):
    assert not read_shuffled(path, ROWS + 1)[0]
