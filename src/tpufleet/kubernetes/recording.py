"""Events that `kubectl describe` shows. One that repeats is counted, not written again."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

from tpufleet.clocks import Clock
from tpufleet.errors import Conflict, FleetError
from tpufleet.kubernetes.connections import EVENT, Connection, Json

log = logging.getLogger(__name__)

LONGEST = 1000  # characters; the server refuses more than 1024


def reference(kind: str, name: str, namespace: str = "", uid: str = "", api: str = "v1") -> Json:
    found = {"apiVersion": api, "kind": kind, "name": name, "namespace": namespace, "uid": uid}
    return {key: value for key, value in found.items() if value}


class Recorder:
    def __init__(self, connection: Connection, clock: Clock, *, source: str) -> None:
        self._connection, self._clock, self._source = connection, clock, source

    def record(self, about: Json, reason: str, words: str, *, warning: bool = False) -> None:
        """An event that cannot be written is logged: what it tells of has happened all the same."""
        namespace = about.get("namespace") or "default"
        now = self._clock.now().strftime("%Y-%m-%dT%H:%M:%SZ")
        text = words[:LONGEST]
        mark = hashlib.sha256(repr((about, reason, text)).encode()).hexdigest()[:16]
        name = f"{about['name'][:200]}.{mark}"
        fresh: dict[str, Any] = {
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": about,
            "reason": reason,
            "message": text,
            "type": "Warning" if warning else "Normal",
            "source": {"component": self._source},
            "reportingComponent": self._source,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            try:
                self._connection.create(EVENT, fresh)
            except Conflict:
                before = self._connection.get(EVENT, name, namespace)
                count = int(before.get("count") or 1) + 1
                self._connection.patch(
                    EVENT, name, {"count": count, "lastTimestamp": now}, namespace
                )
        except FleetError as error:
            log.warning("event %s on %s not written: %s", reason, about["name"], error)
