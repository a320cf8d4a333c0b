"""`tpu queue`: what waits, behind what, until when; and commands that change the order."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from tpufleet.errors import BadInput, Conflict, Forbidden, NotFound
from tpufleet.model.api_types import QueueEntry
from tpufleet.model.job.jobs import ENDED_STATES, JobState
from tpufleet.model.tpu.topology import short_name
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import Cell, json_option, yes_option
from tpufleet.views.cli.settings.preferences import use_time_zone

WAITING_STATES = frozenset({JobState.QUEUED, JobState.WAITING, JobState.RECOVERING})
TITLES = ("QUEUE", "POS", "JOB", "OWNER", "NEEDS", "PRIORITY", "USED", "STARTS", "BECAUSE")


@click.group(
    cls=output.ListingGroup,
    epilog="\b\nExamples:\n  tpu queue --user me --pool lab\n  tpu queue move train --first\n"
    "  tpu queue hold train\n",
)
@click.option("--pool", help="Only this pool.")
@click.option("--user", metavar="NAME", help="Only jobs of this user, or of `me`.")
@json_option
@click.pass_context
def queue(context: click.Context, pool: str | None, user: str | None, as_json: bool) -> None:
    """List jobs that wait, in the order in which they are placed.

    The order is: higher priority first; then users who used fewer chips lately (USED, in chip
    hours, halved every 7 days, compared in steps of doubling); then first in, first out. STARTS is
    the latest time, where time limits of the jobs ahead determine it.
    """
    if context.invoked_subcommand is not None:
        return
    with connection.connect() as client:
        owner = client.me().name if user == "me" else user
        entries = client.queue(pool=pool, owner=owner)
        use_time_zone(client)
    if as_json:
        output.print_json({"queue": entries})
        return
    now = datetime.now(UTC)
    output.print_table(
        TITLES,
        (_cells(entry, now) for entry in entries),
        "no jobs wait",
        droppable=("USED", "PRIORITY", "OWNER", "QUEUE"),
    )


def _cells(entry: QueueEntry, now: datetime) -> list[Cell]:
    row = entry.job
    starts = "-"
    if entry.earliest_start is not None:
        soon = entry.earliest_start <= now
        starts = "now" if soon else f"by {text.local_time(entry.earliest_start)[:-3]}"
    return [
        short_name(entry.queue), str(entry.position or "held"), f"{row.name} ({row.id[:6]})",
        row.owner,
        f"{row.slices}×{short_name(row.accelerator)}", str(row.priority),
        f"{entry.owner_chip_hours:g}", starts, because(entry),
    ]  # fmt: skip


def because(entry: QueueEntry) -> str:
    """`behind ada/train until 16:40; …`."""
    if entry.behind is None:
        return entry.blocked_by
    until = ""
    if entry.behind_until is not None:
        until = f" until {text.local_time(entry.behind_until)[:-3]}"
    relation = "waits for" if entry.position == 1 else "behind"
    return f"{relation} {entry.behind}{until}; {entry.blocked_by}"


@queue.command(epilog="\b\nExamples:\n  tpu queue move train --first\n")
@click.argument("job")
@click.option("--first", is_flag=True, help="To the head of its queue.")
@click.option("--last", is_flag=True, help="To the end of its queue.")
@click.option("--before", metavar="JOB", help="Ahead of this job.")
@json_option
def move(job: str, first: bool, last: bool, before: str | None, as_json: bool) -> None:
    """Move JOB within its queue.

    You can reorder your own jobs; moving one ahead of other users' jobs requires the admin role.
    """
    if first + last + (before is not None) != 1:
        raise BadInput("pass one of --first, --last and --before JOB")
    with connection.connect() as client:
        row = client.move_in_queue(job, first=first, last=last, before=before)
    output.print_result(row, f"moved {row.name} ({row.id})", as_json)


@queue.command("run-now")
@click.argument("job")
@json_option
def run_now(job: str, as_json: bool) -> None:
    """Move JOB to the head of its queue, release it if it is held, and try again at once to get
    its slices."""
    with connection.connect() as client:
        row = client.move_in_queue(job, first=True)
        if row.held_by is not None:
            row = client.release_in_queue(row.id)
        row = client.retry_in_queue(row.id)
    message = f"{row.name} ({row.id}) is next in its queue"
    output.print_result(row, message, as_json)


@queue.command()
@click.argument("jobs", metavar="JOB…", nargs=-1, required=True)
@json_option
def retry(jobs: tuple[str, ...], as_json: bool) -> None:
    """Try again at once to get the slices of each JOB, without waiting for the backoff.

    For example after you repaired the firewall, raised the quota or granted a role. If the request
    is refused again, the backoff continues.
    """
    with connection.connect() as client:
        rows = [client.retry_in_queue(job) for job in jobs]
    lines = "\n".join(
        f"trying again for {row.name} ({row.id})"
        if row.state in WAITING_STATES
        else f"{row.name} ({row.id}) is {row.state}: it waits for nothing"
        for row in rows
    )
    output.print_result({"jobs": rows}, lines, as_json)


@queue.command()
@click.argument("jobs", metavar="JOB…", nargs=-1, required=True)
@json_option
def hold(jobs: tuple[str, ...], as_json: bool) -> None:
    """Keep each JOB from being placed, until `tpu queue release`."""
    with connection.connect() as client:
        rows = [client.hold_in_queue(job) for job in jobs]
    lines = "\n".join(f"held {row.name} ({row.id})" for row in rows)
    output.print_result({"jobs": rows}, lines, as_json)


@queue.command()
@click.argument("jobs", metavar="JOB…", nargs=-1, required=True)
@json_option
def release(jobs: tuple[str, ...], as_json: bool) -> None:
    """Let each held JOB be placed again."""
    with connection.connect() as client:
        rows = [client.release_in_queue(job) for job in jobs]
    lines = "\n".join(f"released {row.name} ({row.id})" for row in rows)
    output.print_result({"jobs": rows}, lines, as_json)


@queue.command(epilog="\b\nExamples:\n  tpu queue remove train\n  tpu queue remove --all --yes\n")
@click.argument("jobs", metavar="JOB…", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All of your jobs that wait.")
@yes_option
@json_option
def remove(jobs: tuple[str, ...], everything: bool, yes: bool, as_json: bool) -> None:
    """Cancel each JOB that waits. A job that runs is not touched: `tpu cancel` cancels it."""
    if bool(jobs) == everything:
        raise BadInput("pass either job names or --all")
    with connection.connect() as client:
        waiting = {entry.job.id: entry.job for entry in client.queue()}
        errors = []
        if everything:
            me = client.me().name
            chosen = [row.id for row in waiting.values() if row.owner == me]
            if chosen:
                count = text.counted(len(chosen), "waiting job")
                output.confirm(f"Cancel {count}?", yes or as_json)
        else:
            chosen = []
            for job in jobs:
                row = client.job(job).row
                if row.id in waiting:
                    chosen.append(row.id)
                else:
                    errors.append(
                        f"{row.name} ({row.id}) is {row.state}, and not in the queue"
                        + ("" if row.state in ENDED_STATES else f"; `tpu cancel {row.id}` ends it")
                    )
        rows = []
        for job_id in chosen:  # one that cannot be cancelled must not protect the others
            try:
                rows.append(client.cancel(job_id))
            except (NotFound, Conflict, Forbidden) as error:
                errors.append(str(error))
    lines = "\n".join(f"removed {row.name} ({row.id})" for row in rows)
    if rows or as_json:
        output.print_result({"jobs": rows}, lines, as_json)
    if errors:
        raise Conflict("\n".join(errors))
    if not rows:
        output.print_status("no jobs of yours wait")
