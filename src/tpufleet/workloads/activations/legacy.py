"""The former form, `shard_0001.pkl.gz`: written for those who still read it, and taken in safely.

A shard is a gzipped pickle `{layer: [{sample_idx, activation, shape, text_preview}, …], …}`.
Pickles can run code when loaded; the reader here allows arrays and plain values, nothing else.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tpufleet.errors import BadInput, NotFound
from tpufleet.runtime.units import Units
from tpufleet.workloads.activations import datasets, plans, recording, sites
from tpufleet.workloads.activations.storage import Storage

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


class _SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise BadInput(f"the pickle asks for {module}.{name}; only arrays are allowed")
        return super().find_class(module, name)


def read_shard(path: Path) -> dict[int, list[dict[str, Any]]]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            return _SafeUnpickler(io.BytesIO(file.read())).load()
    except (pickle.UnpicklingError, EOFError, OSError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from error


def export(
    dataset: datasets.Dataset,
    folder: Path,
    *,
    site: str = "resid_post",
    shard_bytes: int = 1 << 30,
    pad_to: int | None = None,
    compress: bool = True,
) -> dict[str, Any]:
    """Write one site of all layers as `shard_%04d.pkl.gz`, with the `metadata.json` beside them."""
    wanted = [name for name in dataset.sites if sites.split(name)[0] == site]
    if not wanted:
        raise dataset.absent(site)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Any]] = []
    buffer: dict[int, list[dict[str, Any]]] = {}
    size = 0
    for sample in dataset:
        about = dataset.about(sample)
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
            buffer.setdefault(sites.split(name)[1], []).append(record)
            size += values.nbytes + OVERHEAD
        if size >= shard_bytes:  # between samples, so that none is torn
            shards.append(_write(folder, len(shards) + 1, buffer, size, compress))
            buffer, size = {}, 0
    if buffer:
        shards.append(_write(folder, len(shards) + 1, buffer, size, compress))
    facts = {
        "total_shards": len(shards),
        "total_activations": sum(sum(s["samples_per_layer"].values()) for s in shards),
        "total_unique_samples": sum(s["total_samples_in_shard"] for s in shards),
        "shard_size_gb": shard_bytes / 2**30,
        "upload_to_gcs": False,
        "gcs_bucket": None,
        "gcs_prefix": None,
        "shards": shards,
    }
    (folder / "metadata.json").write_text(json.dumps(facts, indent=2))
    return facts


def take_in(
    folder: Path, storage: Storage, *, site: str = "resid_post", unit_samples: int = 64
) -> plans.Plan:
    """Make a dataset of a folder of former shards. Samples that lack a layer, because a former
    run was killed, are named in an error; of a sample stored twice the later one counts."""
    paths = sorted(folder.glob("shard_*.pkl*"))
    if not paths:
        raise NotFound(f"{folder} holds no shard_NNNN.pkl.gz")
    places: dict[int, dict[int, tuple[Path, int]]] = {}
    width, kind = 0, ""
    for path in paths:
        for layer, records in read_shard(path).items():
            for number, record in enumerate(records):
                places.setdefault(record["sample_idx"], {})[layer] = (path, number)
                width, kind = record["activation"].shape[-1], record["activation"].dtype.name
    layers = sorted({layer for found in places.values() for layer in found})
    torn = sorted(sample for sample, found in places.items() if len(found) < len(layers))
    if torn:
        raise BadInput(f"samples lack some layers: {torn[:10]}; {len(torn)} in all")
    names = tuple(f"{site}.{layer}" for layer in layers)
    stored = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}.get(kind)
    if stored is None:
        raise BadInput(f"activations are {kind}; known are bfloat16, float16, float32")
    digest = hashlib.sha256(b"".join(_file_digest(path) for path in paths)).hexdigest()
    plan = plans.adopt(
        storage,
        plans.Plan(
            model="unknown",
            model_digest="unknown",
            tokenizer="unknown",
            tokenizer_digest="unknown",
            data={"kind": "former-shards", "path": str(folder)},
            data_digest=digest,
            samples=len(places),
            unit_samples=unit_samples,
            sites=names,
            widths=dict.fromkeys(names, width),
            dtype=stored,
        ),
    )
    units = Units(storage, count=plan.units, worker=f"import-{digest[:12]}")
    order = sorted(places)
    loaded: dict[Path, dict[int, list[dict[str, Any]]]] = {}
    while (claim := units.claim()) is not None:
        samples = [order[n] for n in plan.span(claim.unit)]
        needed = {path for sample in samples for path, _ in places[sample].values()}
        loaded = {path: loaded.get(path) or read_shard(path) for path in needed}
        file = _record(storage, plan, claim, samples, places, loaded, layers)
        units.commit(claim, recording.outcome(plan, claim.unit, [file]))
    return plan


def _record(
    storage: Storage,
    plan: plans.Plan,
    claim: Any,
    samples: list[int],
    places: dict[int, dict[int, tuple[Path, int]]],
    loaded: dict[Path, dict[int, list[dict[str, Any]]]],
    layers: list[int],
) -> dict[str, Any]:
    def found(sample: int, layer: int) -> dict[str, Any]:
        path, number = places[sample][layer]
        return loaded[path][layer][number]

    recorded = []
    for index, sample in zip(plan.span(claim.unit), samples, strict=True):
        first = found(sample, layers[0])
        rows = first["activation"].shape[0]
        recorded.append(
            recording.Recorded(
                sample=index,
                tokens=np.full(rows, -1, np.int32),  # the former form does not keep them
                positions=np.arange(rows, dtype=np.int32),
                about={"id": str(sample), "preview": first.get("text_preview", "")},
            )
        )
    recorder = recording.UnitRecorder(storage, plan, claim, recorded)
    for name, layer in zip(plan.sites, layers, strict=True):
        for sample in samples:
            recorder.append(name, found(sample, layer)["activation"])
    return recorder.finish()


def _padded(values: np.ndarray, length: int | None) -> np.ndarray:
    if length is None:
        return values
    full = np.zeros((length, values.shape[1]), values.dtype)
    full[: len(values)] = values[:length]
    return full


def _write(
    folder: Path, number: int, buffer: dict[int, Any], size: int, compress: bool
) -> dict[str, Any]:
    name = f"shard_{number:04d}.pkl" + (".gz" if compress else "")
    path = folder / name
    data = pickle.dumps(buffer)
    # Level 1: higher levels take ten times as long and win a percent or two on activations.
    path.write_bytes(gzip.compress(data, 1) if compress else data)
    return {
        "shard_id": number,
        "filename": name,
        "local_path": str(path),
        "gcs_path": None,
        "file_size_mb": path.stat().st_size / 2**20,
        "buffer_size_mb": size / 2**20,
        "layers": sorted(buffer),
        "samples_per_layer": {str(layer): len(records) for layer, records in buffer.items()},
        "total_samples_in_shard": len(next(iter(buffer.values()))),
    }


def checkpoint(plan: plans.Plan, dataset: datasets.Dataset, worker: int = 0) -> dict[str, Any]:
    """The former checkpoint's keys, derived from what is committed. Only a report: nothing
    resumes from it."""
    done = list(dataset)
    whole: dict[str, Any] = {"status": "completed"} if dataset.complete else {}
    return {
        "worker_id": worker,
        "last_processed_sample_idx": _last_in_order(done),
        "total_samples_processed": len(done),
        "total_shards": len(dataset.commits),
        "dataset_path": plan.data.get("path", ""),
        "model_path": plan.model,
        **whole,
    }


def _last_in_order(done: Iterator[int] | list[int]) -> int:
    """The last sample before the first gap."""
    last = -1
    for sample in sorted(done):
        if sample != last + 1:
            break
        last = sample
    return last


def _file_digest(path: Path) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
