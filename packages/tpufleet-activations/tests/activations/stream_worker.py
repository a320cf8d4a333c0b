"""An extractor of synthetic rows and a reader of streams, as processes that tests kill.

`python -m tests.activations.stream_worker serve ADDRESS CREDENTIALS SAMPLES`
`python -m tests.activations.stream_worker read ADDRESS CREDENTIALS CHECKPOINT`
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import numpy as np

from tests.activations import synthetic
from tpufleet_activations import plans
from tpufleet_activations.io import dtypes
from tpufleet_activations.io.shuffling import RowBatch
from tpufleet_activations.io.unit_writer import StoredSample
from tpufleet_activations.pipeline import stream_server
from tpufleet_activations.streams import addresses, stream

BATCH = {"batch": 7, "buffer": 35, "seed": 3}


def plan(samples: int) -> plans.ExtractionPlan:
    return synthetic.plan(samples=samples, unit_samples=13)


def stored(wanted: plans.ExtractionPlan, unit: int) -> list[StoredSample]:
    """In the order of `synthetic.record`."""
    samples = wanted.sample_range(unit)
    return [
        StoredSample(
            sample=sample,
            tokens=synthetic.tokens(sample),
            positions=np.arange(synthetic.length(sample), dtype=np.int32),
            metadata={},
        )
        for sample in sorted(samples, key=lambda sample: (-synthetic.length(sample), sample))
    ]


def write_unit(writer: stream_server.StreamWriter, samples: list[StoredSample]) -> None:
    for batch in (samples[:5], samples[5:6], samples[6:]):
        for site in synthetic.SITES:
            dtype = dtypes.stored_dtype("bf16")
            rows = [synthetic.values(one.sample, site).astype(dtype) for one in batch]
            writer.append(site, *rows)
    writer.finish()


def serve(opened: stream_server.StreamServer, wanted: plans.ExtractionPlan) -> None:
    for claim in opened.claims():
        if claim is not None:
            samples = stored(wanted, claim.unit)
            write_unit(opened.open_writer(claim, samples), samples)


def fold(digest: str, batch: RowBatch) -> str:
    """The digest of all batches so far."""
    parts = [*batch.values.values(), batch.tokens, batch.positions, batch.samples]
    content = b"".join(np.ascontiguousarray(part).tobytes() for part in parts)
    return hashlib.sha256(digest.encode() + content).hexdigest()


def read(address: str, credentials: str | None, checkpoint: Path) -> None:
    """Like a trainer: what it computes and the position are saved together."""
    saved = json.loads(checkpoint.read_text()) if checkpoint.exists() else {}
    digest = saved.get("digest", "")
    with stream(
        address,
        synthetic.SITES,
        credentials=credentials,
        position=saved.get("position"),
        **BATCH,
    ) as rows:
        for batch in rows:
            digest = fold(digest, batch)
            draft = checkpoint.with_suffix(".draft")
            draft.write_text(json.dumps({"digest": digest, "position": rows.position}))
            os.replace(draft, checkpoint)
            print("batch", flush=True)
    print("end", flush=True)


if __name__ == "__main__":
    role, address, folder, last = sys.argv[1:]
    credentials = folder or None
    if role == "read":
        read(address, credentials, Path(last))
    else:
        where = addresses.parse(address)
        wanted = plan(int(last))
        opened = stream_server.StreamServer(
            where, addresses.needed(where, credentials), wanted, lambda: False
        )
        print("listening", flush=True)
        serve(opened, wanted)
        opened.close()
