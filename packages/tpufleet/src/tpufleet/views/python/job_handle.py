"""Jobs from Python: submit, wait, read logs and metrics, explain."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from tpufleet.client import snapshots
from tpufleet.client.fleet import FleetClient, new_job, new_job_id
from tpufleet.client.snapshots import Scan
from tpufleet.errors import BadInput, FleetError, Temporary
from tpufleet.model.api_types import JobExplanation, JobRow
from tpufleet.model.events import Event
from tpufleet.model.job import job_file
from tpufleet.model.job.jobs import ENDED_STATES, JobId, JobState
from tpufleet.model.tpu.type_lookup import short_name
from tpufleet.views import text
from tpufleet.views.cli import connection
from tpufleet.views.python import notebook
from tpufleet.views.python.job_fields import JobFields, to_document
from tpufleet.views.python.session import session

if TYPE_CHECKING:
    from IPython.display import DisplayHandle

POLL_SECONDS = 1.0
LOG_LINES_OF_FAILURE = 20


class JobFailed(Exception):
    """A job failed or was cancelled. `job` has its logs and `why()`."""

    def __init__(self, job: Job, message: str) -> None:
        super().__init__(message)
        self.job = job


class Explanation:
    """What `tpu why` prints."""

    def __init__(self, explained: JobExplanation) -> None:
        self.details = explained

    def __repr__(self) -> str:
        return "\n".join(line for line, _ in text.explanation_lines(self.details))


class Job:
    """A job on the server. Every property is read from there when it is used."""

    def __init__(self, client: FleetClient, job_id: JobId) -> None:
        self._client = client
        self.id = job_id
        self._last_row: JobRow | None = None

    @property
    def row(self) -> JobRow:
        """State, progress and so on, as `tpu jobs` lists them."""
        if self._last_row is None or self._last_row.state not in ENDED_STATES:
            self._last_row = self._client.job(self.id).row
        return self._last_row

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def state(self) -> str:
        return str(self.row.state)

    @property
    def done(self) -> bool:
        return self.row.state in ENDED_STATES

    @property
    def spec(self) -> dict[str, Any]:
        """The job file, with defaults left out."""
        return job_file.to_document(self._client.job(self.id).job.spec)

    def wait(self, timeout: float | None = None, *, check: bool = True) -> Job:
        """Until it has ended. Raises JobFailed unless it succeeded or `check` is false, and
        TimeoutError after `timeout` seconds; the job continues then. Ctrl-C leaves it running."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._has_ended():
            left = POLL_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{self.id} is still {self.state} after {timeout:g} s")
            time.sleep(min(POLL_SECONDS, left))
        if check and self.row.state is not JobState.SUCCEEDED:
            raise self.failure()
        return self

    def logs(
        self, *, host: int | None = 0, attempt: int | None = None, tail: int | None = None
    ) -> str:
        """The output so far, of one host (None: of all)."""
        return "".join(self._client.logs(self.id, host=host, attempt=attempt, tail=tail))

    def follow_logs(self, *, host: int | None = 0, tail: int | None = None) -> Iterator[str]:
        """Each line as it is written, until the job has ended."""
        for line in self._client.follow_logs(self.id, host=host, tail=tail):
            yield line.line

    def events(self) -> tuple[Event, ...]:
        events: list[Event] = []
        while page := self._client.events(self.id, after=events[-1].seq if events else 0).events:
            events += page
        return tuple(events)

    def metrics(self) -> Any:
        """What the program reported over time: a pandas DataFrame, or a list of dicts without
        pandas. Long series are thinned."""
        points = [
            {"at": point.at, "step": point.step, **point.values}
            for point in self._client.metrics(self.id).points
        ]
        try:
            import pandas
        except ImportError:
            return points
        return pandas.DataFrame(points)

    def why(self) -> Explanation:
        """Why it waits, what it is doing, or why it ended."""
        return Explanation(self._client.why(self.id))

    def result(self) -> bytes:
        """The file `result` that the program wrote. Raises NotFound when there is none."""
        return self._client.result(self.id)

    def cancel(self) -> None:
        self._client.cancel(self.id)

    def resume(self, **changes: Unpack[JobFields]) -> Job:
        """A new job that continues from the last checkpoint; see `run` for the changes."""
        return Job(self._client, self._client.resume(self.id, _changes(changes)).id)

    def rerun(self, **changes: Unpack[JobFields]) -> Job:
        """A new job with the same code, from the start."""
        return Job(self._client, self._client.rerun(self.id, _changes(changes)).id)

    def failure(self) -> JobFailed:
        row = self.row
        tail = self.logs(tail=LOG_LINES_OF_FAILURE).rstrip()
        output = f"\nlast lines of its log:\n{tail}" if tail else ""
        return JobFailed(
            self, f"job {row.name} ({row.id}) {row.state}: {text.one_line(row.reason)}{output}"
        )

    def __repr__(self) -> str:
        row = self.row
        progress = text.progress(row.progress)
        shown = f", {progress}" if progress != "-" else ""
        slices = f"{row.slices} × {short_name(row.accelerator)}"
        return f"<Job {row.name} {row.id}: {row.state}{shown}, {slices}>"

    def _repr_html_(self) -> str:
        return notebook.job_html(self.row)

    def _ipython_display_(self) -> None:
        """In a notebook the table stays up to date until the job ends."""
        from IPython.display import HTML, display

        row = self.row
        handle: DisplayHandle = display(HTML(notebook.job_html(row)), display_id=True)
        if handle is not None and row.state not in ENDED_STATES:
            notebook.keep_current(lambda: self.row, lambda html: handle.update(HTML(html)))

    def _has_ended(self) -> bool:
        try:
            return self.done
        except FleetError as error:
            if not isinstance(error, Temporary):
                raise
            return False  # the server is away; the job continues


def run(accelerator: str, command: str | Sequence[str], **fields: Unpack[JobFields]) -> Job:
    """Submit a command and return at once.

    A list is an argument vector; text is a script for bash. The other arguments are the fields of a
    job file. The current folder, or `workdir`, is copied to every host.
    """
    client = session().client
    document = to_document(command, accelerator, fields)
    code = scan_workdir(fields)
    (row,) = submit_documents(client, [(new_job_id(), document)], code)
    return Job(client, row.id)


def job(ref: str) -> Job:
    """A job by id, prefix of an id, name, `owner/name` or `@last`."""
    client = session().client
    return Job(client, client.job(ref).row.id)


def jobs(
    *,
    owner: str | None = None,
    state: str | None = None,
    tag: str | None = None,
    name: str | None = None,
    limit: int = 100,
) -> list[Job]:
    """The newest jobs that match. `state`: states separated by commas, `live` or `ended`."""
    client = session().client
    page = client.jobs(owner=owner, state=state, tag=tag, name=name, limit=limit)
    return [Job(client, row.id) for row in page.jobs]


def scan_workdir(fields: Mapping[str, Any]) -> Scan:
    limit = connection.settings().snapshot_limit
    if "workdir" in fields and fields["workdir"] is None:
        with tempfile.TemporaryDirectory() as empty:
            return snapshots.scan(empty, limit)
    return snapshots.scan(Path(fields.get("workdir", ".")).expanduser(), limit)


def submit_documents(
    client: FleetClient, documents: Sequence[tuple[JobId, dict[str, Any]]], code: Scan
) -> tuple[JobRow, ...]:
    """All jobs or none. Invalid fields are reported before anything is sent."""
    new_jobs = [
        new_job(document, job_file.parse_job(document), job_id, code.digest)
        for job_id, document in documents
    ]
    snapshots.upload(client, code)
    return client.submit(new_jobs)


def _changes(fields: JobFields) -> dict[str, Any]:
    if "workdir" in fields:
        raise BadInput("workdir: the code of a job stays the same; submit a new one with run()")
    changes = to_document("", "", fields)
    return {name: value for name, value in changes.items() if name in fields}
