"""Whatever dies, every document ends, its code succeeds exactly once, and no status goes back."""

from __future__ import annotations

import pytest

from tests.bridges.fault_injection import OPTIONS, FaultInjector
from tests.bridges.harness import BridgeHarness, create_pool


def storm_over(
    world: BridgeHarness, ledger, seed: int, *, slices: int, bridges: int
) -> FaultInjector:
    create_pool(world.server, slices)
    for _ in range(bridges):
        world.start_bridge(*OPTIONS)
    return FaultInjector(world, ledger, seed)


def test_a_short_storm(world: BridgeHarness, ledger):
    storm = storm_over(world, ledger, 7, slices=2, bridges=2)
    storm.add(10)
    storm.inject(blows=5, gap=3.0)
    storm.finish(within=150)


@pytest.mark.chaos
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", [1, 2])
def test_two_hundred_documents_through_a_long_storm(world: BridgeHarness, ledger, seed):
    storm = storm_over(world, ledger, seed, slices=4, bridges=3)
    storm.add(200)
    storm.inject(blows=60, gap=8.0)
    storm.finish(within=1500)
