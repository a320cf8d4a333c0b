"""Shards written past the page cache have the same bytes as any other."""

from __future__ import annotations

import itertools
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tpufleet.runtime.units import Units
from tpufleet_activations import plans
from tpufleet_activations.io import datasets, dtypes, shards, unit_writer, verification
from tpufleet_activations.io.aligned_memory import MemoryPool
from tpufleet_activations.io.direct_file import BLOCK, DirectFile, takes_direct_writes
from tpufleet_activations.io.shard_writer import WriterPool, split_pieces
from tpufleet_activations.io.storage import LocalFolder

MEMORY_DISK = Path("/dev/shm")


@pytest.fixture
def disk(tmp_path):
    if not takes_direct_writes(tmp_path):
        pytest.skip(f"the file system of {tmp_path} takes no direct writes")
    return tmp_path


class CountedFile(DirectFile):
    """Remembers where the memory was that it wrote."""

    def __init__(self, path, memory):
        super().__init__(path, memory)
        self.written: list[tuple[int, int]] = []  # address, size

    def _try(self, content, offset):
        self.written.append((content.ctypes.data, len(content)))
        return super()._try(content, offset)


class RefusingFile(DirectFile):
    """On a file system that takes no direct writes after all."""

    def _try(self, content, offset):
        return False


@pytest.mark.parametrize("kind", [DirectFile, RefusingFile])
@pytest.mark.parametrize("seed", range(6))
def test_any_pieces_in_any_order_make_the_same_file(disk, kind, seed):
    chance = random.Random(seed)
    size = chance.choice([1, BLOCK - 1, BLOCK, 3 * BLOCK + 17, 300_001, 9_000_000])
    data = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    cuts = sorted({0, size, *(chance.randrange(size) for _ in range(chance.choice([0, 3, 40])))})
    parts = []
    for start, stop in itertools.pairwise(cuts):
        inner = sorted({start, stop, *(chance.randrange(start, stop) for _ in range(3))})
        views = [memoryview(data[a:b]) for a, b in itertools.pairwise(inner)]
        parts.append((start, views))
    chance.shuffle(parts)
    target = kind(disk / "file", MemoryPool())
    target.open(size)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda part: target.write(part[1], part[0]), parts))
    target.finish()
    assert (disk / "file").read_bytes() == data.tobytes()
    assert target.direct == (kind is DirectFile)


def test_aligned_memory_is_written_from_where_it_is(disk):
    """As rows arrive from a GPU: whole batches in page-locked memory."""
    tensor = shards.Tensor(name="site", dtype="BF16", shape=(32768, 896))
    rows = MemoryPool().take(tensor.nbytes)
    rows[:] = np.arange(len(rows), dtype=np.uint32).astype(np.uint8)
    header, (placed,) = shards.build_header([tensor])
    assert placed.offset % BLOCK == 0, "or nothing could be written in place"
    target = CountedFile(disk / "file", MemoryPool())
    target.open(len(header) + len(rows))
    target.write([memoryview(header)], 0)
    for start, views in split_pieces([memoryview(rows)], 0):
        target.write(views, placed.offset + start)
    target.finish()
    base = rows.ctypes.data
    in_place = sum(size for at, size in target.written if base <= at < base + len(rows))
    assert in_place >= 0.99 * len(rows)
    assert (disk / "file").read_bytes() == header + rows.tobytes()


def write_unit(folder: LocalFolder, lengths: list[int]) -> bytes:
    """A unit of a real width, as a worker writes it. Returns the bytes of its file."""
    sites = {"resid_post.8": 896, "mlp_hidden.1": 300}
    plan = plans.write(
        folder,
        plans.ExtractionPlan(
            model="m", model_digest="m", tokenizer="m", tokenizer_digest="t",
            data={"kind": "jsonl", "path": "/x"}, data_digest="d", samples=len(lengths),
            unit_samples=len(lengths), sites=tuple(sites), widths=sites,
        ),
    )  # fmt: skip
    units = Units(folder, count=1, worker="a")
    claim = units.claim()
    pool = WriterPool(4, 8)
    samples = [
        unit_writer.StoredSample(
            sample=n,
            tokens=np.arange(length, dtype=np.int32),
            positions=np.arange(length, dtype=np.int32),
            metadata={"id": str(n)},
        )
        for n, length in enumerate(lengths)
    ]
    writer = unit_writer.UnitWriter(folder, plan, claim, samples, executor=pool)
    for n, length in enumerate(lengths):
        for site, width in sites.items():
            values = np.random.default_rng(n).normal(size=(length, width))
            writer.append(site, values.astype(dtypes.stored_dtype("bf16")))
    files = writer.finish()
    pool.shutdown()
    units.commit(claim, unit_writer.commit_outcome(plan, 0, files))
    return folder.local_path(files[0]["name"]).read_bytes()


def test_a_shard_is_the_same_with_and_without_the_page_cache(disk):
    lengths = [2048, 1, 777, 0, 3001, 266]
    direct, buffered = LocalFolder(disk / "direct"), LocalFolder(disk / "buffered", direct=False)
    assert write_unit(direct, lengths) == write_unit(buffered, lengths)
    assert (direct.direct, buffered.direct) == (True, False)
    assert verification.verify(direct).intact
    rows = sum(map(len, datasets.shuffled_rows(datasets.Dataset(direct), "mlp_hidden.1", batch=99)))
    assert rows == sum(lengths)
    assert not [name for name in os.listdir(direct.path / ".staging") if "draft" in name]


@pytest.mark.skipif(not MEMORY_DISK.is_dir(), reason="no /dev/shm on this machine")
def test_files_in_memory_are_written_as_usual():
    folder = MEMORY_DISK / f"tpufleet-{os.getpid()}"
    folder.mkdir()
    try:
        assert not LocalFolder(folder).direct
    finally:
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        folder.rmdir()
