from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.storms import Storm
from tests.processes import Server
from tpufleet.stores.opening import open_store


@pytest.fixture
def storm(tmp_path: Path) -> Iterator[Callable[[int], Storm]]:
    """Makes a storm from a seed: one server on its own SQLite store, started."""
    server = Server(tmp_path / "home")
    stores = []

    def make(seed: int) -> Storm:
        server.start()
        store = open_store(f"sqlite:///{server.home / 'fleet.db'}")
        stores.append(store)
        return Storm(seed, tmp_path, store, [server])

    yield make
    server.end()
    for store in stores:
        store.close()
