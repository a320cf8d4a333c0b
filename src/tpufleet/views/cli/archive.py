"""`tpu archive`, `tpu unarchive` and `tpu purge`: ended jobs that are no longer needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from tpufleet.errors import BadInput
from tpufleet.model import durations
from tpufleet.model.api_types import ArchiveRequest, PurgeReport, PurgeRequest
from tpufleet.model.jobs import ENDED_STATES, JobState
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option, yes_option

JOBS_PER_REQUEST = 100  # deletion takes a while for each; a request must not time out


def _selection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option(
            "--all-users", "-a", is_flag=True, help="Jobs of all users; requires the admin role."
        ),
        output.repeatable(
            "--state",
            type=click.Choice(sorted(state.value for state in ENDED_STATES)),
            help="Only jobs in this state (default: any).",
        ),
        click.option(
            "--older-than", metavar="SPAN", help="Only jobs that ended this long ago: 12h, 14d."
        ),
        click.argument("jobs", metavar="[JOB…]", nargs=-1),
    ):
        command = option(command)
    return command


@click.command(
    epilog="\b\nExamples:\n  tpu archive train\n  tpu archive --older-than 14d\n"
    "  tpu archive --state failed --state cancelled\n  tpu jobs --archived\n",
)
@_selection_options
@click.option("--dry-run", is_flag=True, help="Only list the jobs.")
@click.option("--yes", "-y", is_flag=True, hidden=True)  # scripts from when this deleted files
@json_option
def archive(
    jobs: tuple[str, ...],
    older_than: str | None,
    state: tuple[str, ...],
    all_users: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Hide ended jobs from `tpu jobs`: each JOB, or all of yours that match. Nothing is deleted.

    Jobs that were resumed or rerun are archived together with their parents, judged by the latest
    one. `tpu jobs --archived` lists them, `tpu unarchive` undoes it, `tpu purge` deletes files.
    """
    request = ArchiveRequest(**_selection(jobs, older_than, state, all_users), dry_run=dry_run)
    with connection.connect() as client:
        rows = client.archive(request)
    if as_json:
        output.print_json({"jobs": rows})
        return
    if not rows:
        output.print_status("no ended jobs to archive")
        return
    now = datetime.now(UTC)
    output.print_table(
        ("JOB", "NAME", "OWNER", "STATE", "ENDED"),
        ((row.id, row.name, row.owner, row.state.value, text.age(row.ended_at, now))
         for row in rows),
        "",
    )  # fmt: skip
    counted = text.counted(len(rows), "job")
    click.echo(f"would be archived: {counted}" if dry_run else f"archived: {counted}")
    if not dry_run:
        output.print_status(
            "  next: `tpu jobs --archived` lists them, `tpu unarchive JOB` undoes it, "
            "`tpu purge JOB` deletes their files"
        )


@click.command(epilog="\b\nExample:\n  tpu unarchive train\n")
@click.argument("jobs", metavar="JOB…", nargs=-1, required=True)
@json_option
def unarchive(jobs: tuple[str, ...], as_json: bool) -> None:
    """List each archived JOB in `tpu jobs` again."""
    with connection.connect() as client:
        rows = client.unarchive(jobs)
    names = ", ".join(f"{row.name} ({row.id})" for row in rows)
    output.print_result({"jobs": rows}, f"listed again: {names}", as_json)


@click.command(
    epilog="\b\nExamples:\n  tpu purge train\n  tpu purge --older-than 90d --dry-run\n"
    "  tpu purge --state failed --checkpoints\n",
)
@_selection_options
@click.option("--checkpoints", is_flag=True, help="Delete checkpoints too (default: keep them).")
@click.option("--dry-run", is_flag=True, help="Only list what would be deleted.")
@yes_option
@json_option
def purge(
    jobs: tuple[str, ...],
    older_than: str | None,
    state: tuple[str, ...],
    all_users: bool,
    checkpoints: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete the logs, results and code of ended jobs: of each JOB, or of all of yours that match,
    archived or not. Checkpoints are kept unless --checkpoints is given.

    Jobs that were resumed or rerun are purged together with their parents, judged by the latest
    one. Checkpoints in a location that a job chose itself are never deleted, and costs stay in
    `tpu cost`. Purged jobs cannot be resumed.
    """
    selection = _selection(jobs, older_than, state, all_users)
    with connection.connect() as client:
        report = client.purge(PurgeRequest(**selection, checkpoints=checkpoints, dry_run=True))
        if report.jobs and not as_json:
            _show_jobs(report)
        if dry_run or not report.jobs:
            _show_summary(report, "would be deleted", as_json)
            return
        output.confirm(f"Delete {_summary(report)}?", yes or as_json)
        # Exactly the listed jobs, and none that ended meanwhile.
        ids = [row.id for row in report.jobs]
        for start in range(0, len(ids), JOBS_PER_REQUEST):
            batch = tuple(ids[start : start + JOBS_PER_REQUEST])
            client.purge(PurgeRequest(jobs=batch, checkpoints=checkpoints))
            if start + JOBS_PER_REQUEST < len(ids):
                output.print_status(f"{start + JOBS_PER_REQUEST} of {len(ids)}")
        _show_summary(report, "deleted", as_json)


def _selection(
    jobs: tuple[str, ...], older_than: str | None, state: Sequence[str], all_users: bool
) -> dict[str, Any]:
    if jobs and (older_than or state or all_users):
        raise BadInput("pass either job names or the filters --older-than, --state, --all-users")
    return {
        "jobs": jobs,
        "states": frozenset(JobState(each) for each in state),
        "older_than": _age_limit(older_than),
        "all_owners": all_users,
    }


def _age_limit(option: str | None) -> timedelta:
    limit = durations.parse(option) if option is not None else timedelta(0)
    if limit is None:
        raise BadInput("--older-than: a duration such as 14d is required")
    return limit


def _summary(report: PurgeReport) -> str:
    """`logs, results and code of 2 jobs (4.0 MB) and their checkpoints (2.1 GB)`."""
    deleted = sum(row.checkpoint_size for row in report.jobs if row.with_checkpoints)
    kept = sum(row.checkpoint_size for row in report.jobs if not row.with_checkpoints)
    summary = (
        f"logs, results and code of {text.counted(len(report.jobs), 'job')} "
        f"({text.size(report.size - deleted)})"
    )
    if deleted:
        summary += f" and checkpoints ({text.size(deleted)})"
    return summary + (f"; checkpoints are kept ({text.size(kept)})" if kept else "")


def _show_summary(report: PurgeReport, outcome: str, as_json: bool) -> None:
    if as_json:
        output.print_json(report)
    elif not report.jobs:
        output.print_status("no ended jobs with files to delete")
    else:
        click.echo(f"{outcome}: {_summary(report)}")
        if report.more:
            output.print_status("  next: more jobs match; run the command again for the next ones")


def _show_jobs(report: PurgeReport) -> None:
    now = datetime.now(UTC)
    output.print_table(
        ("JOB", "NAME", "OWNER", "STATE", "ENDED", "FILES", "CHECKPOINTS"),
        (
            (row.id, row.name, row.owner, row.state.value, text.age(row.ended_at, now),
             text.size(row.size), _checkpoints(row.checkpoint_size, row.with_checkpoints))
            for row in report.jobs
        ),
        "",
    )  # fmt: skip


def _checkpoints(size: int, deleted: bool) -> output.Cell:
    if not size:
        return "-"
    return (f"{text.size(size)}, deleted", text.BAD) if deleted else f"{text.size(size)}, kept"
