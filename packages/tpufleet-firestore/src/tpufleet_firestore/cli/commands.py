"""The commands of this distribution, for `tpu --help`."""

from __future__ import annotations

from tpufleet.views.cli.registry import LazyCommand

COMMANDS = {
    "Jobs": {
        "submit-code": LazyCommand(
            "Submit code through Firestore.", "tpufleet_firestore.cli.submit_code:submit_code"
        ),
    },
    "Operators": {
        "bridge": LazyCommand(
            "Run jobs from a Firestore collection.", "tpufleet_firestore.cli.bridge:bridge"
        ),
    },
}
