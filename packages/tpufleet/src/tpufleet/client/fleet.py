"""Client of the server's HTTP API: one method per route. Thread-safe."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote

from tpufleet.client import event_stream
from tpufleet.client.event_stream import ServerSentEvent
from tpufleet.client.transport import CALL_SECONDS, Transport
from tpufleet.errors import NotFound, Unreachable
from tpufleet.model import api_types as api
from tpufleet.model.events import Event
from tpufleet.model.fleet.host_commands import HostCommandReport, HostCommandRequest
from tpufleet.model.fleet.inventory import Inventory, InventoryChange, InventoryNote
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.fleet.reservations import Reservation
from tpufleet.model.fleet.server_status import ServerStatus
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.jobs import (
    ID_LENGTH,
    ID_LETTERS,
    JobId,
    JobSpec,
    default_name,
    is_generated_id,
)
from tpufleet.model.people.audit import AuditEntry
from tpufleet.model.people.budgets import BudgetReport
from tpufleet.model.people.costs import CostReport, StockReport
from tpufleet.model.people.notifications import Delivery, NotificationChannel
from tpufleet.model.people.preferences import PreferenceChanges, Preferences
from tpufleet.model.people.users import Role, TokenScope, User
from tpufleet.model.values.encoding import from_json

T = TypeVar("T")

_BULK_SECONDS = 120.0  # for large submissions, uploads and downloads


def new_job_id() -> JobId:
    """60 random bits: unique, and a short prefix is enough to refer to it."""
    while True:
        text = "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))
        if is_generated_id(text):  # not letters alone, which may be a word
            return JobId(text)


def new_job(
    document: Mapping[str, Any], spec: JobSpec, job_id: JobId, snapshot: str | None
) -> api.NewJob:
    """A job to submit, from a job file and what it was parsed to. Without a name that the user
    chose, it gets one that is unique."""
    name = document.get("name") or default_name(spec.name, job_id)
    return api.NewJob(id=job_id, spec={**document, "name": name}, snapshot=snapshot)


class FleetClient:
    def __init__(
        self,
        url: str,
        token: str,
        *,
        reconnect_timeout: float = 300.0,  # seconds that a stream tries to reconnect
        sleep: Callable[[float], None] = time.sleep,
        ca_file: str | PathLike[str] | None = None,  # CAs to trust besides the system's
        certificate: Path | None = None,  # of a server on this machine; the only one to trust
        timeout: float = CALL_SECONDS,
        # Called when a stream is interrupted, which then tries to reconnect.
        interrupted: Callable[[Unreachable], None] = lambda _: None,
    ) -> None:
        self._transport = Transport(
            url, token, timeout=timeout, ca_file=ca_file, certificate=certificate
        )
        self._call = self._transport.call
        self._reconnect_timeout = reconnect_timeout
        self._sleep = sleep
        self._interrupted = interrupted

    @property
    def url(self) -> str:
        return self._transport.url

    def close(self) -> None:
        """Also ends streams that are being read."""
        self._transport.close()

    def __enter__(self) -> FleetClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def me(self) -> api.CurrentUser:
        return self._get("/me", api.CurrentUser)

    def login_link(self) -> api.LoginLink:
        """A path of the web page that logs a browser in as the caller."""
        return self._call("POST", "/session/link", api.LoginLink)

    # Jobs

    def submit(self, jobs: Sequence[api.NewJob]) -> tuple[api.JobRow, ...]:
        """Submit all jobs or none. Idempotent: the ids are in the request."""
        return self._call(
            "POST",
            "/jobs",
            api.JobPage,
            body=api.SubmitRequest(jobs=tuple(jobs)),
            timeout=_BULK_SECONDS,
        ).jobs

    def check_jobs(self, jobs: Sequence[api.NewJob]) -> tuple[api.JobRow, ...]:
        """What `submit` would submit. Nothing is changed."""
        body = api.SubmitRequest(jobs=tuple(jobs))
        return self._call("POST", "/jobs/check", api.JobPage, body=body, timeout=_BULK_SECONDS).jobs

    def jobs(
        self,
        *,
        owner: str | None = None,
        state: str | None = None,
        pool: str | None = None,
        tag: str | None = None,
        name: str | None = None,
        parent: str | None = None,
        archived: bool = False,
        query: str | None = None,
        limit: int | None = None,
        before: str | None = None,
    ) -> api.JobPage:
        """One page, newest first. `state`: states separated by commas, `live` or `ended`; `query`:
        see `model.job_search`."""
        return self._get(
            "/jobs",
            api.JobPage,
            owner=owner,
            state=state,
            pool=pool,
            tag=tag,
            name=name,
            parent=parent,
            archived="true" if archived else None,
            q=query,
            limit=limit,
            before=before,
        )

    def all_jobs(self, *, limit: int = 1000, **filters: Any) -> Iterator[api.JobRow]:
        page = self.jobs(limit=limit, **filters)
        yield from page.jobs
        while page.next is not None:
            page = self.jobs(limit=limit, before=page.next, **filters)
            yield from page.jobs

    def job(self, ref: str) -> api.JobDetail:
        return self._get(f"/jobs/{job_segment(ref)}", api.JobDetail)

    def why(self, ref: str) -> api.JobExplanation:
        return self._get(f"/jobs/{job_segment(ref)}/why", api.JobExplanation)

    def change_job(self, ref: str, changes: api.JobChanges) -> api.JobRow:
        """Change name, tags, notes or priority."""
        return self._call("PATCH", f"/jobs/{job_segment(ref)}", api.JobRow, body=changes)

    def metrics(self, ref: str) -> api.MetricSeries:
        return self._get(f"/jobs/{job_segment(ref)}/metrics", api.MetricSeries)

    def compare(self, refs: Sequence[str]) -> api.Comparison:
        return self._get("/compare", api.Comparison, jobs=",".join(refs))

    def cancel(self, ref: str) -> api.JobRow:
        return self._call("POST", f"/jobs/{job_segment(ref)}/cancel", api.JobRow)

    def resume(
        self,
        ref: str,
        changes: Mapping[str, Any] | None = None,
        *,
        job_id: JobId | None = None,
        snapshot: str | None = None,
    ) -> api.JobRow:
        """A new job from the last checkpoint; `snapshot` is the digest of new code."""
        return self._resubmit(ref, "resume", changes, job_id, snapshot)

    def rerun(
        self,
        ref: str,
        changes: Mapping[str, Any] | None = None,
        *,
        job_id: JobId | None = None,
        snapshot: str | None = None,
    ) -> api.JobRow:
        return self._resubmit(ref, "rerun", changes, job_id, snapshot)

    def events(
        self,
        ref: str | None = None,
        *,
        slice_id: str | None = None,
        pool: str | None = None,
        user: str | None = None,
        reservation: str | None = None,
        after: int = 0,
        limit: int = 500,
        newest: bool = False,
    ) -> api.EventPage:
        """Events of one job, slice, pool or reservation, caused by one user, or of the whole fleet;
        with `newest`, the last ones."""
        path = "/events" if ref is None else f"/jobs/{job_segment(ref)}/events"
        of = {"slice": slice_id, "pool": pool, "user": user, "reservation": reservation}
        page = {"after": after, "limit": limit, "newest": "1" if newest else None}
        return self._get(path, api.EventPage, **of, **page)

    # Streams

    def stream(
        self, job: str | None = None, *, after: int | None = None
    ) -> Iterator[Event | api.JobRow]:
        """Events, and the rows of changed jobs, without end. Reconnects after the last event."""
        params = {"job": job, "after": after}
        for message in self._listen("/stream", params, None):
            if message.event == "event":
                yield from_json(message.data, Event)
            elif message.event == "job":
                yield from_json(message.data, api.JobRow)

    def follow_logs(
        self,
        ref: str,
        *,
        host: int | None = None,
        attempt: int | None = None,
        tail: int | None = None,
    ) -> Iterator[api.LogLine]:
        """Every line once, until the job has ended and its logs are complete."""
        params = {"host": host, "attempt": attempt, "tail": tail}
        for message in self._listen(f"/jobs/{job_segment(ref)}/logs/stream", params, "end"):
            if message.event == "line":
                yield from_json(message.data, api.LogLine)

    def logs(
        self,
        ref: str,
        *,
        host: int | None = None,
        attempt: int | None = None,
        tail: int | None = None,
    ) -> Iterator[str]:
        """The log so far, in chunks of any size."""
        params = {"host": host, "attempt": attempt, "tail": tail}
        with self._transport.stream(f"/jobs/{job_segment(ref)}/logs", params=params) as response:
            yield from response.iter_text()

    def result(self, ref: str) -> bytes:
        """The result file of the job. Raises NotFound when there is none, or none yet."""
        path = f"/jobs/{job_segment(ref)}/result"
        return self._transport.send("GET", path, timeout=_BULK_SECONDS).content

    def create_link(self, ref: str, resource: str, expires_in: timedelta) -> api.SignedLink:
        """A link to the `logs` or the `result` of a job that works without a token."""
        body = api.NewLink(resource=resource, expires_in=expires_in)
        return self._call("POST", f"/jobs/{job_segment(ref)}/links", api.SignedLink, body=body)

    def archive(self, refs: Sequence[str]) -> tuple[api.JobRow, ...]:
        """Leave ended jobs out of listings."""
        body = api.JobSelection(jobs=tuple(refs))
        return self._call("POST", "/archive", api.JobPage, body=body).jobs

    def unarchive(self, refs: Sequence[str]) -> tuple[api.JobRow, ...]:
        body = api.JobSelection(jobs=tuple(refs))
        return self._call("POST", "/unarchive", api.JobPage, body=body).jobs

    def purge(self, request: api.PurgeRequest) -> api.PurgeReport:
        """Delete the files of ended jobs, or list which ones (dry run)."""
        return self._call("POST", "/purge", api.PurgeReport, body=request, timeout=_BULK_SECONDS)

    # The queue

    def queue(
        self,
        *,
        pool: str | None = None,
        owner: str | None = None,
    ) -> tuple[api.QueueEntry, ...]:
        page = self._get("/queue", api.QueuePage, pool=pool, owner=owner)
        return page.entries

    def move_in_queue(
        self, ref: str, *, first: bool = False, last: bool = False, before: str | None = None
    ) -> api.JobRow:
        body = api.QueueMove(first=first, last=last, before=before)
        return self._call("POST", f"/queue/{job_segment(ref)}/move", api.JobRow, body=body)

    def hold_in_queue(self, ref: str) -> api.JobRow:
        return self._call("POST", f"/queue/{job_segment(ref)}/hold", api.JobRow)

    def retry_in_queue(self, ref: str) -> api.JobRow:
        return self._call("POST", f"/queue/{job_segment(ref)}/retry", api.JobRow)

    def release_in_queue(self, ref: str) -> api.JobRow:
        return self._call("POST", f"/queue/{job_segment(ref)}/release", api.JobRow)

    # Reservations

    def reservations(self, *, ended: bool = False) -> tuple[Reservation, ...]:
        return self._get(
            "/reservations", api.ReservationPage, all=1 if ended else None
        ).reservations

    def reserve(self, new: api.NewReservation) -> Reservation:
        return self._call("POST", "/reservations", Reservation, body=new)

    def extend_reservation(self, reservation_id: str, by: timedelta) -> Reservation:
        path = f"/reservations/{path_segment(reservation_id)}"
        return self._call("PATCH", path, Reservation, body=api.ReservationExtension(extend_by=by))

    def end_reservation(self, reservation_id: str, reason: str = "") -> Reservation:
        """Release one's own; an admin breaks that of another user, with a reason."""
        path = f"/reservations/{path_segment(reservation_id)}"
        params = {"reason": reason or None}
        return self._call("DELETE", path, Reservation, params=params)

    def release_held_slice(self, slice_id: str) -> None:
        self._call("POST", f"/slices/{path_segment(slice_id)}/release")

    # The inventory

    def inventory(self) -> Inventory:
        return self._get("/inventory", Inventory)

    def annotate(self, name: str, change: InventoryChange) -> InventoryNote:
        """Change alias, note or belongs-to of a slice or a pool."""
        return self._call("PATCH", f"/inventory/{path_segment(name)}", InventoryNote, body=change)

    # Preferences

    def preferences(self, user: str | None = None) -> Preferences:
        return self._get("/preferences", Preferences, user=user)

    def change_preferences(
        self, changes: PreferenceChanges, user: str | None = None
    ) -> Preferences:
        return self._call("PATCH", "/preferences", Preferences, body=changes, params={"user": user})

    # Notifications

    def channels(self) -> tuple[NotificationChannel, ...]:
        return self._get("/notifications", api.ChannelPage).channels

    def put_channel(self, name: str, new: api.NewChannel) -> api.CreatedChannel:
        return self._call(
            "PUT", f"/notifications/{path_segment(name)}", api.CreatedChannel, body=new
        )

    def delete_channel(self, name: str) -> NotificationChannel:
        return self._call("DELETE", f"/notifications/{path_segment(name)}", NotificationChannel)

    def test_channel(self, name: str) -> Delivery:
        """Queue a message, and return how it stands."""
        return self._call("POST", f"/notifications/{path_segment(name)}/test", Delivery)

    def deliveries(self) -> tuple[Delivery, ...]:
        """What was sent to your channels lately, newest first."""
        return self._get("/deliveries", api.DeliveryPage).deliveries

    # Users, tokens and secrets

    def users(self) -> tuple[User, ...]:
        return self._get("/users", api.UserPage).users

    def put_user(
        self, name: str, role: Role, *, service: bool | None = None, take_over: bool = False
    ) -> User:
        body = api.NewUser(name=name, role=role, service=service, take_over=take_over)
        return self._call("POST", "/users", User, body=body)

    def delete_user(self, name: str) -> api.DeletedUser:
        return self._call("DELETE", f"/users/{path_segment(name)}", api.DeletedUser)

    def tokens(self, user: str | None = None) -> tuple[api.TokenRow, ...]:
        return self._get("/tokens", api.TokenPage, user=user).tokens

    def job_cost(self, ref: str) -> CostReport:
        return self._get(f"/jobs/{job_segment(ref)}/cost", CostReport)

    def create_token(
        self,
        user: str | None = None,
        note: str = "",
        expires_in: timedelta | None = None,
        scope: TokenScope = TokenScope.FULL,
    ) -> api.CreatedToken:
        body = api.NewToken(user=user, note=note, expires_in=expires_in, scope=scope)
        return self._call("POST", "/tokens", api.CreatedToken, body=body)

    def rotate_token(self, token_id: str, overlap: timedelta) -> api.CreatedToken:
        path = f"/tokens/{path_segment(token_id)}/rotate"
        return self._call("POST", path, api.CreatedToken, body=api.TokenRotation(overlap=overlap))

    def audit(
        self,
        *,
        user: str | None = None,
        token: str | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> tuple[AuditEntry, ...]:
        """The audit log, newest first; or the entries of one token."""
        path = "/audit" if token is None else f"/tokens/{path_segment(token)}/audit"
        return self._get(path, api.AuditPage, user=user, before=before, limit=limit).entries

    def revoke_token(self, token_id: str) -> api.RevokedTokens:
        return self._call("DELETE", f"/tokens/{path_segment(token_id)}", api.RevokedTokens)

    def revoke_tokens(self, user: str) -> api.RevokedTokens:
        """All of a user but the one in use."""
        return self._call("DELETE", "/tokens", api.RevokedTokens, params={"user": user})

    def secrets(self) -> api.SecretNames:
        return self._get("/secrets", api.SecretNames)

    def put_secret(self, name: str, value: str, *, shared: bool = False) -> None:
        body = api.SecretValue(value=value, shared=shared)
        self._call("PUT", f"/secrets/{path_segment(name)}", body=body)

    def delete_secret(self, name: str, *, shared: bool = False) -> None:
        params = {"shared": "true"} if shared else {}
        self._call("DELETE", f"/secrets/{path_segment(name)}", params=params)

    # Slices and pools

    def slices(
        self, *, pool: str | None = None, job: str | None = None, include_released: bool = False
    ) -> tuple[api.SliceRow, ...]:
        gone = 1 if include_released else None
        return self._get("/slices", api.SlicePage, pool=pool, job=job, all=gone).slices

    def find_slice(self, slice_id: str) -> api.SliceRow | None:
        """Also if it is gone."""
        return next(iter(self._get("/slices", api.SlicePage, id=slice_id).slices), None)

    def adopt(self, node: str, zone: str, pool: str) -> SliceId:
        """Make a node that a person made a slice of a pool. The server prepares it; the startup
        script in its metadata then has to run on its hosts."""
        body = api.AdoptRequest(node=node, zone=zone, pool=pool)
        return self._call("POST", "/slices", api.AdoptedNode, body=body).slice_id

    def unregister(self, slice_id: str) -> None:
        """Give an adopted node back. It is not deleted."""
        self._call("DELETE", f"/slices/{path_segment(slice_id)}")

    def send_host_command(self, slice_id: str, request: HostCommandRequest) -> None:
        self._call("POST", f"/slices/{path_segment(slice_id)}/commands", body=request)

    def host_command(self, slice_id: str, command_id: str) -> HostCommandReport:
        return self._get(
            f"/slices/{path_segment(slice_id)}/commands/{path_segment(command_id)}",
            HostCommandReport,
        )

    def host_command_file(self, slice_id: str, command_id: str, host: int) -> bytes:
        """What a host sent with its result: the archive of a profile."""
        path = f"/slices/{path_segment(slice_id)}/commands/{path_segment(command_id)}/file"
        params = {"host": host}
        return self._transport.send("GET", path, params=params, timeout=_BULK_SECONDS).content

    def costs(self, since: datetime | None = None) -> CostReport:
        """Of all jobs since then; without it of everything, earlier months summed by owner."""
        return self._get("/costs", CostReport, since=since.isoformat() if since else None)

    def budgets(self) -> BudgetReport:
        return self._get("/budgets", BudgetReport)

    def status(self) -> ServerStatus:
        return self._get("/status", ServerStatus)

    def stock(self) -> StockReport:
        return self._get("/stock", StockReport)

    def inject_fault(self, slice_id: str, fault: str, host: int | None = None) -> None:
        body = api.FaultRequest(fault=fault, host=host)
        self._call("POST", f"/slices/{path_segment(slice_id)}/fault", body=body)

    def pools(self) -> tuple[Pool, ...]:
        return self._get("/pools", api.PoolPage).pools

    def pool(self, name: str) -> Pool:
        return self._get(f"/pools/{path_segment(name)}", Pool)

    def put_pool(self, pool: Pool) -> Pool:
        return self._call("PUT", f"/pools/{path_segment(pool.name)}", Pool, body=pool)

    def delete_pool(self, name: str) -> None:
        self._call("DELETE", f"/pools/{path_segment(name)}")

    # Snapshots

    def has_snapshot(self, digest: str) -> bool:
        try:
            self._transport.send("HEAD", f"/snapshots/{path_segment(digest)}")
        except NotFound:
            return False
        return True

    def put_snapshot(self, digest: str, packed: BinaryIO | bytes) -> None:
        self._call(
            "PUT", f"/snapshots/{path_segment(digest)}", content=packed, timeout=_BULK_SECONDS
        )

    def openapi(self) -> dict[str, Any]:
        return self._get("/openapi.json", dict)

    def _resubmit(
        self,
        ref: str,
        verb: str,
        changes: Mapping[str, Any] | None,
        job_id: JobId | None,
        snapshot: str | None,
    ) -> api.JobRow:
        body = api.ResubmitRequest(
            id=job_id or new_job_id(), changes=dict(changes or {}), snapshot=snapshot
        )
        return self._call("POST", f"/jobs/{job_segment(ref)}/{verb}", api.JobRow, body=body)

    def _get(self, path: str, answer: type[T], **params: Any) -> T:
        return self._call("GET", path, answer, params=params)

    def _listen(
        self, path: str, params: Mapping[str, Any], last: str | None
    ) -> Iterator[ServerSentEvent]:
        return event_stream.follow(
            self._transport,
            path,
            params,
            last,
            reconnect_timeout=self._reconnect_timeout,
            sleep=self._sleep,
            interrupted=self._interrupted,
        )


def path_segment(text: str) -> str:
    """Quote one segment of a path. An empty one becomes a name that matches nothing."""
    return quote(text, safe="") or "%20"


def job_segment(ref: str) -> str:
    """A reference to a job as a segment of a path, where `OWNER/NAME` is written `OWNER:NAME`."""
    return path_segment(ref.replace("/", ":", 1))
