"""The control plane as its users see it: one method for each route. Safe in several threads."""

from __future__ import annotations

import secrets as randomness
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from tpufleet.client import sse, streams
from tpufleet.client.people import People
from tpufleet.client.routes import path_segment
from tpufleet.client.transport import Transport
from tpufleet.errors import NotFound
from tpufleet.model.api_types import (
    CleanReport,
    CleanRequest,
    CurrentUser,
    EventPage,
    FaultRequest,
    JobDetail,
    JobExplanation,
    JobPage,
    JobRow,
    LogLine,
    NewJob,
    PoolPage,
    ResubmitRequest,
    SlicePage,
    SliceRow,
    SubmitRequest,
)
from tpufleet.model.costs import CostReport, StockReport
from tpufleet.model.encoding import from_json
from tpufleet.model.events import Event
from tpufleet.model.host_commands import HostCommandReport, HostCommandRequest
from tpufleet.model.jobs import JobId
from tpufleet.model.pools import Pool

_LETTERS = "abcdefghijklmnopqrstuvwxyz234567"
_BULK_SECONDS = 120.0  # a large submit or upload may take a while


def new_job_id() -> JobId:
    """60 random bits: no two alike, and a short prefix is enough to name one."""
    return JobId("".join(randomness.choice(_LETTERS) for _ in range(12)))


class FleetClient(People):
    def __init__(
        self,
        url: str,
        token: str,
        *,
        reconnect_timeout: float = 300.0,  # how long a stream waits for a server that went away
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(Transport(url, token))
        self._patience = reconnect_timeout
        self._sleep = sleep

    @property
    def url(self) -> str:
        return self._transport.url

    def close(self) -> None:
        """Streams that are being read end."""
        self._transport.close()

    def __enter__(self) -> FleetClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def me(self) -> CurrentUser:
        return self._get("/me", CurrentUser)

    # Jobs.

    def submit(self, jobs: Sequence[NewJob]) -> tuple[JobRow, ...]:
        """All or nothing. Sending the same jobs again changes nothing."""
        return self._transport.call(
            "POST", "/jobs", JobPage, body=SubmitRequest(jobs=tuple(jobs)), timeout=_BULK_SECONDS
        ).jobs

    def jobs(
        self,
        *,
        owner: str | None = None,
        state: str | None = None,
        pool: str | None = None,
        tag: str | None = None,
        name: str | None = None,
        parent: str | None = None,
        cleaned: bool = False,
        limit: int | None = None,
        before: str | None = None,
    ) -> JobPage:
        """One page, newest first. `state` may be several with commas, `live` or `ended`."""
        return self._get(
            "/jobs",
            JobPage,
            owner=owner,
            state=state,
            pool=pool,
            tag=tag,
            name=name,
            parent=parent,
            cleaned="true" if cleaned else None,
            limit=limit,
            before=before,
        )

    def all_jobs(self, *, limit: int = 1000, **filters: Any) -> Iterator[JobRow]:
        page = self.jobs(limit=limit, **filters)
        yield from page.jobs
        while page.next is not None:
            page = self.jobs(limit=limit, before=page.next, **filters)
            yield from page.jobs

    def job(self, ref: str) -> JobDetail:
        return self._get(f"/jobs/{path_segment(ref)}", JobDetail)

    def why(self, ref: str) -> JobExplanation:
        return self._get(f"/jobs/{path_segment(ref)}/why", JobExplanation)

    def cancel(self, ref: str) -> JobRow:
        return self._transport.call("POST", f"/jobs/{path_segment(ref)}/cancel", JobRow)

    def resume(
        self, ref: str, changes: Mapping[str, Any] | None = None, *, job_id: JobId | None = None
    ) -> JobRow:
        return self._again(ref, "resume", changes, job_id)

    def rerun(
        self, ref: str, changes: Mapping[str, Any] | None = None, *, job_id: JobId | None = None
    ) -> JobRow:
        return self._again(ref, "rerun", changes, job_id)

    def events(
        self, ref: str | None = None, *, after: int = 0, limit: int = 500, newest: bool = False
    ) -> EventPage:
        """Of one job, or of everything; `newest` for the last ones."""
        path = "/events" if ref is None else f"/jobs/{path_segment(ref)}/events"
        return self._get(path, EventPage, after=after, limit=limit, newest="1" if newest else None)

    # Streams.

    def stream(
        self, job: str | None = None, *, after: int | None = None
    ) -> Iterator[Event | JobRow]:
        """Events, and the rows of jobs that changed, for ever. A server that comes back goes on
        where it left off."""
        params = {"job": job, "after": after}
        for message in self._listen("/stream", params, None):
            if message.kind == "event":
                yield from_json(message.data, Event)
            elif message.kind == "job":
                yield from_json(message.data, JobRow)

    def follow_logs(
        self,
        ref: str,
        *,
        host: int | None = None,
        attempt: int | None = None,
        tail: int | None = None,
    ) -> Iterator[LogLine]:
        """Every line once, until the job has ended and all was told."""
        params = {"host": host, "attempt": attempt, "tail": tail}
        for message in self._listen(f"/jobs/{path_segment(ref)}/logs/stream", params, "end"):
            if message.kind == "line":
                yield from_json(message.data, LogLine)

    def logs(
        self,
        ref: str,
        *,
        host: int | None = None,
        attempt: int | None = None,
        tail: int | None = None,
    ) -> Iterator[str]:
        """Text as it is now, in pieces of any size."""
        params = {"host": host, "attempt": attempt, "tail": tail}
        with self._transport.stream(f"/jobs/{path_segment(ref)}/logs", params=params) as response:
            yield from response.iter_text()

    def result(self, ref: str) -> bytes:
        """What the job handed over. NotFound when it has not, or not yet."""
        path = f"/jobs/{path_segment(ref)}/result"
        return self._transport.send("GET", path, timeout=_BULK_SECONDS).content

    def delete_job_files(self, ref: str) -> None:
        """The result and the code of a job that has ended. It cannot be run again after that."""
        self._transport.call("DELETE", f"/jobs/{path_segment(ref)}/files")

    def clean(self, order: CleanRequest) -> CleanReport:
        """Clean away jobs that have ended, or tell which ones it would be."""
        return self._transport.call(
            "POST", "/clean", CleanReport, body=order, timeout=_BULK_SECONDS
        )

    # Slices and pools.

    def slices(
        self, *, pool: str | None = None, job: str | None = None, include_released: bool = False
    ) -> tuple[SliceRow, ...]:
        page = self._get(
            "/slices", SlicePage, pool=pool, job=job, all="1" if include_released else None
        )
        return page.slices

    def send_host_command(self, slice_id: str, order: HostCommandRequest) -> None:
        self._transport.call("POST", f"/slices/{path_segment(slice_id)}/errands", body=order)

    def host_command(self, slice_id: str, errand_id: str) -> HostCommandReport:
        return self._get(
            f"/slices/{path_segment(slice_id)}/errands/{path_segment(errand_id)}", HostCommandReport
        )

    def costs(self) -> CostReport:
        return self._get("/costs", CostReport)

    def stock(self) -> StockReport:
        return self._get("/stock", StockReport)

    def inject_fault(self, slice_id: str, fault: str, host: int | None = None) -> None:
        body = FaultRequest(fault=fault, host=host)
        self._transport.call("POST", f"/slices/{path_segment(slice_id)}/fault", body=body)

    def pools(self) -> tuple[Pool, ...]:
        return self._get("/pools", PoolPage).pools

    def pool(self, name: str) -> Pool:
        return self._get(f"/pools/{path_segment(name)}", Pool)

    def put_pool(self, pool: Pool) -> Pool:
        return self._transport.call("PUT", f"/pools/{path_segment(pool.name)}", Pool, body=pool)

    def delete_pool(self, name: str) -> None:
        self._transport.call("DELETE", f"/pools/{path_segment(name)}")

    # Snapshots.

    def has_snapshot(self, digest: str) -> bool:
        try:
            self._transport.send("HEAD", f"/snapshots/{path_segment(digest)}")
        except NotFound:
            return False
        return True

    def put_snapshot(self, digest: str, packed: BinaryIO | bytes) -> None:
        self._transport.call(
            "PUT", f"/snapshots/{path_segment(digest)}", content=packed, timeout=_BULK_SECONDS
        )

    def openapi(self) -> dict[str, Any]:
        return self._get("/openapi.json", dict)

    def _again(
        self, ref: str, verb: str, changes: Mapping[str, Any] | None, job_id: JobId | None
    ) -> JobRow:
        body = ResubmitRequest(id=job_id or new_job_id(), changes=dict(changes or {}))
        return self._transport.call("POST", f"/jobs/{path_segment(ref)}/{verb}", JobRow, body=body)

    def _listen(
        self, path: str, params: Mapping[str, Any], last: str | None
    ) -> Iterator[sse.ServerSentEvent]:
        return streams.messages(
            self._transport, path, params, last, patience=self._patience, sleep=self._sleep
        )
