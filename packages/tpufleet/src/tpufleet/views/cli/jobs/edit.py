"""`tpu tag`, `tpu note`, `tpu rename` and `tpu priority`: change live and ended jobs."""

from __future__ import annotations

import click

from tpufleet.errors import BadInput
from tpufleet.model.api_types import JobChanges
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.jobs.jobs import names_owner
from tpufleet.views.cli.output import json_option


@click.command(
    epilog="\b\nExamples:\n  tpu tag train baseline paper\n  tpu tag train --remove 'sweep-*'\n"
    "  tpu tag --query 'owner:me since:1d name:train-*' --yes sweep-3\n"
)
@click.argument("job", metavar="[JOB]", required=False)
@click.argument("tags", metavar="TAG…", nargs=-1)
@output.repeatable("--remove", "-r", metavar="TAG", help="Remove it; `*` matches anything.")
@click.option("--query", "-q", help="Tag all jobs that match, instead of one JOB.")
@output.yes_option
@json_option
def tag(
    job: str | None,
    tags: tuple[str, ...],
    remove: tuple[str, ...],
    query: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Add tags to a live or ended JOB, or remove some."""
    if query is not None and job is not None:
        tags = (job, *tags)
    if query is not None and not query.strip():
        raise BadInput("--query is empty; `--query owner:me` matches all jobs of yours")
    if not tags and not remove:
        raise BadInput("no tags; pass some, or --remove TAG")
    changes = JobChanges(add_tags=tags, remove_tags=remove)
    with connection.connect() as client:
        if query is not None:
            owner = None if names_owner(query) else client.me().name
            refs: list[str] = [row.id for row in client.all_jobs(query=query, owner=owner)]
            output.confirm(f"Change the tags of {text.counted(len(refs), 'job')}?", yes or as_json)
        elif job is None:
            raise BadInput("no job; pass a JOB, or --query QUERY")
        else:
            refs = [job]
        rows = [client.change_job(ref, changes) for ref in refs]
    if as_json:
        output.print_json({"jobs": rows})
        return
    for row in rows:
        output.print_line(f"{row.name} ({row.id}): tags {', '.join(row.tags) or 'none'}")
    if not rows:
        output.print_status("no jobs match")


@click.command(epilog="\b\nExamples:\n  tpu note train 'diverged at step 900'\n  tpu note train\n")
@click.argument("job")
@click.argument("words", metavar="[TEXT]…", nargs=-1)
@click.option("--append", "-a", is_flag=True, help="Add a line to the notes that are there.")
@click.option("--clear", is_flag=True, help="Remove the notes.")
@json_option
def note(job: str, words: tuple[str, ...], append: bool, clear: bool, as_json: bool) -> None:
    """Set the notes of a live or ended JOB; without TEXT, print them."""
    if clear and words:
        raise BadInput("pass either TEXT or --clear")
    written = " ".join(words)
    with connection.connect() as client:
        if not words and not clear:
            row = client.job(job).row
            shown = text.without_control_characters(row.notes)
            output.print_result(row, shown or "no notes", as_json)
            return
        if append and (earlier := client.job(job).row.notes):
            written = f"{earlier}\n{written}"
        row = client.change_job(job, JobChanges(notes=written))
    output.print_result(row, f"{row.name} ({row.id}): notes changed", as_json)


@click.command(epilog="\b\nExample:\n  tpu rename train-k3f9 baseline\n")
@click.argument("job")
@click.argument("name")
@json_option
def rename(job: str, name: str, as_json: bool) -> None:
    """Give a live or ended JOB another NAME."""
    with connection.connect() as client:
        row = client.change_job(job, JobChanges(name=name))
    output.print_result(row, f"{row.id} is now {row.name}", as_json)


@click.command(epilog="\b\nExamples:\n  tpu priority train 10\n  tpu priority train -- -5\n")
@click.argument("job")
@click.argument("number", metavar="N", type=int)
@json_option
def priority(job: str, number: int, as_json: bool) -> None:
    """Set the priority of JOB. Jobs of higher priority are placed first."""
    with connection.connect() as client:
        row = client.change_job(job, JobChanges(priority=number))
    output.print_result(row, f"{row.name} ({row.id}): priority {row.priority}", as_json)
