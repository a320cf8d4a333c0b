"""`tpu clean`: delete what ended jobs left behind."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import click

from tpufleet.errors import BadInput
from tpufleet.model import durations
from tpufleet.model.api_types import CleanReport, CleanRequest
from tpufleet.model.jobs import ENDED_STATES, JobState
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option

AT_ONCE = 100  # jobs a call: of many, each may take a while


@click.command(
    short_help="Delete what ended jobs left.",
    epilog="\b\nExamples:\n  tpu clean train\n  tpu clean --older-than 14d\n"
    "  tpu clean --state failed --state cancelled --yes\n  tpu clean --all-users --dry-run\n",
)
@click.argument("jobs", metavar="[JOB…]", nargs=-1)
@click.option("--older-than", metavar="SPAN", help="Only jobs that ended so long ago: 12h, 14d.")
@output.repeatable(
    "--state",
    type=click.Choice(sorted(state.value for state in ENDED_STATES)),
    help="Only jobs that ended so (default: any).",
)
@click.option("--all-users", "-a", is_flag=True, help="Everybody's jobs; for admins.")
@click.option("--keep-checkpoints", is_flag=True, help="Leave the checkpoints where they are.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@json_option
def clean(
    jobs: tuple[str, ...],
    older_than: str | None,
    state: tuple[str, ...],
    all_users: bool,
    keep_checkpoints: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete the logs, code, results and checkpoints of jobs that have ended: of each JOB, or of
    all of yours that match. `tpu jobs` leaves them out from then on.

    Jobs that were resumed or run again go together with their parents, judged by the last of them.
    Checkpoints in a place that a job named itself are never deleted, and what was paid for stays in
    `tpu cost`.
    """
    if jobs and (older_than or state or all_users):
        raise BadInput("name the jobs, or say which ones by --older-than, --state and --all-users")
    order = CleanRequest(
        jobs=jobs,
        states=frozenset(JobState(each) for each in state),
        older_than=_span(older_than),
        all_owners=all_users,
        checkpoints=not keep_checkpoints,
        dry_run=True,
    )
    with connection.connect() as client:
        found = client.clean(order)
        if found.jobs and not as_json:
            _show(found)
        if dry_run or not found.jobs:
            _tell(found, "would go", as_json)
            return
        output.confirm(f"delete what {_of(found)} left?", yes or as_json)
        # Those that were shown, and no others that ended meanwhile.
        shown = [row.id for row in found.jobs]
        for start in range(0, len(shown), AT_ONCE):
            part = tuple(shown[start : start + AT_ONCE])
            client.clean(CleanRequest(jobs=part, checkpoints=order.checkpoints))
            if start + AT_ONCE < len(shown):
                output.print_status(f"{start + AT_ONCE} of {len(shown)}")
        _tell(found, "cleaned away", as_json)


def _span(given: str | None) -> timedelta:
    span = durations.parse(given) if given is not None else timedelta(0)
    if span is None:
        raise BadInput("--older-than: a span such as 14d is needed, not none")
    return span


def _of(found: CleanReport) -> str:
    return f"{text.counted(len(found.jobs), 'job')} ({text.size(found.size)})"


def _tell(found: CleanReport, words: str, as_json: bool) -> None:
    if as_json:
        output.print_json(found)
    elif not found.jobs:
        output.print_status("nothing to clean")
    else:
        click.echo(f"{_of(found)} {words}")


def _show(found: CleanReport) -> None:
    now = datetime.now(UTC)
    output.print_table(
        ("JOB", "NAME", "OWNER", "STATE", "ENDED", "SIZE"),
        (
            (row.id, row.name, row.owner, row.state.value, text.age(row.ended_at, now),
             text.size(row.size))
            for row in found.jobs
        ),
        "",
    )  # fmt: skip
