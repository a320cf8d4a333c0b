"""`tpu exec`: run a command on the hosts of a slice or a job."""

from __future__ import annotations

import secrets
from datetime import timedelta

import click

from tpufleet.model.fleet.host_commands import (
    HEARTBEAT_ALLOWANCE,
    MAX_TIMEOUT,
    HostCommandRequest,
    HostCommandResult,
)
from tpufleet.model.job.spec_types import SHELL
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.jobs import job_options
from tpufleet.views.cli.output import json_option
from tpufleet.views.cli.parameter_types import Duration, host_option
from tpufleet.views.cli.slices.host_commands import (
    find_slices,
    no_answer,
    unanswered_hosts,
    wait_for_results,
)


@click.command(
    "exec",
    epilog="\b\nExamples:\n  tpu exec train -- df -h /\n"
    "  tpu exec train-1 --host 0 --timeout 5m -- 'ls /tmp | wc -l'\n",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("target", metavar="JOB|SLICE")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@host_option("Only this host (default: all).")
@click.option(
    "--timeout",
    type=Duration(most=MAX_TIMEOUT),
    default="1m",
    show_default=True,
    help="Kill the command after this long; at most 1h.",
)
@json_option
def exec_(target: str, command: tuple[str, ...], host: int | None, timeout: timedelta) -> int:
    """Run COMMAND on one or all hosts of a slice, or of the slices of a JOB, beside the job,
    through the agents. Requires that the job is yours, or the admin role.

    As in `tpu run`, one argument with spaces is a script for bash; several are a program and its
    arguments, without a shell. Each line is prefixed with its host. The exit status is the first
    that is not 0.
    """
    script = job_options.command_of(command)
    command = (*SHELL, script) if isinstance(script, str) else command
    status = 0
    with connection.connect() as client:
        rows = find_slices(client, target)
        requests = {
            row.id: HostCommandRequest(
                id=secrets.token_hex(8), command=command, host=host, timeout=timeout
            )
            for row in rows
        }
        for slice_id, request in requests.items():
            client.send_host_command(slice_id, request)
        for slice_id, request in requests.items():
            report = wait_for_results(client, slice_id, request, timeout + HEARTBEAT_ALLOWANCE)
            if output.as_json():
                output.print_json(report)
            else:
                label = f"{slice_id}/" if len(rows) > 1 else ""
                for result in report.results:
                    _print_result(result, label if len(rows) > 1 or len(report.hosts) > 1 else None)
            if missing := unanswered_hosts(report):
                raise no_answer(missing, timeout, slice_id)
            failed = (result.status or 1 for result in report.results if result.status != 0)
            status = status or next(failed, 0)
    return status


def _print_result(result: HostCommandResult, label: str | None) -> None:
    """Lines are prefixed with the label and the host number, unless the label is None."""
    number = f"{label or ''}{result.host_id.rpartition('/')[2]}"
    for line in result.output.splitlines():
        shown = text.without_control_characters(line)
        click.echo(shown if label is None else f"[{number}] {shown}")
    notes = [
        result.message or (f"exit status {result.status}" if result.status else ""),
        "output truncated" if result.truncated else "",
    ]
    if any(notes):
        click.echo(f"[{number}] {'; '.join(note for note in notes if note)}", err=True)
