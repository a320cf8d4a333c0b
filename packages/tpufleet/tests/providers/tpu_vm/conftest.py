from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.providers.tpu_vm.emulated_tpus import EmulatedTpus


@pytest.fixture
def tpus(tmp_path: Path) -> Iterator[Callable[..., EmulatedTpus]]:
    """Makes emulated clouds with a provider on each."""
    from tests.providers.tpu_vm.emulated_tpus import EmulatedTpus  # needs Google's client

    opened: list[EmulatedTpus] = []

    def make(**settings: Any) -> EmulatedTpus:
        opened.append(EmulatedTpus(tmp_path / str(len(opened)), **settings))
        return opened[-1]

    yield make
    for world in opened:
        world.close()


@pytest.fixture
def world(tpus: Callable[..., EmulatedTpus]) -> EmulatedTpus:
    return tpus()
