"""The commands of this distribution: hidden from `tpu --help`, for who knows their names."""

from __future__ import annotations

from tpufleet.views.cli.registry import LazyCommand

COMMANDS = {
    "Jobs": {
        "workload": LazyCommand(
            "Run jobs with the options of xpk.", "tpufleet_migration.workload:workload", hidden=True
        ),
    },
}
CONFIG_COMMANDS = {
    "import": LazyCommand(
        "Import the data.json of the former job manager.",
        "tpufleet_migration.data_file:config_import",
    ),
    "user-dir": LazyCommand(
        "Set a folder of another user.", "tpufleet_migration.user_folders:user_dir", hidden=True
    ),
}
