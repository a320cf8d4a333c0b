"""Export of a dataset as Parquet files that Hugging Face datasets reads, a row for each token.

The layout is that of a dataset repository: `data/train-00000-of-00004.parquet`, and a README.md
that names them (https://huggingface.co/docs/hub/datasets-manual-configuration). Columns are
`sample`, `id`, `position`, `token`, and one of float32 vectors for each site.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tpufleet.errors import BadInput
from tpufleet_activations.io import dtypes, shards
from tpufleet_activations.io.datasets import Dataset
from tpufleet_activations.io.storage import Storage, check_empty

# Uncompressed float32 values, the sizes that the hub recommends for files and row groups.
FILE_BYTES = 500 << 20
ROW_GROUP_BYTES = 64 << 20
FILE = "data/train-{number:05d}-of-{files:05d}.parquet"
CARD = """\
---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*.parquet
---
# Activations of {model}

One row for each token: `sample`, `id`, `position`, `token`, and a float32 vector for each of
{sites}. {rows:,} rows of {samples:,} samples. Written by `tpu extract export`.
"""


def select_sites(dataset: Dataset, chosen: Sequence[str]) -> tuple[str, ...]:
    """The sites of a dataset that are named, or belong to a kind that is; all without a choice."""
    for name in chosen:
        if not any(_matches(site, name) for site in dataset.sites):
            raise dataset.missing_site_error(name)
    return tuple(
        site for site in dataset.sites if not chosen or any(_matches(site, n) for n in chosen)
    )


def _matches(site: str, name: str) -> bool:
    return site == name or site.startswith(f"{name}.")


def export_parquet(
    dataset: Dataset, target: Storage, *, sites: Sequence[str] = (), file_bytes: int = FILE_BYTES
) -> dict[str, Any]:
    """Write the samples committed so far to an empty folder, the README last."""
    names = select_sites(dataset, sites)
    dataset.check_records()
    rows = dataset.total_rows
    if not rows:
        raise BadInput("no samples are committed yet; run `tpu extract run` first")
    check_empty(target)
    row_bytes = 4 * sum(dataset.plan.widths[name] for name in names)
    per_file = max(file_bytes // row_bytes, 1)
    files = -(-rows // per_file)
    schema = pa.schema(
        [("sample", pa.int64()), ("id", pa.string()), ("position", pa.int32())]
        + [("token", pa.int32())]
        + [(name, pa.list_(pa.float32(), dataset.plan.widths[name])) for name in names]
    )
    exported: set[int] = set()  # samples with rows: others were skipped, or have none that is kept
    tables = _tables(dataset, names, schema, max(ROW_GROUP_BYTES // row_bytes, 1), exported)
    rest: pa.Table | None = None
    for number in range(files):
        name = FILE.format(number=number, files=files)
        draft = target.staging() / f"export-{os.getpid()}-{number}.parquet"
        left = min(per_file, rows - number * per_file)
        with pq.ParquetWriter(
            draft,
            schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=["id"],
            use_byte_stream_split=True,  # the low bytes of bfloat16 values are zero
        ) as writer:
            while left:
                table = rest if rest is not None else next(tables)
                writer.write_table(table.slice(0, left))
                rest = table.slice(left) if table.num_rows > left else None
                left -= min(table.num_rows, left)
        target.upload(draft, name)
    card = CARD.format(
        model=model_name(dataset.plan.model),
        sites=", ".join(names),
        rows=rows,
        samples=len(exported),
    )
    target.replace("README.md", card.encode())
    return {
        "files": files,
        "rows": rows,
        "sites": list(names),
        "samples": len(exported),
        "without_rows": len(dataset) - len(exported),
    }


def model_name(model: str) -> str:
    """The name on the Hugging Face Hub, or else the last part of the path: an export is public."""
    if model.count("/") == 1 and not model.startswith((".", "/", "~")):
        return model.partition("@")[0]  # without a commit
    return model.rstrip("/").rpartition("/")[2]


def _tables(
    dataset: Dataset, names: Sequence[str], schema: pa.Schema, height: int, exported: set[int]
) -> Iterator[pa.Table]:
    """All rows. Adds their samples to `exported`."""
    for unit, file, start, stop in dataset.blocks(height):
        samples = dataset.row_samples(unit, file, start, stop)
        ids = {sample: _id(dataset, sample) for sample in np.unique(samples).tolist()}
        exported.update(ids)
        columns = [
            pa.array(samples, pa.int64()),
            pa.array([ids[sample] for sample in samples.tolist()], pa.string()),
            pa.array(dataset.rows(unit, file, shards.POSITIONS, start, stop), pa.int32()),
            pa.array(dataset.rows(unit, file, shards.TOKENS, start, stop), pa.int32()),
        ]
        for name in names:
            values = dtypes.as_float32(dataset.rows(unit, file, name, start, stop))
            flat = pa.array(np.ascontiguousarray(values).reshape(-1), pa.float32())
            columns.append(pa.FixedSizeListArray.from_arrays(flat, dataset.plan.widths[name]))
        yield pa.Table.from_arrays(columns, schema=schema)


def _id(dataset: Dataset, sample: int) -> str:
    value = dataset.metadata(sample).get("id", sample)
    return value if isinstance(value, str) else json.dumps(value)
