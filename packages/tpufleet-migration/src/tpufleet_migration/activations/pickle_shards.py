"""Pickle shards (`shard_0001.pkl.gz`) of the older scripts: exporting, and reading safely.

A shard is a gzipped pickle `{layer: [{sample_idx, activation, shape, text_preview}, …], …}`.
Pickles can run code when loaded; this reader allows only arrays and plain values.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tpufleet.errors import BadInput, unreadable
from tpufleet_activations.io import datasets
from tpufleet_activations.io.storage import Storage, check_empty
from tpufleet_activations.model import sites

SUMMARY = "metadata.json"
OVERHEAD = 1024  # bytes that the older writer counted per record besides the array

ALLOWED = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy.core.numeric", "_frombuffer"),
    ("ml_dtypes", "bfloat16"),
    ("_codecs", "encode"),
}


# Errors that gzip and pickle raise for a truncated or corrupted file.
CORRUPTION_ERRORS = (
    pickle.UnpicklingError,
    zlib.error,
    EOFError,
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ImportError,
    MemoryError,
)


class _SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise BadInput(f"the pickle refers to {module}.{name}; only arrays are allowed")
        return super().find_class(module, name)


def read_shard(path: Path) -> dict[int, list[dict[str, Any]]]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            shard = _SafeUnpickler(io.BytesIO(file.read())).load()
    except CORRUPTION_ERRORS as error:
        raise unreadable(path, error) from error
    if not _is_shard(shard):
        raise unreadable(path, "not lists of activation records by layer")
    return shard


def _is_shard(shard: Any) -> bool:
    return isinstance(shard, dict) and all(
        isinstance(layer, int)
        and isinstance(records, list)
        and all(
            isinstance(record, dict)
            and isinstance(record.get("sample_idx"), int)
            and isinstance(record.get("activation"), np.ndarray)
            and record["activation"].ndim == 2
            for record in records
        )
        for layer, records in shard.items()
    )


def export_shards(
    dataset: datasets.Dataset,
    storage: Storage,
    *,
    site: str = "resid_post",
    shard_bytes: int = 1 << 30,
    pad_to: int | None = None,
    compress: bool = True,
) -> dict[str, Any]:
    """Write one site of all layers as `shard_%04d.pkl.gz`, with `metadata.json` and
    `checkpoint_worker_0.json`. Returns the contents of `metadata.json`."""
    selected = sites.parse_site(site)
    wanted = [name for name in dataset.sites if sites.split_name(name)[0] == selected]
    if not wanted:
        raise dataset.missing_site_error(site)
    dataset.check_records()
    if pad_to is not None:
        for sample in dataset:
            _check_padding(len(dataset.tokens(sample)), pad_to)
    check_empty(storage)
    shards: list[dict[str, Any]] = []
    buffer: dict[int, list[dict[str, Any]]] = {}
    size = 0
    for sample in dataset:
        metadata = dataset.metadata(sample)
        if metadata.get("skipped"):
            continue
        for name in wanted:
            values = _padded(dataset.read(sample, name), pad_to)
            record = {
                "sample_idx": sample,
                "activation": np.array(values),
                "shape": tuple(values.shape),
                "text_preview": _preview(metadata),
            }
            buffer.setdefault(sites.split_name(name)[1], []).append(record)
            size += values.nbytes + OVERHEAD
        if size >= shard_bytes:  # checked between samples, so that none is split
            shards.append(_write(storage, len(shards) + 1, buffer, size, compress))
            buffer, size = {}, 0
    if buffer:
        shards.append(_write(storage, len(shards) + 1, buffer, size, compress))
    remote = "://" in storage.url
    bucket, _, prefix = storage.url.partition("://")[2].partition("/")
    summary = {
        "total_shards": len(shards),
        "total_activations": sum(sum(s["samples_per_layer"].values()) for s in shards),
        "total_unique_samples": sum(s["total_samples_in_shard"] for s in shards),
        "shard_size_gb": shard_bytes / 2**30,
        "upload_to_gcs": remote,
        "gcs_bucket": bucket if remote else None,
        "gcs_prefix": prefix if remote else None,
        "shards": shards,
    }
    storage.replace(SUMMARY, json.dumps(summary, indent=2).encode())
    checkpoint = {**build_checkpoint(dataset), "total_shards": len(shards)}
    storage.replace("checkpoint_worker_0.json", json.dumps(checkpoint).encode())
    return summary


def _preview(metadata: Mapping[str, Any]) -> str:
    return f"Task: {metadata['id']}, Prompt: {metadata.get('preview', '')}"[:200]


def _check_padding(rows: int, length: int) -> None:
    if rows > length:
        raise BadInput(f"a sample has {rows} rows, more than --pad-to {length}")


def _padded(values: np.ndarray, length: int | None) -> np.ndarray:
    if length is None:
        return values
    full = np.zeros((length, values.shape[1]), values.dtype)
    full[: len(values)] = values
    return full


def _write(
    storage: Storage, number: int, buffer: dict[int, Any], size: int, compress: bool
) -> dict[str, Any]:
    name = f"shard_{number:04d}.pkl" + (".gz" if compress else "")
    draft = storage.staging() / name
    data = pickle.dumps(buffer)
    # Level 1: higher levels take ten times as long and save 1 to 2 % on activations.
    draft.write_bytes(gzip.compress(data, 1) if compress else data)
    stored = draft.stat().st_size
    storage.upload(draft, name)
    local = storage.local_path(name)
    return {
        "shard_id": number,
        "filename": name,
        "local_path": str(local) if local else None,
        "gcs_path": None if local else f"{storage.url}/{name}",
        "file_size_mb": stored / 2**20,
        "buffer_size_mb": size / 2**20,
        "layers": sorted(buffer),
        "samples_per_layer": {str(layer): len(records) for layer, records in buffer.items()},
        "total_samples_in_shard": len(next(iter(buffer.values()))),
    }


def build_checkpoint(dataset: datasets.Dataset) -> dict[str, Any]:
    """The older checkpoint's keys, derived from the commits. Only a report: nothing resumes from
    it."""
    done = list(dataset)
    stored = sum(not dataset.metadata(sample).get("skipped") for sample in done)
    status: dict[str, Any] = {"status": "completed"} if dataset.complete else {}
    return {
        "worker_id": 0,
        "last_processed_sample_idx": _last_in_order(done),
        "total_samples_processed": stored,
        "total_shards": len(dataset.commits),
        "dataset_path": dataset.plan.data.get("path", ""),
        "model_path": dataset.plan.model,
        **status,
    }


def _last_in_order(done: Sequence[int]) -> int:
    """The last sample before the first gap."""
    last = -1
    for sample in done:
        if sample != last + 1:
            break
        last = sample
    return last
