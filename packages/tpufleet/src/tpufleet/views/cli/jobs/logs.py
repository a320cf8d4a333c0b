"""`tpu logs` and `tpu events`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import click
from msgspec.structs import replace

from tpufleet.errors import BadInput
from tpufleet.model.api_types import JobDetail
from tpufleet.model.events import Event
from tpufleet.views import text
from tpufleet.views.cli import connection, output
from tpufleet.views.cli.output import json_option
from tpufleet.views.cli.parameter_types import Duration, host_option
from tpufleet.views.cli.settings.preferences import use_time_zone

SHOWN_EVENTS, MOST_EVENTS = 100, 10_000
# Of events, beside jobs: the argument of the client, and the field of an event.
SUBJECTS = {"slice": "slice_id", "pool": "pool", "user": "user", "reservation": "reservation"}
FIELDS = {**SUBJECTS, "user": "by"}


@click.command(
    epilog="\b\nExamples:\n  tpu logs train\n  tpu logs -f train --host 0\n"
    "  tpu logs train --attempt 0 --tail 50\n",
)
@click.argument("job")
@click.option("--follow", "-f", is_flag=True, help="Follow until the job has ended.")
@host_option("Only this host (default: all, prefixed).")
@click.option(
    "--attempt", type=click.IntRange(min=0), help="Only this attempt (default: the latest)."
)
@click.option(
    "--tail", metavar="N", type=click.IntRange(min=0), help="Only the last N lines of each host."
)
@click.option(
    "--raw", is_flag=True, help="The output as it was written, with all control sequences."
)
@json_option
def logs(
    job: str,
    follow: bool,
    host: int | None,
    attempt: int | None,
    tail: int | None,
    raw: bool,
) -> None:
    """Print the output of JOB, each line prefixed with its host.

    With --follow, print new lines as they arrive, and exit when the job ends.

    Text and colours are printed; other control sequences, with which a job could change the title,
    the clipboard or the screen of a terminal, are removed, as are the lines in which JAX counts the
    connections between its processes. Files and pipes get no colours.
    """
    with connection.connect(follow=follow) as client:
        if follow:
            current: int | None = None
            for line in client.follow_logs(job, host=host, attempt=attempt, tail=tail):
                if output.as_json():
                    output.print_json(line)
                    continue
                named = line.line if host is not None else f"[{line.host}] {line.line}"
                shown = named if raw else text.program_output(named)
                if shown is None:
                    continue
                if current is not None and line.attempt != current:
                    click.echo(text.attempt_heading(line.attempt))
                current = line.attempt
                click.echo(shown, color=raw or None)
            return
        pieces = client.logs(job, host=host, attempt=attempt, tail=tail)
        if output.as_json():
            output.print_json({"job": job, "lines": _lines("".join(pieces))})
            return
        last = ""
        for piece in pieces if raw else text.program_lines(pieces):
            click.echo(piece, nl=False, color=raw or None)
            last = piece or last
        click.echo("", nl=not last.endswith("\n") and bool(last))
        if not last and tail != 0:
            output.print_status(_why_empty(client.job(job), host))


def _lines(output: str) -> list[str]:
    """Ended by line feeds only: a progress bar has carriage returns in its line."""
    lines = output.split("\n")
    return lines if lines[-1] else lines[:-1]


def _why_empty(detail: JobDetail, host: int | None) -> str:
    job = f"{detail.job.spec.name} ({detail.job.id})"
    if not detail.attempts:
        return f"{job} has not started: no output\n  next: `tpu why {detail.job.id}`"
    which = "" if host is None else f" of host {host}"
    if detail.job.ended:
        # Agents write a line before each command, so an attempt that ran has a log.
        return (
            f"no logs{which} of {job} are stored: they were deleted, or it was "
            "restored from a backup without logs"
        )
    return f"no output{which} of {job} yet"


class _EventsCommand(click.Command):
    """`--pool lab` is the subject `pool:lab`."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        options = [f"--{name}" for name in SUBJECTS]
        return super().parse_args(context, output.options_as_terms(args, options))


@click.command(
    cls=_EventsCommand,
    epilog="\b\nExamples:\n  tpu events train\n  tpu events pool:lab\n  tpu events -f\n",
)
@click.argument("subject", metavar="[JOB|KIND:NAME]", required=False)
@click.option("--follow", "-f", is_flag=True, help="Follow until interrupted.")
@click.option("--since", type=Duration(), help="Only those of the last 2h, 7d, ….")
@click.option(
    "--limit", type=click.IntRange(1, MOST_EVENTS), help="Default: 100; with --since, all."
)
@json_option
def events(subject: str | None, follow: bool, since: timedelta | None, limit: int | None) -> None:
    """Print the events of JOB, of slice:ID, pool:NAME, user:NAME or reservation:ID, or of the whole
    fleet, oldest first."""
    kind, colon, name = (subject or "").partition(":")
    if colon and kind not in SUBJECTS:
        raise BadInput(f"{subject}: write a job, or one of {', '.join(SUBJECTS)} before the colon")
    job = subject if not colon else None
    about: dict[str, Any] = {SUBJECTS[kind]: name} if colon else {}
    with connection.connect(follow=follow) as client:
        limit = limit or (SHOWN_EVENTS if since is None else MOST_EVENTS)
        page = client.events(job, limit=limit, newest=True, **about)
        if since is not None:
            start = datetime.now(UTC) - since
            page = replace(page, events=tuple(each for each in page.events if each.at >= start))
        if not output.as_json():
            use_time_zone(client)
        if output.as_json() and not follow:
            output.print_json(page)
            return
        for event in page.events:
            _show(event, about=job is None)
        if not follow:
            if not page.events:
                output.print_status("no events yet")
            return
        ref = client.job(job).job.id if job is not None else None
        for item in client.stream(job=ref, after=page.last):
            if isinstance(item, Event) and name in ("", getattr(item, FIELDS.get(kind, ""), "")):
                _show(item, about=job is None)


def _show(event: Event, *, about: bool) -> None:
    if output.as_json():
        output.print_json(event)
    else:
        output.print_line(text.event(event, about=about), text.colour(event.state))
