"""Whatever dies, every document ends, its code succeeds exactly once, and no status goes back."""

from __future__ import annotations

import pytest

from tests.bridges.storms import OPTIONS, Storm
from tests.bridges.worlds import World, make_pool


def storm_over(world: World, ledger, seed: int, *, slices: int, bridges: int) -> Storm:
    make_pool(world.server, slices)
    for _ in range(bridges):
        world.start_bridge(*OPTIONS)
    return Storm(world, ledger, seed)


def test_a_short_storm(world: World, ledger):
    storm = storm_over(world, ledger, 7, slices=2, bridges=2)
    storm.add(10)
    storm.strike(blows=5, gap=3.0)
    storm.finish(within=150)


@pytest.mark.chaos
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", [1, 2])
def test_two_hundred_documents_through_a_long_storm(world: World, ledger, seed):
    storm = storm_over(world, ledger, seed, slices=4, bridges=3)
    storm.add(200)
    storm.strike(blows=60, gap=8.0)
    storm.finish(within=1500)
