from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.emulator.worlds import EmulatedWorld


@pytest.fixture
def emulated() -> Iterator[Callable[..., EmulatedWorld]]:
    """Makes emulators on a clock that the test moves."""
    from tests.emulator.worlds import EmulatedWorld  # needs Google's client

    opened: list[EmulatedWorld] = []

    def make(**settings: object) -> EmulatedWorld:
        opened.append(EmulatedWorld(**settings))
        return opened[-1]

    yield make
    for world in opened:
        world.close()


@pytest.fixture
def world(emulated: Callable[..., EmulatedWorld]) -> EmulatedWorld:
    return emulated()
