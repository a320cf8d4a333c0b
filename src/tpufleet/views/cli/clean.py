"""`tpu clean`: delete logs, code, results and checkpoints of ended jobs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import click

from tpufleet.errors import BadInput
from tpufleet.model import durations
from tpufleet.model.api_types import CleanReport, CleanRequest
from tpufleet.model.jobs import ENDED_STATES, JobState
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option, yes_option

JOBS_PER_REQUEST = 100  # deletion takes a while for each; a request must not time out


@click.command(
    epilog="\b\nExamples:\n  tpu clean train\n  tpu clean --older-than 14d\n"
    "  tpu clean --state failed --state cancelled --yes\n  tpu clean --all-users --dry-run\n",
)
@click.argument("jobs", metavar="[JOB…]", nargs=-1)
@click.option("--older-than", metavar="SPAN", help="Only jobs that ended this long ago: 12h, 14d.")
@output.repeatable(
    "--state",
    type=click.Choice(sorted(state.value for state in ENDED_STATES)),
    help="Only jobs in this state (default: any).",
)
@click.option("--all-users", "-a", is_flag=True, help="Jobs of all users; requires the admin role.")
@click.option("--keep-checkpoints", is_flag=True, help="Do not delete checkpoints.")
@click.option("--dry-run", is_flag=True, help="Only list what would be deleted.")
@yes_option
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
    """Delete the logs, code, results and checkpoints of ended jobs: of each JOB, or of all of yours
    that match. `tpu jobs` no longer lists them.

    Jobs that were resumed or rerun are cleaned together with their parents, judged by the latest
    one. Checkpoints in a location that a job chose itself are never deleted, and costs stay in
    `tpu cost`.
    """
    if jobs and (older_than or state or all_users):
        raise BadInput("pass either job names or the filters --older-than, --state, --all-users")
    request = CleanRequest(
        jobs=jobs,
        states=frozenset(JobState(each) for each in state),
        older_than=_age_limit(older_than),
        all_owners=all_users,
        checkpoints=not keep_checkpoints,
        dry_run=True,
    )
    with connection.connect() as client:
        report = client.clean(request)
        if report.jobs and not as_json:
            _show_jobs(report)
        if dry_run or not report.jobs:
            _show_summary(report, "would be deleted", as_json)
            return
        output.confirm(f"Delete the files of {_summary(report)}?", yes or as_json)
        # Exactly the listed jobs, and none that ended meanwhile.
        ids = [row.id for row in report.jobs]
        for start in range(0, len(ids), JOBS_PER_REQUEST):
            batch = tuple(ids[start : start + JOBS_PER_REQUEST])
            client.clean(CleanRequest(jobs=batch, checkpoints=request.checkpoints))
            if start + JOBS_PER_REQUEST < len(ids):
                output.print_status(f"{start + JOBS_PER_REQUEST} of {len(ids)}")
        _show_summary(report, "deleted", as_json)


def _age_limit(option: str | None) -> timedelta:
    limit = durations.parse(option) if option is not None else timedelta(0)
    if limit is None:
        raise BadInput("--older-than: a duration such as 14d is required")
    return limit


def _summary(report: CleanReport) -> str:
    return f"{text.counted(len(report.jobs), 'job')} ({text.size(report.size)})"


def _show_summary(report: CleanReport, outcome: str, as_json: bool) -> None:
    if as_json:
        output.print_json(report)
    elif not report.jobs:
        output.print_status("no ended jobs to clean")
    else:
        click.echo(f"{outcome}: {_summary(report)}")


def _show_jobs(report: CleanReport) -> None:
    now = datetime.now(UTC)
    output.print_table(
        ("JOB", "NAME", "OWNER", "STATE", "ENDED", "SIZE"),
        (
            (row.id, row.name, row.owner, row.state.value, text.age(row.ended_at, now),
             text.size(row.size))
            for row in report.jobs
        ),
        "",
    )  # fmt: skip
