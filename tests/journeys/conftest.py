from __future__ import annotations

import pytest

from tests.journeys.simulated_fleet import SimulatedFleet
from tpufleet.stores.base import Store
from tpufleet.stores.memory import MemoryStore


@pytest.fixture
def make_world(tmp_path):
    made = []

    def make(store: Store | None = None, **options) -> SimulatedFleet:
        world = SimulatedFleet(tmp_path, store or MemoryStore(), **options)
        made.append(world)
        return world

    yield make
    for world in made:
        world.close()


@pytest.fixture
def world(make_world) -> SimulatedFleet:
    return make_world()
