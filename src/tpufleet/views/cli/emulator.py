"""`tpu emulator`: an emulator of the Cloud TPU API."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import click

from tpufleet.errors import BadInput
from tpufleet.model import durations, fleets
from tpufleet.views.cli import connection


@click.command(
    epilog="\b\nExamples:\n  tpu emulator\n"
    "  tpu emulator --listen 127.0.0.1:8475 --nodes us-central1-a=4 --plan storm.yaml\n",
)
@click.option("--listen", default="127.0.0.1:8475", show_default=True, help="Address.")
@click.option("--zone", "zones", multiple=True, help="Existing zone (default: all of Google's).")
@click.option("--nodes", multiple=True, metavar="ZONE=N", help="Maximum number of nodes of a zone.")
@click.option("--plan", type=click.Path(path_type=Path), help="Fault plan (YAML).")
@click.option("--boot", default="5s", show_default=True, help="Boot time of a node.")
@click.option("--notice", default="30s", show_default=True, help="From notice to preemption.")
@click.option("--agents/--no-agents", default=True, help="Run real agents on the nodes.")
@click.pass_context
def emulator(
    context: click.Context,
    listen: str,
    zones: tuple[str, ...],
    nodes: tuple[str, ...],
    plan: Path | None,
    boot: str,
    notice: str,
    agents: bool,
) -> None:
    """Serve the Cloud TPU API v2 (gRPC) on this machine, without a cloud account.

    A control plane uses it with this config:

    \b
      tpu_vm:
        project: my-project
        zones: [us-central1-a]
        endpoint: 127.0.0.1:8475

    The plan may hold `seed`, `calls` (errors by call, probability or time), `storms`, `closings`,
    `stock` (nodes by zone and type) and `quota` (chips).
    """
    for zone in zones:
        fleets.check_zone(zone)
    if not re.fullmatch(r".+:\d{1,5}", listen):
        raise BadInput(f"--listen: {listen!r} is not ADDRESS:PORT, such as 127.0.0.1:8475")
    folder = connection.settings().home / "emulator" if agents else None
    limits = dict(_node_limit(option) for option in nodes)
    boot_time, notice_time = _duration(boot, "--boot"), _duration(notice, "--notice")

    from tpufleet.compose.providers import EmulatorOptions, run_emulator

    context.exit(
        run_emulator(
            EmulatorOptions(
                listen=listen,
                folder=folder,
                zones=zones,
                plan=plan,
                nodes=limits,
                boot=boot_time,
                notice=notice_time,
            )
        )
    )


def _node_limit(option: str) -> tuple[str, int]:
    zone, _, limit = option.partition("=")
    if not zone or not limit.isdecimal():
        raise BadInput(f"--nodes: {option!r} is not ZONE=N, such as us-central1-a=4")
    return fleets.check_zone(zone), int(limit)


def _duration(value: str, option: str) -> timedelta:
    try:
        duration = durations.parse(value)
    except BadInput as error:
        raise BadInput(f"{option}: {error}") from error
    return duration or timedelta(0)
