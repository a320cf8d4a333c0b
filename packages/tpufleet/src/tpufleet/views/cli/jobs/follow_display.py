"""Displays of followed jobs: progress bars on a terminal, plain lines in a pipe, JSON lines."""

from __future__ import annotations

import sys
from typing import Any, Protocol

import click

from tpufleet.model.api_types import JobExplanation, JobRow, LogLine
from tpufleet.model.events import Event
from tpufleet.model.fleet.hosts import Progress
from tpufleet.model.job.jobs import ENDED_STATES, JobId, JobState
from tpufleet.model.values import encoding
from tpufleet.views import text
from tpufleet.views.cli import output
from tpufleet.views.cli.jobs import waiting_table


class Screen(Protocol):
    shows_waiting: bool = False  # whether `waiting` draws anything

    def row(self, row: JobRow) -> None: ...
    def event(self, event: Event) -> None: ...
    def log(self, line: LogLine) -> None: ...
    def waiting(self, row: JobRow, explanation: JobExplanation | None) -> None:
        """Where the only job looks for capacity; None: it no longer does. Events say it too."""
        return

    def note(self, message: str) -> None:
        """A message about the connection, not about the job."""
        click.echo(message, err=True)

    def close(self) -> None:
        sys.stdout.flush()


def screen() -> Screen:
    if output.as_json():
        return JsonScreen()
    return TerminalScreen() if sys.stdout.isatty() else PlainScreen()


class JsonScreen(Screen):
    """One JSON object per line, each with its kind."""

    def row(self, row: JobRow) -> None:
        self._print("job", row)

    def event(self, event: Event) -> None:
        self._print("event", event)

    def log(self, line: LogLine) -> None:
        self._print("log", line)

    def _print(self, kind: str, value: object) -> None:
        click.echo(encoding.to_json({"kind": kind, kind: value}))


class PlainScreen(Screen):
    """One line per event and log line; progress every 5 %, or every 100 steps without a total."""

    def __init__(self) -> None:
        self._shown: dict[JobId, tuple[int, int]] = {}
        self._attempt = 0  # of the last line; only one job is followed with its output

    def row(self, row: JobRow) -> None:
        reported = row.progress
        if reported is None or reported.step is None or row.state in ENDED_STATES:
            return
        step, total = reported.step, reported.total
        mark = step * 20 // total if total else step // 100
        if self._shown.get(row.id) != (row.attempts, mark):
            self._shown[row.id] = (row.attempts, mark)
            click.echo(f"{'':8}  progress    {row.name}: {progress_text(reported)}")

    def event(self, event: Event) -> None:
        click.echo(text.event(event))

    def log(self, line: LogLine) -> None:
        shown = text.program_output(f"[{line.host}] {line.line}")
        if shown is None:
            return
        if line.attempt != self._attempt:
            self._attempt = line.attempt
            click.echo(text.attempt_heading(line.attempt))
        click.echo(shown)


class TerminalScreen(Screen):
    """A progress bar per job at the bottom, and while the only job waits, a table of the sources of
    capacity that it may use; events and log lines scroll above."""

    shows_waiting = True

    def __init__(self) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self._console = Console()
        self._bars = Bars(
            TextColumn("{task.fields[name]}", markup=False),
            TextColumn("[{task.fields[style]}]{task.fields[state]}"),
            BarColumn(30, complete_style="cyan", finished_style="green", pulse_style="cyan"),
            TextColumn("{task.fields[progress]}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._tasks: dict[JobId, Any] = {}
        self._table: list[Any] = []
        self._attempt = 0  # of the last line; only one job is followed with its output
        self._live = Live(
            get_renderable=lambda: Group(*self._table, self._bars),
            console=self._console,
            refresh_per_second=4,
        )
        self._live.start()

    def row(self, row: JobRow) -> None:
        reported = row.progress
        fields: dict[str, Any] = {
            "name": text.one_line(row.name),
            "state": row.state.value,
            "style": text.colour(row.state.value) or "none",
            "progress": progress_text(reported) if reported else "",
        }
        if row.id not in self._tasks:
            self._tasks[row.id] = self._bars.add_task("", total=None, **fields)
        task = self._tasks[row.id]
        bar = next(item for item in self._bars.tasks if item.id == task)
        total = reported.total if reported else bar.total
        done = reported.step if reported and reported.step is not None else bar.completed
        fields["progress"] = fields["progress"] or bar.fields["progress"]
        if row.state is JobState.SUCCEEDED:
            done = total = total or 1
            fields["progress"] = text.counted(row.attempts, "attempt")
        self._bars.update(task, total=total, completed=done, **fields)
        if row.state in ENDED_STATES:
            self._bars.stop_task(task)

    def event(self, event: Event) -> None:
        self._print(text.event(event), text.colour(event.state))

    def waiting(self, row: JobRow, explanation: JobExplanation | None) -> None:
        self._table = [] if explanation is None else waiting_table.render(row, explanation)

    def log(self, line: LogLine) -> None:
        from rich.text import Text

        shown = text.program_output(line.line)
        if shown is None:
            return
        if line.attempt != self._attempt:
            self._attempt = line.attempt
            self._print(text.attempt_heading(line.attempt), text.QUIET)
        prefixed = Text.assemble((f"[{line.host}] ", "dim"), Text.from_ansi(shown))
        self._console.print(prefixed, soft_wrap=True)

    def note(self, message: str) -> None:
        self._print(message, text.AMBER)

    def close(self) -> None:
        self._table = []
        self._live.stop()

    def _print(self, line: str, style: str) -> None:
        from rich.text import Text

        # The style argument of print() would colour the bars as well.
        self._console.print(Text(line, style=style), soft_wrap=True)


def progress_text(reported: Progress) -> str:
    parts = (text.progress(reported), text.metrics(reported))
    return "  ".join(part for part in parts if part not in ("", "-"))
