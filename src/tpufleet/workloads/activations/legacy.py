"""The former form, `shard_0001.pkl.gz`: written for those who still read it, and read safely.

A shard is a gzipped pickle `{layer: [{sample_idx, activation, shape, text_preview}, …], …}`.
Pickles can run code when loaded; the reader here allows arrays and plain values, nothing else.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tpufleet.errors import BadInput
from tpufleet.workloads.activations.io import datasets
from tpufleet.workloads.activations.io.storage import Storage
from tpufleet.workloads.activations.model import sites

OVERHEAD = 1024  # what the former writer counted for each record beside its array

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


# What a cut or changed file makes of the readers.
DAMAGE = (
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
            raise BadInput(f"the pickle asks for {module}.{name}; only arrays are allowed")
        return super().find_class(module, name)


def read_shard(path: Path) -> dict[int, list[dict[str, Any]]]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            found = _SafeUnpickler(io.BytesIO(file.read())).load()
    except DAMAGE as error:
        raise BadInput(f"{path} cannot be read: {error}") from error
    if not _is_shard(found):
        raise BadInput(f"{path} is not a shard: no records of activations by layer")
    return found


def _is_shard(found: Any) -> bool:
    return isinstance(found, dict) and all(
        isinstance(layer, int)
        and isinstance(records, list)
        and all(
            isinstance(record, dict)
            and isinstance(record.get("sample_idx"), int)
            and isinstance(record.get("activation"), np.ndarray)
            and record["activation"].ndim == 2
            for record in records
        )
        for layer, records in found.items()
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
    """Write one site of all layers as `shard_%04d.pkl.gz`, with `metadata.json` and the former
    checkpoint beside them."""
    chosen = sites.parse_site(site)
    wanted = [name for name in dataset.sites if sites.split_name(name)[0] == chosen]
    if not wanted:
        raise dataset.missing_site_error(site)
    shards: list[dict[str, Any]] = []
    buffer: dict[int, list[dict[str, Any]]] = {}
    size = 0
    for sample in dataset:
        about = dataset.metadata(sample)
        if about.get("skipped"):
            continue
        for name in wanted:
            values = _padded(dataset.read(sample, name), pad_to)
            record = {
                "sample_idx": sample,
                "activation": np.array(values),
                "shape": tuple(values.shape),
                "text_preview": f"Task: {about['id']}, Prompt: {about.get('preview', '')}"[:200],
            }
            buffer.setdefault(sites.split_name(name)[1], []).append(record)
            size += values.nbytes + OVERHEAD
        if size >= shard_bytes:  # between samples, so that none is torn
            shards.append(_write(storage, len(shards) + 1, buffer, size, compress))
            buffer, size = {}, 0
    if buffer:
        shards.append(_write(storage, len(shards) + 1, buffer, size, compress))
    remote = "://" in storage.url
    bucket, _, prefix = storage.url.partition("://")[2].partition("/")
    facts = {
        "total_shards": len(shards),
        "total_activations": sum(sum(s["samples_per_layer"].values()) for s in shards),
        "total_unique_samples": sum(s["total_samples_in_shard"] for s in shards),
        "shard_size_gb": shard_bytes / 2**30,
        "upload_to_gcs": remote,
        "gcs_bucket": bucket if remote else None,
        "gcs_prefix": prefix if remote else None,
        "shards": shards,
    }
    storage.replace("metadata.json", json.dumps(facts, indent=2).encode())
    told = {**build_checkpoint(dataset), "total_shards": len(shards)}
    storage.replace(f"checkpoint_worker_{told['worker_id']}.json", json.dumps(told).encode())
    return facts


def _padded(values: np.ndarray, length: int | None) -> np.ndarray:
    if length is None:
        return values
    if len(values) > length:
        raise BadInput(f"a sample has {len(values)} rows, more than --pad-to {length}")
    full = np.zeros((length, values.shape[1]), values.dtype)
    full[: len(values)] = values
    return full


def _write(
    storage: Storage, number: int, buffer: dict[int, Any], size: int, compress: bool
) -> dict[str, Any]:
    name = f"shard_{number:04d}.pkl" + (".gz" if compress else "")
    draft = storage.staging() / name
    data = pickle.dumps(buffer)
    # Level 1: higher levels take ten times as long and win a percent or two on activations.
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


def build_checkpoint(dataset: datasets.Dataset, worker: int = 0) -> dict[str, Any]:
    """The former checkpoint's keys, derived from what is committed. Only a report: nothing
    resumes from it."""
    done = list(dataset)
    whole: dict[str, Any] = {"status": "completed"} if dataset.complete else {}
    return {
        "worker_id": worker,
        "last_processed_sample_idx": _last_in_order(done),
        "total_samples_processed": len(done),
        "total_shards": len(dataset.commits),
        "dataset_path": dataset.plan.data.get("path", ""),
        "model_path": dataset.plan.model,
        **whole,
    }


def _last_in_order(done: Sequence[int]) -> int:
    """The last sample before the first gap."""
    last = -1
    for sample in done:
        if sample != last + 1:
            break
        last = sample
    return last
