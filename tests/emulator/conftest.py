from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from tests.emulator.worlds import EmulatedWorld


@pytest.fixture
def emulated() -> Iterator[Callable[..., EmulatedWorld]]:
    """Makes emulators on a clock that the test moves."""
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
