from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.chaos_run import ChaosRun
from tests.server_process import Server
from tpufleet.stores.open_store import open_store


@pytest.fixture
def chaos_run(tmp_path: Path) -> Iterator[Callable[[int], ChaosRun]]:
    """Makes a chaos_run from a seed: one server on its own SQLite store, started."""
    server = Server(tmp_path / "home", timeout=30)
    stores = []

    def make(seed: int) -> ChaosRun:
        server.start()
        store = open_store(f"sqlite:///{server.home / 'fleet.db'}")
        stores.append(store)
        return ChaosRun(seed, tmp_path, store, [server])

    yield make
    server.cleanup()
    for store in stores:
        store.close()
