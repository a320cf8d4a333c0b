"""Writing one unit: the activations of its samples into shards, in batch order."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from tpufleet.runtime.units import Claim
from tpufleet_activations import plans
from tpufleet_activations.io import dtypes, shard_writer, shards, zstd_shards
from tpufleet_activations.io.storage import Storage


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSample:
    """A sample as stored, without its activations."""

    sample: int
    tokens: np.ndarray
    positions: np.ndarray
    metadata: Mapping[str, Any]


class RowWriter(Protocol):
    """Where the rows of a unit go."""

    def append(self, site: str, *parts: np.ndarray) -> None: ...

    def finish(self) -> list[dict[str, Any]]: ...

    def abandon(self) -> None: ...


class UnitWriter:
    """Writes one part (one process's share) of a unit. Rows are in the order of `samples`.

    On a disk a part is one file. For a bucket it is several of about `storage.file_bytes`, each
    with consecutive samples: a file is uploaded from memory as soon as its last row has arrived,
    while others are filled, and no file is ever on a disk.
    """

    def __init__(
        self,
        storage: Storage,
        plan: plans.ExtractionPlan,
        claim: Claim,
        samples: Sequence[StoredSample],
        *,
        part: int = 0,
        executor: Executor | None = None,
        uploader: Executor | None = None,
    ):
        self._storage, self._plan = storage, plan
        self._uploader = uploader or shard_writer.InlineWriter()
        name = shards.ShardName(claim.unit, claim.token, part)
        self._files: list[_ShardPart] = []
        size = storage.file_bytes
        groups = [samples] if size is None else split_samples(plan, samples, size)
        for number, own in enumerate(groups):
            file = name if size is None else name._replace(number=number)
            draft = f"{claim.nonce}-{part:03d}-{number:04d}"
            self._files.append(_ShardPart(storage, plan, str(file), draft, own, executor))
        self._ends = list(accumulate(file.rows for file in self._files))
        self._appended: Counter[str] = Counter()  # rows of each tensor

    def append(self, site: str, *parts: np.ndarray) -> None:
        """Append rows of a site. They may be written later, so they must not change."""
        at = self._appended[site]
        if at + sum(map(len, parts)) > self._ends[-1]:
            raise shards.wrong_rows(site, self._ends[-1])
        number = bisect_right(self._ends, at)
        within: list[np.ndarray] = []
        for part in parts:
            while len(part):
                room = self._ends[number] - at
                within.append(part[:room])
                at += len(within[-1])
                part = part[room:]
                if at == self._ends[number]:
                    self._files[number].append(site, within)
                    self._upload_complete(number)
                    within, number = [], bisect_right(self._ends, at)
        if within:
            self._files[number].append(site, within)
        self._appended[site] = at

    def _upload_complete(self, number: int) -> None:
        """Upload a file whose rows have all arrived. That of a disk is finished with the unit: the
        thread that appends must not wait for the disk."""
        file = self._files[number]
        if self._storage.file_bytes is not None and file.complete:
            file.uploaded = self._uploader.submit(file.finish)

    def finish(self) -> list[dict[str, Any]]:
        """Upload what is left, and return descriptions of the files. They are valid only once
        committed."""
        for file in self._files:
            if file.uploaded is None:
                file.uploaded = self._uploader.submit(file.finish)
        return [file.uploaded.result() for file in self._files if file.uploaded is not None]

    def abandon(self) -> None:
        for file in self._files:
            file.abandon()


class _ShardPart:
    """One file of a unit."""

    def __init__(
        self,
        storage: Storage,
        plan: plans.ExtractionPlan,
        name: str,
        draft: str,
        samples: Sequence[StoredSample],
        executor: Executor | None,
    ):
        self._storage, self._name = storage, name
        self.rows = sum(len(sample.tokens) for sample in samples)
        self.uploaded: Future[dict[str, Any]] | None = None
        self._tables = _tables(samples)
        tensors = _tensors(plan, self._tables, self.rows)
        self._missing = {
            tensor.name: self.rows for tensor in tensors if tensor.name not in self._tables
        }
        self._target = storage.new_shard(name, draft)
        self._writer: shard_writer.RawShardWriter | zstd_shards.ZstdShardWriter
        if plan.compression == "zstd":
            self._writer = zstd_shards.ZstdShardWriter(
                self._target, name, tensors, compressed=plan.sites, executor=executor
            )
        else:
            self._writer = shard_writer.RawShardWriter(self._target, name, tensors, executor)

    def append(self, site: str, parts: Sequence[np.ndarray]) -> None:
        self._writer.append(site, *parts)
        self._missing[site] -= sum(map(len, parts))

    @property
    def complete(self) -> bool:
        return not any(self._missing.values())

    def finish(self) -> dict[str, Any]:
        for name, values in self._tables.items():
            self._writer.append(name, values)
        file = self._writer.finish()
        if isinstance(self._target, shard_writer.DraftFile):
            self._storage.upload(self._target.path, self._name)
        else:
            self._storage.put(self._target.stream(), self._name)
            self._target.abandon()  # frees the memory
        return file.to_json()

    def abandon(self) -> None:
        sent = self.uploaded
        if sent is not None and not sent.cancel() and sent.exception() is None:
            self._storage.delete(self._name)
        self._writer.abandon()


def split_samples(
    plan: plans.ExtractionPlan, samples: Sequence[StoredSample], file_bytes: int
) -> list[Sequence[StoredSample]]:
    """Consecutive samples that make files of at most `file_bytes`, or of a single sample."""
    row = dtypes.bytes_per_token(plan.widths, plan.dtype)
    groups: list[list[StoredSample]] = [[]]
    size = 0
    for sample in samples:
        need = row * len(sample.tokens)
        if groups[-1] and size + need > file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(sample)
        size += need
    return list(groups)


def commit_outcome(
    plan: plans.ExtractionPlan, unit: int, files: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The outcome in a unit's commit record."""
    span = plan.sample_range(unit)
    tokens = sum(file["tensors"][shards.TOKENS][2][0] for file in files)
    return {
        "start": span.start,
        "end": span.stop,
        "tokens": tokens,
        "bytes": sum(file["size"] for file in files),
        "plan": plan.identity,
        "files": list(files),
    }


def _tensors(
    plan: plans.ExtractionPlan, tables: Mapping[str, np.ndarray], rows: int
) -> list[shards.Tensor]:
    tensors = [
        shards.Tensor(name=name, dtype=dtypes.DTYPE_NAMES[values.dtype], shape=values.shape)
        for name, values in tables.items()
    ]
    for site in plan.sites:
        stored = dtypes.site_dtype(site, plan.dtype)
        tensors.append(shards.Tensor(name=site, dtype=stored, shape=(rows, plan.widths[site])))
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
