"""`tpu status`: the server, its leader, its providers and the queue."""

from __future__ import annotations

import click

from tpufleet.model.server_status import ServerStatus
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option


@click.command(epilog="\b\nExamples:\n  tpu status\n  tpu status --json\n")
@json_option
@click.pass_context
def status(context: click.Context, as_json: bool) -> None:
    """Show the state of the server: its leader, what each provider answered last, the queue, and
    where capacity was refused. The exit status is 1 if something fails."""
    with connection.connect() as client:
        report = client.status()
    if as_json:
        output.print_json(report)
    else:
        for line in lines(report):
            click.echo(line)
    if problems(report):
        context.exit(1)


def problems(status: ServerStatus) -> bool:
    controller = status.controller
    return status.controller_stale or any(
        provider.problems for provider in (controller.providers if controller else ())
    )


def lines(status: ServerStatus) -> list[str]:
    now, controller = status.now, status.controller
    shown = [f"server     {status.version}"]
    if controller is None:
        shown.append("leader     none; start a server with `tpu serve`")
    elif status.controller_stale:
        last = text.age(controller.reported_at, now)
        shown.append(f"leader     none; {controller.holder} reported last {last}")
    else:
        since = text.duration(now - controller.leader_since)
        shown.append(f"leader     {controller.holder}, for {since}")
    counts = ", ".join(f"{count} {state}" for state, count in status.jobs.items() if count)
    shown.append(f"jobs       {counts or 'none'}")
    shown.append(f"slices     {status.slices}")
    for provider in controller.providers if controller else ():
        answered = f"answered {text.age(provider.answered_at, now)}"
        never = "has not answered yet"
        state = never if provider.answered_at is None else answered
        shown.append(f"provider   {provider.name}: {state}")
        for problem in provider.problems:
            where = f" in {problem.zone}" if problem.zone else ""
            shown.append(
                f"  error: {problem.call} fails{where} for {text.duration(now - problem.since)}: "
                f"{text.one_line(problem.message)}"
            )
    for refusal in status.waiting_for:
        shown.append(
            f"refused    {refusal.accelerator} ({refusal.capacity}) in {refusal.zone}, retry "
            f"{text.age(refusal.until, now)}: {text.one_line(refusal.message)}"
        )
    return shown
