"""`tpu jobs`, `tpu show` and `tpu why`."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from tpufleet.errors import Unreachable
from tpufleet.model.api_types import JobDetail, JobExplanation, JobRow
from tpufleet.model.job import job_file
from tpufleet.model.job.attempts import Attempt
from tpufleet.model.job.jobs import ENDED_STATES, JobState
from tpufleet.model.people.preferences import Preferences
from tpufleet.model.tpu.type_lookup import short_name
from tpufleet.model.values import durations
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import Cell, example, json_option
from tpufleet.views.cli.settings.preferences import use_time_zone, with_view

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient

SHORT_LINE = 16  # characters: enough lines are requested for a program that writes such lines
# On a narrow terminal these columns are left out, the first one first.
DROPPED_FIRST = ("OWNER", "ATTEMPTS", "SUBMITTED", "TYPE", "PROGRESS")
DROPPED_FIRST_OF_ALL_USERS = ("ATTEMPTS", "SUBMITTED", "TYPE", "PROGRESS", "OWNER")
MOST_ROWS = 10_000
TERMS = ("--state", "--tag", "--name", "--pool", "--view")
TITLES = ("ID", "NAME", "STATE", "TYPE", "PROGRESS", "ATTEMPTS", "SUBMITTED", "OWNER", "REASON")


class _QueryCommand(click.Command):
    """Its arguments may start with a dash: `-state:failed` is a term, not options. And `--state
    failed` is the term `state:failed`."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        negated = re.compile(r"-(?=[A-Za-z_]{2,}[\w./-]*[:<>=!])")
        args = [negated.sub("!", arg, count=1) if negated.match(arg) else arg for arg in args]
        return super().parse_args(context, output.options_as_terms(args, TERMS))


@click.command(
    cls=_QueryCommand,
    epilog="\b\nExamples:\n  tpu jobs\n  tpu jobs state:running,waiting --all-users\n"
    "  tpu jobs 'tag:sweep-* loss<0.3 since:7d -state:failed resnet'\n"
    "  tpu jobs is:archived\n",
)
@click.argument("query", metavar="[QUERY]…", nargs=-1)
@click.option("--all-users", "-a", is_flag=True, help="Jobs of all users (default: yours).")
@click.option("--limit", default=30, show_default=True, type=click.IntRange(1, MOST_ROWS))
@click.option("--watch", "-w", is_flag=True, help="Refresh until interrupted.")
@click.option("--verbose", "-v", is_flag=True, help="The newest output of each live job too.")
@json_option
def jobs(
    query: tuple[str, ...],
    all_users: bool,
    limit: int,
    watch: bool,
    verbose: bool,
) -> None:
    """List jobs, newest first, with state, progress and reason.

    The default is the 30 newest of your own jobs in any state. On a terminal each job takes one
    line: columns that do not fit are left out, and `tpu why JOB` shows the whole reason.

    QUERY is a list of terms that all match: owner:NAME (or owner:me), tag:T, state:S (live and
    ended are groups), name:N, pool:P, type:v5e-16, id:I, parent:ID, since:7d, until:2026-01-31,
    is:archived, view:NAME (see `tpu config view`), a metric such as loss<0.3, or words of the name,
    command, notes and tags. `-` before a term negates it, a comma means either, `*` matches
    anything. Quote the query for the shell.
    """
    filtered = all_users or bool(query)
    with connection.connect() as client:
        preferences = client.preferences()
        search = with_view(preferences, " ".join(query))
        all_users = all_users or names_owner(search)
        owner = None if all_users else client.me().name
        selection: dict[str, Any] = {"owner": owner, "query": search or None}

        def refresh() -> None:
            found = client.jobs(limit=min(limit + 1, MOST_ROWS), **selection).jobs
            rows = found[:limit]
            if output.printed_json({"jobs": rows}):
                return
            empty = "" if rows else _empty_list(client, selection, filtered)
            if watch and output.is_terminal():
                click.clear()
            show_rows(
                rows,
                empty,
                all_users=all_users,
                show_type=bool(preferences.setting("monitor_tpu")),
                reason_length=int(preferences.setting("show_length")),
            )
            if len(found) > limit:
                output.print_status(f"the newest {limit}; --limit shows more")
            if verbose or (watch and preferences.setting("monitor_verbose")):
                _show_output(client, rows, preferences)

        refresh()
        while watch:
            time.sleep(float(preferences.setting("monitor_upd_time")))
            try:
                refresh()
            except Unreachable as error:
                output.print_retrying(error)


def _show_output(client: FleetClient, rows: Iterable[JobRow], preferences: Preferences) -> None:
    """What each live job does, the end of its output, and the folder that its code came from."""
    length = int(preferences.setting("monitor_length"))
    for row in rows:
        if row.state in ENDED_STATES:
            continue
        folder = ""
        if preferences.setting("monitor_dir"):
            folder = f", {client.job(row.id).job.spec.workdir}"
        lines = client.logs(row.id, host=0, tail=-(-length // SHORT_LINE)) if length else ()
        newest = "".join(lines)[-length:]
        activity = text.activity(newest)
        click.echo(f"\n{row.name} ({row.id}{folder}):{activity and f' {activity}'}")
        for line in newest.splitlines():
            click.echo(f"  {text.without_control_characters(line)}")


def names_owner(query: str) -> bool:
    """It says whose jobs are meant, so yours are not the default."""
    return re.search(r"(^|\s)[-!]?(owner|user|by):", query) is not None


EMPTY = "no jobs; start one with `tpu run v5e-16 -- CMD`, or list all with `tpu jobs --all-users`"
EMPTY_FILTER = "no jobs match"


def _empty_list(client: FleetClient, selection: dict[str, Any], filtered: bool) -> str:
    if client.jobs(limit=1, **{**selection, "archived": True}).jobs:
        none = EMPTY_FILTER if filtered else "no jobs"
        return f"{none}, except archived ones: `tpu jobs is:archived`"
    return EMPTY_FILTER if filtered else EMPTY


def show_rows(
    rows: Iterable[JobRow],
    empty: str = EMPTY,
    *,
    all_users: bool = False,
    show_type: bool = True,
    reason_length: int = 10_000,
) -> None:
    hidden = None if show_type else TITLES.index("TYPE")
    cells = (_cells(row, reason_length) for row in rows)
    output.print_table(
        [title for index, title in enumerate(TITLES) if index != hidden],
        ([cell for index, cell in enumerate(row) if index != hidden] for row in cells),
        empty,
        droppable=DROPPED_FIRST_OF_ALL_USERS if all_users else DROPPED_FIRST,
    )


def _shortened(reason: str, length: int) -> str:
    return reason if len(reason) <= length else f"{reason[: length - 1]}…"


def _cells(row: JobRow, reason_length: int) -> list[Cell]:
    """Without a reason for a job that succeeded: the state says it, and the room is needed."""
    reason = "" if row.state is JobState.SUCCEEDED else _shortened(row.reason, reason_length)
    kind = short_name(row.accelerator)
    kind = kind if row.slices == 1 else f"{row.slices}×{kind}"
    return [
        row.id, row.name, (row.state.value, text.colour(row.state)), kind,
        text.job_progress(row), str(row.attempts), text.age(row.submitted_at),
        row.owner, reason,
    ]  # fmt: skip


@click.command(epilog=example("tpu show train"))
@click.argument("job")
@json_option
def show(job: str) -> None:
    """Show one JOB: its spec, attempts, slices and hosts.

    JOB is a name (your newest job of that name), OWNER/NAME, @last (your newest job), an id, or the
    beginning of an id.
    """
    with connection.connect() as client:
        detail = client.job(job)
    if output.printed_json(detail):
        return
    _show_job(detail)
    recovered = {each.attempt: f"{each.seconds:.1f} s" for each in detail.recoveries}
    useful = dict(enumerate(detail.goodput))
    if detail.attempts:
        click.echo()
        output.print_table(
            (
                "ATTEMPT",
                "STATE",
                "STARTED",
                "RECOVERY",
                "RAN",
                "USEFUL",
                "CHECKPOINT",
                "OUTCOME",
            ),
            (
                _attempt_cells(attempt, recovered, useful.get(attempt.number))
                for attempt in detail.attempts
            ),
            "",
        )
    if detail.recoveries:
        click.echo()
        for recovery in detail.recoveries:
            click.echo(recovery.text)
    if detail.slices:
        click.echo()
        output.print_table(
            ("SLICE", "STATE", "ZONE", "CAPACITY", "HOSTS", "REASON"),
            (
                (row.id, (row.state.value, text.colour(row.state)), row.zone, row.capacity.value,
                 f"{row.hosts_seen}/{row.hosts}", row.reason)
                for row in detail.slices
            ),
            "",
        )  # fmt: skip
    if detail.hosts:
        click.echo()
        output.print_table(
            ("HOST", "PHASE", "SEEN", "PROGRESS", "NOTICE"),
            (
                (f"{row.process} ({row.id})", (row.phase.value, text.colour(row.phase)),
                 text.age(row.seen_at), text.progress(row.progress), row.notice or "-")
                for row in detail.hosts
            ),
            "",
        )  # fmt: skip


def _show_job(detail: JobDetail) -> None:
    job, row, spec = detail.job, detail.row, detail.job.spec
    document = job_file.to_document(spec)
    shown = ("zones", "providers", "pool", "priority", "rule", "tags", "notes", "setup")
    output.print_fields(
        [
            ("job", f"{job.id} ({spec.name})"),
            ("state", (f"{job.state}: {job.reason}", text.colour(job.state))),
            ("advice", job.advice),
            ("progress", text.job_progress(row)),
            ("metrics", text.metrics(row.progress)),
            ("owner", job.owner),
            ("submitted", text.age(job.submitted_at)),
            ("ended", text.age(job.ended_at)),
            ("files", _deleted(detail.files_deleted_at)),
            ("command", shlex.join(spec.command)),
            (
                "slices",
                f"{spec.slices} × {short_name(spec.accelerator)}, {', '.join(spec.capacity)}",
            ),
            *((name, _joined(document[name])) for name in shown if name in document),
            ("env", ", ".join(f"{name}={value}" for name, value in spec.env.items())),
            ("secrets", ", ".join(spec.secrets)),
            ("timeout", str(durations.to_builtin(spec.timeout)) if spec.timeout else ""),
            ("code", (job.snapshot or "")[:12]),
            ("environment", _environment(detail)),
            ("checkpoints", job.checkpoint),
            ("parent", f"{job.parent} ({job.parent_relation})" if job.parent else ""),
            ("children", ", ".join(f"{child.id} ({child.state})" for child in detail.children)),
        ]
    )


def _deleted(at: datetime | None) -> str:
    return "" if at is None else f"deleted on {at:%Y-%m-%d}"


def _environment(detail: JobDetail) -> str:
    """Of the newest attempt that has one."""
    made = [each.environment.text for each in detail.attempts if each.environment is not None]
    return made[-1] if made else ""


def _joined(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _attempt_cells(
    attempt: Attempt, recovered: Mapping[int, str], useful: float | None
) -> list[Cell]:
    state = str(attempt.end_reason or attempt.state)
    end = attempt.ended_at or datetime.now(UTC)
    ran = text.duration(end - attempt.running_at) if attempt.running_at else "-"
    step = "-" if attempt.checkpoint_step is None else f"step {attempt.checkpoint_step}"
    started = text.age(attempt.created_at)
    return [
        str(attempt.number), (state, text.colour(state)), started,
        recovered.get(attempt.number, "-"), ran, "-" if useful is None else f"{useful:.0%}", step,
        attempt.message,
    ]  # fmt: skip


@click.command(epilog=example("tpu why @last"))
@click.argument("job")
@json_option
def why(job: str) -> None:
    """Explain why JOB waits and until when, what it is doing, or why it ended."""
    with connection.connect() as client:
        explanation = client.why(job)
        use_time_zone(client)
    if output.as_json():
        output.print_json(explanation)
    else:
        show_explanation(explanation)


def show_explanation(explanation: JobExplanation) -> None:
    for line, style in text.explanation_lines(explanation):
        output.print_line(line, style)
