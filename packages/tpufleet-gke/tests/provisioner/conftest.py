"""Provisioners on a manual clock, closed after the test."""

from __future__ import annotations

import pytest


@pytest.fixture
def make():
    from tests.provisioner.harness import ProvisionerHarness  # needs the extra `gke`

    harnesses = []

    def one(**settings):
        harnesses.append(ProvisionerHarness(**settings))
        return harnesses[-1]

    yield one
    for harness in harnesses:
        harness.close()
