"""The commands of this distribution, for `tpu --help`."""

from __future__ import annotations

from tpufleet.views.cli.registry import CLUSTER, LazyCommand

COMMANDS = {
    "Operators": {
        "cluster": LazyCommand("Create GKE environments; run one here.", CLUSTER),
        "emulator": LazyCommand(
            "Run an emulator of the Cloud TPU API.", "tpufleet_testbed.cli.emulator:emulator"
        ),
    },
}
CLUSTER_COMMANDS = {
    "local": LazyCommand(
        "Run Kubernetes on this machine.", "tpufleet_testbed.cli.local_cluster:local_group"
    ),
}
