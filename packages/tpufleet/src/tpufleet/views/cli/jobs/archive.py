"""`tpu archive` with `undo` and `purge`: ended jobs that are no longer needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import click

from tpufleet.errors import BadInput
from tpufleet.model.api_types import ArchiveRequest, JobRow, PurgedJob, PurgeReport, PurgeRequest
from tpufleet.model.job.jobs import ENDED_STATES, JobState
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option, yes_option
from tpufleet.views.cli.parameter_types import Duration

JOBS_PER_REQUEST = 100  # deletion takes a while for each; a request must not time out
NAMED_JOBS = 10  # more are counted


_selection_options = output.options(
    click.argument("jobs", metavar="[JOB…]", nargs=-1),
    click.option(
        "--older-than", type=Duration(), help="Only jobs that ended this long ago: 12h, 14d."
    ),
    output.repeatable(
        "--state",
        type=click.Choice(sorted(state.value for state in ENDED_STATES)),
        help="Only jobs in this state (default: any).",
    ),
    click.option(
        "--all-users", "-a", is_flag=True, help="Jobs of all users; requires the admin role."
    ),
)


@click.command(
    cls=output.CommandGroup,
    epilog="\b\nExamples:\n  tpu archive train\n  tpu archive --older-than 14d\n"
    "  tpu archive --state failed --state cancelled\n  tpu jobs is:archived\n",
)
@_selection_options
@output.dry_run_option
@yes_option
@json_option
def archive(
    jobs: tuple[str, ...],
    older_than: timedelta | None,
    state: tuple[str, ...],
    all_users: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Hide ended jobs from `tpu jobs`: each JOB, or all of yours that match. Nothing is deleted.

    Without a JOB or a filter it asks first. `tpu jobs is:archived` lists archived jobs,
    `tpu archive undo` undoes it, `tpu archive purge` deletes files.
    """
    request = ArchiveRequest(**_selection(jobs, older_than, state, all_users), dry_run=dry_run)
    everything = not (jobs or older_than or state or dry_run)
    with connection.connect() as client:
        if everything and not (yes or output.as_json()):
            matching = len(client.archive(replace(request, dry_run=True)))
            if matching:
                whose = "of all users" if all_users else "of yours"
                question = f"Archive all {text.counted(matching, 'ended job')} {whose}?"
                output.confirm(question, yes)
        rows = client.archive(request)
    if output.printed_json({"jobs": rows}):
        return
    if not rows:
        output.print_status("no ended jobs to archive")
        return
    output.print_table(
        ("JOB", "NAME", "OWNER", "STATE", "ENDED"),
        ((row.id, row.name, row.owner, row.state.value, text.age(row.ended_at))
         for row in rows),
        "",
    )  # fmt: skip
    counted = text.counted(len(rows), "job")
    click.echo(f"{'would be archived' if dry_run else 'archived'}: {counted}")
    if not dry_run:
        output.print_status(
            "  next: `tpu jobs is:archived` lists them, `tpu archive undo JOB` undoes it, "
            "`tpu archive purge JOB` deletes their files"
        )


@archive.command(
    epilog="\b\nExamples:\n  tpu archive undo train\n  tpu archive undo --query is:archived\n"
)
@click.argument("jobs", metavar="[JOB…]", nargs=-1)
@click.option("--query", help="Archived jobs of yours that match; all: is:archived.")
@json_option
def undo(jobs: tuple[str, ...], query: str | None) -> None:
    """List archived jobs in `tpu jobs` again: each JOB, or those that match --query.

    Files that `tpu archive purge` deleted do not come back.
    """
    output.require_one({"JOB": jobs, "--query": query is not None})
    with connection.connect() as client:
        refs = list(jobs)
        if not jobs:
            found = client.all_jobs(owner=client.me().name, archived=True, query=query)
            refs = [row.id for row in found]
        rows: list[JobRow] = []
        for start in range(0, len(refs), JOBS_PER_REQUEST):
            rows += client.unarchive(refs[start : start + JOBS_PER_REQUEST])
    if output.as_json():
        output.print_json({"jobs": rows})
    elif not rows:
        output.print_status("no archived jobs match")
    else:
        few = [f"{row.name} ({row.id})" for row in rows] if len(rows) <= NAMED_JOBS else []
        click.echo(f"listed again: {', '.join(few) or text.counted(len(rows), 'job')}")


@archive.command(
    epilog="\b\nExamples:\n  tpu archive purge train\n"
    "  tpu archive purge --older-than 90d --dry-run\n"
    "  tpu archive purge --state failed --checkpoints\n",
)
@_selection_options
@click.option("--checkpoints", is_flag=True, help="Delete checkpoints too (default: keep them).")
@output.dry_run_option
@yes_option
@json_option
def purge(
    jobs: tuple[str, ...],
    older_than: timedelta | None,
    state: tuple[str, ...],
    all_users: bool,
    checkpoints: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Delete the logs, results and code of ended jobs: of each JOB, or of all of yours that match,
    archived or not. Checkpoints are kept unless --checkpoints is given.

    Checkpoints that another job uses, because it was resumed from this one, are kept until that
    job is purged too. Those in a location that a job chose itself are never deleted, and costs stay
    in `tpu cost`. Purged jobs cannot be resumed.
    """
    selection = _selection(jobs, older_than, state, all_users)
    with connection.connect() as client:
        report = client.purge(PurgeRequest(**selection, checkpoints=checkpoints, dry_run=True))
        if report.jobs and not output.as_json():
            _show_jobs(report)
        if dry_run or not report.jobs:
            _show_summary(report, "would be deleted")
            return
        output.confirm(f"Delete {_summary(report)}?", yes or output.as_json())
        # Exactly the listed jobs, and none that ended meanwhile.
        # Newest first: those that use the checkpoints of an earlier one go before it.
        ids = [row.id for row in reversed(report.jobs)]
        deleted = PurgeReport(jobs=(), code_size=0, more=report.more)
        for start in range(0, len(ids), JOBS_PER_REQUEST):
            batch = tuple(ids[start : start + JOBS_PER_REQUEST])
            part = client.purge(PurgeRequest(jobs=batch, checkpoints=checkpoints))
            deleted = replace(
                deleted,
                jobs=part.jobs + deleted.jobs,
                code_size=deleted.code_size + part.code_size,
            )
            if start + JOBS_PER_REQUEST < len(ids):
                output.print_status(f"{start + JOBS_PER_REQUEST} of {len(ids)}")
        _show_summary(deleted, "deleted")


def _selection(
    jobs: tuple[str, ...], older_than: timedelta | None, state: Sequence[str], all_users: bool
) -> dict[str, Any]:
    if jobs and (older_than or state or all_users):
        raise BadInput("pass either job names or the filters --older-than, --state, --all-users")
    return {
        "jobs": jobs,
        "states": frozenset(JobState(each) for each in state),
        "older_than": older_than or timedelta(0),
        "all_owners": all_users,
    }


def _summary(report: PurgeReport) -> str:
    """`logs and results of 2 jobs (4.0 MB), code (120 kB), checkpoints (2.1 GB)`."""
    deleted = sum(row.checkpoint_size for row in report.jobs if row.with_checkpoints)
    kept = [row for row in report.jobs if row.checkpoint_size and not row.with_checkpoints]
    parts = [
        f"logs and results of {text.counted(len(report.jobs), 'job')} "
        f"({text.size(sum(row.size for row in report.jobs))})"
    ]
    if report.code_size:
        parts.append(f"code that no other job uses ({text.size(report.code_size)})")
    if deleted:
        parts.append(f"checkpoints ({text.size(deleted)})")
    summary = ", ".join(parts)
    if kept:
        summary += f"; checkpoints are kept ({text.size(sum(row.checkpoint_size for row in kept))})"
    return summary


def _show_summary(report: PurgeReport, outcome: str) -> None:
    if output.as_json():
        output.print_json(report)
    elif not report.jobs:
        output.print_status("no files of ended jobs to delete")
    else:
        click.echo(f"{outcome}: {_summary(report)}")
        if report.more:
            output.print_status("  next: more jobs match; run the command again for the next ones")


def _show_jobs(report: PurgeReport) -> None:
    output.print_table(
        ("JOB", "NAME", "OWNER", "STATE", "ENDED", "FILES", "CHECKPOINTS"),
        (
            (row.id, row.name, row.owner, row.state.value, text.age(row.ended_at),
             text.size(row.size), _checkpoints(row))
            for row in report.jobs
        ),
        "",
    )  # fmt: skip


def _checkpoints(row: PurgedJob) -> output.Cell:
    if not row.checkpoint_size:
        return "-"
    size = text.size(row.checkpoint_size)
    if row.with_checkpoints:
        return (f"{size}, deleted", text.BAD)
    first, more = row.checkpoints_used_by[:1], len(row.checkpoints_used_by) - 1
    users = f" for {first[0]}" if first else ""
    return f"{size}, kept{users}" + (f" and {more} more" if more > 0 else "")
