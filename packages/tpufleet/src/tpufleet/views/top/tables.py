"""The four tables of `tpu top`: columns, and rows made from what the server sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from tpufleet.model.api_types import JobRow, QueueEntry, SliceRow
from tpufleet.model.events import Event
from tpufleet.model.job.jobs import ENDED_STATES, JobId, JobState
from tpufleet.model.tpu.type_lookup import short_name
from tpufleet.views import text
from tpufleet.views.cli.jobs.queue import because, starts
from tpufleet.views.cli.output import Cell, column_widths

MAX_EVENTS = 500
EVENT_COLUMNS = ("WHEN", "KIND", "STATE", "ABOUT", "MESSAGE")


class Tab(StrEnum):
    JOBS = "Jobs"
    SLICES = "Slices"
    QUEUE = "Queue"
    EVENTS = "Events"


@dataclass(frozen=True, kw_only=True)
class TableColumns:
    titles: tuple[str, ...]
    dropped_first: tuple[str, ...]  # on a narrow terminal


COLUMNS = {
    Tab.JOBS: TableColumns(
        titles=("NAME", "STATE", "TYPE", "PROGRESS", "TRIES", "AGE", "OWNER", "TAGS", "REASON"),
        dropped_first=("TAGS", "AGE", "TRIES"),
    ),
    Tab.SLICES: TableColumns(
        titles=("SLICE", "STATE", "TYPE", "ZONE", "CAPACITY", "HOSTS", "POOL", "JOB", "REASON"),
        dropped_first=("CAPACITY", "POOL", "HOSTS"),
    ),
    Tab.QUEUE: TableColumns(
        titles=("QUEUE", "POS", "JOB", "OWNER", "NEEDS", "PRIORITY", "STARTS", "BECAUSE"),
        dropped_first=("PRIORITY", "OWNER"),
    ),
    Tab.EVENTS: TableColumns(titles=EVENT_COLUMNS, dropped_first=("KIND",)),
}


@dataclass(frozen=True)
class TableRow:
    key: str  # of the job, slice or event
    cells: Sequence[Cell]
    detail: str  # shown whole, for the selected row
    job_id: JobId | None


@dataclass
class FleetView:
    """What the server sent so far."""

    jobs: dict[JobId, JobRow] = field(default_factory=dict)  # newest first
    slices: tuple[SliceRow, ...] = ()
    queue: tuple[QueueEntry, ...] = ()
    events: list[Event] = field(default_factory=list)  # newest first

    def add_event(self, event: Event) -> None:
        self.events.insert(0, event)
        del self.events[MAX_EVENTS:]

    def rows(self, tab: Tab, now: datetime) -> list[TableRow]:
        if tab is Tab.JOBS:
            return [self._job(row, now) for row in self.jobs.values()]
        if tab is Tab.SLICES:
            return [_slice(row, self._name(row.job_id)) for row in self.slices]
        if tab is Tab.QUEUE:
            return [_waiting(entry, now) for entry in self.queue]
        return [_event(event, self._name(event.job_id), now) for event in self.events]

    def counts(self, most: int) -> str:
        """`2 running, 1 waiting, 4 ended`, of the listed jobs, of which there are `most`."""
        live = [row.state for row in self.jobs.values() if row.state not in ENDED_STATES]
        running = sum(state is JobState.RUNNING for state in live)
        parts = {"running": running, "waiting": len(live) - running}
        if len(self.jobs) >= most:
            return ", ".join(f"{parts[name]} {name}" for name in parts) + f" of the newest {most}"
        parts["ended"] = len(self.jobs) - len(live)
        return ", ".join(f"{count} {name}" for name, count in parts.items() if count) or "no jobs"

    def _name(self, job_id: JobId | None) -> str:
        known = self.jobs.get(job_id) if job_id is not None else None
        return known.name if known is not None else job_id or "-"

    def _job(self, row: JobRow, now: datetime) -> TableRow:
        kind = short_name(row.accelerator)
        kind = kind if row.slices == 1 else f"{row.slices}×{kind}"
        notes = f" · {row.notes}" if row.notes else ""
        return TableRow(
            row.id,
            (
                row.name, (row.state.value, text.colour(row.state)), kind,
                text.job_progress(row, now), str(row.attempts),
                text.duration(now - row.submitted_at), row.owner, ",".join(row.tags) or "-",
                row.reason,
            ),
            f"{row.name} ({row.id}): {row.reason}{notes}",
            row.id,
        )  # fmt: skip


def _slice(row: SliceRow, job: str) -> TableRow:
    return TableRow(
        row.id,
        (
            row.id, (row.state.value, text.colour(row.state)), short_name(row.accelerator),
            row.zone, row.capacity.value, f"{row.hosts_seen}/{row.hosts}", row.pool or "-", job,
            row.reason,
        ),
        f"{row.id}: {row.reason}",
        row.job_id,
    )  # fmt: skip


def _waiting(entry: QueueEntry, now: datetime) -> TableRow:
    row = entry.job
    return TableRow(
        row.id,
        (
            entry.queue, str(entry.position or "held"), row.name, row.owner,
            f"{row.slices}×{short_name(row.accelerator)}", str(row.priority), starts(entry, now),
            because(entry),
        ),
        f"{row.name} ({row.id}): {because(entry)}",
        row.id,
    )  # fmt: skip


def _event(event: Event, job: str, now: datetime) -> TableRow:
    about = job if event.job_id is not None else event.slice_id or event.pool or "-"
    when = text.local_time(event.at, now)
    return TableRow(
        str(event.seq),
        (when, event.kind.value, (event.state, text.colour(event.state)), about, event.message),
        event.message,
        event.job_id,
    )


def widths(tab: Tab, rows: Sequence[TableRow], total: int) -> dict[str, int]:
    """The columns that fit, and how wide they are."""
    columns = COLUMNS[tab]
    natural = (
        {
            title: max(len(title), *(len(shown(row.cells[at])) for row in rows), 1)
            for at, title in enumerate(columns.titles)
        }
        if rows
        else {title: len(title) for title in columns.titles}
    )
    return column_widths(natural, columns.dropped_first, total)


def shown(cell: Cell) -> str:
    return text.one_line(cell if isinstance(cell, str) else cell[0])
