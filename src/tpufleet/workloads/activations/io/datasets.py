"""Reading a dataset of activations by (sample, site), touching only the bytes asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np

from tpufleet.errors import BadInput, NotFound
from tpufleet.runtime.units import Commit, Units
from tpufleet.workloads.activations import plans
from tpufleet.workloads.activations.io import dtypes, shards, zstd_shards
from tpufleet.workloads.activations.io.storage import Storage, open_storage

SAMPLE_INDEX, SAMPLE_ROWS = "sample_index", "sample_rows"
TOKENS, POSITIONS, METADATA = "tokens", "positions", "samples.json"
SCALE = ".scale"
READERS = 8  # blocks of a shuffled stream that are read at once


class Dataset:
    """What has been committed so far. Samples are numbered as in the plan, from 0."""

    def __init__(self, storage: Storage):
        self.storage = storage
        self.plan = plans.load(storage)
        units = Units(storage, count=self.plan.units, worker="reader")
        self.commits: dict[int, Commit] = units.committed()
        self._files: dict[int, list[shards.ShardFile]] = {}
        self._places: Callable[[int], dict[int, tuple[int, int, int, int]]] = lru_cache(256)(
            self._read_places
        )
        self._abouts: Callable[[int], dict[int, dict[str, Any]]] = lru_cache(8)(self._read_abouts)
        # Each holds a file open, of which a process may have about a thousand.
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
        """The numbers of the samples that are there."""
        for unit in sorted(self.commits):
            yield from self.plan.sample_range(unit)

    def read(self, sample: int, site: str) -> np.ndarray:
        """One sample's activations [tokens, width] as stored; int8 comes back as float32."""
        if site not in self.plan.sites:
            raise self.missing_site_error(site)
        unit, file, start, stop = self._find(sample)
        return self.rows(unit, file, site, start, stop)

    def tokens(self, sample: int) -> np.ndarray:
        unit, file, start, stop = self._find(sample)
        return self._raw(self.files(unit)[file], TOKENS, start, stop)

    def positions(self, sample: int) -> np.ndarray:
        unit, file, start, stop = self._find(sample)
        return self._raw(self.files(unit)[file], POSITIONS, start, stop)

    def metadata(self, sample: int) -> Mapping[str, Any]:
        """The sample's own id, the hash of its prompt, and what its source said about it."""
        unit = self.plan.unit_of(sample)
        self._find(sample)
        found = self._abouts(unit).get(sample)
        if found is None:
            raise NotFound(f"sample {sample} has no description")
        return found

    def missing_site_error(self, site: str) -> NotFound:
        return NotFound(f"{site} is not stored here; there are {', '.join(self.plan.sites)}")

    def files(self, unit: int) -> list[shards.ShardFile]:
        if unit not in self._files:
            found = self.commits[unit].outcome["files"]
            self._files[unit] = [shards.ShardFile.from_json(file) for file in found]
        return self._files[unit]

    def file_metadata(self, unit: int, file: int) -> list[dict[str, Any]]:
        shard = self.files(unit)[file]
        return json.loads(self._raw(shard, METADATA, 0, shard.tensors[METADATA].shape[0]).tobytes())

    def rows(self, unit: int, file: int, site: str, start: int, stop: int) -> np.ndarray:
        shard = self.files(unit)[file]
        values = self._raw(shard, site, start, stop)
        if self.plan.dtype != "int8":
            return values
        return values.astype(np.float32) * self._raw(shard, site + SCALE, start, stop)[:, None]

    def row_count(self, unit: int, file: int) -> int:
        return self.files(unit)[file].tensors[TOKENS].shape[0]

    def _find(self, sample: int) -> tuple[int, int, int, int]:
        unit = self.plan.unit_of(sample)
        if unit not in self.commits:
            raise NotFound(f"sample {sample} is in unit {unit}, which is not committed yet")
        return self._places(unit)[sample]

    def _read_places(self, unit: int) -> dict[int, tuple[int, int, int, int]]:
        places = {}
        for number, shard in enumerate(self.files(unit)):
            count = shard.tensors[SAMPLE_INDEX].shape[0]
            indexes = self._raw(shard, SAMPLE_INDEX, 0, count)
            rows = self._raw(shard, SAMPLE_ROWS, 0, count + 1)
            for i, sample in enumerate(indexes.tolist()):
                places[sample] = (unit, number, int(rows[i]), int(rows[i + 1]))
        return places

    def _read_abouts(self, unit: int) -> dict[int, dict[str, Any]]:
        found = (self.file_metadata(unit, file) for file in range(len(self.files(unit))))
        return {entry["sample"]: entry for entries in found for entry in entries}

    def _raw(self, shard: shards.ShardFile, name: str, start: int, stop: int) -> np.ndarray:
        if name in shard.unfolded:
            fetch = lambda tensor, offset, size: self._bytes(shard, tensor, offset, size)
            return zstd_shards.read_rows(shard, name, start, stop, fetch)
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
        return np.memmap(self.storage.local_path(name), np.uint8, mode="r")


def open_dataset(url: str) -> Dataset:
    """The dataset in a folder or bucket, as committed at this moment."""
    return Dataset(open_storage(url))


def as_torch(values: np.ndarray) -> Any:
    """A torch tensor of the same bits; bfloat16 included, which torch cannot take from numpy."""
    import torch

    values = np.array(values)  # torch wants memory that it may write to
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
    """Every stored row of a site once, in batches, mixed over the dataset: for training on tokens.

    Blocks of rows are read in random order and mixed in memory, so that disks read long stretches.
    The next blocks are read while these are used. Ranks share the blocks; the same seed gives the
    same order.
    """
    if batch < 1 or block < 1 or blocks_in_memory < 1 or not 0 <= rank < world_size:
        raise BadInput("batch and blocks must be positive and rank below world")
    if site not in dataset.sites:
        raise dataset.missing_site_error(site)
    blocks = [
        (unit, file, site, start, min(start + block, dataset.row_count(unit, file)))
        for unit in sorted(dataset.commits)
        for file in range(len(dataset.files(unit)))
        for start in range(0, dataset.row_count(unit, file), block)
    ]
    random = np.random.default_rng(seed)
    order = random.permutation(len(blocks))[rank::world_size]
    mixing = np.random.default_rng((seed, rank))
    left: np.ndarray | None = None
    with ThreadPoolExecutor(READERS) as readers:

        def read(place: tuple[int, int, str, int, int]) -> np.ndarray:
            return np.array(dataset.rows(*place))  # now, not when its pages are touched

        def begin(first: int) -> list[Future[np.ndarray]]:
            chosen = order[first : first + blocks_in_memory]
            return [readers.submit(read, blocks[n]) for n in chosen]

        coming = begin(0)
        for first in range(0, len(order), blocks_in_memory):
            rows = [one.result() for one in coming]
            coming = begin(first + blocks_in_memory)
            pool = np.concatenate(rows if left is None else [left, *rows])
            pool = pool[mixing.permutation(len(pool))]
            whole = len(pool) // batch * batch
            yield from pool[:whole].reshape(-1, batch, *pool.shape[1:])
            left = pool[whole:]
    if left is not None and len(left):
        yield left
