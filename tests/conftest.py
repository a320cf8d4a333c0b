"""What all tests share."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# How long one example takes says more about who else uses the machine than about the code.
settings.register_profile(
    "shared machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    # The same examples each time: a new failure is the change's, not the dice's.
    derandomize=True,
)
settings.load_profile("shared machine")

# Each starts a control plane, which is much for one machine; so no more than these run at a time.
CLUSTERS = ("real node", "cluster")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Side by side go whole files, so that what a file sets up is set up once. What needs a
    control plane goes in one line instead, and first, for it takes longest."""
    lines = {id(item): _line(item) for item in items}
    for item in items:
        item.add_marker(pytest.mark.xdist_group(lines[id(item)]))
    items.sort(key=lambda item: lines[id(item)] not in CLUSTERS)


def _line(item: pytest.Item) -> str:
    if item.path.parent.name != "k8s" or "plane" not in getattr(item, "fixturenames", ()):
        return str(item.path)
    real = item.path.name.startswith("test_real_")
    return CLUSTERS[0] if real else CLUSTERS[1]
