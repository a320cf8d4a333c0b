"""The commands that this package adds to `tpu extract`."""

from __future__ import annotations

from tpufleet.views.cli.registry import LazyCommand

HERE = "tpufleet_migration.activations"
COMMANDS = {
    "deploy": LazyCommand("Run a fleet of workers as jobs.", f"{HERE}.deploy:deploy"),
    "export": LazyCommand("Export to Hugging Face, or pickles.", f"{HERE}.commands:export"),
    "import": LazyCommand("Import pickle shards.", f"{HERE}.commands:import_shards"),
    "streams": LazyCommand("Split ARC pairs into streams.", f"{HERE}.commands:streams"),
    "manifest": LazyCommand("Print a stream manifest.", f"{HERE}.commands:manifest"),
}
