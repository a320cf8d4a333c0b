"""Errands on their way to agents, and what came back. They meet in the store, so that an agent and
the person who waits may talk to different servers; each server looks there once a second."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from datetime import datetime, timedelta

from tpufleet.clocks import Clock
from tpufleet.errors import Conflict, NotFound
from tpufleet.model.errands import Errand, ErrandOrder, ErrandReport, ErrandResult, SentErrand
from tpufleet.model.hosts import HostId
from tpufleet.model.slices import SliceId
from tpufleet.stores.base import Store

logger = logging.getLogger(__name__)

# How long after its own time limit an errand is kept: somebody may still ask what came of it.
KEPT = timedelta(minutes=10)


class Errands:
    def __init__(self, store: Store) -> None:
        self._store = store
        # Replaced, never changed: beats read it while others write.
        self._open: Mapping[HostId, tuple[Errand, ...]] = {}

    def send(
        self, order: ErrandOrder, slice_id: SliceId, hosts: tuple[HostId, ...], now: datetime
    ) -> None:
        errand = Errand(
            id=order.id, kind=order.kind, command=order.command, timeout=order.timeout
        )
        wanted = SentErrand(errand=errand, slice_id=slice_id, hosts=hosts, sent_at=now)
        known = self._store.put_errand(wanted)
        if (known.errand, known.slice_id, known.hosts) != (errand, slice_id, hosts):
            raise Conflict(f"errand {order.id} is another one already")
        self.look(now)

    def waiting_for(self, host: HostId) -> tuple[Errand, ...]:
        """What this host had not answered when the store was last looked at."""
        return self._open.get(host, ())

    def answer(self, errand_id: str, result: ErrandResult, now: datetime) -> None:
        sent = self._store.errand(errand_id)
        if sent is None or result.host_id not in sent.hosts:
            raise NotFound(f"host {result.host_id} has no errand {errand_id!r}")
        self._store.put_errand_result(errand_id, result)
        self.look(now)

    def report(self, errand_id: str, slice_id: str, now: datetime) -> ErrandReport:
        sent = self._store.errand(errand_id)
        if sent is None or sent.slice_id != slice_id:
            raise NotFound(f"slice {slice_id} has no errand {errand_id!r}; old ones are forgotten")
        results = self._store.errand_results([errand_id]).get(errand_id, [])
        by_host = {result.host_id: result for result in results}
        told = tuple(by_host[host] for host in sent.hosts if host in by_host)
        return ErrandReport(id=errand_id, hosts=sent.hosts, results=told, now=now)

    def look(self, now: datetime) -> None:
        """What is open in the store; what nobody can wait for any more is dropped."""
        sent = self._store.errands()
        old = [each.errand.id for each in sent if now > each.sent_at + each.errand.timeout + KEPT]
        if old:
            self._store.drop_errands(old)
        current = [each for each in sent if each.errand.id not in old]
        results = self._store.errand_results([each.errand.id for each in current])
        found: dict[HostId, tuple[Errand, ...]] = {}
        for each in current:
            answered = {result.host_id for result in results.get(each.errand.id, ())}
            for host in each.hosts:
                if host not in answered:
                    found[host] = (*found.get(host, ()), each.errand)
        self._open = found

    async def look_for_ever(self, clock: Clock, every: float = 1.0) -> None:
        while True:
            await asyncio.sleep(every)
            try:
                await asyncio.to_thread(self.look, clock.now())
            except Exception:
                logger.exception("errands could not be read; trying again in %s s", every)
