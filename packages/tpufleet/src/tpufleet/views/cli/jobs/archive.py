"""`tpu archive` with `undo` and `purge`: ended jobs that are no longer needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from tpufleet.errors import one_of
from tpufleet.model.api_types import JobRow, PurgedJob, PurgeReport, PurgeRequest
from tpufleet.model.job.jobs import JobId
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.jobs.jobs import names_owner
from tpufleet.views.cli.output import json_option, yes_option

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient

JOBS_PER_REQUEST = 100  # deletion takes a while for each; a request must not time out
JOBS_PER_REPORT = 1_000
NAMED_JOBS = 10  # more are counted

_selection_options = output.options(
    click.argument("jobs", metavar="[JOB…]", nargs=-1),
    click.option("--query", "-q", help="Ended jobs that match, as in `tpu jobs` (default: all)."),
)


@click.command(
    cls=output.CommandGroup,
    epilog="\b\nExamples:\n  tpu archive train\n  tpu archive -q until:14d\n"
    "  tpu archive -q state:failed,cancelled\n  tpu jobs is:archived\n",
)
@_selection_options
@yes_option
@json_option
def archive(jobs: tuple[str, ...], query: str | None, yes: bool) -> None:
    """Hide ended jobs from `tpu jobs`: each JOB, or all of yours that match. Nothing is deleted.

    Without a JOB or a query it asks first. Jobs that a live one continues stay, unless they are
    named. `tpu jobs is:archived` lists archived jobs, `tpu archive undo` undoes it,
    `tpu archive purge` deletes files.
    """
    _require_one_selection(jobs, query)
    rows: list[JobRow] = []
    with connection.connect() as client:
        refs = jobs or _without_continued(client, _matching(client, query))
        if refs and not jobs and query is None:
            question = f"Archive all {text.counted(len(refs), 'ended job')} of yours?"
            output.confirm(question, yes or output.as_json())
        for batch in _batches(refs, JOBS_PER_REQUEST):
            rows += client.archive(batch)
    if output.printed_json({"jobs": rows}):
        return
    if not rows:
        output.print_nothing_to("archive", "ended jobs")
        return
    output.print_table(
        ("JOB", "NAME", "OWNER", "STATE", "ENDED"),
        ((row.id, row.name, row.owner, row.state.value, text.age(row.ended_at))
         for row in rows),
        "",
    )  # fmt: skip
    click.echo(f"archived: {text.counted(len(rows), 'job')}")
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
    rows: list[JobRow] = []
    with connection.connect() as client:
        refs = list(jobs)
        if not jobs:
            found = client.all_jobs(owner=client.me().name, archived=True, query=query)
            refs = [row.id for row in found]
        for batch in _batches(refs, JOBS_PER_REQUEST):
            rows += client.unarchive(batch)
    if output.as_json():
        output.print_json({"jobs": rows})
    elif not rows:
        output.print_nothing_to("list again", "archived jobs")
    else:
        few = [f"{row.name} ({row.id})" for row in rows] if len(rows) <= NAMED_JOBS else []
        click.echo(f"listed again: {', '.join(few) or text.counted(len(rows), 'job')}")


@archive.command(
    epilog="\b\nExamples:\n  tpu archive purge train\n"
    "  tpu archive purge -q until:90d --dry-run\n"
    "  tpu archive purge -q 'is:archived state:failed' --checkpoints\n",
)
@_selection_options
@click.option("--checkpoints", is_flag=True, help="Delete checkpoints too (default: keep them).")
@output.dry_run_option
@yes_option
@json_option
def purge(
    jobs: tuple[str, ...], query: str | None, checkpoints: bool, dry_run: bool, yes: bool
) -> None:
    """Delete the logs, results and code of ended jobs: of each JOB, or of all of yours that match;
    of archived jobs, if the query says is:archived. Checkpoints are kept unless --checkpoints is
    given.

    Checkpoints that another job uses, because it was resumed from this one, are kept until that
    job is purged too. Those in a location that a job chose itself are never deleted, and costs stay
    in `tpu cost`. Purged jobs cannot be resumed.
    """
    _require_one_selection(jobs, query)
    with connection.connect() as client:
        report, deleted = NOTHING, NOTHING
        for batch in _batches(jobs or list(_matching(client, query)), JOBS_PER_REPORT):
            request = PurgeRequest(jobs=tuple(batch), checkpoints=checkpoints, dry_run=True)
            report = _with_earlier(report, client.purge(request))
        if report.jobs and not output.as_json():
            _show_jobs(report)
        if dry_run or not report.jobs:
            _show_summary(report, "would be deleted")
            return
        output.confirm_deletion(_summary(report), yes or output.as_json())
        # Exactly the listed jobs, and none that ended meanwhile.
        # Newest first: those that use the checkpoints of an earlier one go before it.
        ids = [row.id for row in reversed(report.jobs)]
        for batch in _batches(ids, JOBS_PER_REQUEST):
            if deleted.jobs:
                output.print_status(f"{len(deleted.jobs)} of {len(ids)}")
            request = PurgeRequest(jobs=tuple(batch), checkpoints=checkpoints)
            deleted = _with_earlier(deleted, client.purge(request))
        _show_summary(deleted, "deleted")


def _require_one_selection(jobs: Sequence[str], query: str | None) -> None:
    if jobs and query is not None:
        raise one_of("job names", "--query")


NOTHING = PurgeReport(jobs=(), code_size=0)


def _with_earlier(report: PurgeReport, part: PurgeReport) -> PurgeReport:
    return PurgeReport(jobs=part.jobs + report.jobs, code_size=report.code_size + part.code_size)


def _matching(client: FleetClient, query: str | None) -> dict[JobId, JobId | None]:
    """Ended jobs, newest first, with their parents; of others only where the query says whose."""
    owner = None if query and names_owner(query) else client.me().name
    return {row.id: row.parent for row in client.all_jobs(owner=owner, query=query, state="ended")}


def _without_continued(client: FleetClient, ended: Mapping[JobId, JobId | None]) -> Sequence[JobId]:
    """Those that no live job was resumed or run again from."""
    continued = set()
    for row in client.all_jobs(state="live"):
        parent = row.parent
        while parent is not None and parent in ended:
            continued.add(parent)
            parent = ended[parent]
    return [job_id for job_id in ended if job_id not in continued]


def _batches(refs: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(refs), size):
        yield refs[start : start + size]


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
        output.print_nothing_to("delete", "files of ended jobs")
    else:
        click.echo(f"{outcome}: {_summary(report)}")


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
