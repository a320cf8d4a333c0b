"""Datasets for the loaders of other libraries, none of which is needed otherwise.

Loaders of samples, such as `grain.MapDataset.source` and torch's `DataLoader`, take a `Dataset`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tpufleet.errors import not_installed
from tpufleet_activations.io import dtypes, shards
from tpufleet_activations.io.dataset_reader import Dataset
from tpufleet_activations.io.shuffling import RowBatch, shuffled_batches

BLOCK = 4096  # rows


class ShuffledBatches:
    """`shuffled_batches`, from the start in each iteration. Workers of a torch `DataLoader` divide
    the rows among themselves, within those of the rank."""

    def __init__(
        self,
        dataset: Dataset,
        sites: str | Sequence[str],
        *,
        batch: int,
        rank: int = 0,
        world_size: int = 1,
        **options: Any,
    ):
        self._dataset, self._sites, self._batch = dataset, sites, batch
        self._rank, self._world_size, self._options = rank, world_size, options

    def __iter__(self) -> Iterator[RowBatch]:
        worker, workers = _torch_worker()
        return shuffled_batches(
            self._dataset,
            self._sites,
            batch=self._batch,
            rank=self._rank * workers + worker,
            world_size=self._world_size * workers,
            **self._options,
        )


def as_torch(values: np.ndarray) -> Any:
    """A torch tensor with the same bits, also for bfloat16, which torch cannot take from numpy."""
    import torch

    values = np.array(values)  # torch needs writable memory
    if values.dtype == dtypes.NUMPY_DTYPES["BF16"]:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def torch_dataset(batches: ShuffledBatches) -> Any:
    """A `torch.utils.data.IterableDataset` of dictionaries of tensors, which are batches already:
    give it to `DataLoader(…, batch_size=None)`."""
    return _torch_class()(batches)


@lru_cache(1)
def _torch_class() -> Any:
    from torch.utils.data import IterableDataset

    class TorchBatches(IterableDataset):  # type: ignore[misc,type-arg,unused-ignore]  # torch is optional
        def __init__(self, batches: ShuffledBatches):
            self.batches = batches

        def __iter__(self) -> Iterator[dict[str, Any]]:
            for rows in self.batches:
                labels = {"tokens": rows.tokens, "positions": rows.positions}
                arrays = {**rows.values, **labels, "samples": rows.samples}
                yield {name: as_torch(values) for name, values in arrays.items()}

        def __reduce__(self) -> Any:
            return torch_dataset, (self.batches,)

    return TorchBatches


def hugging_face_dataset(dataset: Dataset, sites: str | Sequence[str]) -> Any:
    """A `datasets.IterableDataset` of rows in stored order, with float32 vectors. Its shards, which
    workers divide, are the units."""
    try:
        import datasets
    except ImportError as error:
        raise not_installed("datasets", "datasets") from error
    names = [sites] if isinstance(sites, str) else list(sites)
    for site in names:
        if site not in dataset.sites:
            raise dataset.missing_site_error(site)
    dataset.check_records()
    arguments = {"dataset": dataset, "sites": tuple(names), "units": sorted(dataset.commits)}
    return datasets.IterableDataset.from_generator(_unit_rows, gen_kwargs=arguments)


def _unit_rows(
    dataset: Dataset, sites: Sequence[str], units: Sequence[int]
) -> Iterator[dict[str, Any]]:
    for unit in units:
        for block in dataset.unit_blocks(unit, 0, BLOCK):
            columns = {
                "sample": dataset.row_samples(*block),
                "position": dataset.rows(*block[:2], shards.POSITIONS, *block[2:]),
                "token": dataset.rows(*block[:2], shards.TOKENS, *block[2:]),
            }
            for site in sites:
                columns[site] = dtypes.as_float32(dataset.rows(*block[:2], site, *block[2:]))
            for row in range(block.height):
                yield {name: values[row] for name, values in columns.items()}


def _torch_worker() -> tuple[int, int]:
    """The number of this worker of a `DataLoader`, and how many there are; without one, 0 of 1."""
    data = sys.modules.get("torch.utils.data")
    found = data.get_worker_info() if data is not None else None
    return (0, 1) if found is None else (found.id, found.num_workers)
