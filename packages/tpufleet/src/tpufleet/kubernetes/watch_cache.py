"""A local cache of one resource kind: listed once, then kept up to date by a watch.

`read` never returns outdated data: while the watch is down, or after a write of our own, it lists
from the server. `all` and `get` only look into the cache; their callers check `stale`. Items are
shared between readers and must not be modified.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from tpufleet.backoff import Backoff
from tpufleet.errors import Conflict, FleetError
from tpufleet.kubernetes.connections import Connection, Json, ResourceKind

log = logging.getLogger(__name__)

FIRST_RETRY, LONGEST_RETRY = 0.4, 10.0  # seconds
CLOSE_WITHIN = 5.0
# A working watch is confirmed at least every 30 s, when the server ends it and it is reopened.
STALE_AFTER = timedelta(minutes=2)


class WatchCache:
    """Its thread lives from `start` to `close`, and reconnects for as long as it takes."""

    def __init__(
        self,
        connection: Connection,
        kind: ResourceKind,
        on_change: Callable[[], None],
        *,
        namespace: str | None = None,
        labels: Mapping[str, Any] | None = None,
        fields: Mapping[str, Any] | None = None,
        stale_after: timedelta = STALE_AFTER,
        backoff: Backoff | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self.kind = kind
        self._on_change = on_change
        self._scope: dict[str, Any] = {"namespace": namespace, "labels": labels, "fields": fields}
        self._stale_after = stale_after
        self._backoff = backoff or Backoff(first=FIRST_RETRY, longest=LONGEST_RETRY)
        self._monotonic = monotonic
        self._items: dict[tuple[str, str], Json] = {}
        self._version = 0  # resourceVersion up to which the cache is complete; it only grows
        self._watch_seen_at: float | None = None  # last sign of a working watch; None: not watching
        self._confirmed_at = monotonic()  # last list or sign of the watch; at first: creation
        self._writes = self._listed_writes = 0  # our own writes, and how many a list has included
        self._falls_back = False
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.synced = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch-{kind.plural}", daemon=True)

    def start(self) -> WatchCache:
        self._thread.start()
        return self

    def close(self) -> None:
        self._closed.set()
        deadline = time.monotonic() + CLOSE_WITHIN
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._connection.interrupt(self._thread)  # repeatedly: it may just have opened a watch
            self._thread.join(0.05)

    def all(self) -> list[Json]:
        with self._lock:
            return list(self._items.values())

    def get(self, name: str, namespace: str = "") -> Json | None:
        with self._lock:
            return self._items.get((namespace, name))

    @property
    def age(self) -> timedelta:
        """Time since the server last confirmed the cache: by a list, an event or a new watch."""
        with self._lock:
            return timedelta(seconds=self._monotonic() - self._confirmed_at)

    @property
    def stale(self) -> bool:
        """Unconfirmed for too long to decide anything from it."""
        return self.age >= self._stale_after

    def read(self) -> list[Json]:
        """Every resource, including our own writes: from the cache if it is current, else from the
        server."""
        with self._lock:
            watching, current = self._watching(), self._listed_writes == self._writes
            if watching and current:
                return list(self._items.values())
            # Neither the time before the first list nor our own write is a failure of the watch.
            newly_broken = not watching and self.synced.is_set() and not self._falls_back
            self._falls_back = self._falls_back or newly_broken
        if newly_broken:
            log.warning("watch on %s is down; listing instead", self.kind.plural)
        return self.list_from_server()

    def list_from_server(self) -> list[Json]:
        self._list()
        return self.all()

    def invalidate(self) -> None:
        """After a write of our own: the cache is outdated until the next list."""
        with self._lock:
            self._writes += 1

    def _watching(self) -> bool:
        seen_at = self._watch_seen_at
        return seen_at is not None and self._monotonic() - seen_at < self._connection.max_silence

    def _list(self) -> str:
        with self._lock:
            writes, version_before = self._writes, self._version
        items, version = self._connection.list(self.kind, **self._scope)
        listed = {_key(item): item for item in items}
        with self._lock:
            self._confirmed_at = self._monotonic()
            self._listed_writes = max(self._listed_writes, writes)
            # A slow list does not undo events that arrived meanwhile. But a server whose version
            # went backwards was restored from a backup, and its list is right.
            accepted = int(version) >= self._version or int(version) < version_before
            changed = accepted and _versions(listed) != _versions(self._items)
            if accepted:
                self._version, self._items = int(version), listed
        if changed:
            self._on_change()
        return version

    def _initial_list(self) -> str:
        """The version from which to watch."""
        version = self._list()
        self._confirm()
        if not self.synced.is_set():
            self.synced.set()
            self._on_change()  # even if the list is empty
        return version

    def _connected(self) -> None:
        self._backoff.succeeded()
        self._confirm()
        with self._lock:
            self._falls_back = False

    def _confirm(self) -> None:
        with self._lock:
            self._watch_seen_at = self._confirmed_at = self._monotonic()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._follow(self._initial_list())
            except Conflict:
                pass  # 410 Gone: the version is too old to watch from
            except Exception as error:
                if not self._closed.is_set():
                    expected = isinstance(error, FleetError)
                    log.warning(
                        "watch on %s failed; reconnecting: %s",
                        self.kind.plural,
                        error,
                        exc_info=None if expected else error,
                    )
            finally:
                with self._lock:
                    self._watch_seen_at = None
            self._closed.wait(self._backoff.failed())

    def _follow(self, version: str) -> None:
        events = self._connection.watch(
            self.kind, version, on_connected=self._connected, **self._scope
        )
        for event_type, item in events:
            if self._closed.is_set():
                return
            self._confirm()
            if event_type == "BOOKMARK":
                continue
            self._apply(event_type, item)
            self._on_change()

    def _apply(self, event_type: str, item: Json) -> None:
        version = int(item["metadata"]["resourceVersion"])
        with self._lock:
            if version <= self._version:
                return  # already included in a list
            self._version = version
            if event_type == "DELETED":
                self._items.pop(_key(item), None)
            else:
                self._items[_key(item)] = item


def _key(item: Json) -> tuple[str, str]:
    metadata = item["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def _versions(items: Mapping[tuple[str, str], Json]) -> dict[tuple[str, str], str]:
    return {key: item["metadata"]["resourceVersion"] for key, item in items.items()}
