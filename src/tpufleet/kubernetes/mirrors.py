"""A live copy of one kind of resource: listed once, then kept by a watch. Reading it is free."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tpufleet.errors import Conflict, FleetError
from tpufleet.kubernetes.connections import Connection, Json, Kind

log = logging.getLogger(__name__)

FIRST_WAIT, LONGEST_WAIT = 0.2, 10.0
CLOSE_WITHIN = 5.0


class Mirror:
    """Its thread lives from `start` to `close`."""

    def __init__(
        self,
        connection: Connection,
        kind: Kind,
        changed: Callable[[], None],
        *,
        namespace: str | None = None,
        labels: Mapping[str, Any] | None = None,
    ) -> None:
        self._connection = connection
        self._kind = kind
        self._changed = changed
        self._scope = {"namespace": namespace, "labels": labels}
        self._items: dict[tuple[str, str], Json] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.synced = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"mirror-{kind.plural}", daemon=True
        )

    def start(self) -> Mirror:
        self._thread.start()
        return self

    def close(self) -> None:
        self._closed.set()
        deadline = time.monotonic() + CLOSE_WITHIN
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._connection.interrupt(self._thread)  # again: it may have begun a watch just now
            self._thread.join(0.05)

    def all(self) -> list[Json]:
        with self._lock:
            return list(self._items.values())

    def get(self, name: str, namespace: str = "") -> Json | None:
        with self._lock:
            return self._items.get((namespace, name))

    def relist(self) -> str:
        """Take everything anew; the version from which to watch."""
        found, version = self._connection.list(self._kind, **self._scope)
        with self._lock:
            self._items = {_key(item): item for item in found}
        self.synced.set()
        self._changed()
        return version

    def _run(self) -> None:
        failures = 0
        while not self._closed.is_set():
            try:
                version = self.relist()
                failures = 0
                self._follow(version)
            except Conflict:
                continue  # the version is too old to go on from
            except FleetError as error:
                failures += 1
                if not self._closed.is_set():
                    log.warning("%s; trying again", error)
            except Exception:
                failures += 1
                if not self._closed.is_set():
                    log.exception("the watch on %s broke; trying again", self._kind.plural)
            self._closed.wait(min(FIRST_WAIT * 2**failures, LONGEST_WAIT))

    def _follow(self, version: str) -> None:
        for kind, item in self._connection.watch(self._kind, version, **self._scope):
            if self._closed.is_set():
                return
            if kind == "BOOKMARK":
                continue
            with self._lock:
                if kind == "DELETED":
                    self._items.pop(_key(item), None)
                else:
                    self._items[_key(item)] = item
            self._changed()


def _key(item: Json) -> tuple[str, str]:
    metadata = item["metadata"]
    return metadata.get("namespace", ""), metadata["name"]
