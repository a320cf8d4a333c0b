"""Writing one unit: the activations of its samples into a shard, in batch order."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpufleet.runtime.units import Claim
from tpufleet.workloads.activations import plans
from tpufleet.workloads.activations.io import dtypes, shard_writer, shards, zstd_shards
from tpufleet.workloads.activations.io.storage import Storage


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSample:
    """A sample as stored, without its activations."""

    sample: int
    tokens: np.ndarray
    positions: np.ndarray
    metadata: Mapping[str, Any]


class UnitWriter:
    """Writes one part (one process's share) of a unit. Rows are in the order of `samples`."""

    def __init__(
        self,
        storage: Storage,
        plan: plans.ExtractionPlan,
        claim: Claim,
        samples: Sequence[StoredSample],
        *,
        part: int = 0,
        executor: shard_writer.TaskExecutor | None = None,
    ):
        self._storage, self._plan = storage, plan
        # The name has the claim's token, so a fenced worker never touches its successor's file.
        self._name = f"shards/{claim.unit:08d}-{claim.token:04d}-{part:03d}.safetensors"
        self._draft = storage.staging() / f"{claim.nonce}-{part:03d}.draft"
        self._samples = samples
        tensors = _tensors(plan, samples)
        if plan.compression == "zstd":
            self._writer: shard_writer.ShardWriter = zstd_shards.ZstdShardWriter(
                self._draft, self._name, tensors, compressed=plan.sites, executor=executor
            )
        else:
            self._writer = shard_writer.RawShardWriter(self._draft, self._name, tensors, executor)

    def append(self, site: str, *parts: np.ndarray) -> None:
        """Append rows of a site. They may be written later, so they must not change."""
        self._writer.append(site, *parts)

    def finish(self) -> dict[str, Any]:
        """Upload the shard and return its description. It is valid only once committed."""
        for name, values in _tables(self._samples).items():
            self._writer.append(name, values)
        file = self._writer.finish()
        self._storage.upload(self._draft, self._name)
        return file.to_json()

    def abandon(self) -> None:
        self._writer.abandon()


def commit_outcome(
    plan: plans.ExtractionPlan, unit: int, files: Sequence[Mapping[str, Any]], compute: str = ""
) -> dict[str, Any]:
    """The outcome in a unit's commit record. `compute` is the dtype of the forward pass."""
    span = plan.sample_range(unit)
    tokens = sum(file["tensors"][shards.TOKENS][1][0] for file in files)
    return {
        "start": span.start,
        "end": span.stop,
        "tokens": tokens,
        "bytes": sum(file["size"] for file in files),
        "plan": plan.identity,
        "compute": compute,
        "files": list(files),
    }


def _tensors(plan: plans.ExtractionPlan, samples: Sequence[StoredSample]) -> list[shards.Tensor]:
    rows = sum(len(sample.tokens) for sample in samples)
    stored = dtypes.STORED_DTYPES[plan.dtype]
    tensors = [
        shards.Tensor(name=name, dtype=dtypes.DTYPE_NAMES[values.dtype], shape=values.shape)
        for name, values in _tables(samples).items()
    ]
    for site in plan.sites:
        tensors.append(shards.Tensor(name=site, dtype=stored, shape=(rows, plan.widths[site])))
        if plan.dtype == "int8":
            tensors.append(shards.Tensor(name=site + shards.SCALE, dtype="F32", shape=(rows,)))
    return tensors


def _tables(samples: Sequence[StoredSample]) -> dict[str, np.ndarray]:
    lengths = [len(sample.tokens) for sample in samples]
    metadata = [
        {**sample.metadata, "sample": sample.sample, "tokens": len(sample.tokens)}
        for sample in samples
    ]
    # Ids from the data may hold lone surrogates, which UTF-8 cannot.
    text = json.dumps(metadata, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    none = np.empty(0, np.int32)
    return {
        shards.SAMPLE_INDEX: np.array([sample.sample for sample in samples], np.int64),
        shards.SAMPLE_ROWS: np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        shards.TOKENS: np.concatenate([none, *(s.tokens for s in samples)]).astype(np.int32),
        shards.POSITIONS: np.concatenate([none, *(s.positions for s in samples)]).astype(np.int32),
        shards.METADATA: np.frombuffer(text, np.uint8),
    }
