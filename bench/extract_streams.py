"""Rows into a training process beside the same run that keeps nothing; and queries of latents.

    python bench/extract_streams.py [--entries 100000000] [--batches 40]

A reader in a process of its own takes every row, shuffled. Then an index is built of a synthetic
dataset with so many stored latents, and the strongest tokens of random latents are looked up, each
on a newly opened index.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import extract_gpu_ours as ours
import reporting
from extract_gpu_shape import BATCHES, LENGTH, ROWS, SHAPE, TOY, emit

# Of a model that a CPU runs at some thousand tokens per second.
SMALL = SHAPE | {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 1024}
SMALL |= {"num_attention_heads": 4, "vocab_size": 512}
SMALL_LENGTH, SMALL_ROWS = (64, 4) if TOY else (256, 16)
LATENTS, K = 65_536, 64
READER = """
import sys
from tpufleet_activations.streams import stream
address, credentials, site = sys.argv[1:]
rows = 0
with stream(address, site, batch=4096, credentials=credentials or None) as batches:
    for batch in batches:
        rows += len(batch.values[site])
print(rows)
"""


class Nothing:
    """A writer that keeps no rows."""

    def append(self, site: str, *parts: Any) -> None:
        pass

    def finish(self) -> list:
        return []

    def abandon(self) -> None:
        pass


class EveryUnit:
    """A coordinator of one run over all units, of which nothing is recorded."""

    part, parts = 0, 1

    def __init__(self, plan: Any):
        self.plan = plan

    def claims(self) -> Any:
        from tpufleet.runtime.units import Claim

        for unit in range(self.plan.units):
            yield Claim(unit=unit, token=0, worker="bench", nonce=str(unit), at=0.0)

    def should_stop(self) -> bool:
        return False

    def commit(self, claim: Any, files: Any, outcome: Any) -> None:
        pass


def run(engine: Any, storage: Any, plan: Any, coordinator: Any, open_writer: Any) -> float:
    """Tokens per second, from the first batch that has arrived to the end."""
    from tpufleet_activations.pipeline import locations, workers

    worker = workers.Worker(
        storage,
        plan,
        locations.resolve_plan(plan),
        workers.OpenedEngine(engine),
        coordinator,
        open_writer=open_writer,
    )
    return float(worker.run().tokens_per_second() or 0.0)


def streamed(engine: Any, storage: Any, plan: Any, folder: Path, kind: str) -> float:
    from tpufleet_activations.pipeline import stream_server
    from tpufleet_activations.streams import addresses

    credentials = None
    address = addresses.Address(path=str(folder / "socket"))
    if kind == "tcp":
        address = addresses.Address(host="127.0.0.1")
        credentials = addresses.Credentials(folder / "credentials")
        credentials.create_missing()
    opened = stream_server.StreamServer(address, credentials, plan, lambda: False)
    shown = f"tcp://127.0.0.1:{opened.port}" if credentials else str(address)
    secret = str(credentials.folder) if credentials else ""
    command = [sys.executable, "-c", READER, shown, secret, plan.sites[0]]
    reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    rate = run(engine, storage, plan, opened, opened.open_writer)
    rows = int(reader.communicate()[0])
    opened.close()
    expected = plan.samples * plan.max_length
    if reader.returncode or rows != expected:
        raise RuntimeError(f"the reader got {rows:,} of {expected:,} rows")
    return rate


def rates(engine: Any, storage: Any, plan: Any, folder: Path) -> dict[str, float]:
    """Medians of three turns, in which each is measured once: other programs slow all alike."""
    found: dict[str, list[float]] = {"nothing": [], "shared memory": [], "tcp": []}
    run(engine, storage, plan, EveryUnit(plan), lambda claim, samples: Nothing())  # compiles
    for _ in range(1 if TOY else 3):
        nothing = run(engine, storage, plan, EveryUnit(plan), lambda claim, samples: Nothing())
        found["nothing"].append(nothing)
        for kind in ("shared memory", "tcp"):
            found[kind].append(streamed(engine, storage, plan, folder, kind))
    return {kind: statistics.median(values) for kind, values in found.items()}


def stream_1() -> dict:
    """At the shape of `extract_gpu`, one layer."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        engine = ours.build([f"resid_post.{SHAPE['num_hidden_layers'] - 1}"])
        storage, plan = ours.plan_of(engine, folder, BATCHES[1], rows=ROWS, length=LENGTH)
        results: dict = rates(engine, storage, plan, folder)
        emit(results)
        return results


def small_rates(count: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        engine = ours.build(["resid_post.3"], shape=SMALL)
        storage, plan = ours.plan_of(
            engine, folder, count, shape=SMALL, rows=SMALL_ROWS, length=SMALL_LENGTH
        )
        return rates(engine, storage, plan, folder)


def latent_plan(rows: int, unit_rows: int, latents: int) -> Any:
    from tpufleet_activations import plans

    sites = ("latents.resid_post.3", "latent_ids.resid_post.3")
    return plans.ExtractionPlan(
        model="m", model_digest="m", tokenizer="m", tokenizer_digest="t",
        data={"kind": "jsonl", "path": "/x"}, data_digest="d",
        samples=-(-rows // unit_rows), unit_samples=1, sites=sites, widths=dict.fromkeys(sites, K),
        encode={"site": "resid_post.3", "k": K, "latents": latents, "path": "x", "digest": "e"},
    )  # fmt: skip


def write_latents(folder: Path, entries: int, latents: int) -> None:
    """Some latents are a thousand times as frequent as others."""
    import ml_dtypes
    import numpy as np

    from tpufleet.runtime.units import Units
    from tpufleet_activations import plans
    from tpufleet_activations.io import unit_writer
    from tpufleet_activations.io.storage import LocalFolder

    storage, unit_rows = LocalFolder(folder), 65_536
    plan = plans.write(storage, latent_plan(max(entries // K, unit_rows), unit_rows, latents))
    units = Units(storage, count=plan.units, worker="bench")
    chance = np.random.default_rng(0)
    while (claim := units.claim()) is not None:
        positions = np.arange(unit_rows, dtype=np.int32)
        sample = unit_writer.StoredSample(
            sample=claim.unit, tokens=positions, positions=positions, metadata={}
        )
        writer = unit_writer.UnitWriter(storage, plan, claim, [sample])
        ids = (latents * chance.random((unit_rows, K), np.float32) ** 3).astype(np.int32)
        values = chance.standard_exponential((unit_rows, K), np.float32)
        writer.append(plan.sites[0], values.astype(ml_dtypes.bfloat16))
        writer.append(plan.sites[1], ids)
        outcome = unit_writer.commit_outcome(plan, claim.unit, writer.finish())
        units.commit(claim, outcome)


def queries(entries: int) -> dict[str, float]:
    import numpy as np

    from tpufleet_activations.io import datasets
    from tpufleet_activations.io.latents import LatentIndex

    folder = Path(tempfile.mkdtemp())
    latents = 512 if TOY else LATENTS
    try:
        write_latents(folder, entries, latents)
        began = time.perf_counter()
        dataset = datasets.open_dataset(str(folder))
        LatentIndex(dataset)
        built = time.perf_counter() - began
        times = []
        for latent in np.random.default_rng(1).integers(0, latents, 100).tolist():
            began = time.perf_counter()
            found = LatentIndex(dataset).strongest(latent)
            times.append(time.perf_counter() - began)
            values = [entry.value for entry in found]
            if not values or values != sorted(values, reverse=True):
                raise RuntimeError(f"latent {latent} has no order")
        return {"build": built, "median": statistics.median(times), "worst": max(times)}
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=100_000_000)
    parser.add_argument("--batches", type=int, default=40)
    options = parser.parse_args()
    measures = []
    found = small_rates(options.batches)
    for kind in ("shared memory", "tcp"):
        measures.append(
            reporting.Measure(
                name=f"rows to a reader by {kind}, tokens/s",
                ours=found[kind],
                unit="/s",
                goal=0.9 * found["nothing"],
                more_is_better=True,
                anchor=found["nothing"],
                peer="kept by nobody",
            )
        )
    took = queries(options.entries)
    count = f"{options.entries:,} entries"
    for name, value, goal in (
        (f"strongest tokens of a latent, {count}", took["median"], 100.0),
        ("the slowest of 100", took["worst"], 100.0),
    ):
        measures.append(reporting.Measure(name=name, ours=1000 * value, unit="ms", goal=goal))
    measures.append(
        reporting.Measure(name=f"build the index of {count}", ours=took["build"], unit="s")
    )
    reporting.report("extract_streams", measures)


if __name__ == "__main__":
    reporting.run_benchmark(main)
