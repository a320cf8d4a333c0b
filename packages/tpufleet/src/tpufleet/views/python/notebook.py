"""How a job looks in a notebook."""

from __future__ import annotations

import contextlib
import html
import threading
from collections.abc import Callable
from datetime import UTC, datetime

from tpufleet.errors import FleetError
from tpufleet.model.api_types import JobRow
from tpufleet.model.job.jobs import ENDED_STATES
from tpufleet.model.tpu.type_lookup import short_name
from tpufleet.views import text

REFRESH_SECONDS = 1.0
REFRESHER = "tpufleet-notebook-table"  # the name of the thread

_COLOURS = {
    text.GOOD: "#1a7f37",
    text.BUSY: "#0969da",
    text.AMBER: "#9a6700",
    text.BAD: "#cf222e",
    text.QUIET: "#6e7781",
}


def job_html(row: JobRow) -> str:
    """A small table. All text of users is escaped."""
    style = text.colour(row.state).removeprefix("bold ")
    colour = _COLOURS.get(style, "inherit")
    end = row.ended_at or datetime.now(UTC)
    cells = {
        "job": f"{_text(row.name)} <code>{_text(row.id)}</code>",
        "state": f'<b style="color:{colour}">{_text(row.state)}</b> {_text(row.reason)}',
        "slices": f"{row.slices} × {_text(short_name(row.accelerator))}",
        "progress": _text(text.progress(row.progress)) + _bar(row),
        "metrics": _text(text.metrics(row.progress)) or "-",
        "time": f"{text.duration(end - row.submitted_at)}, {text.counted(row.attempts, 'attempt')}",
    }
    lines = "".join(
        f'<tr><th style="text-align:left">{name}</th><td style="text-align:left">{value}</td></tr>'
        for name, value in cells.items()
    )
    return f"<table>{lines}</table>"


def keep_current(read: Callable[[], JobRow], update: Callable[[str], object]) -> threading.Thread:
    """Call `update` with new HTML whenever the job that `read` returns changes, until it ended."""
    thread = threading.Thread(target=_refresh, args=(read, update), name=REFRESHER, daemon=True)
    thread.start()
    return thread


def _refresh(read: Callable[[], JobRow], update: Callable[[str], object]) -> None:
    shown, pause = "", threading.Event()
    while True:
        with contextlib.suppress(FleetError):  # the server is away: keep what is shown
            row = read()
            current = job_html(row)
            if current != shown:
                update(current)
                shown = current
            if row.state in ENDED_STATES:
                return
        pause.wait(REFRESH_SECONDS)


def _bar(row: JobRow) -> str:
    progress = row.progress
    if progress is None or progress.step is None or not progress.total:
        return ""
    return f' <progress value="{min(progress.step, progress.total)}" max="{progress.total}">'


def _text(value: str) -> str:
    return html.escape(text.one_line(value))
