from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.testbed.cloud_tpu.emulated_cloud import EmulatedCloud


@pytest.fixture
def emulated() -> Iterator[Callable[..., EmulatedCloud]]:
    """Creates emulators on a manual clock; with fixed durations, unless `latencies` is given."""
    from tests.testbed.cloud_tpu.emulated_cloud import FIXED, EmulatedCloud  # needs Google's client

    clouds: list[EmulatedCloud] = []

    def create(**settings: object) -> EmulatedCloud:
        clouds.append(EmulatedCloud(**{"latencies": FIXED, **settings}))
        return clouds[-1]

    yield create
    for cloud in clouds:
        cloud.close()


@pytest.fixture
def world(emulated: Callable[..., EmulatedCloud]) -> EmulatedCloud:
    return emulated()
