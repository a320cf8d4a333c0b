"""Under random faults, every document ends and succeeds exactly once; no status goes back."""

from __future__ import annotations

import pytest

from tests.firestore.fault_injection import OPTIONS, FaultInjector
from tests.firestore.harness import BridgeHarness, create_pool


def start(harness: BridgeHarness, ledger, seed: int, *, slices: int, bridges: int) -> FaultInjector:
    create_pool(harness.server, slices)
    for _ in range(bridges):
        harness.start_bridge(*OPTIONS)
    return FaultInjector(harness, ledger, seed)


@pytest.mark.parametrize(
    ("documents", "faults"), [(6, 4), pytest.param(10, 5, marks=pytest.mark.slow)]
)
def test_a_few_faults(harness: BridgeHarness, ledger, documents, faults):
    injector = start(harness, ledger, 7, slices=2, bridges=2)
    injector.add(documents)
    injector.inject(faults=faults, max_gap=3.0)
    injector.finish(timeout=900)


@pytest.mark.chaos
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", [1, 2])
def test_two_hundred_documents_under_many_faults(harness: BridgeHarness, ledger, seed):
    injector = start(harness, ledger, seed, slices=4, bridges=3)
    injector.add(200)
    injector.inject(faults=60, max_gap=8.0)
    injector.finish(timeout=1500)
