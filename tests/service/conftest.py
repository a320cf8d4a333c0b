from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.harness import ServiceHarness
from tpufleet.stores.memory import MemoryStore


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ServiceHarness]:
    world = ServiceHarness(MemoryStore(), tmp_path)
    world.start()
    yield world
    world.close()


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceHarness]:
    """One server for all tests of a module that leave nothing behind."""
    world = ServiceHarness(MemoryStore(), tmp_path_factory.mktemp("state"))
    world.start()
    yield world
    world.close()
