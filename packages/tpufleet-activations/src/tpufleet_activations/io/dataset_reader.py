"""Reading a dataset of activations by (sample, site), without reading more bytes than needed."""

from __future__ import annotations

import hashlib
import json
import operator
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tpufleet.errors import NotFound
from tpufleet.runtime.units import Commit, DamagedRecord, Units
from tpufleet_activations import plans
from tpufleet_activations.formatting import extract_command
from tpufleet_activations.io import dtypes, scattered_reads, shards, zstd_shards
from tpufleet_activations.io.addresses import open_storage
from tpufleet_activations.io.aligned_memory import MemoryPool
from tpufleet_activations.io.storage import Storage, read_exactly

MAPPED_FROM = 128 << 10  # smaller reads are faster as a copy than as a map


class RowSpan(NamedTuple):
    """Consecutive rows, start … stop, of a file of a unit (by number): those of a sample, of one of
    its contexts, or of a block."""

    unit: int
    file: Any  # its number; of rows that are received, what they arrived in
    start: int
    stop: int

    @property
    def height(self) -> int:
        return self.stop - self.start


class Dataset:
    """The samples committed so far, by their index in the plan."""

    def __init__(self, storage: Storage, *, indexed: bool = True):
        """Units whose record is damaged are missing, and in `damaged`; the index hides some of
        them, for readers, which need no records then."""
        plan = plans.load(storage)
        units = Units(
            storage,
            count=plan.units,
            worker="reader",
            tolerant=True,
            indexed=indexed,
        )
        commits = units.committed()
        self._open(storage, plan, commits, {n: why for n, (_, why) in units.damaged.items()})

    def _open(
        self,
        storage: Storage,
        plan: plans.ExtractionPlan,
        commits: dict[int, Commit],
        damaged: dict[int, str],
    ) -> None:
        self.storage, self.plan, self.commits, self.damaged = storage, plan, commits, damaged
        self._local = storage.local_path(plans.PLAN_FILE) is not None
        self._files: dict[int, list[shards.ShardFile]] = {}
        self._spans: Callable[[int], dict[int, list[RowSpan]]] = lru_cache(256)(self._read_spans)
        self._row_owners: Callable[[int, int], tuple[np.ndarray, np.ndarray]] = lru_cache(1024)(
            self._read_row_owners
        )
        self._metadata: Callable[[int], dict[int, dict[str, Any]]] = lru_cache(8)(
            self._read_metadata
        )
        # Each map keeps a file open too, and a process may have about a thousand open files.
        self._map: Callable[[str], np.ndarray] = lru_cache(32)(self._open_map)
        self.memory = MemoryPool()  # of batches; the next epoch uses it again
        self._file: Callable[[str], FileIO] = lru_cache(32)(self._open_file)

    def __getstate__(self) -> tuple[Any, ...]:
        return self.storage.url, self.plan.to_json(), self.commits, self.damaged

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """The same units, of which no record is read again."""
        url, plan, commits, damaged = state
        self._open(open_storage(url), plans.from_json(plan), commits, damaged)

    @property
    def sites(self) -> tuple[str, ...]:
        return self.plan.sites

    @property
    def complete(self) -> bool:
        return len(self.commits) == self.plan.units

    @property
    def fingerprint(self) -> str:
        """Of the plan and the rows of each committed unit: what the order of shuffled rows depends
        on, besides the seed."""
        rows = [
            [unit, *(self.row_count(unit, file) for file in range(len(self.files(unit))))]
            for unit in sorted(self.commits)
        ]
        text = json.dumps([self.plan.identity, rows], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def __len__(self) -> int:
        return max(self._ends[1], default=0)

    @cached_property
    def _ends(self) -> tuple[list[int], list[int]]:
        """The committed units in order, and the number of samples up to the end of each."""
        units = sorted(self.commits)
        return units, list(accumulate(len(self.plan.sample_range(unit)) for unit in units))

    def __iter__(self) -> Iterator[int]:
        """Indexes of the committed samples."""
        for unit in sorted(self.commits):
            yield from self.plan.sample_range(unit)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """A committed sample, with all sites: what loaders of samples take."""
        units, ends = self._ends
        place = operator.index(number)
        place += len(self) if place < 0 else 0
        if not 0 <= place < len(self):
            raise IndexError(f"no sample number {number} of {len(self):,}")
        unit = bisect_right(ends, place)
        sample = self.plan.sample_range(units[unit])[place - ends[unit]]  # from the end
        labels = {"sample": sample, "tokens": self.tokens(sample)}
        labels["positions"] = self.positions(sample)
        return labels | {site: self.read(sample, site) for site in self.sites}

    def read(self, sample: int, site: str) -> np.ndarray:
        """One sample's activations [tokens, width] as stored."""
        if site not in self.plan.sites:
            raise self.missing_site_error(site)
        return _joined(
            self.rows(span.unit, span.file, site, span.start, span.stop)
            for span in self._find(sample)
        )

    def tokens(self, sample: int) -> np.ndarray:
        return _joined(self._read_span(span, shards.TOKENS) for span in self._find(sample))

    def positions(self, sample: int) -> np.ndarray:
        """Positions of the stored tokens within the sample."""
        return _joined(self._read_span(span, shards.POSITIONS) for span in self._find(sample))

    def metadata(self, sample: int) -> Mapping[str, Any]:
        """The sample's id, the hash of its prompt, and metadata from its source."""
        self._find(sample)
        metadata = self._metadata(self.plan.unit_of(sample)).get(sample)
        if metadata is None:
            raise NotFound(f"sample {sample} has no metadata; run `tpu extract verify`")
        return metadata

    def check_records(self) -> None:
        """Raise if a unit is missing because its record is damaged: for what reads all rows."""
        for reason in self.damaged.values():
            raise DamagedRecord(reason)

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

    def rows(self, unit: int, file: int, name: str, start: int, stop: int) -> np.ndarray:
        """Of a site, or of `shards.TOKENS` or `shards.POSITIONS`."""
        return self._raw(self.files(unit)[file], name, start, stop)

    def read_rows_to(self, unit: int, file: int, site: str, start: int, rows: np.ndarray) -> bool:
        """Read consecutive rows, each to its address: `rows` are `scattered_reads.row_vectors`.
        False, and nothing is read, where they are not plain bytes of a local file."""
        shard = self.files(unit)[file]
        if not (self._local and scattered_reads.AVAILABLE) or site in shard.uncompressed:
            return False
        tensor, opened = shard.tensors[site], self._file(shard.name)
        row_bytes = tensor.row_bytes
        offset = tensor.offset + start * row_bytes
        if not scattered_reads.read_rows(opened.fileno(), offset, row_bytes, rows):
            raise self._truncated(shard)
        return True

    def row_samples(self, unit: int, file: int, start: int, stop: int) -> np.ndarray:
        """The sample that each row belongs to."""
        samples, rows = self._row_owners(unit, file)
        return samples[rows.searchsorted(np.arange(start, stop), side="right") - 1]

    def row_count(self, unit: int, file: int) -> int:
        return self.files(unit)[file].tensors[shards.TOKENS].shape[0]

    @property
    def total_rows(self) -> int:
        return sum(
            self.row_count(unit, file)
            for unit in self.commits
            for file in range(len(self.files(unit)))
        )

    def blocks(self, height: int) -> Iterator[RowSpan]:
        """All rows, so many at a time."""
        for unit in sorted(self.commits):
            yield from self.unit_blocks(unit, 0, height)

    def unit_blocks(self, unit: int, start: int, height: int) -> Iterator[RowSpan]:
        """The rows of a unit from `start` on, counted over its files."""
        for file in range(len(self.files(unit))):
            count = self.row_count(unit, file)
            for first in range(min(start, count), count, height):
                yield RowSpan(unit, file, first, min(first + height, count))
            start = max(start - count, 0)

    def _find(self, sample: int) -> list[RowSpan]:
        """In the order of the sample's tokens."""
        unit = self.plan.unit_of(sample)
        if unit in self.damaged:
            raise DamagedRecord(self.damaged[unit])
        if unit not in self.commits:
            raise NotFound(f"sample {sample} is in unit {unit}, which is not committed yet")
        spans = self._spans(unit)[sample]
        if len(spans) > 1:
            first = [span._replace(stop=span.start + 1) for span in spans]
            order = [int(self._read_span(span, shards.POSITIONS)[0]) for span in first]
            spans = [span for _, span in sorted(zip(order, spans, strict=True))]
        return spans

    def _read_span(self, span: RowSpan, tensor: str) -> np.ndarray:
        return self._raw(self.files(span.unit)[span.file], tensor, span.start, span.stop)

    def _read_spans(self, unit: int) -> dict[int, list[RowSpan]]:
        spans: dict[int, list[RowSpan]] = {}
        for number, shard in enumerate(self.files(unit)):
            count = shard.tensors[shards.SAMPLE_INDEX].shape[0]
            indexes = self._raw(shard, shards.SAMPLE_INDEX, 0, count)
            rows = self._raw(shard, shards.SAMPLE_ROWS, 0, count + 1)
            for i, sample in enumerate(indexes.tolist()):
                span = RowSpan(unit, number, int(rows[i]), int(rows[i + 1]))
                spans.setdefault(sample, []).append(span)
        return spans

    def _read_row_owners(self, unit: int, file: int) -> tuple[np.ndarray, np.ndarray]:
        """The samples of a file that have rows, in order, and the first row of each."""
        shard = self.files(unit)[file]
        count = shard.tensors[shards.SAMPLE_INDEX].shape[0]
        samples = self._raw(shard, shards.SAMPLE_INDEX, 0, count)
        rows = self._raw(shard, shards.SAMPLE_ROWS, 0, count + 1)
        present = np.diff(rows) > 0
        return samples[present], rows[:-1][present]

    def _read_metadata(self, unit: int) -> dict[int, dict[str, Any]]:
        metadata: dict[int, dict[str, Any]] = {}
        for file in range(len(self.files(unit))):
            for entry in self.file_metadata(unit, file):
                entry.pop("context", None)
                known = metadata.setdefault(entry["sample"], entry)
                if known is not entry:  # another context of the same sample
                    known["tokens"] += entry["tokens"]
        return metadata

    def _raw(self, shard: shards.ShardFile, name: str, start: int, stop: int) -> np.ndarray:
        if name in shard.uncompressed:
            read = partial(self._bytes, shard)
            return zstd_shards.read_rows(shard, name, start, stop, read)
        tensor = shard.tensors[name]
        row_bytes = tensor.row_bytes
        data = self._bytes(shard, name, start * row_bytes, (stop - start) * row_bytes)
        shape = (stop - start, *tensor.shape[1:])
        return np.frombuffer(data, dtypes.NUMPY_DTYPES[tensor.dtype]).reshape(shape)

    def _bytes(self, shard: shards.ShardFile, name: str, offset: int, size: int) -> Any:
        data: Any
        begin = shard.tensors[name].offset + offset
        if size == 0:
            return b""
        if not self._local:
            with self._naming_verify():
                return read_exactly(self.storage, shard.name, begin, size)
        if size < MAPPED_FROM:
            opened = self._file(shard.name)  # not closed before it has been read
            data = os.pread(opened.fileno(), size, begin)
        else:
            data = self._map(shard.name)[begin : begin + size]
        if len(data) < size:
            raise self._truncated(shard)
        return data

    def _truncated(self, shard: shards.ShardFile) -> NotFound:
        return self._verify(f"{self._path(shard.name)} ends before its {shard.size:,} bytes")

    def _verify(self, problem: object) -> NotFound:
        return NotFound(f"{problem}; run {extract_command('verify', self.storage.url)}")

    @contextmanager
    def _naming_verify(self) -> Iterator[None]:
        """A shard that is gone is reported with the command that finds all such shards."""
        try:
            yield
        except NotFound as error:
            raise self._verify(error) from error

    def _open_map(self, name: str) -> np.ndarray:
        # Slices of a memmap are slow.
        return np.asarray(np.memmap(self._path(name), np.uint8, mode="r"))

    def _open_file(self, name: str) -> FileIO:
        return FileIO(self._path(name))  # closed once nobody reads it

    def _path(self, name: str) -> Path:
        with self._naming_verify():
            path = self.storage.local_path(name)
        assert path is not None  # since that of the plan is not
        return path


def _joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    """One array; that of a sample with a single context is not copied."""
    arrays = list(parts)
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
