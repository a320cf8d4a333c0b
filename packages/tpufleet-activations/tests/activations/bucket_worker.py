"""A worker that writes units of several default-size files to a bucket; tests kill it."""

from __future__ import annotations

from datetime import timedelta

import numpy as np

from tpufleet.runtime.units import Units
from tpufleet_activations import plans
from tpufleet_activations.io import dtypes, shard_writer, unit_writer
from tpufleet_activations.io.addresses import open_storage
from tpufleet_activations.io.storage import Storage
from tpufleet_activations.pipeline import workers

SITES = ("resid_post.0", "resid_post.1")
WIDTH, ROWS = 1024, 2048  # a sample has 8 MiB
UNIT_SAMPLES = 9  # 72 MiB: a file of 64 MiB and a small one


def plan(units: int) -> plans.ExtractionPlan:
    return plans.ExtractionPlan(
        model="m", model_digest="m", tokenizer="m", tokenizer_digest="t",
        data={"kind": "jsonl", "path": "/x"}, data_digest="d",
        samples=units * UNIT_SAMPLES, unit_samples=UNIT_SAMPLES,
        sites=SITES, widths=dict.fromkeys(SITES, WIDTH),
    )  # fmt: skip


def values(sample: int, site: str) -> np.ndarray:
    row = (np.arange(WIDTH) + 7 * sample + SITES.index(site)) % 113
    return np.tile(row.astype(dtypes.stored_dtype("bf16")), (ROWS, 1))


def samples(wanted: plans.ExtractionPlan, unit: int) -> list[unit_writer.StoredSample]:
    return [
        unit_writer.StoredSample(
            sample=sample,
            tokens=np.full(ROWS, sample, np.int32),
            positions=np.arange(ROWS, dtype=np.int32),
            metadata={"id": str(sample)},
        )
        for sample in wanted.sample_range(unit)
    ]


def write_unit(storage: Storage, wanted: plans.ExtractionPlan, claim, pools) -> list[dict]:
    executor, uploader = pools
    stored = samples(wanted, claim.unit)
    writer = unit_writer.UnitWriter(
        storage, wanted, claim, stored, executor=executor, uploader=uploader
    )
    for sample in stored:
        for site in SITES:
            writer.append(site, values(sample.sample, site))
    return writer.finish()


def work(url: str, units: int, name: str, lease: float, started=None) -> None:
    """Claim, write and commit units until none is left, at the default options of a worker."""
    storage, options = open_storage(url), workers.WorkerOptions()
    wanted = plans.write(storage, plan(units))
    pools = (
        shard_writer.WriterPool(options.writers, options.backlog),
        shard_writer.WriterPool(options.upload_streams, 2 * options.upload_streams),
    )
    own = Units(storage, count=wanted.units, worker=name, lease=timedelta(seconds=lease))
    if started is not None:
        started.set()
    while (claim := own.claim()) is not None:
        files = write_unit(storage, wanted, claim, pools)
        own.commit(claim, unit_writer.commit_outcome(wanted, claim.unit, files))
