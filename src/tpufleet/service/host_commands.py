"""Host commands on their way to agents, and their results.

They are kept in the store, because the agent and the person who waits may be connected to different
servers. Every server refreshes its view once a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta

from tpufleet.clocks import Clock
from tpufleet.errors import BadInput, Conflict, DatabaseUnreachable, NotFound
from tpufleet.model.host_commands import (
    MAX_FILE_BYTES,
    HostCommand,
    HostCommandReport,
    HostCommandRequest,
    HostCommandResult,
    SentHostCommand,
)
from tpufleet.model.hosts import HostId
from tpufleet.model.jobs import JobId
from tpufleet.model.slices import SliceId
from tpufleet.stores.base import Store

logger = logging.getLogger(__name__)

# How long results can be read after the command's own timeout.
RETENTION = timedelta(minutes=10)


class HostCommandQueue:
    def __init__(self, store: Store) -> None:
        self._store = store
        # Replaced, never modified: heartbeats read it from another thread.
        self._pending: Mapping[HostId, tuple[HostCommand, ...]] = {}

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
        known = self._store.put_host_command(sent)
        if (known.host_command, known.slice_id, known.hosts) != (command, slice_id, hosts):
            raise Conflict(f"host command id {request.id} is already in use")
        self.refresh(now)

    def pending_for(self, host: HostId) -> tuple[HostCommand, ...]:
        """Commands without a result from this host, as of the last refresh."""
        return self._pending.get(host, ())

    def record_result(self, command_id: str, result: HostCommandResult, now: datetime) -> None:
        sent = self._store.host_command(command_id)
        if sent is None or result.host_id not in sent.hosts:
            raise NotFound(f"host {result.host_id} has no host command {command_id!r}")
        self._store.put_host_command_result(command_id, result)
        self.refresh(now)

    def append_file(
        self, command_id: str, host: HostId, offset: int, data: bytes, now: datetime
    ) -> None:
        """A part of the file that the host sends with its result. Sending it again is no error."""
        sent = self._store.host_command(command_id)
        if sent is None or host not in sent.hosts:
            raise NotFound(f"host {host} has no host command {command_id!r}")
        if not 0 <= offset <= MAX_FILE_BYTES - len(data):
            raise BadInput(f"offset: the file may have {MAX_FILE_BYTES} bytes")
        self._store.put_object(f"{_files(command_id, host)}{offset:012d}", data, now)

    def read_file(self, command_id: str, slice_id: str, host: HostId) -> Iterator[bytes]:
        sent = self._store.host_command(command_id)
        parts = self._store.objects(_files(command_id, host))
        if sent is None or sent.slice_id != slice_id or not parts:
            raise NotFound(
                f"host command {command_id!r} has no file of host {host}; files are kept for "
                f"{RETENTION.total_seconds() / 60:.0f} minutes"
            )
        return (self._store.read_objects([part.name])[part.name] for part in parts)

    def report(self, command_id: str, slice_id: str, now: datetime) -> HostCommandReport:
        sent = self._store.host_command(command_id)
        if sent is None or sent.slice_id != slice_id:
            raise NotFound(
                f"slice {slice_id} has no host command {command_id!r}; results are kept for "
                f"{RETENTION.total_seconds() / 60:.0f} minutes"
            )
        results = self._store.host_command_results([command_id]).get(command_id, [])
        by_host = {result.host_id: result for result in results}
        ordered = tuple(by_host[host] for host in sent.hosts if host in by_host)
        return HostCommandReport(id=command_id, hosts=sent.hosts, results=ordered, now=now)

    def refresh(self, now: datetime) -> None:
        """Reload what is pending from the store, and delete what has expired."""
        sent = self._store.host_commands()
        expired = {
            each.host_command.id
            for each in sent
            # In this order nothing overflows, whatever the timeout.
            if now - each.sent_at - RETENTION > each.host_command.timeout
        }
        if expired:
            self._store.delete_host_commands(sorted(expired))
            files = [self._store.objects(_files(each)) for each in sorted(expired)]
            self._store.delete_objects([part.name for parts in files for part in parts])
        current = [each for each in sent if each.host_command.id not in expired]
        results = self._store.host_command_results([each.host_command.id for each in current])
        pending: dict[HostId, tuple[HostCommand, ...]] = {}
        for each in current:
            if each.job_id is not None and not self._is_held(each.slice_id, each.job_id):
                continue
            answered = {result.host_id for result in results.get(each.host_command.id, ())}
            for host in each.hosts:
                if host not in answered:
                    pending[host] = (*pending.get(host, ()), each.host_command)
        self._pending = pending

    def _is_held(self, slice_id: SliceId, job_id: JobId) -> bool:
        tpu_slice = self._store.slice(slice_id)
        return tpu_slice is not None and tpu_slice.job_id == job_id

    async def refresh_forever(self, clock: Clock, every: float = 1.0) -> None:
        while True:
            await asyncio.sleep(every)
            try:
                await asyncio.to_thread(self.refresh, clock.now())
            except DatabaseUnreachable as error:  # logged by its store
                logger.debug("cannot read host commands: %s", error)
            except Exception:
                logger.exception("cannot read host commands; retrying in %s s", every)


def _files(command_id: str, host: HostId | None = None) -> str:
    """Prefix of the names of the parts, in order; without a host, of all hosts."""
    return f"host-commands/{command_id}/" + (f"{host}/" if host is not None else "")
