"""Host commands on their way to agents, and their results.

They are kept in the store, because the agent and the person who waits may be connected to different
servers. Every server refreshes its view once a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from threading import Lock

from tpufleet.clocks import Clock
from tpufleet.errors import Conflict, NotFound, must_be
from tpufleet.model.fleet.host_commands import (
    FILE_CHUNK_BYTES,
    HEARTBEAT_ALLOWANCE,
    MAX_FILE_BYTES,
    HostCommand,
    HostCommandReport,
    HostCommandRequest,
    HostCommandResult,
    SentHostCommand,
)
from tpufleet.model.fleet.hosts import HostId, slice_id_of
from tpufleet.model.fleet.slices import SliceId, SliceState, TpuSlice
from tpufleet.model.identifiers import check_range
from tpufleet.model.job.jobs import JobId
from tpufleet.service.operations.background import log_failure
from tpufleet.service.transport.limits import HEARTBEATS, TooManyRequests
from tpufleet.stores.base import Store

logger = logging.getLogger(__name__)

# How long results can be read after the command's own timeout.
RETENTION = timedelta(minutes=10)
# Per host and not per slice, because a profile of all hosts is one command for each.
MAX_PENDING_PER_HOST = 20
REFRESH_SECONDS = 1.0
# Of commands that need no more results, the newest are kept: all are read every second.
MAX_KEPT_PER_HOST = 50


class HostCommandQueue:
    def __init__(self, store: Store) -> None:
        self._store = store
        # Replaced, never modified: heartbeats read it from another thread.
        self._pending: Mapping[HostId, tuple[HostCommand, ...]] = {}
        # A burst of requests must not pass the limit together.
        self._send_lock = Lock()

    def send(
        self,
        request: HostCommandRequest,
        slice_id: SliceId,
        hosts: tuple[HostId, ...],
        now: datetime,
        job_id: JobId | None = None,
    ) -> None:
        """With `job_id`, it is withdrawn as soon as another job, or none, holds the slice."""
        command = HostCommand(
            id=request.id,
            kind=request.kind,
            command=request.command,
            timeout=request.timeout,
            duration=request.duration,
        )
        sent = SentHostCommand(
            host_command=command, slice_id=slice_id, hosts=hosts, sent_at=now, job_id=job_id
        )
        with self._send_lock:
            self._check_limit(sent, now)
            known = self._store.put_host_command(sent)
        if (known.host_command, known.slice_id, known.hosts) != (command, slice_id, hosts):
            raise Conflict(f"host command id {request.id} is already in use")
        self.refresh(now)

    def _check_limit(self, new: SentHostCommand, now: datetime) -> None:
        if self._store.host_command(new.host_command.id) is not None:
            return  # a resend
        same_slice = [each for each in self._store.host_commands() if each.slice_id == new.slice_id]
        pending = self._pending_by_host(same_slice, self._slices_of(same_slice), now)
        for host in new.hosts:
            if len(pending.get(host, ())) >= MAX_PENDING_PER_HOST:
                raise TooManyRequests(
                    f"host {host} has {MAX_PENDING_PER_HOST} host commands without a result; "
                    "wait until some of them have ended or timed out"
                )

    def pending_for(self, host: HostId) -> tuple[HostCommand, ...]:
        """Commands without a result from this host, as of the last refresh."""
        return self._pending.get(host, ())

    def record_result(self, command_id: str, result: HostCommandResult, now: datetime) -> None:
        self._require(command_id, slice_id_of(result.host_id), result.host_id)
        self._store.put_host_command_result(command_id, result)
        self.refresh(now)

    def append_file(
        self, command_id: str, host: HostId, offset: int, data: bytes, now: datetime
    ) -> None:
        """A part of the file that the host sends with its result. Sending it again is no error."""
        self._require(command_id, slice_id_of(host), host)
        check_range("offset", offset, 0, MAX_FILE_BYTES - len(data))
        if offset % FILE_CHUNK_BYTES:  # parts that overlap would be kept beside each other
            raise must_be(f"a multiple of {FILE_CHUNK_BYTES}", offset, "offset")
        self._store.put_object(f"{_files(command_id, host)}{offset:012d}", data, now)

    def read_file(self, command_id: str, slice_id: str, host: HostId) -> Iterator[bytes]:
        self._require(command_id, slice_id)
        parts = self._store.objects(_files(command_id, host))
        if not parts:
            raise NotFound(f"host {host} sent no file with the result of this command")
        return (self._store.read_objects([part.name])[part.name] for part in parts)

    def report(self, command_id: str, slice_id: str, now: datetime) -> HostCommandReport:
        sent = self._require(command_id, slice_id)
        results = self._store.host_command_results([command_id]).get(command_id, [])
        by_host = {result.host_id: result for result in results}
        ordered = tuple(by_host[host] for host in sent.hosts if host in by_host)
        return HostCommandReport(id=command_id, hosts=sent.hosts, results=ordered, now=now)

    def _require(
        self, command_id: str, slice_id: str, host: HostId | None = None
    ) -> SentHostCommand:
        sent = self._store.host_command(command_id)
        known = sent is not None and sent.slice_id == slice_id
        if sent is None or not known or (host is not None and host not in sent.hosts):
            raise NotFound(
                f"slice {slice_id} has no host command {command_id!r}; results are kept for "
                f"{RETENTION // timedelta(minutes=1)} minutes"
            )
        return sent

    def refresh(self, now: datetime) -> None:
        """Reload what is pending from the store, and delete what has expired."""
        sent = self._store.host_commands()
        slices = self._slices_of(sent)
        expired = {
            each.host_command.id
            for each in sent
            if now - each.sent_at > each.host_command.timeout + RETENTION
            or _was_deleted(slices[each.slice_id], now - RETENTION)
        }
        current = [each for each in sent if each.host_command.id not in expired]
        self._pending = self._pending_by_host(current, slices, now)
        pending = {each.id for commands in self._pending.values() for each in commands}
        settled = [each for each in current if each.host_command.id not in pending]
        self._delete(expired | _surplus(settled))

    def _delete(self, command_ids: Collection[str]) -> None:
        if not command_ids:
            return
        self._store.delete_host_commands(sorted(command_ids))
        files = [self._store.objects(_files(each)) for each in sorted(command_ids)]
        self._store.delete_objects([part.name for parts in files for part in parts])

    def _pending_by_host(
        self,
        sent: Iterable[SentHostCommand],
        slices: Mapping[SliceId, TpuSlice | None],
        now: datetime,
    ) -> dict[HostId, tuple[HostCommand, ...]]:
        """What each host is to run: not answered, not withdrawn, and still waited for."""
        wanted = [
            each
            for each in sent
            if now - each.sent_at <= each.host_command.timeout + HEARTBEAT_ALLOWANCE
            and _may_run(each, slices[each.slice_id])
        ]
        results = self._store.host_command_results([each.host_command.id for each in wanted])
        pending: dict[HostId, tuple[HostCommand, ...]] = {}
        for each in wanted:
            answered = {result.host_id for result in results.get(each.host_command.id, ())}
            for host in each.hosts:
                earlier = pending.get(host, ())
                # There are more if several servers accepted some at the same time.
                if host not in answered and len(earlier) < MAX_PENDING_PER_HOST:
                    pending[host] = (*earlier, each.host_command)
        return pending

    def _slices_of(self, sent: Iterable[SentHostCommand]) -> dict[SliceId, TpuSlice | None]:
        return {slice_id: self._store.slice(slice_id) for slice_id in {e.slice_id for e in sent}}

    async def refresh_forever(self, clock: Clock) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                await HEARTBEATS.run(self.refresh, clock.now())
            except Exception as error:
                log_failure(logger, "read host commands", error)


def _was_deleted(tpu_slice: TpuSlice | None, before: datetime) -> bool:
    if tpu_slice is None:
        return True
    return tpu_slice.gone_since is not None and tpu_slice.gone_since < before


def _may_run(sent: SentHostCommand, tpu_slice: TpuSlice | None) -> bool:
    if tpu_slice is None or tpu_slice.state is SliceState.GONE:
        return False
    return sent.job_id is None or tpu_slice.job_id == sent.job_id


def _surplus(settled: Sequence[SentHostCommand]) -> set[str]:
    """The commands, sorted by age, that are not among the newest of any of their hosts."""
    kept: Counter[HostId] = Counter()
    surplus = set()
    for each in reversed(settled):
        if all(kept[host] >= MAX_KEPT_PER_HOST for host in each.hosts):
            surplus.add(each.host_command.id)
        kept.update(each.hosts)
    return surplus


def _files(command_id: str, host: HostId | None = None) -> str:
    """Prefix of the names of the parts, in order; without a host, of all hosts."""
    return f"host-commands/{command_id}/" + (f"{host}/" if host is not None else "")
