"""`tpu jobs`, `tpu show`, `tpu why`: reading changes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import click

from tpufleet.model import durations, job_file
from tpufleet.model.api_types import JobDetail, JobExplanation, JobRow
from tpufleet.model.jobs import JobState
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import Cell, json_option

WATCH_EVERY = 2.0  # seconds
TITLES = ("ID", "NAME", "STATE", "TYPE", "PROGRESS", "TRIES", "SUBMITTED", "OWNER", "REASON")


@click.command(
    short_help="List jobs, newest first.",
    epilog="\b\nExamples:\n  tpu jobs\n  tpu jobs --state running --state waiting --all-users\n"
    "  tpu jobs --tag sweep-3 --json\n",
)
@click.option("--all-users", "-a", is_flag=True, help="Everybody's jobs (default: yours).")
@output.repeatable(
    "--state",
    type=click.Choice([state.value for state in JobState]),
    help="Only these states (default: all).",
)
@click.option("--tag", help="Only jobs with this tag.")
@click.option("--name", help="Only jobs of this name.")
@click.option("--pool", help="Only jobs of this pool.")
@click.option("--cleaned", is_flag=True, help="Those that `tpu clean` took away, instead.")
@click.option("--limit", default=30, show_default=True, type=click.IntRange(1, 10_000))
@click.option("--watch", "-w", is_flag=True, help="Show the list anew until Ctrl-C.")
@json_option
def jobs(
    all_users: bool, state: tuple[str, ...], limit: int, watch: bool, as_json: bool, **filters: Any
) -> None:
    """List your jobs, newest first: where they stand, how far they are, and why.

    By default the 30 newest of your own, in any state.
    """
    with connection.connect() as client:
        owner = None if all_users else client.me().name
        while True:
            rows = client.jobs(
                owner=owner, state=",".join(state) or None, limit=limit, **filters
            ).jobs
            if as_json:
                output.print_json({"jobs": rows})
            else:
                if watch and output.is_terminal():
                    click.clear()
                show_rows(rows)
            if not watch:
                return
            time.sleep(WATCH_EVERY)


def show_rows(rows: Iterable[JobRow]) -> None:
    now = datetime.now(UTC)
    output.print_table(
        TITLES,
        (_cells(row, now) for row in rows),
        "no jobs; `tpu run v5e-16 -- CMD` runs one, `tpu jobs --all-users` shows everybody's",
    )


def _cells(row: JobRow, now: datetime) -> list[Cell]:
    kind = row.accelerator if row.slices == 1 else f"{row.slices}×{row.accelerator}"
    return [
        row.id, row.name, (row.state.value, text.colour(row.state)), kind,
        text.progress(row.progress), str(row.attempts), text.age(row.submitted_at, now),
        row.owner, row.reason,
    ]  # fmt: skip


@click.command(short_help="Everything about one job.", epilog="\b\nExample:\n  tpu show train\n")
@click.argument("job")
@json_option
def show(job: str, as_json: bool) -> None:
    """Show one JOB (id, beginning of an id, or name): its spec, attempts, slices and hosts."""
    with connection.connect() as client:
        found = client.job(job)
    if as_json:
        output.print_json(found)
        return
    _show_job(found)
    now = datetime.now(UTC)
    if found.attempts:
        click.echo()
        output.print_table(
            ("ATTEMPT", "STATE", "STARTED", "RAN", "CHECKPOINT", "HOW IT WENT"),
            (_attempt_cells(attempt, now) for attempt in found.attempts),
            "",
        )
    if found.slices:
        click.echo()
        output.print_table(
            ("SLICE", "STATE", "ZONE", "CAPACITY", "HOSTS", "REASON"),
            (
                (row.id, (row.state.value, text.colour(row.state)), row.zone, row.capacity.value,
                 f"{row.hosts_seen}/{row.hosts}", row.reason)
                for row in found.slices
            ),
            "",
        )  # fmt: skip
    if found.hosts:
        click.echo()
        output.print_table(
            ("HOST", "PHASE", "SEEN", "PROGRESS", "NOTICE"),
            (
                (f"{row.process} ({row.id})", (row.phase.value, text.colour(row.phase)),
                 text.age(row.seen_at, now), text.progress(row.progress), row.notice or "-")
                for row in found.hosts
            ),
            "",
        )  # fmt: skip


def _show_job(found: JobDetail) -> None:
    job, row, spec = found.job, found.row, found.job.spec
    now = datetime.now(UTC)
    plain = job_file.to_document(spec)
    shown = ("zones", "providers", "pool", "priority", "rule", "tags", "notes", "setup")
    output.print_fields(
        [
            ("job", f"{job.id} ({spec.name})"),
            ("state", (f"{job.state}: {job.reason}", text.colour(job.state))),
            ("advice", job.advice),
            ("progress", text.progress(row.progress)),
            ("metrics", text.metrics(row.progress)),
            ("owner", job.owner),
            ("submitted", text.age(job.submitted_at, now)),
            ("ended", text.age(job.ended_at, now)),
            ("command", " ".join(spec.command)),
            ("runs on", f"{spec.slices} × {spec.accelerator}, {', '.join(spec.capacity)}"),
            *((name, _written(plain[name])) for name in shown if name in plain),
            ("env", ", ".join(f"{name}={value}" for name, value in spec.env.items())),
            ("secrets", ", ".join(spec.secrets)),
            ("timeout", str(durations.to_builtin(spec.timeout)) if spec.timeout else ""),
            ("code", (job.snapshot or "")[:12]),
            ("checkpoints", job.checkpoint),
            ("parent", f"{job.parent} ({job.parent_relation})" if job.parent else ""),
            ("children", ", ".join(f"{child.id} ({child.state})" for child in found.children)),
        ]
    )


def _written(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _attempt_cells(attempt: Any, now: datetime) -> list[Cell]:
    word = str(attempt.end_reason or attempt.state)
    end = attempt.ended_at or now
    ran = text.duration(end - attempt.running_at) if attempt.running_at else "-"
    step = "-" if attempt.checkpoint_step is None else f"step {attempt.checkpoint_step}"
    started = text.age(attempt.created_at, now)
    return [str(attempt.number), (word, text.colour(word)), started, ran, step, attempt.words]


@click.command(
    short_help="Why a job waits, or why it ended.", epilog="\b\nExample:\n  tpu why train\n"
)
@click.argument("job")
@json_option
def why(job: str, as_json: bool) -> None:
    """Say in words why JOB waits and until when, what it is doing, or why it ended."""
    with connection.connect() as client:
        answer = client.why(job)
    if as_json:
        output.print_json(answer)
    else:
        show_why(answer)


def show_why(answer: JobExplanation) -> None:
    output.print_line(text.one_line(answer.message), text.colour(answer.state))
    for words in answer.details:
        click.echo(f"  - {text.one_line(words)}")
    if answer.until is not None:
        when = text.age(answer.until, datetime.now(UTC))
        click.echo(f"  - next change {when} ({text.time_of_day(answer.until)})")
    for attempt in answer.attempts[:-1]:  # the last one is among the reasons
        word = str(attempt.end_reason or attempt.state)
        output.print_line(f"  - earlier: attempt {attempt.number}: {text.one_line(attempt.message)}",
                    text.colour(word))  # fmt: skip
    if answer.advice:
        click.echo(f"what to do: {text.one_line(answer.advice)}")
