from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.fake_store import FakeStore
from tests.service.harness import ServiceHarness


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceHarness]:
    service = ServiceHarness(FakeStore(), tmp_path)
    service.start()
    yield service
    service.close_soon()


@pytest.fixture(scope="module")
def shared_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceHarness]:
    """One server for all tests of a module that leave nothing behind."""
    service = ServiceHarness(FakeStore(), tmp_path_factory.mktemp("state"))
    service.start()
    yield service
    service.close_soon()
