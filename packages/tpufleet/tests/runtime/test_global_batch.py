"""The global batch of an elastic job is the same on any number of slices."""

from __future__ import annotations

import numpy as np
import pytest

from tpufleet.errors import BadInput
from tpufleet.runtime import Context, global_batch


def divide(size, slices, *, most=4, hosts=1, chips=4, process=0):
    here = Context(
        num_slices=slices, max_slices=most, num_processes=slices * hosts, process_id=process
    )
    return global_batch(size, slices * hosts * chips, here)


@pytest.mark.parametrize(
    ("size", "slices", "rounds", "rows"),
    [
        (48, 4, 1, 48),
        (48, 3, 2, 24),
        (48, 2, 2, 24),
        (48, 1, 4, 12),
        (50, 4, 1, 64),
        (50, 3, 2, 36),
    ],
)
def test_fewer_slices_take_more_rounds(size, slices, rounds, rows):
    batch = divide(size, slices)
    assert (batch.rounds, batch.rows) == (rounds, rows)
    assert rows <= slices * divide(size, 4).rows / 4, "no chip holds more than with all slices"


@pytest.mark.parametrize("slices", [1, 2, 3, 4])
@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("size", [1, 7, 48, 50])
def test_every_example_counts_once_however_many_slices_there_are(size, hosts, slices):
    counted = np.zeros(size)
    for process in range(slices * hosts):
        batch = divide(size, slices, hosts=hosts, process=process)
        numbers, weights = batch.split(range(size))
        np.add.at(counted, numbers[:, batch.own], weights[:, batch.own])
    assert (counted == 1).all()


def test_the_weighted_sum_of_gradients_is_that_of_the_whole_batch():
    examples = np.random.default_rng(0).standard_normal((50, 3))
    for slices in (1, 2, 3, 4):
        rows, weights = divide(50, slices).split(examples)
        assert np.einsum("rnd,rn->d", rows, weights) / 50 == pytest.approx(examples.mean(axis=0))


def test_a_batch_of_another_size_is_refused():
    with pytest.raises(BadInput, match="the global batch has 48"):
        divide(48, 4).split(range(47))


def test_without_tpufleet_it_is_one_round():
    assert global_batch(8, 1, Context()).rounds == 1
