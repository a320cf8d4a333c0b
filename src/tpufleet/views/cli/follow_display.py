"""Where a followed job is drawn: bars on a terminal, plain lines in a pipe, JSON for programs."""

from __future__ import annotations

import sys
from typing import Any, Protocol

import click

from tpufleet.model import encoding
from tpufleet.model.api_types import JobRow, LogLine
from tpufleet.model.events import Event
from tpufleet.model.hosts import Progress
from tpufleet.model.jobs import ENDED_STATES, JobId, JobState
from tpufleet.views import text


class Screen(Protocol):
    def row(self, row: JobRow) -> None: ...
    def event(self, event: Event) -> None: ...
    def log(self, line: LogLine) -> None: ...
    def note(self, words: str) -> None:
        """Something about the connection, not about the job."""
        ...

    def close(self) -> None: ...


def screen_for(as_json: bool) -> Screen:
    if as_json:
        return JsonScreen()
    return TerminalScreen() if sys.stdout.isatty() else PlainScreen()


class JsonScreen:
    """One JSON object a line, each with its kind."""

    def row(self, row: JobRow) -> None:
        self._say("job", row)

    def event(self, event: Event) -> None:
        self._say("event", event)

    def log(self, line: LogLine) -> None:
        self._say("log", line)

    def note(self, words: str) -> None:
        click.echo(words, err=True)

    def close(self) -> None:
        sys.stdout.flush()

    def _say(self, kind: str, value: object) -> None:
        click.echo(encoding.to_json({"kind": kind, kind: value}))


class PlainScreen:
    """A line for each event and each line of log; progress when it has moved on by a twentieth."""

    def __init__(self) -> None:
        self._told: dict[JobId, Any] = {}

    def row(self, row: JobRow) -> None:
        said = row.progress
        if said is None or said.step is None or row.state in ENDED_STATES:
            return
        mark = said.step * 20 // said.total if said.total else said.step // 100
        if self._told.get(row.id) != (row.attempts, mark):
            self._told[row.id] = (row.attempts, mark)
            click.echo(f"{'':8}  progress    {row.name}: {progress_text(said)}")

    def event(self, event: Event) -> None:
        click.echo(text.event(event))

    def log(self, line: LogLine) -> None:
        click.echo(f"[{line.host}] {line.line}")

    def note(self, words: str) -> None:
        click.echo(words, err=True)

    def close(self) -> None:
        sys.stdout.flush()


class TerminalScreen:
    """A bar for each job at the foot of the screen; events and log lines pass above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self._console = Console()
        self._bars = Bars(
            TextColumn("{task.fields[name]}", markup=False),
            TextColumn("[{task.fields[style]}]{task.fields[state]}"),
            BarColumn(30, complete_style="cyan", finished_style="green", pulse_style="cyan"),
            TextColumn("{task.fields[said]}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            transient=False,
        )
        self._tasks: dict[JobId, Any] = {}
        self._bars.start()

    def row(self, row: JobRow) -> None:
        said = row.progress
        fields = {
            "name": text.one_line(row.name),
            "state": row.state.value,
            "style": text.colour(row.state.value) or "none",
            "said": progress_text(said) if said else "",
        }
        if row.id not in self._tasks:
            self._tasks[row.id] = self._bars.add_task("", total=None, **fields)
        task = self._tasks[row.id]
        known = next(found for found in self._bars.tasks if found.id == task)
        total = said.total if said else known.total
        done = said.step if said and said.step is not None else known.completed
        fields["said"] = fields["said"] or known.fields["said"]
        if row.state is JobState.SUCCEEDED:
            done = total = total or 1
            fields["said"] = text.counted(row.attempts, "attempt")
        self._bars.update(task, total=total, completed=done, **fields)
        if row.state in ENDED_STATES:
            self._bars.stop_task(task)

    def event(self, event: Event) -> None:
        self._print(text.event(event), text.colour(event.state))

    def log(self, line: LogLine) -> None:
        from rich.text import Text

        marked = Text.assemble((f"[{line.host}] ", "dim"), Text.from_ansi(line.line))
        self._console.print(marked, soft_wrap=True)

    def note(self, words: str) -> None:
        self._print(words, text.AMBER)

    def close(self) -> None:
        self._bars.stop()

    def _print(self, words: str, style: str) -> None:
        from rich.text import Text

        # A style given to print() would colour the bars below as well.
        self._console.print(Text(words, style=style), soft_wrap=True)


def progress_text(said: Progress) -> str:
    parts = (text.progress(said), text.metrics(said))
    return "  ".join(part for part in parts if part not in ("", "-"))
