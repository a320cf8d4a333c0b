"""`tpu edit`: change live and ended jobs."""

from __future__ import annotations

from dataclasses import replace

import click

from tpufleet.model.api_types import JobChanges
from tpufleet.model.job.jobs import ENDED_STATES
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.jobs.jobs import EMPTY_FILTER, names_owner
from tpufleet.views.cli.output import json_option


@click.command(
    epilog="\b\nExamples:\n  tpu edit train-k3f9 --name baseline --tag paper\n"
    "  tpu edit train --note 'diverged at step 900'\n  tpu edit train --priority 10\n"
    "  tpu edit --query 'owner:me since:1d name:train-*' --tag sweep-3 --yes\n"
)
@click.argument("job", metavar="[JOB]", required=False)
@click.option("--name", help="Another name.")
@output.tag_option("--tag", "-t")
@output.repeatable(
    "--untag", "--remove", "-r", "untag", metavar="TAG", help="Remove it; `*` matches anything."
)
@click.option("--note", metavar="TEXT", help="Set the notes; an empty text removes them.")
@click.option("--append", "-a", is_flag=True, help="Add --note as a line to the notes.")
@click.option("--priority", metavar="N", type=int, help="Higher ones are placed first.")
@click.option("--query", "-q", help="Change all jobs that match, instead of one JOB.")
@output.yes_option
@json_option
def edit(
    job: str | None,
    name: str | None,
    tags: tuple[str, ...],
    untag: tuple[str, ...],
    note: str | None,
    append: bool,
    priority: int | None,
    query: str | None,
    yes: bool,
) -> None:
    """Change the name, tags, notes or priority of a live or ended JOB."""
    changes = JobChanges(name=name, add_tags=tags, remove_tags=untag, notes=note, priority=priority)
    output.require_any(
        {"--name": name, "--tag": tags, "--untag": untag, "--note": note, "--priority": priority}
    )
    output.require_one({"JOB": job, "--query": query is not None and query.strip()})
    with connection.connect() as client:
        refs: list[str] = [job] if job is not None else []
        if query is not None:
            owner = None if names_owner(query) else client.me().name
            refs = [row.id for row in client.all_jobs(query=query, owner=owner)]
            output.confirm(f"Change {text.counted(len(refs), 'job')}?", yes or output.as_json())
        rows = []
        for ref in refs:
            earlier = client.job(ref).row.notes if append and note else ""
            appended = replace(changes, notes=f"{earlier}\n{note}") if earlier else changes
            rows.append(client.change_job(ref, appended))
    if output.printed_json({"jobs": rows}):
        return
    for row in rows:
        output.print_line(
            f"{row.name} ({row.id}): priority {row.priority}, tags {', '.join(row.tags) or 'none'}"
            + (f", notes: {text.one_line(row.notes)}" if row.notes else "")
        )
        if priority is not None and row.state in ENDED_STATES:
            output.print_status(f"{row.id} has already ended: the priority is that of its reruns")
    if not rows:
        output.print_status(EMPTY_FILTER)
