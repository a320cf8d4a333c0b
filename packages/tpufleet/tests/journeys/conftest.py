from __future__ import annotations

import pytest

from tests.contract.fake_store import FakeStore
from tests.journeys.simulated_fleet import SimulatedFleet
from tpufleet.stores.base import Store


@pytest.fixture
def make_fleet(tmp_path):
    fleets = []

    def make(store: Store | None = None, **options) -> SimulatedFleet:
        fleet = SimulatedFleet(tmp_path, store or FakeStore(), **options)
        fleets.append(fleet)
        return fleet

    yield make
    for fleet in fleets:
        fleet.close()


@pytest.fixture
def fleet(make_fleet) -> SimulatedFleet:
    return make_fleet()
