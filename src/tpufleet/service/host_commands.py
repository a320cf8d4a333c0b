"""Errands on their way to agents, and what came back. They meet in the store, so that an agent and
the person who waits may talk to different servers; each server looks there once a second."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from datetime import datetime, timedelta

from tpufleet.clocks import Clock
from tpufleet.errors import Conflict, NotFound
from tpufleet.model.host_commands import (
    HostCommand,
    HostCommandReport,
    HostCommandRequest,
    HostCommandResult,
    SentHostCommand,
)
from tpufleet.model.hosts import HostId
from tpufleet.model.slices import SliceId
from tpufleet.stores.base import Store

logger = logging.getLogger(__name__)

# How long after its own time limit an errand is kept: somebody may still ask what came of it.
RETENTION = timedelta(minutes=10)


class HostCommandQueue:
    def __init__(self, store: Store) -> None:
        self._store = store
        # Replaced, never changed: beats read it while others write.
        self._open: Mapping[HostId, tuple[HostCommand, ...]] = {}

    def send(
        self, order: HostCommandRequest, slice_id: SliceId, hosts: tuple[HostId, ...], now: datetime
    ) -> None:
        errand = HostCommand(
            id=order.id, kind=order.kind, command=order.command, timeout=order.timeout
        )
        wanted = SentHostCommand(host_command=errand, slice_id=slice_id, hosts=hosts, sent_at=now)
        known = self._store.put_host_command(wanted)
        if (known.host_command, known.slice_id, known.hosts) != (errand, slice_id, hosts):
            raise Conflict(f"errand {order.id} is another one already")
        self.refresh(now)

    def pending_for(self, host: HostId) -> tuple[HostCommand, ...]:
        """What this host had not answered when the store was last looked at."""
        return self._open.get(host, ())

    def record_result(self, errand_id: str, result: HostCommandResult, now: datetime) -> None:
        sent = self._store.host_command(errand_id)
        if sent is None or result.host_id not in sent.hosts:
            raise NotFound(f"host {result.host_id} has no errand {errand_id!r}")
        self._store.put_host_command_result(errand_id, result)
        self.refresh(now)

    def report(self, errand_id: str, slice_id: str, now: datetime) -> HostCommandReport:
        sent = self._store.host_command(errand_id)
        if sent is None or sent.slice_id != slice_id:
            raise NotFound(f"slice {slice_id} has no errand {errand_id!r}; old ones are forgotten")
        results = self._store.host_command_results([errand_id]).get(errand_id, [])
        by_host = {result.host_id: result for result in results}
        told = tuple(by_host[host] for host in sent.hosts if host in by_host)
        return HostCommandReport(id=errand_id, hosts=sent.hosts, results=told, now=now)

    def refresh(self, now: datetime) -> None:
        """What is open in the store; what nobody can wait for any more is dropped."""
        sent = self._store.host_commands()
        old = [
            each.host_command.id
            for each in sent
            if now > each.sent_at + each.host_command.timeout + RETENTION
        ]
        if old:
            self._store.delete_host_commands(old)
        current = [each for each in sent if each.host_command.id not in old]
        results = self._store.host_command_results([each.host_command.id for each in current])
        found: dict[HostId, tuple[HostCommand, ...]] = {}
        for each in current:
            answered = {result.host_id for result in results.get(each.host_command.id, ())}
            for host in each.hosts:
                if host not in answered:
                    found[host] = (*found.get(host, ()), each.host_command)
        self._open = found

    async def refresh_forever(self, clock: Clock, every: float = 1.0) -> None:
        while True:
            await asyncio.sleep(every)
            try:
                await asyncio.to_thread(self.refresh, clock.now())
            except Exception:
                logger.exception("errands could not be read; trying again in %s s", every)
