"""Errands on their way to agents, and what came back. In memory: they are for somebody who waits,
and are gone with the server that took them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from tpufleet.errors import Conflict, NotFound
from tpufleet.model.errands import Errand, ErrandOrder, ErrandResult
from tpufleet.model.hosts import HostId
from tpufleet.model.slices import SliceId

REMEMBERED = 200


@dataclass(slots=True)
class Sent:
    errand: Errand
    slice_id: SliceId
    hosts: tuple[HostId, ...]
    results: dict[HostId, ErrandResult] = field(default_factory=dict)


class Errands:
    def __init__(self) -> None:
        self._sent: OrderedDict[str, Sent] = OrderedDict()
        self._lock = threading.Lock()

    def send(self, order: ErrandOrder, slice_id: SliceId, hosts: tuple[HostId, ...]) -> None:
        errand = Errand(
            id=order.id, kind=order.kind, command=order.command, timeout=order.timeout
        )
        with self._lock:
            known = self._sent.get(order.id)
            if known is not None and (known.errand, known.hosts) != (errand, hosts):
                raise Conflict(f"errand {order.id} is another one already")
            if known is None:
                self._sent[order.id] = Sent(errand, slice_id, hosts)
            while len(self._sent) > REMEMBERED:
                self._sent.popitem(last=False)

    def waiting_for(self, host: HostId) -> tuple[Errand, ...]:
        """What this host has not answered yet."""
        if not self._sent:
            return ()
        with self._lock:
            return tuple(
                sent.errand
                for sent in self._sent.values()
                if host in sent.hosts and host not in sent.results
            )

    def answer(self, errand_id: str, result: ErrandResult) -> None:
        with self._lock:
            sent = self._sent.get(errand_id)
            if sent is None or result.host_id not in sent.hosts:
                raise NotFound(f"host {result.host_id} has no errand {errand_id!r}")
            sent.results.setdefault(result.host_id, result)

    def find(self, errand_id: str) -> Sent:
        with self._lock:
            found = self._sent.get(errand_id)
        if found is None:
            raise NotFound(f"there is no errand {errand_id!r}; the server may have started anew")
        return found
