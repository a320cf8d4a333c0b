"""`tpu init check`: what a cloud project lacks before the first job."""

from __future__ import annotations

import click

from tpufleet.errors import BadInput
from tpufleet.model.fleet.preflight import Check, CheckStatus, passed
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu import type_lookup
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option

COLOURS = {
    CheckStatus.OK: "green",
    CheckStatus.WARNING: "yellow",
    CheckStatus.FAILED: "red",
    CheckStatus.SKIPPED: "",
}


@click.command(
    epilog="\b\nExamples:\n  tpu init check\n  tpu init check --type v5e-16 --type v4-8:on-demand\n"
)
@click.option(
    "--type", "types", multiple=True, metavar="TYPE[:CAPACITY]",
    help="Check the quota of this type; repeat it for each slice (default: 4 spot chips of each).",
)  # fmt: skip
@json_option
@click.pass_context
def check(context: click.Context, types: tuple[str, ...]) -> None:
    """Check the Google Cloud project of the config file: credentials, API, roles, quota, network,
    bucket, bundle, and the address of the server.

    Nothing is changed and nothing is paid for. Each problem comes with the command that fixes it.
    The exit status is 1 if a check failed. `tpu serve` runs the same checks before its first start.
    """
    from tpufleet.compose.providers import preflight

    checks = preflight(connection.settings(), list(map(type_and_capacity, types)))
    report(context, checks)


def report(context: click.Context, checks: list[Check], **fields: str) -> None:
    """Print them; exit status 1 if one failed."""
    if not output.printed_json({**fields, "checks": checks, "passed": passed(checks)}):
        print_checks(checks)
    context.exit(0 if passed(checks) else 1)


def type_and_capacity(text: str) -> tuple[str, Capacity]:
    """`v4-8:on-demand`"""
    name, _, capacity = text.partition(":")
    if capacity and capacity not in {*Capacity}:
        raise BadInput(f"--type {text}: the capacity is one of {', '.join(Capacity)}")
    return type_lookup.short_name(type_lookup.find(name).name), Capacity(capacity or Capacity.SPOT)


def print_checks(checks: list[Check]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        line = f"{check.status.value:<8} {check.name:<{width}}  {check.message}"
        output.print_line(line, COLOURS[check.status])
        if check.fix:
            click.echo(f"{'':<8} {'':<{width}}  next: {check.fix}")
    failed = sum(check.status is CheckStatus.FAILED for check in checks)
    warned = sum(check.status is CheckStatus.WARNING for check in checks)
    summary = f"{text.counted(failed, 'problem')}, {text.counted(warned, 'warning')}"
    output.print_status(summary if failed or warned else "everything is set up")
