"""Reading a dataset of activations by (sample, site), without reading more bytes than needed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from tpufleet.errors import BadInput, NotFound
from tpufleet.runtime.units import Commit, Units
from tpufleet.workloads.activations import plans
from tpufleet.workloads.activations.io import dtypes, shards, zstd_shards
from tpufleet.workloads.activations.io.storage import Storage, open_storage

READERS = 8  # blocks of a shuffled stream read concurrently


Block = tuple[int, int, str, int, int]  # unit, file, site, first row, end


class RowSpan(NamedTuple):
    """The rows of a sample: start … stop of a file (by number) of a unit."""

    unit: int
    file: int
    start: int
    stop: int


class Dataset:
    """The samples committed so far, by their index in the plan."""

    def __init__(self, storage: Storage, *, tolerant: bool = False):
        """With `tolerant`, units whose record is damaged are missing, and in `damaged`."""
        self.storage = storage
        self.plan = plans.load(storage)
        units = Units(storage, count=self.plan.units, worker="reader", tolerant=tolerant)
        self.commits: dict[int, Commit] = units.committed()
        self.damaged = {unit: reason for unit, (_, reason) in units.damaged.items()}
        self._files: dict[int, list[shards.ShardFile]] = {}
        self._spans: Callable[[int], dict[int, RowSpan]] = lru_cache(256)(self._read_spans)
        self._metadata: Callable[[int], dict[int, dict[str, Any]]] = lru_cache(8)(
            self._read_metadata
        )
        # Each map keeps a file open, and a process may have about a thousand open files.
        self._map: Callable[[str], np.ndarray] = lru_cache(64)(self._open_map)

    @property
    def sites(self) -> tuple[str, ...]:
        return self.plan.sites

    @property
    def complete(self) -> bool:
        return len(self.commits) == self.plan.units

    def __len__(self) -> int:
        return sum(len(self.plan.sample_range(unit)) for unit in self.commits)

    def __iter__(self) -> Iterator[int]:
        """Indexes of the committed samples."""
        for unit in sorted(self.commits):
            yield from self.plan.sample_range(unit)

    def read(self, sample: int, site: str) -> np.ndarray:
        """One sample's activations [tokens, width] as stored; int8 is converted to float32."""
        if site not in self.plan.sites:
            raise self.missing_site_error(site)
        span = self._find(sample)
        return self.rows(span.unit, span.file, site, span.start, span.stop)

    def tokens(self, sample: int) -> np.ndarray:
        return self._read_span(self._find(sample), shards.TOKENS)

    def positions(self, sample: int) -> np.ndarray:
        return self._read_span(self._find(sample), shards.POSITIONS)

    def metadata(self, sample: int) -> Mapping[str, Any]:
        """The sample's id, the hash of its prompt, and metadata from its source."""
        metadata = self._metadata(self._find(sample).unit).get(sample)
        if metadata is None:
            raise NotFound(f"sample {sample} has no metadata; run `tpu extract verify`")
        return metadata

    def missing_site_error(self, site: str) -> NotFound:
        stored = ", ".join(self.plan.sites)
        return NotFound(f"site {site} is not in the dataset; stored sites: {stored}")

    def files(self, unit: int) -> list[shards.ShardFile]:
        if unit not in self._files:
            files = self.commits[unit].outcome["files"]
            self._files[unit] = [shards.ShardFile.from_json(file) for file in files]
        return self._files[unit]

    def file_metadata(self, unit: int, file: int) -> list[dict[str, Any]]:
        shard = self.files(unit)[file]
        return json.loads(
            self._raw(shard, shards.METADATA, 0, shard.tensors[shards.METADATA].shape[0]).tobytes()
        )

    def rows(self, unit: int, file: int, site: str, start: int, stop: int) -> np.ndarray:
        shard = self.files(unit)[file]
        values = self._raw(shard, site, start, stop)
        if self.plan.dtype != "int8":
            return values
        return (
            values.astype(np.float32) * self._raw(shard, site + shards.SCALE, start, stop)[:, None]
        )

    def row_count(self, unit: int, file: int) -> int:
        return self.files(unit)[file].tensors[shards.TOKENS].shape[0]

    def _find(self, sample: int) -> RowSpan:
        unit = self.plan.unit_of(sample)
        if unit not in self.commits:
            raise NotFound(f"sample {sample} is in unit {unit}, which is not committed yet")
        return self._spans(unit)[sample]

    def _read_span(self, span: RowSpan, tensor: str) -> np.ndarray:
        return self._raw(self.files(span.unit)[span.file], tensor, span.start, span.stop)

    def _read_spans(self, unit: int) -> dict[int, RowSpan]:
        spans = {}
        for number, shard in enumerate(self.files(unit)):
            count = shard.tensors[shards.SAMPLE_INDEX].shape[0]
            indexes = self._raw(shard, shards.SAMPLE_INDEX, 0, count)
            rows = self._raw(shard, shards.SAMPLE_ROWS, 0, count + 1)
            for i, sample in enumerate(indexes.tolist()):
                spans[sample] = RowSpan(unit, number, int(rows[i]), int(rows[i + 1]))
        return spans

    def _read_metadata(self, unit: int) -> dict[int, dict[str, Any]]:
        per_file = (self.file_metadata(unit, file) for file in range(len(self.files(unit))))
        return {entry["sample"]: entry for entries in per_file for entry in entries}

    def _raw(self, shard: shards.ShardFile, name: str, start: int, stop: int) -> np.ndarray:
        if name in shard.uncompressed:
            read = partial(self._bytes, shard)
            return zstd_shards.read_rows(shard, name, start, stop, read)
        tensor = shard.tensors[name]
        data = self._bytes(shard, name, start * tensor.row_bytes, (stop - start) * tensor.row_bytes)
        shape = (stop - start, *tensor.shape[1:])
        return np.frombuffer(data, dtypes.NUMPY_DTYPES[tensor.dtype]).reshape(shape)

    def _bytes(self, shard: shards.ShardFile, name: str, offset: int, size: int) -> Any:
        begin = shard.tensors[name].offset + offset
        if size == 0:
            return b""
        if self.storage.local_path(shard.name) is None:
            return self.storage.read_range(shard.name, begin, size)
        return self._map(shard.name)[begin : begin + size]

    def _open_map(self, name: str) -> np.ndarray:
        path = self.storage.local_path(name)
        assert path is not None  # checked by `_bytes`
        return np.memmap(path, np.uint8, mode="r")


def open_dataset(url: str) -> Dataset:
    """The dataset in a folder or bucket, as committed at the time of the call."""
    return Dataset(open_storage(url))


def as_torch(values: np.ndarray) -> Any:
    """A torch tensor with the same bits, also for bfloat16, which torch cannot take from numpy."""
    import torch

    values = np.array(values)  # torch needs writable memory
    if values.dtype == dtypes.NUMPY_DTYPES["BF16"]:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def as_jax(values: np.ndarray) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(values)


def shuffled_rows(
    dataset: Dataset,
    site: str,
    *,
    batch: int,
    seed: int = 0,
    block: int = 256,
    blocks_in_memory: int = 256,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[np.ndarray]:
    """Every stored row of a site once, shuffled over the dataset, in batches: for training.

    Blocks of consecutive rows are read in random order and shuffled in memory, so that reads stay
    sequential; the next blocks are read ahead. The same seed gives the same order. Each rank gets
    its own rows, as many as every other, so that all ranks take the same number of steps: of the
    stored rows, the last `rows % world_size` of the shuffled order are dropped.
    """
    if batch < 1 or block < 1 or blocks_in_memory < 1 or not 0 <= rank < world_size:
        raise BadInput("batch and blocks must be positive, and rank less than world_size")
    if site not in dataset.sites:
        raise dataset.missing_site_error(site)
    blocks = [
        (unit, file, site, start, min(start + block, dataset.row_count(unit, file)))
        for unit in sorted(dataset.commits)
        for file in range(len(dataset.files(unit)))
        for start in range(0, dataset.row_count(unit, file), block)
    ]
    random = np.random.default_rng(seed)
    blocks = [blocks[n] for n in random.permutation(len(blocks))]
    each = sum(block[4] - block[3] for block in blocks) // world_size
    blocks = _cut(blocks, rank * each, (rank + 1) * each)
    shuffling = np.random.default_rng((seed, rank))
    rest: np.ndarray | None = None
    with ThreadPoolExecutor(READERS) as readers:

        def read(block: Block) -> np.ndarray:
            return np.array(dataset.rows(*block))  # copied, so that pages are read in this thread

        def begin(first: int) -> list[Future[np.ndarray]]:
            return [readers.submit(read, one) for one in blocks[first : first + blocks_in_memory]]

        pending = begin(0)
        for first in range(0, len(blocks), blocks_in_memory):
            rows = [future.result() for future in pending]
            pending = begin(first + blocks_in_memory)
            pool = np.concatenate(rows if rest is None else [rest, *rows])
            pool = pool[shuffling.permutation(len(pool))]
            full = len(pool) // batch * batch
            yield from pool[:full].reshape(-1, batch, *pool.shape[1:])
            rest = pool[full:]
    if rest is not None and len(rest):
        yield rest


def _cut(blocks: list[Block], start: int, stop: int) -> list[Block]:
    """The blocks that hold rows start … stop of all blocks in order, cut at both ends."""
    chosen: list[Block] = []
    at = 0
    for unit, file, site, first, last in blocks:
        low, high = max(start - at, 0), min(stop - at, last - first)
        if low < high:
            chosen.append((unit, file, site, first + low, first + high))
        at += last - first
    return chosen
