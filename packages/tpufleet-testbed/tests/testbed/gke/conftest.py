from __future__ import annotations

import pytest


@pytest.fixture
def cluster():
    """An emulated GKE on a manual clock."""
    from tests.testbed.gke.test_node_pools import Cluster

    cluster = Cluster()
    yield cluster
    cluster.server.close()
