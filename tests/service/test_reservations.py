"""Reservations: requests at the same time, and limits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from tests.service.harness import ServiceHarness
from tpufleet.errors import Conflict
from tpufleet.model.api_types import NewReservation
from tpufleet.model.pools import Pool
from tpufleet.model.reservations import Reservation
from tpufleet.stores.base import ChangeSet

HOUR, DAY = timedelta(hours=1), timedelta(days=1)


@pytest.fixture
def lab(service: ServiceHarness) -> None:
    put_pool(service)


def put_pool(service: ServiceHarness, **fields) -> None:
    values = {"name": "lab", "provider": "local", "accelerator": "v5litepod-16", "largest": 2}
    service.store.commit(ChangeSet(pools=[Pool(**{**values, **fields})]))


def reserve(service: ServiceHarness, name: str, by: str = "mel", *, after=None, **fields):
    starts_at = None if after is None else service.clock.now() + after
    values = {"pool": "lab", "slices": 1, "duration": HOUR, "starts_at": starts_at}
    return service.client(by).reserve(NewReservation(id=name, **{**values, **fields}))


def test_concurrent_reservations_with_one_token_take_no_slice_twice(service, lab):
    def attempt(number: int) -> bool:
        try:
            reserve(service, f"r{number}")
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(attempt, range(8))) == 2
    assert len(service.store.documents(Reservation)) == 2
