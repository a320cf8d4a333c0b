"""Datasets in the loaders of other libraries, and in other processes."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import types

import numpy as np
import pytest

from tests.activations import synthetic
from tpufleet_activations.io import datasets
from tpufleet_activations.io.storage import LocalFolder

SITE = synthetic.SITES[1]
SAMPLES = 60


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = LocalFolder(tmp_path_factory.mktemp("acts"))
    synthetic.extract(folder, synthetic.plan(samples=SAMPLES, unit_samples=9))
    return datasets.open_dataset(str(folder.path))


def labels(batches):
    return sorted(
        (int(sample), int(position))
        for rows in batches
        for sample, position in zip(rows.samples, rows.positions, strict=True)
    )


ALL = sorted((n, at) for n in range(SAMPLES) for at in range(synthetic.length(n)))


def read_sample(data, sample):
    return data.read(sample, SITE).astype(float)


def test_a_dataset_is_given_to_a_spawned_process(data):
    data.read(1, SITE)  # opens files, which no other process can use
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert np.array_equal(pool.apply(read_sample, (data, 17)), synthetic.values(17, SITE))


def test_a_pickled_dataset_has_the_units_of_that_time(data):
    copy = pickle.loads(pickle.dumps(data))
    assert copy.fingerprint == data.fingerprint
    assert list(copy) == list(data)


class Counted(dict):
    """Counts how often all units are gone through."""

    times = 0

    def __iter__(self):
        self.times += 1
        return super().__iter__()


def test_units_are_put_in_order_once_for_all_samples(data):
    copy = pickle.loads(pickle.dumps(data))
    copy.commits = Counted(copy.commits)
    for number in range(SAMPLES):
        assert copy[number]["sample"] == number
    assert copy.commits.times == 1


def test_samples_by_number(data):
    found = data[17]
    assert found["sample"] == 17
    assert np.array_equal(found["tokens"], synthetic.tokens(17))
    assert np.array_equal(found[SITE].astype(float), synthetic.values(17, SITE))
    assert [data[n]["sample"] for n in range(-SAMPLES, SAMPLES)] == [*range(SAMPLES)] * 2
    for number in (SAMPLES, -SAMPLES - 1):
        with pytest.raises(IndexError):
            data[number]


def test_an_iterable_can_be_iterated_again(data):
    rows = datasets.ShuffledBatches(data, SITE, batch=8, seed=2)
    assert labels(rows) == labels(rows) == ALL


def as_worker(monkeypatch, number, count):
    """Of torch only the function that says which worker this is."""
    worker = types.SimpleNamespace(id=number, num_workers=count)
    torch = types.SimpleNamespace(get_worker_info=lambda: worker)
    monkeypatch.setitem(sys.modules, "torch.utils.data", torch)


def test_workers_of_a_loader_divide_the_rows(data, monkeypatch):
    rows = pickle.loads(pickle.dumps(datasets.ShuffledBatches(data, SITE, batch=4)))
    parts = []
    for number in range(3):
        as_worker(monkeypatch, number, 3)
        parts.append(labels(rows))
    assert {len(part) for part in parts} == {len(ALL) // 3}
    assert len({label for part in parts for label in part}) == len(ALL) - len(ALL) % 3


def test_ranks_and_workers_divide_the_rows(data, monkeypatch):
    parts = []
    for rank in range(2):
        rows = datasets.ShuffledBatches(data, SITE, batch=4, rank=rank, world_size=2)
        for number in range(2):
            as_worker(monkeypatch, number, 2)
            parts.append(labels(rows))
    assert len({label for part in parts for label in part}) == len(ALL) - len(ALL) % 4


@pytest.mark.parametrize("workers", [0, 2])
def test_a_torch_loader_with_workers_has_each_row_once(data, workers):
    torch_data = pytest.importorskip("torch.utils.data")
    rows = datasets.torch_dataset(datasets.ShuffledBatches(data, SITE, batch=4))
    context = "spawn" if workers else None
    loader = torch_data.DataLoader(
        rows, batch_size=None, num_workers=workers, multiprocessing_context=context
    )
    found = [
        (sample, position)
        for batch in loader
        for sample, position in zip(
            batch["samples"].tolist(), batch["positions"].tolist(), strict=True
        )
    ]
    assert len(set(found)) == len(found) == len(ALL) - len(ALL) % max(workers, 1)


def test_a_hugging_face_dataset_has_each_row_once(data):
    pytest.importorskip("datasets")
    rows = datasets.hugging_face_dataset(data, SITE)
    assert rows.num_shards == data.plan.units
    found = list(rows)
    assert sorted((row["sample"], row["position"]) for row in found) == ALL
    row = found[5]
    assert np.array_equal(row[SITE], synthetic.values(row["sample"], SITE)[row["position"]])


def test_grain_takes_a_dataset(data):
    grain = pytest.importorskip("grain")
    shuffled = grain.MapDataset.source(data).shuffle(seed=3)
    found = list(shuffled.to_iter_dataset())
    assert sorted(one["sample"] for one in found) == list(range(SAMPLES))
    one = found[4]
    assert np.array_equal(one["tokens"], synthetic.tokens(one["sample"]))
