"""Following jobs to their end: events, log lines and progress, as they come.

One thread reads each stream into a queue; the caller's thread draws, so Ctrl-C always answers.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from tpufleet.errors import FleetError, Temporary
from tpufleet.model.api_types import JobRow, LogLine
from tpufleet.model.events import Event
from tpufleet.model.jobs import ENDED_STATES, JobId, JobState
from tpufleet.views.cli.follow_display import Screen

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient

REFRESH = 1.0  # seconds between two looks at progress, which makes no events
LOGS_WITHIN = 10.0  # seconds that the last lines may take after the job has ended

Item = Event | JobRow | LogLine | FleetError | None  # None: the logs of one job are complete


def follow(
    client: FleetClient, jobs: Sequence[JobId], screen: Screen, *, logs: bool = True
) -> dict[JobId, JobRow]:
    """Draws until every job has ended; returns how they stand then."""
    followed = _Followed(client, jobs, screen)
    try:
        return followed.to_the_end(logs)
    finally:
        followed.left = True
        screen.close()


def exit_status(rows: dict[JobId, JobRow]) -> int:
    return 0 if all(row.state is JobState.SUCCEEDED for row in rows.values()) else 1


class _Followed:
    def __init__(self, client: FleetClient, jobs: Sequence[JobId], screen: Screen) -> None:
        self._client, self._jobs, self._screen = client, tuple(jobs), screen
        self._items: queue.Queue[Item] = queue.Queue(maxsize=10_000)
        self._rows: dict[JobId, JobRow] = {}
        self._seen: dict[JobId, int] = dict.fromkeys(self._jobs, 0)  # newest event of each
        self._logs_open = 0
        self._cut_off = False
        self.left = False

    def to_the_end(self, logs: bool) -> dict[JobId, JobRow]:
        self._open(logs)
        looked = ended = None
        while True:
            now = time.monotonic()
            if looked is None or now - looked >= REFRESH:
                self._look()
                looked = now
            if all(self._ended(job) for job in self._jobs):
                ended = ended or now
                if self._items.empty() and (not self._logs_open or now - ended > LOGS_WITHIN):
                    self._catch_up()
                    return self._rows
            try:
                self._draw(self._items.get(timeout=REFRESH / 5))
            except queue.Empty:
                continue

    def _open(self, logs: bool) -> None:
        self._catch_up()
        # One job has its own stream; several share the stream of everything.
        newest = max(self._seen.values(), default=0)
        only = self._jobs[0] if len(self._jobs) == 1 else None
        self._read(self._client.stream(only, after=newest))
        for job in self._jobs if logs else ():
            self._logs_open += 1
            self._read(self._lines(job))

    def _ended(self, job: JobId) -> bool:
        return job in self._rows and self._rows[job].state in ENDED_STATES

    def _draw(self, item: Item) -> None:
        if isinstance(item, Event):
            job = item.job_id
            if job in self._seen and item.seq > self._seen[job]:
                self._seen[job] = item.seq
                self._screen.event(item)
        elif isinstance(item, JobRow):
            self._show(item)
        elif isinstance(item, LogLine):
            self._screen.log(item)
        elif isinstance(item, FleetError):
            raise item
        else:
            self._logs_open -= 1

    def _show(self, row: JobRow) -> None:
        # A row that was read before the end may arrive after it.
        if row.id in self._seen and not self._ended(row.id):
            self._rows[row.id] = row
            self._screen.row(row)

    def _look(self) -> None:
        """Progress is read, not streamed; and an end is noticed even if its event was missed."""
        try:
            for job in self._jobs:
                if not self._ended(job):
                    self._show(self._client.job(job).row)
        except FleetError as error:
            if not isinstance(error, Temporary):
                raise
            if not self._cut_off:
                self._screen.note(f"{error}; trying again, the job goes on")
            self._cut_off = True
        else:
            self._cut_off = False

    def _catch_up(self) -> None:
        """Events after the last one drawn."""
        for job in self._jobs:
            for event in self._client.events(job, after=self._seen[job]).events:
                self._draw(event)

    def _lines(self, job: JobId) -> Iterator[Item]:
        yield from self._client.follow_logs(job)
        yield None

    def _read(self, source: Iterable[Item]) -> None:
        threading.Thread(target=self._pump, args=(source,), daemon=True).start()

    def _pump(self, source: Iterable[Item]) -> None:
        """To the end of the stream; the client opens it again when the connection breaks."""
        try:
            for item in source:
                if self.left:
                    return
                self._items.put(item)
        except FleetError as error:
            self._items.put(error)
        except RuntimeError:  # httpx says so when the client was closed meanwhile
            if not self.left:
                raise
