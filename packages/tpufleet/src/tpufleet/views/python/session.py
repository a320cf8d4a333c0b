"""The connection that scripts and notebooks share, made when it is first needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cached_property

from tpufleet.backoff import Backoff
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import FleetError, NotFound
from tpufleet.model.api_types import JobRow
from tpufleet.model.job.jobs import ENDED_STATES, JobId
from tpufleet.views.cli import connection

OnEnd = Callable[[JobRow], None]

_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 0.5, 30.0
_CALLBACK_THREADS = 8  # results are downloaded in them


class EndWatcher:
    """Calls back when jobs end. One stream of events for any number of jobs."""

    def __init__(self, client: FleetClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._waiting: dict[JobId, OnEnd] = {}
        self._thread: threading.Thread | None = None
        self._callbacks: Executor = ThreadPoolExecutor(
            _CALLBACK_THREADS, thread_name_prefix="tpufleet-result"
        )

    def expect(self, job_id: JobId, on_end: OnEnd) -> None:
        """Call it before the job is submitted, so that no end is missed; `check` afterwards where
        the job exists already."""
        with self._lock:
            self._waiting[job_id] = on_end
            if self._thread is None:
                after = self._client.events(limit=1, newest=True).last
                self._thread = threading.Thread(
                    target=self._run, args=(after,), name="tpufleet-events", daemon=True
                )
                self._thread.start()

    def forget(self, job_id: JobId) -> None:
        with self._lock:
            self._waiting.pop(job_id, None)

    def check(self, job_id: JobId) -> None:
        self._take(self._client.job(job_id).row)

    def _run(self, after: int) -> None:
        backoff = Backoff(first=_FIRST_RETRY_SECONDS, longest=_LONGEST_RETRY_SECONDS)
        while True:
            try:
                for item in self._client.stream(after=after):
                    backoff.succeeded()
                    if isinstance(item, JobRow):
                        self._take(item)
                    else:
                        after = item.seq
                return  # the client was closed
            except RuntimeError:  # raised by httpx when the client was closed meanwhile
                return
            except FleetError:  # the server is away; jobs continue without us
                threading.Event().wait(backoff.failed())
                self._check_all()

    def _check_all(self) -> None:
        with self._lock:
            waiting = list(self._waiting)
        for job_id in waiting:
            try:
                self.check(job_id)
            except NotFound:  # not submitted yet
                continue
            except FleetError:  # still away
                return

    def _take(self, row: JobRow) -> None:
        if row.state not in ENDED_STATES:
            return
        with self._lock:
            on_end = self._waiting.pop(row.id, None)
        if on_end is not None:
            self._callbacks.submit(on_end, row)


class Session:
    def __init__(self, client: FleetClient) -> None:
        self.client = client

    @cached_property
    def ends(self) -> EndWatcher:
        return EndWatcher(self.client)


_lock = threading.Lock()
_session: Session | None = None


def session() -> Session:
    """Of the configured server, as for the command line; without one, a server is started on this
    machine."""
    global _session
    with _lock:
        if _session is None:
            _session = Session(connection.connect(start=True))
        return _session


def connect(
    url: str | None = None, token: str | None = None, *, ca_file: str | None = None
) -> FleetClient:
    """Use this server from now on. Without arguments: the one that the command line uses."""
    global _session
    if url is None:
        made = connection.connect(start=True)
    elif token is None:
        made = connection.client_for(connection.settings(), url)
    else:
        made = FleetClient(url, token, ca_file=ca_file)
    made.me()  # a wrong URL or token shows here
    with _lock:
        _session = Session(made)
    return made
