"""Where a latent of an autoencoder is strongest: an index of stored latents.

For each latent it has the strongest tokens of the dataset, and how many tokens have it at all. It
is built in one pass over the dataset, and a query reads the few rows of one latent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tpufleet.errors import BadInput, NotFound
from tpufleet_activations.io import dtypes, shards
from tpufleet_activations.io.dataset_reader import Dataset
from tpufleet_activations.io.storage import read_exactly

STRONGEST = 64  # tokens of a latent that are kept
BLOCK = 16384  # rows read at a time
INDEX_NAME = "index/latents-{}.safetensors"  # with the fingerprint of the dataset's rows
HEADER_BYTES = 4096


class Entry(NamedTuple):
    """A token that a latent is active on."""

    value: float
    sample: int
    position: int  # of the token in the sample


class Block(NamedTuple):
    """Rows with their latents, and where they are."""

    ids: np.ndarray  # [rows, k]
    values: np.ndarray  # [rows, k]
    samples: np.ndarray
    positions: np.ndarray


class IndexBuilder:
    """Keeps the strongest entries of each latent, from blocks in the order of the dataset.

    Entries that are weaker than all that are kept are dropped at once. The others are collected,
    and merged when there are as many as are kept.
    """

    def __init__(self, latents: int, strongest: int = STRONGEST):
        shape = (latents, strongest)
        self.values = np.zeros(shape, np.float32)
        self.samples = np.full(shape, -1, np.int64)
        self.positions = np.full(shape, -1, np.int32)
        self.counts = np.zeros(latents, np.int64)
        self._waiting: list[tuple[np.ndarray, ...]] = []
        self._number = 0

    def add(self, block: Block) -> None:
        ids = block.ids.reshape(-1)
        values = dtypes.as_float32(block.values).reshape(-1)
        weakest = self.values[:, -1]
        self.counts += np.bincount(ids[values > 0], minlength=len(self.counts))
        strong = np.flatnonzero(values > weakest[ids])
        rows = strong // block.ids.shape[1]
        entry = (ids[strong], values[strong], block.samples[rows], block.positions[rows])
        self._waiting.append(entry)
        self._number += len(strong)
        if self._number >= self.values.size:
            self.merge()

    def merge(self) -> None:
        if not self._waiting:
            return
        ids, values, samples, positions = map(np.concatenate, zip(*self._waiting, strict=True))
        self._waiting, self._number = [], 0
        touched = np.unique(ids)
        height, width = len(touched), self.values.shape[1]
        # What is kept comes first, so that of equal values the earlier ones stay.
        ids = np.concatenate([np.repeat(touched, width), ids])
        values = np.concatenate([self.values[touched].reshape(-1), values])
        samples = np.concatenate([self.samples[touched].reshape(-1), samples])
        positions = np.concatenate([self.positions[touched].reshape(-1), positions])
        order = np.lexsort((-values, ids))
        starts = np.searchsorted(ids[order], touched)
        chosen = order[starts[:, None] + np.arange(width)]  # each has at least `width` entries
        assert chosen.shape == (height, width)
        self.values[touched] = values[chosen]
        self.samples[touched] = samples[chosen]
        self.positions[touched] = positions[chosen]

    def to_bytes(self) -> bytes:
        self.merge()
        arrays: dict[str, np.ndarray] = {
            "samples": self.samples,
            "counts": self.counts,
            "values": self.values,
            "positions": self.positions,
        }
        tensors = [
            shards.Tensor(name=name, dtype=dtypes.DTYPE_NAMES[array.dtype], shape=array.shape)
            for name, array in arrays.items()
        ]
        header, placed = shards.build_header(tensors)
        return header + b"".join(arrays[tensor.name].tobytes() for tensor in placed)


class LatentIndex:
    """Reads an index: a few kilobytes for each latent."""

    def __init__(self, dataset: Dataset):
        """Builds it if the dataset has none for the rows that it has now."""
        encode = dataset.plan.encode
        if not encode:
            raise BadInput(
                f"{dataset.storage.url} has no latents; make a plan with `tpu extract plan "
                "--encode FILE`"
            )
        self._storage = dataset.storage
        self._name = INDEX_NAME.format(dataset.fingerprint)
        try:
            head = self._storage.read_range(self._name, 0, HEADER_BYTES)
        except NotFound:
            builder = IndexBuilder(encode["latents"])
            for block in _blocks(dataset):
                builder.add(block)
            content = builder.to_bytes()
            self._storage.create(self._name, content)
            head = content[:HEADER_BYTES]
        self._tensors = {tensor.name: tensor for tensor in shards.read_header(head)}

    def __len__(self) -> int:
        return self._tensors["counts"].shape[0]

    def count(self, latent: int) -> int:
        """Tokens that the latent is active on."""
        return int(self._row("counts", latent))

    def strongest(self, latent: int, most: int = STRONGEST) -> list[Entry]:
        """The strongest first."""
        names = ("values", "samples", "positions")
        columns = [self._row(name, latent)[:most].tolist() for name in names]
        return [Entry(*entry) for entry in zip(*columns, strict=True) if entry[0] > 0]

    def _row(self, name: str, latent: int) -> np.ndarray:
        if not 0 <= latent < len(self):
            raise NotFound(f"no latent {latent}: the autoencoder has {len(self):,}")
        tensor = self._tensors[name]
        kind = dtypes.NUMPY_DTYPES[tensor.dtype]
        size = tensor.row_bytes
        data = read_exactly(self._storage, self._name, tensor.offset + latent * size, size)
        return np.frombuffer(data, kind).reshape(tensor.shape[1:])


def activations(dataset: Dataset, sample: int, latent: int) -> dict[int, float]:
    """The latent on the tokens of a sample, by position; 0 where it is not one of the largest."""
    values, ids = dataset.sites
    found = np.where(dataset.read(sample, ids) == latent, dataset.read(sample, values), 0)
    strength = dtypes.as_float32(found).max(axis=1, initial=0)
    return dict(zip(dataset.positions(sample).tolist(), strength.tolist(), strict=True))


def _blocks(dataset: Dataset) -> Iterator[Block]:
    dataset.check_records()
    values, ids = dataset.sites
    for span in dataset.blocks(BLOCK):
        found = [
            dataset.rows(span.unit, span.file, name, span.start, span.stop)
            for name in (ids, values, shards.POSITIONS)
        ]
        yield Block(found[0], found[1], dataset.row_samples(*span), found[2])
