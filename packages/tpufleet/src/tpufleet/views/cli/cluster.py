"""`tpu cluster`: Kubernetes clusters. Its commands come from other distributions."""

from __future__ import annotations

from pathlib import Path

import click

from tpufleet.entry_points import registered
from tpufleet.views.cli.registry import SharedLazyGroup

cluster = SharedLazyGroup(
    name="cluster",
    sections={
        "Commands": {k: v for table in registered("tpufleet.cluster") for k, v in table.items()}
    },
    params=[
        click.Option(
            ["--file", "-f"],
            type=click.Path(path_type=Path, dir_okay=False),
            default=Path("cluster.yaml"),
            show_default=True,
            help="The environment on GKE; files are generated beside it.",
        )
    ],
    help="Kubernetes clusters for jobs: on GKE, from a cluster.yaml; or on this machine.",
    epilog="\b\nExamples:\n  tpu cluster plan --rehearse\n  tpu cluster local up\n",
)
