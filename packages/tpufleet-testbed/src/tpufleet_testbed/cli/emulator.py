"""`tpu emulator`: an emulator of the Cloud TPU API and of Compute Engine."""

from __future__ import annotations

import re
from pathlib import Path

import click

from tpufleet.errors import invalid
from tpufleet.views.cli import connection


@click.command(
    epilog="\b\nExamples:\n  tpu emulator\n"
    "  tpu emulator --listen 127.0.0.1:8475 --plan storm.yaml\n",
)
@click.option("--listen", default="127.0.0.1:8475", show_default=True, help="Address.")
@click.option("--plan", type=click.Path(path_type=Path), help="Fault plan (YAML).")
@click.option(
    "--speed", type=click.FloatRange(min=1.0), default=1.0, show_default=True, metavar="FACTOR",
    help="Divide the durations of all operations by this.",
)  # fmt: skip
@click.option("--agents/--no-agents", default=True, help="Run real agents on the nodes.")
@click.pass_context
def emulator(
    context: click.Context,
    listen: str,
    plan: Path | None,
    speed: float,
    agents: bool,
) -> None:
    """Serve the Cloud TPU API v2 (gRPC) on this machine, without a cloud account.

    A server uses it with this config:

    \b
      tpu_vm:
        project: my-project
        zones: [us-central1-a]
        endpoint: 127.0.0.1:8475

    The plan may hold `seed`, `calls` (errors by call, probability or time), `storms`, `closings`,
    `stock` (nodes by zone and type), `quota` (chips), `latencies` (of operations) and `compute`. By
    default operations take as long as on Google Cloud; --speed 30 makes minutes seconds.
    """
    if not re.fullmatch(r".+:\d{1,5}", listen):
        raise invalid(listen, "HOST:PORT", "127.0.0.1:8475", "--listen")
    folder = connection.settings().home / "emulator" if agents else None

    from tpufleet_testbed.cloud_tpu.emulator import run_emulator

    context.exit(run_emulator(listen, folder, plan, speed))
