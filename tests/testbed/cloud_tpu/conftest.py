from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.testbed.cloud_tpu.emulated_cloud import EmulatedCloud


@pytest.fixture
def emulated() -> Iterator[Callable[..., EmulatedCloud]]:
    """Makes emulators on a clock that the test moves."""
    from tests.testbed.cloud_tpu.emulated_cloud import EmulatedCloud  # needs Google's client

    opened: list[EmulatedCloud] = []

    def make(**settings: object) -> EmulatedCloud:
        opened.append(EmulatedCloud(**settings))
        return opened[-1]

    yield make
    for world in opened:
        world.close()


@pytest.fixture
def world(emulated: Callable[..., EmulatedCloud]) -> EmulatedCloud:
    return emulated()
