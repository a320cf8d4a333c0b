"""Writes Kubernetes events, as shown by `kubectl describe`. Repeated events are counted."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

from tpufleet.clocks import Clock
from tpufleet.errors import Conflict, FleetError
from tpufleet.kubernetes.connections import EVENT, Connection, Json

log = logging.getLogger(__name__)

MAX_MESSAGE_LENGTH = 1000  # characters; the server refuses more than 1024


def object_reference(
    kind: str, name: str, namespace: str = "", uid: str = "", api_version: str = "v1"
) -> Json:
    fields = {
        "apiVersion": api_version,
        "kind": kind,
        "name": name,
        "namespace": namespace,
        "uid": uid,
    }
    return {key: value for key, value in fields.items() if value}


class KubernetesEventRecorder:
    def __init__(self, connection: Connection, clock: Clock, *, source: str) -> None:
        self._connection, self._clock, self._source = connection, clock, source

    def record(
        self,
        involved_object: Json,
        reason: str,
        message: str,
        *,
        warning: bool = False,
        annotations: Mapping[str, str] | None = None,
    ) -> None:
        """Never raises: an event that cannot be written is only logged."""
        namespace = involved_object.get("namespace") or "default"
        now = self._clock.now().strftime("%Y-%m-%dT%H:%M:%SZ")
        text = message[:MAX_MESSAGE_LENGTH]
        digest = hashlib.sha256(repr((involved_object, reason, text)).encode()).hexdigest()[:16]
        name = f"{involved_object['name'][:200]}.{digest}"
        event: dict[str, Any] = {
            "metadata": {
                "name": name,
                "namespace": namespace,
                "annotations": dict(annotations or {}),
            },
            "involvedObject": involved_object,
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
                self._connection.create(EVENT, event)
            except Conflict:
                before = self._connection.get(EVENT, name, namespace)
                count = int(before.get("count") or 1) + 1
                self._connection.patch(
                    EVENT, name, {"count": count, "lastTimestamp": now}, namespace
                )
        except FleetError as error:
            log.warning("cannot write event %s on %s: %s", reason, involved_object["name"], error)
