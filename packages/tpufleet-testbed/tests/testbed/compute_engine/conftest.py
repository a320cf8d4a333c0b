from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.testbed.compute_engine.emulated_compute import EmulatedCompute


@pytest.fixture
def emulated() -> Iterator[Callable[..., EmulatedCompute]]:
    """Creates emulators on a manual clock, with the fields of a fault plan."""
    from tests.testbed.compute_engine.emulated_compute import EmulatedCompute  # Google's client

    worlds: list[EmulatedCompute] = []

    def create(**plan: Any) -> EmulatedCompute:
        worlds.append(EmulatedCompute(**plan))
        return worlds[-1]

    yield create
    for world in worlds:
        world.close()


@pytest.fixture
def world(emulated: Callable[..., EmulatedCompute]) -> EmulatedCompute:
    return emulated()
