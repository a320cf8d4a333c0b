"""Python functions on slices: `submit` and `map`, with futures like those of concurrent.futures."""

from __future__ import annotations

import concurrent.futures
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar, Unpack, cast

from tpufleet.client.fleet import new_job_id
from tpufleet.client.snapshots import with_files
from tpufleet.errors import BadInput, FleetError, NotFound, invalid
from tpufleet.model.api_types import JobRow
from tpufleet.model.job.jobs import JobId, JobState, default_name
from tpufleet.model.values.names import label_from
from tpufleet.views.python import function_files
from tpufleet.views.python.job_fields import JobFields, to_document
from tpufleet.views.python.job_handle import Job, JobFailed, scan_workdir, submit_documents
from tpufleet.views.python.session import Session, session

R = TypeVar("R")

DEFAULT_ACCELERATOR = "v5e-1"
MAX_CALLS = 10_000  # of one map: they are one snapshot


class RemoteTraceback(Exception):
    """The cause of an exception that was raised on a host: its traceback there."""

    def __init__(self, traceback: str) -> None:
        super().__init__(f"\n{traceback}")


class Future(concurrent.futures.Future[R], Generic[R]):
    """The result of a function on a slice. Works with `concurrent.futures.wait` and
    `as_completed`. `job` is the job that runs it."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job

    def cancel(self) -> bool:
        """Cancel the job. False if it has ended already."""
        if self.done():
            return False
        self.job.cancel()
        return self._cancelled()

    def running(self) -> bool:
        return not self.done() and self.job.state == JobState.RUNNING

    def __repr__(self) -> str:
        state = "done" if self.done() else self.job.state
        return f"<Future of job {self.job.id}: {state}>"

    def settle(self, row: JobRow) -> None:
        """The job has ended."""
        if row.state is JobState.CANCELLED:
            self._cancelled()
            return
        try:
            content = _downloaded(self.job)
        except Exception as error:
            self._end_with(error)
            return
        if row.state is JobState.SUCCEEDED and content is not None and "value" in content:
            try:
                self.set_result(content["value"])
            except concurrent.futures.InvalidStateError:
                return  # cancelled meanwhile
        else:
            self._end_with(_exception_from(self.job, content))

    def _end_with(self, error: BaseException) -> None:
        try:
            self.set_exception(error)
        except concurrent.futures.InvalidStateError:
            return  # cancelled meanwhile

    def _cancelled(self) -> bool:
        if not super().cancel():
            return False
        self.set_running_or_notify_cancel()
        return True


def submit(
    function: Callable[..., R],
    *arguments: Any,
    accelerator: str = DEFAULT_ACCELERATOR,
    **fields: Unpack[JobFields],
) -> Future[R]:
    """Call a function on a slice. Every host of the slice calls it; the result is that of host 0.

    The function, its arguments and the current folder are sent along; the other arguments are the
    fields of a job file. Use functools.partial for keyword arguments of the function.
    """
    (future,) = _submit_calls(function, [arguments], accelerator, fields)
    return future


def submit_all(
    function: Callable[[Any], R],
    items: Iterable[Any],
    *,
    accelerator: str = DEFAULT_ACCELERATOR,
    **fields: Unpack[JobFields],
) -> list[Future[R]]:
    """One job for each item, submitted together; a future for each."""
    return _submit_calls(function, [(item,) for item in items], accelerator, fields)


def map(
    function: Callable[[Any], R],
    items: Iterable[Any],
    *,
    accelerator: str = DEFAULT_ACCELERATOR,
    **fields: Unpack[JobFields],
) -> Iterator[R]:
    """The results in the order of the items; one job for each, submitted at once. Jobs that have
    not ended are cancelled when the iteration ends early."""
    futures = _submit_calls(function, [(item,) for item in items], accelerator, fields)
    return _results(futures)


def attach(job: Job) -> Future[Any]:
    """The future of a function that was submitted earlier, by this user: from another notebook,
    say. Only your own jobs: reading a result runs code that its author chose."""
    current = session()
    me = current.client.me().name
    if job.row.owner != me:
        raise BadInput(
            f"{job.id} belongs to {job.row.owner}; only results of your own jobs can be read as "
            "Python objects"
        )
    future: Future[Any] = Future(job)
    current.ends.expect(job.id, future.settle)
    current.ends.check(job.id)
    return future


def _submit_calls(
    function: Callable[..., R],
    calls: list[tuple[Any, ...]],
    accelerator: str,
    fields: JobFields,
) -> list[Future[R]]:
    if not callable(function):
        raise invalid(function, "a function", "train; for a command, use run()")
    if len(calls) > MAX_CALLS:
        raise BadInput(f"{len(calls):,} items, more than {MAX_CALLS:,}: submit them in parts")
    if not calls:
        return []
    current = session()
    # Only the first result of a job is kept, so an error may be it only if nothing follows.
    retried = fields.get("retries", {}).get("failure", 0) > 0
    folder = scan_workdir(fields)
    files = function_files.pack_calls(
        function,
        calls,
        sent={entry.path for entry in folder.entries},
        return_errors=not retried,
    )
    code = with_files(folder, files)
    documents = []
    for number in range(len(calls)):
        job_id = new_job_id()
        document = to_document(["python", function_files.RUNNER, str(number)], accelerator, fields)
        document.setdefault("name", _name(function, job_id))
        documents.append((job_id, document))
    futures: list[Future[R]] = [Future(Job(current.client, job_id)) for job_id, _ in documents]
    for future in futures:
        current.ends.expect(future.job.id, future.settle)
    try:
        submit_documents(current.client, documents, code)
    except BaseException:
        _forget(current, futures)
        raise
    return futures


def _name(function: Callable[..., Any], job_id: JobId) -> str:
    return default_name(label_from(getattr(function, "__name__", "")) or "function", job_id)


def _forget(current: Session, futures: list[Future[R]]) -> None:
    for future in futures:
        current.ends.forget(future.job.id)


def _results(futures: list[Future[R]]) -> Iterator[R]:
    try:
        for future in futures:
            yield future.result()
    finally:
        for future in futures:
            if not future.done():
                future.cancel()


def _downloaded(job: Job) -> dict[str, Any] | None:
    try:
        data = job.result()
    except NotFound:
        return None
    return cast(dict[str, Any], pickle.loads(data))


def _exception_from(job: Job, content: dict[str, Any] | None) -> BaseException:
    if content is None or "traceback" not in content:
        try:
            return job.failure()
        except FleetError as unreachable:
            return JobFailed(job, f"job {job.id} did not return a result: {unreachable}")
    error: BaseException | None = content.get("error")
    if error is None:
        return JobFailed(job, f"job {job.id} raised an exception:\n{content['traceback']}")
    error.__cause__ = RemoteTraceback(content["traceback"])
    return error
