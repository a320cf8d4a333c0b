"""Synthetic datasets with known values, so that labels can be checked."""

from __future__ import annotations

import numpy as np

from tpufleet.runtime.units import Units
from tpufleet_activations import plans
from tpufleet_activations.io import dtypes, unit_writer

SITES = ("resid_post.0", "resid_post.3", "mlp_hidden.1")
WIDTHS = {"resid_post.0": 8, "resid_post.3": 8, "mlp_hidden.1": 24}


def plan(samples: int = 10, unit_samples: int = 4, **more) -> plans.ExtractionPlan:
    settings = {
        "model": "/models/synthetic",
        "model_digest": "m1",
        "tokenizer": "/models/synthetic",
        "tokenizer_digest": "t1",
        "data": {"kind": "jsonl", "path": "/data/x.jsonl"},
        "data_digest": "d1",
        "samples": samples,
        "unit_samples": unit_samples,
        "sites": SITES,
        "widths": WIDTHS,
        **more,
    }
    return plans.ExtractionPlan(**settings)


def length(sample: int) -> int:
    return sample * 7 % 5 + 1


def tokens(sample: int) -> np.ndarray:
    return np.arange(length(sample), dtype=np.int32) + 100 * sample


def values(sample: int, site: str) -> np.ndarray:
    """Small integers, which every stored dtype represents exactly."""
    width, place = WIDTHS[site], SITES.index(site)
    rows = np.arange(length(sample))[:, None] + np.arange(width)[None, :]
    return (rows + sample + 31 * place) % 127 - 63.0


def record(storage, wanted: plans.ExtractionPlan, claim) -> list[dict]:
    """Write one unit like a worker, without a model: rows in two batches, longest first."""
    samples = sorted(wanted.sample_range(claim.unit), key=lambda sample: (-length(sample), sample))
    writer = unit_writer.UnitWriter(
        storage,
        wanted,
        claim,
        [
            unit_writer.StoredSample(
                sample=sample,
                tokens=tokens(sample),
                positions=np.arange(length(sample), dtype=np.int32),
                metadata={"id": f"synthetic-{sample}"},
            )
            for sample in samples
        ],
    )
    for batch in (samples[:2], samples[2:]):
        for site in SITES:
            rows = [values(sample, site) for sample in batch]
            block = np.concatenate([np.empty((0, WIDTHS[site])), *rows])
            writer.append(site, block.astype(dtypes.stored_dtype(wanted.dtype)))
    return writer.finish()


def extract(storage, wanted: plans.ExtractionPlan, worker: str = "a", **options) -> None:
    """Claim, write and commit units until none is left for this worker."""
    wanted = plans.write(storage, wanted)
    units = Units(storage, count=wanted.units, worker=worker, **options)
    while (claim := units.claim()) is not None:
        files = record(storage, wanted, claim)
        units.commit(claim, unit_writer.commit_outcome(wanted, claim.unit, files))
