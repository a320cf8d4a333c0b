"""`tpu status`: the server, its leader, its providers and the queue."""

from __future__ import annotations

from datetime import datetime

import click

from tpufleet.model.fleet.server_status import ProviderProblem, ServerStatus
from tpufleet.model.tpu.type_lookup import short_name
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import example, json_option

MAX_ERRORS = 5


@click.command(epilog=example("tpu status --json"))
@json_option
@click.pass_context
def status(context: click.Context) -> None:
    """Show the state of the server: its leader, the queue, what each provider answered last, where
    capacity was refused, and what the server logged in the last hour. The exit status is 1 if there
    is no leader or a provider fails."""
    with connection.connect() as client:
        report = client.status()
    if output.as_json():
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
    up = f", up {text.duration(now - status.started_at)}" if status.started_at else ""
    name = f"{status.server}, version " if status.server else ""
    shown = [f"server     {name}{status.version}{up}"]
    if controller is None:
        shown.append("leader     none; start a server with `tpu serve`")
    elif status.controller_stale:
        last = text.age(controller.reported_at, now)
        shown.append(f"leader     none; {controller.holder} reported last {last}")
    else:
        since = text.duration(now - controller.leader_since)
        other = f", version {controller.version}" if _is_other_version(status) else ""
        this = " (this server)" if controller.holder == status.server else ""
        shown.append(f"leader     {controller.holder}{this}, for {since}{other}")
    for server in status.servers:
        if server.name != status.server:
            seen = text.age(server.seen_at, now)
            shown.append(f"other      {server.name}, version {server.version}, seen {seen}")
    counts = ", ".join(f"{count} {state}" for state, count in status.jobs.items() if count)
    shown.append(f"jobs       {counts or 'none'}")
    if status.oldest_queued_at is not None:
        waited = text.duration(now - status.oldest_queued_at)
        shown.append(f"queue      oldest job waits for {waited}; see `tpu jobs state:queued`")
    shown.append(f"slices     {status.slices}, {text.counted(status.hosts, 'host')} reporting")
    for provider in controller.providers if controller else ():
        answered = f"answered {text.age(provider.answered_at, now)}"
        never = "has not answered yet"
        state = never if provider.answered_at is None else answered
        shown.append(f"provider   {provider.name}: {state}")
        for problem in provider.problems:
            where = f" in {problem.zone}" if problem.zone else ""
            shown.append(
                f"  error: {problem.call} fails{where} for {text.duration(now - problem.since)}: "
                f"{text.one_line(problem.message)}{_next_try(problem, now)}"
            )
    if (jobs := status.local_jobs) is not None:
        first, *others = jobs.description.split("; ")
        shown.append(f"{'local' if jobs.isolated else 'warning':<10} jobs on local: {first}")
        shown += [f"{'':<10} {part}" for part in others]
    for refusal in status.waiting_for:
        shown.append(
            f"refused    {short_name(refusal.accelerator)} ({refusal.capacity}) in {refusal.zone}, "
            f"retry {text.age(refusal.until, now)}: {text.one_line(refusal.message)}"
        )
    for error in status.errors[:MAX_ERRORS]:
        times = f" ({error.count} times)" if error.count > 1 else ""
        shown.append(
            f"{error.level:<10} {text.age(error.at, now)}{times}: {text.one_line(error.message)}"
        )
    return shown


def _next_try(problem: ProviderProblem, now: datetime) -> str:
    if problem.retry_at is None or problem.retry_at <= now:
        return ""
    return f"; next try in {text.duration(problem.retry_at - now)}"


def _is_other_version(status: ServerStatus) -> bool:
    controller = status.controller
    return controller is not None and controller.version not in ("", status.version)
