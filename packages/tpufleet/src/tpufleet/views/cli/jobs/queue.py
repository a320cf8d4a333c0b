"""`tpu queue`: what waits, behind what, until when; and commands that change the order."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import click

from tpufleet.client.fleet import FleetClient
from tpufleet.model.api_types import JobRow, QueueEntry
from tpufleet.model.job.jobs import WAITING_STATES
from tpufleet.model.tpu.type_lookup import short_name
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import Cell, example, json_option
from tpufleet.views.cli.settings.preferences import use_time_zone

Change = Callable[[FleetClient, str], JobRow]
TITLES = ("QUEUE", "POS", "JOB", "OWNER", "NEEDS", "PRIORITY", "USED", "STARTS", "BECAUSE")


@click.group(
    cls=output.CommandGroup,
    epilog="\b\nExamples:\n  tpu queue --user me --pool lab\n  tpu queue move train --first\n"
    "  tpu queue hold train\n",
)
@click.option("--pool", help="Only this pool.")
@click.option("--user", metavar="NAME", help="Only jobs of this user, or of `me`.")
@click.option("--mine", is_flag=True, hidden=True)  # an earlier spelling of `--user me`
@json_option
def queue(pool: str | None, user: str | None, mine: bool) -> None:
    """List jobs that wait, in the order in which they are placed.

    The order is: higher priority first; then users who used fewer chips lately (USED, in chip
    hours, halved every 7 days, compared in steps of doubling); then first in, first out. STARTS is
    the latest time, where time limits of the jobs ahead determine it.
    """
    with connection.connect() as client:
        owner = client.me().name if mine or user == "me" else user
        entries = client.queue(pool=pool, owner=owner)
        use_time_zone(client)
    now = datetime.now(UTC)
    output.print_table(
        TITLES,
        (_cells(entry, now) for entry in entries),
        "no jobs wait",
        droppable=("USED", "PRIORITY", "OWNER", "QUEUE"),
        value={"queue": entries},
    )


def starts(entry: QueueEntry, now: datetime) -> str:
    """At the latest."""
    if entry.earliest_start is None:
        return "-"
    soon = entry.earliest_start <= now
    return "now" if soon else f"by {text.local_time(entry.earliest_start)[:-3]}"


def _cells(entry: QueueEntry, now: datetime) -> list[Cell]:
    row = entry.job
    return [
        short_name(entry.queue), str(entry.position or "held"), f"{row.name} ({row.id[:6]})",
        row.owner,
        f"{row.slices}×{short_name(row.accelerator)}", str(row.priority),
        f"{entry.owner_chip_hours:g}", starts(entry, now), because(entry),
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
def move(job: str, first: bool, last: bool, before: str | None) -> None:
    """Move JOB within its queue.

    You can reorder your own jobs; moving one ahead of other users' jobs requires the admin role.
    """
    output.require_one({"--first": first, "--last": last, "--before": before is not None})
    with connection.connect() as client:
        row = client.move_in_queue(job, first=first, last=last, before=before)
    output.print_result(row, f"moved {row.name} ({row.id})")


def _subcommand(name: str, help_text: str, change: Change, done: str) -> None:
    """`tpu queue NAME JOB…`, which changes each job."""

    @queue.command(name, help=help_text, epilog=example(f"tpu queue {name} train"))
    @click.argument("jobs", metavar="JOB…", nargs=-1, required=True)
    @json_option
    def command(jobs: tuple[str, ...]) -> None:
        with connection.connect() as client:
            rows = [change(client, job) for job in jobs]
        lines = "\n".join(
            f"{row.name} ({row.id}): {done if row.state in WAITING_STATES else row.state}"
            for row in rows
        )
        output.print_result({"jobs": rows}, lines)


def _run_now(client: FleetClient, job: str) -> JobRow:
    row = client.move_in_queue(job, first=True)
    if row.held_by is not None:
        client.release_in_queue(row.id)
    return client.retry_in_queue(row.id)


_subcommand(
    "run-now",
    "Move each JOB to the head of its queue, release it if it is held, and try again at once to "
    "get its slices.",
    _run_now,
    "next in its queue",
)
_subcommand(
    "retry",
    "Try again at once to get the slices of each JOB, without waiting for the backoff: for example "
    "after you raised the quota or granted a role. A refused request continues the backoff.",
    FleetClient.retry_in_queue,
    "trying again",
)
_subcommand(
    "hold",
    "Keep each JOB from being placed, until `tpu queue release`.",
    FleetClient.hold_in_queue,
    "held",
)
_subcommand(
    "release", "Let each held JOB be placed again.", FleetClient.release_in_queue, "released"
)
