"""Write throughput: plain files, shards, and the older gzip-pickle format."""

from __future__ import annotations

import gzip
import importlib.util
import os
import pickle
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from extract_gpu_shape import emit


def plain_writing(folder: Path, size: int = 4 << 30) -> float:
    """Bytes per second of large writes to one new file, with a final fsync."""
    size = size if not os.environ.get("EXTRACT_BENCH_TOY") else 64 << 20
    data = memoryview(os.urandom(16 << 20))
    path = folder / "plain"
    began = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for _ in range(size // len(data)):
            file.write(data)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    path.unlink()
    return size / seconds


def parallel_writing(folder: Path, streams: int = 8, size: int = 1 << 30) -> float:
    """Bytes per second of large writes by several threads, each to a file of its own."""
    size = size if not os.environ.get("EXTRACT_BENCH_TOY") else 4 << 20
    data = memoryview(os.urandom(4 << 20))

    def write(number: int) -> None:
        with open(folder / f"plain-{number}", "wb", buffering=0) as file:
            for _ in range(size // len(data)):
                file.write(data)

    began = time.perf_counter()
    with ThreadPoolExecutor(streams) as threads:
        list(threads.map(write, range(streams)))
    seconds = time.perf_counter() - began
    for number in range(streams):
        (folder / f"plain-{number}").unlink()
    return streams * size / seconds


def writers() -> dict:
    """Encoding and writing only, compared with the older gzip-pickle writer."""
    import ml_dtypes
    import numpy as np

    from tpufleet_activations.io import shard_writer, shards, zstd_shards

    chance = np.random.default_rng(0)
    toy = bool(os.environ.get("EXTRACT_BENCH_TOY"))
    height = 2048 if toy else 32768
    rows = chance.normal(size=(height, 896)).astype(ml_dtypes.bfloat16)
    results: dict = {"megabytes": rows.nbytes / 1e6}
    part = rows[: 64 if toy else 2048]
    began = time.perf_counter()
    gzip.compress(pickle.dumps({23: [{"sample_idx": 0, "activation": np.array(part)}]}), 9)
    results["gzip_pickle_bytes_per_second"] = part.nbytes / (time.perf_counter() - began)
    emit(results)
    folder = Path(tempfile.mkdtemp())
    kinds = [("raw", 2 if toy else 32)]
    if importlib.util.find_spec("zstandard") is None:
        results["zstd"] = "not measured: the package zstandard is not installed"
    else:
        kinds.append(("zstd", 2 if toy else 8))
    for name, count in kinds:
        tensor = shards.Tensor(name="x", dtype="BF16", shape=(height * count, 896))
        draft = folder / f"{name}.safetensors"
        pool = shard_writer.WriterPool(8, 64)
        began = time.perf_counter()
        writer = (
            shard_writer.RawShardWriter(shard_writer.DraftFile(draft), name, [tensor], pool)
            if name == "raw"
            else zstd_shards.ZstdShardWriter(
                shard_writer.DraftFile(draft),
                name,
                [tensor],
                compressed=["x"],
                executor=pool,
            )
        )
        for _ in range(count):
            writer.append("x", rows)
        file = writer.finish()
        seconds = time.perf_counter() - began
        pool.shutdown()
        results[f"{name}_bytes_per_second"] = count * rows.nbytes / seconds
        results[f"{name}_share"] = file.size / (count * rows.nbytes)
        emit(results)
    shutil.rmtree(folder)
    return results
