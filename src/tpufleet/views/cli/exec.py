"""`tpu exec` and `tpu ssh`: the hosts of a slice."""

from __future__ import annotations

import os
import secrets
import shlex
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from tpufleet.errors import BadInput, FleetError, NotFound
from tpufleet.model import durations
from tpufleet.model.host_commands import HostCommandReport, HostCommandRequest, HostCommandResult
from tpufleet.views import text
from tpufleet.views.cli import connection, gcloud, output
from tpufleet.views.cli.output import json_option

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient
    from tpufleet.model.api_types import SliceRow

LOOK_SECONDS = 0.3
# A host hears of an errand with its next heartbeat, and tells with the one after.
HEARTBEAT_ALLOWANCE = timedelta(seconds=20)
# Somebody who has waited this long is told what for.
PATIENCE_SECONDS = 5.0


@click.command(
    "exec",
    short_help="Run a command on the hosts of a slice.",
    epilog="\b\nExamples:\n  tpu exec train-1 -- df -h /\n"
    "  tpu exec train-1 --host 0 --timeout 5m -- sh -c 'ls /tmp | wc -l'\n",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("slice_id", metavar="SLICE")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--host", type=click.IntRange(min=0), help="Only this host (default: all).")
@click.option("--timeout", default="1m", show_default=True, help="End it after this.")
@json_option
def exec_(
    slice_id: str, command: tuple[str, ...], host: int | None, timeout: str, as_json: bool
) -> int:
    """Run COMMAND on one or all hosts of SLICE, beside its job, through the agents. Only admins.

    No shell is used unless you name one. Each line stands behind the number of its host. The exit
    status is the first that is not 0.
    """
    limit = _limit(timeout)
    order = HostCommandRequest(id=secrets.token_hex(8), command=command, host=host, timeout=limit)
    with connection.connect() as client:
        report = wait_for_results(client, slice_id, order, limit + HEARTBEAT_ALLOWANCE)
    if as_json:
        output.print_json(report)
    else:
        for result in report.results:
            _print(result, label=len(report.hosts) > 1)
    if missing := unanswered_hosts(report):
        raise FleetError(f"no answer from {', '.join(missing)}; `tpu doctor {slice_id}` says more")
    return next((result.status or 1 for result in report.results if result.status != 0), 0)


@click.command(
    short_help="A shell on a host, through gcloud.",
    epilog="\b\nExamples:\n  tpu ssh train-1\n  tpu ssh train-1 --host 3 -- nvtop\n",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("slice_id", metavar="SLICE")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--host", default=0, type=click.IntRange(min=0), help="Which host.")
@click.option("--dry-run", is_flag=True, help="Only show the gcloud command.")
def ssh(slice_id: str, command: tuple[str, ...], host: int, dry_run: bool) -> None:
    """Open a shell on a host of SLICE. For people: nothing of tpufleet needs ssh."""
    with connection.connect() as client:
        row = find_slice(client, slice_id)
    if row.provider != "tpu-vm":
        raise BadInput(f"{slice_id} is no TPU VM; use `tpu exec {slice_id} -- …`")
    known = connection.settings().tpu_vm or {}
    if known.get("endpoint") and not dry_run:
        raise BadInput(f"{slice_id} is on an emulator; use `tpu exec {slice_id} -- …`")
    project = known.get("project")
    argv = gcloud.ssh(row.id, row.zone, project, str(host), command)
    if dry_run:
        click.echo(shlex.join(argv))
        return
    gcloud.require_gcloud()
    os.execvp(argv[0], argv)


def _limit(timeout: str) -> timedelta:
    try:
        limit = durations.parse(timeout)
    except BadInput as error:
        raise BadInput(f"--timeout: {error}") from error
    if not limit:
        raise BadInput("--timeout: an end is needed; write 1m, say")
    return limit


def find_slice(client: FleetClient, slice_id: str) -> SliceRow:
    rows = {row.id: row for row in client.slices(include_released=True)}
    if slice_id not in rows:
        raise NotFound(f"no slice is called {slice_id!r}; `tpu slices` lists them")
    return rows[slice_id]  # type: ignore[index]


def wait_for_results(
    client: FleetClient,
    slice_id: str,
    order: HostCommandRequest,
    within: timedelta,
    expected: int | None = None,
) -> HostCommandReport:
    """Until every host has answered, or every one that gives signs of life, or time is up."""
    client.send_host_command(slice_id, order)
    begun, told = time.monotonic(), False
    # Hosts that are silent are not waited for once the others have answered.
    while True:
        report = client.host_command(slice_id, order.id)
        enough = report.done or (expected is not None and len(report.results) >= expected)
        waited = time.monotonic() - begun
        if enough or waited > within.total_seconds():
            return report
        if waited > PATIENCE_SECONDS and not told:
            output.print_status(f"waiting for {', '.join(unanswered_hosts(report))}")
            told = True
        time.sleep(LOOK_SECONDS)


def unanswered_hosts(report: HostCommandReport) -> list[str]:
    return sorted({*report.hosts} - {result.host_id for result in report.results})


def _print(result: HostCommandResult, *, label: bool) -> None:
    number = result.host_id.rpartition("/")[2]
    for line in result.output.splitlines():
        click.echo(
            f"[{number}] {text.without_control_characters(line)}"
            if label
            else text.without_control_characters(line)
        )
    told = result.message or (f"exit status {result.status}" if result.status else "")
    if result.truncated:
        told = f"{told}; there was more output" if told else "there was more output"
    if told:
        click.echo(f"[{number}] {told}", err=True)
