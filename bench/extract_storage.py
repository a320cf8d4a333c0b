"""Datasets of activations: sending units to a bucket, opening many units, reading shuffled rows.

    python bench/extract_storage.py

The bucket is fake-gcs-server on loopback (`tests/fake_gcs.py` says where it is looked for). It
computes digests of what it receives and shares this machine's cores with the client, so the goal is
a share of what the same server takes from eight plain streams of the official client.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import reporting

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests import fake_gcs
from tpufleet.runtime import commit_index, index_parts
from tpufleet.runtime import units as unit_records
from tpufleet_activations import plans
from tpufleet_activations.io import datasets, dtypes, shard_writer, unit_writer
from tpufleet_activations.io.addresses import open_storage
from tpufleet_activations.io.storage import LocalFolder, Storage
from tpufleet_activations.pipeline import planning, workers

WIDTH, SITES = 896, ("resid_post.8", "resid_post.16")
LENGTH = 512  # tokens of a sample
STREAMS = 8


@contextmanager
def storage_server() -> Iterator[None]:
    with fake_gcs.server() as url:
        os.environ["STORAGE_EMULATOR_HOST"] = url
        from tpufleet.runtime import gcs

        gcs.connect().create_bucket("bench")
        yield


def make_plan(units: int, unit_bytes: int, **more: object) -> plans.ExtractionPlan:
    samples = max(unit_bytes // (LENGTH * WIDTH * 2 * len(SITES)), 1)
    return plans.ExtractionPlan(
        model="bench", model_digest="m", tokenizer="bench", tokenizer_digest="t",
        data={"kind": "jsonl", "path": "/x"}, data_digest="d", samples=units * samples,
        unit_samples=samples, sites=SITES, widths=dict.fromkeys(SITES, WIDTH), **more,
    )  # fmt: skip


def write_units(storage: Storage, plan: plans.ExtractionPlan) -> float:
    """Write and commit all units as a worker does at its defaults. Returns the seconds."""
    plans.write(storage, plan)
    options = workers.default_options(os.cpu_count() or 1)
    rows = np.random.default_rng(0).normal(size=(LENGTH, WIDTH)).astype(dtypes.stored_dtype("bf16"))
    pool = shard_writer.WriterPool(options.writers, options.backlog)
    uploader = shard_writer.WriterPool(options.upload_streams, 2 * options.upload_streams)
    own = unit_records.Units(storage, count=plan.units, worker="bench")
    position = np.arange(LENGTH, dtype=np.int32)
    began = time.perf_counter()

    def write(claim: unit_records.Claim) -> None:
        samples = [
            unit_writer.StoredSample(
                sample=sample, tokens=position, positions=position, metadata={"id": str(sample)}
            )
            for sample in plan.sample_range(claim.unit)
        ]
        writer = unit_writer.UnitWriter(
            storage, plan, claim, samples, executor=pool, uploader=uploader
        )
        for _ in samples:
            for site in SITES:
                writer.append(site, rows)
        own.commit(claim, unit_writer.commit_outcome(plan, claim.unit, writer.finish()))

    with ThreadPoolExecutor(options.committers) as threads:
        claims = [own.claim() for _ in range(plan.units)]
        list(threads.map(write, [claim for claim in claims if claim is not None]))
    seconds = time.perf_counter() - began
    pool.shutdown()
    uploader.shutdown()
    return seconds


def plain_uploads(total: int, size: int) -> float:
    """Bytes per second of eight threads that upload objects from memory with the client."""
    from tpufleet.runtime import gcs

    bucket, data = gcs.connect().bucket("bench"), os.urandom(size)
    names = [f"plain/{n}" for n in range(max(total // size, STREAMS))]

    def send(name: str) -> None:
        bucket.blob(name).upload_from_string(data, checksum="crc32c")

    began = time.perf_counter()
    with ThreadPoolExecutor(STREAMS) as threads:
        list(threads.map(send, names))
    seconds = time.perf_counter() - began
    for name in names:
        bucket.blob(name).delete()
    return len(names) * size / seconds


def upload_rates(total: int, rounds: int) -> tuple[float, float]:
    """The best rates of ours and of plain uploads, which take turns."""
    unit_bytes = min(planning.SHARD_BYTES, total)
    ours = plain = 0.0
    for _ in range(rounds):
        plain = max(plain, plain_uploads(total, min(64 << 20, total // STREAMS)))
        storage = open_storage(f"gs://bench/ours/{uuid.uuid4().hex}")
        plan = make_plan(max(total // unit_bytes, 1), unit_bytes)
        seconds = write_units(storage, plan)
        size = sum(c.outcome["bytes"] for c in datasets.Dataset(storage).commits.values())
        ours = max(ours, size / seconds)
        for name in storage.names(""):
            storage.delete(name)
    return ours, plain


def one_outcome() -> Mapping[str, Any]:
    """The outcome of a unit, as a worker records it."""
    one = Path(tempfile.mkdtemp())
    try:
        write_units(LocalFolder(one), make_plan(1, 1 << 20))
        return dict(next(iter(datasets.Dataset(LocalFolder(one)).commits.values())).outcome)
    finally:
        shutil.rmtree(one)


def write_complete(storage: Storage, count: int) -> int:
    """An index of so many units, as the last worker of such a dataset writes it."""
    plans.write(storage, make_plan(count, 1 << 20))
    outcome = one_outcome()
    commits = {
        unit: unit_records.Commit(unit=unit, token=0, worker="bench", at=1.0, outcome=outcome)
        for unit in range(count)
    }
    storage.replace(unit_records.INDEX, commit_index.encode(commits))
    return count


def write_growing(storage: Storage, count: int) -> int:
    """Three quarters of so many units, by eight workers that commit one in a second. The parts of
    the index are written as workers write them. The records that the index has are left out, since
    nothing reads them and a server takes minutes to store them; those of the last half minute are
    there, which the index lacks."""
    plans.write(storage, make_plan(count, 1 << 20))
    outcome, seconds = one_outcome(), itertools.count()
    share = count // STREAMS
    committed = share * 3 // 4
    for worker in range(STREAMS):
        name, first = f"worker{worker}", worker * share
        # Asked for the time once for each commit.
        writer = index_parts.IndexWriter(storage, f"{name}-0", lambda: float(next(seconds)))
        for unit in range(first, first + committed):
            writer.add(
                unit_records.Commit(unit=unit, token=0, worker=name, at=1.0, outcome=outcome)
            )
    reader = unit_records.Units(storage, count=count, worker="bench", indexed=True)
    indexed = reader.committed()
    for worker in range(STREAMS):
        own = range(worker * share, worker * share + committed)
        for unit in own:
            if unit not in indexed:
                record = {"worker": f"worker{worker}", "nonce": "n", "at": 1.0}
                claim = {**record, "kind": "claim", "incarnation": 0}
                commit = {**record, "kind": "commit", "outcome": outcome}
                for number, body in enumerate((claim, commit)):
                    storage.create(f"units/{unit:08d}-{number:04d}.json", json.dumps(body).encode())
    return STREAMS * committed


def opening_seconds(
    storage: Storage, count: int, write: Callable[[Storage, int], int] = write_complete
) -> float:
    """The best of three."""
    committed, best = write(storage, count), float("inf")
    for _ in range(3):
        began = time.perf_counter()
        dataset = datasets.open_dataset(storage.url)
        best = min(best, time.perf_counter() - began)
        assert len(dataset.commits) == committed
    return best


def reading_rates(folder: Path, total: int) -> tuple[float, float, float]:
    """Bytes per second of `shuffled_batches` over one site, from files that the kernel has read
    before: the disk of a virtual machine would be all that is measured. In a second epoch, which
    uses the memory of the first again. Then those of a plain sequential read of the same bytes with
    as many threads, and of copies in memory: each row has to be copied at least once."""
    storage = LocalFolder(folder)
    unit_bytes = min(256 << 20, total)
    write_units(storage, make_plan(max(total // unit_bytes, 1), unit_bytes))
    dataset = datasets.Dataset(storage)
    shuffled = plain = copied = 0.0
    for _ in range(3):
        size, began = 0, time.perf_counter()
        for rows in datasets.shuffled_batches(dataset, [SITES[0]], batch=4096):
            size += rows.values[SITES[0]].nbytes
        shuffled = max(shuffled, size / (time.perf_counter() - began))
    chunk = 1 << 20
    memory = threading.local()

    def buffers() -> tuple[np.ndarray, np.ndarray]:
        if not hasattr(memory, "pair"):
            memory.pair = np.zeros(chunk, np.uint8), np.ones(chunk, np.uint8)
        return memory.pair

    def read(place: tuple[int, int]) -> int:
        return os.preadv(place[0], [buffers()[0]], place[1])

    def copy(_: object) -> int:
        target, source = buffers()
        np.copyto(target, source)
        return len(target)

    opened = [
        os.open(storage.path / file.name, os.O_RDONLY)
        for unit in dataset.commits
        for file in dataset.files(unit)
    ]
    places = [(file, at) for file in opened for at in range(0, os.fstat(file).st_size, chunk)]
    with ThreadPoolExecutor(STREAMS) as threads:
        for _ in range(3):
            began = time.perf_counter()
            plain = max(plain, sum(threads.map(read, places)) / (time.perf_counter() - began))
            began = time.perf_counter()
            copied = max(copied, sum(threads.map(copy, places)) / (time.perf_counter() - began))
    for file in opened:
        os.close(file)
    return shuffled, plain, copied


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=2048, help="sent to the bucket in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--units", type=int, default=100_000)
    options = parser.parse_args()
    total = options.mib << 20
    measures = []
    with tempfile.TemporaryDirectory() as place:
        if fake_gcs.installed() is not None:
            with storage_server():
                ours, plain = upload_rates(total, options.rounds)
                measures.append(
                    reporting.Measure(
                        name="units to a bucket, hashed, verified and committed, against 8 plain "
                        f"streams ({ours / 1e6:,.0f} and {plain / 1e6:,.0f} MB/s)",
                        ours=ours / plain, unit="×", goal=0.8, more_is_better=True,
                    )
                )  # fmt: skip
                bucket = open_storage("gs://bench/many")
                seconds = opening_seconds(bucket, options.units)
                measures.append(_opening(seconds, options.units, "in a bucket"))
                growing = open_storage("gs://bench/growing")
                seconds = opening_seconds(growing, options.units, write_growing)
                measures.append(_opening(seconds, options.units, "in a bucket, while it grows"))
        folder = Path(place)
        seconds = opening_seconds(LocalFolder(folder / "many"), options.units)
        measures.append(_opening(seconds, options.units, "in a folder"))
        growing = LocalFolder(folder / "growing")
        seconds = opening_seconds(growing, options.units, write_growing)
        measures.append(_opening(seconds, options.units, "in a folder, while it grows"))
        rate, plain, copied = reading_rates(folder / "rows", min(total, 2 << 30))
        measures.append(
            reporting.Measure(
                name="shuffled rows from local files in the page cache (a plain read of them "
                f"{plain / 1e9:.1f}, copies in memory {copied / 1e9:.1f} GB/s)",
                ours=rate / 1e9, unit="GB/s", goal=3.0, more_is_better=True,
            )
        )  # fmt: skip
    reporting.report("extract_storage", measures)


def _opening(seconds: float, count: int, where: str) -> reporting.Measure:
    return reporting.Measure(
        name=f"open a dataset of {count:,} units {where}", ours=seconds, unit="s", goal=2.0
    )


if __name__ == "__main__":
    reporting.run_benchmark(main)
