"""`tpu cluster`: Kubernetes clusters. Its commands come from other distributions."""

from __future__ import annotations

from tpufleet.views.cli.entry_points import registered
from tpufleet.views.cli.registry import LazyGroup

cluster = LazyGroup(
    name="cluster",
    sections={
        "Commands": {k: v for table in registered("tpufleet.cluster") for k, v in table.items()}
    },
    help="Kubernetes clusters for jobs: on GKE, from a cluster.yaml; or on this machine.",
)
