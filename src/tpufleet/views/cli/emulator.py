"""`tpu emulator`: a Cloud TPU API on this machine, for a dry run of a whole fleet."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import click

from tpufleet.errors import BadInput
from tpufleet.model import durations, fleets
from tpufleet.views.cli import connection


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatorOptions:
    listen: str
    folder: Path | None  # where agents run; None: nodes are only names
    zones: tuple[str, ...]  # empty: all of Google's
    plan: Path | None
    nodes: dict[str, int]  # the most that a zone has to give
    boot: timedelta
    notice: timedelta


def emulator_command(run: Callable[[EmulatorOptions], int]) -> click.Command:
    @click.command(
        "emulator",
        short_help="Run a Cloud TPU API on this machine.",
        epilog="\b\nExamples:\n  tpu emulator\n"
        "  tpu emulator --listen 127.0.0.1:8475 --nodes us-central1-a=4 --plan storm.yaml\n",
    )
    @click.option("--listen", default="127.0.0.1:8475", show_default=True, help="Where to listen.")
    @click.option("--zone", "zones", multiple=True, help="A zone that exists (default: Google's).")
    @click.option("--nodes", multiple=True, metavar="ZONE=N", help="The most nodes of a zone.")
    @click.option("--plan", type=click.Path(path_type=Path), help="What goes wrong (YAML).")
    @click.option("--boot", default="5s", show_default=True, help="How long a node boots.")
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
        """Speak the Cloud TPU API v2 (gRPC) on this machine, with no bill.

        A control plane uses it when its config says so:

        \b
          tpu_vm:
            project: my-project
            zones: [us-central1-a]
            endpoint: 127.0.0.1:8475

        The plan may hold `seed`, `calls` (errors by call, chance or time), `storms`, `closings`,
        `stock` (nodes by zone and type) and `quota` (chips).
        """
        for zone in zones:
            fleets.check_zone(zone)
        if not re.fullmatch(r".+:\d{1,5}", listen):
            raise BadInput(f"--listen: {listen!r} is not ADDRESS:PORT; write 127.0.0.1:8475")
        folder = connection.settings().home / "emulator" if agents else None
        context.exit(
            run(
                EmulatorOptions(
                    listen=listen,
                    folder=folder,
                    zones=zones,
                    plan=plan,
                    nodes=dict(_limit(text) for text in nodes),
                    boot=_span(boot, "--boot"),
                    notice=_span(notice, "--notice"),
                )
            )
        )

    return emulator


def _limit(text: str) -> tuple[str, int]:
    zone, _, most = text.partition("=")
    if not zone or not most.isdecimal():
        raise BadInput(f"--nodes: {text!r} is not ZONE=N; write us-central1-a=4")
    return fleets.check_zone(zone), int(most)


def _span(text: str, option: str) -> timedelta:
    try:
        found = durations.parse(text)
    except BadInput as error:
        raise BadInput(f"{option}: {error}") from error
    return found or timedelta(0)
