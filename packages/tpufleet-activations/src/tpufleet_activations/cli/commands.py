"""The commands of this distribution, for `tpu --help`."""

from __future__ import annotations

from tpufleet.views.cli.registry import LazyCommand

COMMANDS = {
    "Jobs": {
        "extract": LazyCommand(
            "Extract activations, each sample once.", "tpufleet_activations.cli.group:extract"
        ),
    },
}
