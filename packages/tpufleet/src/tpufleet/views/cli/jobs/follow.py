"""Following jobs until they end: events, log lines and progress, as they arrive.

One thread per stream reads into a queue; the caller's thread draws, so Ctrl-C always works.
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
from tpufleet.model.job.jobs import ENDED_STATES, WAITING_STATES, JobId, JobState
from tpufleet.views.cli.jobs.follow_display import Screen

if TYPE_CHECKING:
    from tpufleet.client.fleet import FleetClient

REFRESH_SECONDS = 1.0  # progress is polled, because it produces no events
EXPLAIN_SECONDS = 3.0  # the server looks at the whole queue for it
LAST_LOGS_SECONDS = 10.0  # how long to wait for log lines after the job has ended

Item = Event | JobRow | LogLine | FleetError | None  # None: the logs of one job are complete


def follow(
    client: FleetClient,
    jobs: Sequence[JobId],
    screen: Screen,
    *,
    logs: bool = True,
    host: int | None = None,
) -> dict[JobId, JobRow]:
    """Draw until every job has ended; the final row of each. `host` limits the logs to one rank."""
    follower = _Follower(client, jobs, screen, host)
    try:
        return follower.run(logs)
    finally:
        follower.closed = True
        screen.close()


def exit_status(rows: dict[JobId, JobRow]) -> int:
    return 0 if all(row.state is JobState.SUCCEEDED for row in rows.values()) else 1


class _Follower:
    def __init__(
        self, client: FleetClient, jobs: Sequence[JobId], screen: Screen, host: int | None
    ) -> None:
        self._client, self._jobs, self._screen = client, tuple(jobs), screen
        self._host = host
        self._items: queue.Queue[Item] = queue.Queue(maxsize=10_000)
        self._rows: dict[JobId, JobRow] = {}
        self._seen: dict[JobId, int] = dict.fromkeys(self._jobs, 0)  # newest event of each
        self._logs_open = 0
        self._disconnected = False
        self._explained_at: float | None = None  # why the job waits
        self.closed = False

    def run(self, logs: bool) -> dict[JobId, JobRow]:
        self._open(logs)
        polled = ended = None
        while True:
            now = time.monotonic()
            if polled is None or now - polled >= REFRESH_SECONDS:
                self._poll()
                polled = now
            if all(self._ended(job) for job in self._jobs):
                ended = ended or now
                if self._items.empty() and (not self._logs_open or now - ended > LAST_LOGS_SECONDS):
                    self._catch_up()
                    return self._rows
            try:
                self._draw(self._items.get(timeout=REFRESH_SECONDS / 5))
            except queue.Empty:
                continue

    def _open(self, logs: bool) -> None:
        self._catch_up()
        # One job has its own stream; several share the stream of the fleet.
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
        # A row that was read before the job ended may arrive afterwards.
        if row.id in self._seen and not self._ended(row.id):
            self._rows[row.id] = row
            self._screen.row(row)

    def _poll(self) -> None:
        """Progress is not streamed; and the end is detected even if its event was missed."""
        try:
            for job in self._jobs:
                if not self._ended(job):
                    self._show(self._client.job(job).row)
            if len(self._jobs) == 1:
                self._show_waiting(self._rows[self._jobs[0]])
        except FleetError as error:
            if not isinstance(error, Temporary):
                raise
            if not self._disconnected:
                self._screen.note(f"{error}; retrying, the job continues")
            self._disconnected = True
        else:
            self._disconnected = False

    def _show_waiting(self, row: JobRow) -> None:
        if not self._screen.shows_waiting:
            return
        now = time.monotonic()
        if row.state not in WAITING_STATES:
            if self._explained_at is not None:
                self._screen.waiting(row, None)
            self._explained_at = None
        elif self._explained_at is None or now - self._explained_at >= EXPLAIN_SECONDS:
            self._explained_at = now
            self._screen.waiting(row, self._client.why(row.id))

    def _catch_up(self) -> None:
        """Draw the events after the last one drawn."""
        for job in self._jobs:
            for event in self._client.events(job, after=self._seen[job]).events:
                self._draw(event)

    def _lines(self, job: JobId) -> Iterator[Item]:
        yield from self._client.follow_logs(job, host=self._host)
        yield None

    def _read(self, source: Iterable[Item]) -> None:
        threading.Thread(target=self._pump, args=(source,), daemon=True).start()

    def _pump(self, source: Iterable[Item]) -> None:
        """Until the end of the stream; the client reconnects when the connection breaks."""
        try:
            for item in source:
                if self.closed:
                    return
                self._items.put(item)
        except FleetError as error:
            self._items.put(error)
        except RuntimeError:  # raised by httpx when the client was closed meanwhile
            if not self.closed:
                raise
