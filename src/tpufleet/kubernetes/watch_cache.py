"""A live copy of one kind of resource: listed once, then kept by a watch. Reading it is free, and
as good as asking the server unless the watch is broken or we wrote something ourselves: then the
server is asked. What is read is shared by all who read; nobody may change it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tpufleet.errors import Conflict, FleetError
from tpufleet.kubernetes.connections import Connection, Json, ResourceKind

log = logging.getLogger(__name__)

FIRST_WAIT, LONGEST_WAIT = 0.2, 10.0
CLOSE_WITHIN = 5.0


class WatchCache:
    """Its thread lives from `start` to `close`."""

    def __init__(
        self,
        connection: Connection,
        kind: ResourceKind,
        on_change: Callable[[], None],
        *,
        namespace: str | None = None,
        labels: Mapping[str, Any] | None = None,
    ) -> None:
        self._connection = connection
        self._kind = kind
        self._changed = on_change
        self._scope = {"namespace": namespace, "labels": labels}
        self._items: dict[tuple[str, str], Json] = {}
        self._version = 0  # up to which the copy is whole; the server counts upwards
        self._heard: float | None = None  # when we last knew that the watch works; None: broken
        self._wrote = self._took = 0  # writes of our own, and how many of them a list has shown
        self._falls_back = False
        self._failures = 0  # since the server last took up a watch
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.synced = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"mirror-{kind.plural}", daemon=True)

    def start(self) -> WatchCache:
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

    # Reading what others rely on.

    def read(self) -> list[Json]:
        """Everything there is, our own writes included."""
        with self._lock:
            whole, current = self._trusted(), self._took == self._wrote
            if whole and current:
                self._falls_back = False
                return list(self._items.values())
            # Before the first list nothing broke, and after a write nothing did.
            says = not whole and self.synced.is_set() and not self._falls_back
            self._falls_back = self._falls_back or says
        if says:
            log.warning("the watch on %s is broken; listing them meanwhile", self._kind.plural)
        return self.list_from_server()

    def list_from_server(self) -> list[Json]:
        """The same, from the server itself, whatever the watch brought."""
        self._list()
        return self.all()

    def invalidate(self) -> None:
        """We wrote: what the watch brought is old until a list has shown it."""
        with self._lock:
            self._wrote += 1

    def _trusted(self) -> bool:
        heard, silence = self._heard, self._connection.max_silence
        return heard is not None and time.monotonic() - heard < silence

    # Following the server.

    def _list(self) -> str:
        with self._lock:
            wrote, stood_at = self._wrote, self._version
        found, version = self._connection.list(self._kind, **self._scope)
        listed = {_key(item): item for item in found}
        with self._lock:
            self._took = max(self._took, wrote)
            # What came while the list was on its way is not undone by it. But a server that is
            # behind what it said before was set back, to a backup say, and is right.
            takes = int(version) >= self._version or int(version) < stood_at
            news = takes and _versions(listed) != _versions(self._items)
            if takes:
                self._version, self._items = int(version), listed
        if news:
            self._changed()
        return version

    def _begin(self) -> str:
        """The version from which to watch."""
        version = self._list()
        self._hear()
        if not self.synced.is_set():
            self.synced.set()
            self._changed()  # also where there is nothing yet
        return version

    def _began(self) -> None:
        self._failures = 0
        self._hear()

    def _hear(self) -> None:
        with self._lock:
            self._heard = time.monotonic()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._follow(self._begin())
            except Conflict:
                pass  # the version is too old to go on from
            except FleetError as error:
                if not self._closed.is_set():
                    log.warning("%s; trying again", error)
            except Exception:
                if not self._closed.is_set():
                    log.exception("the watch on %s broke; trying again", self._kind.plural)
            finally:
                with self._lock:
                    self._heard = None
            self._failures += 1
            self._closed.wait(min(FIRST_WAIT * 2**self._failures, LONGEST_WAIT))

    def _follow(self, version: str) -> None:
        news = self._connection.watch(self._kind, version, on_connected=self._began, **self._scope)
        for kind, item in news:
            if self._closed.is_set():
                return
            self._hear()
            if kind == "BOOKMARK":
                continue
            self._take(kind, item)
            self._changed()

    def _take(self, kind: str, item: Json) -> None:
        version = int(item["metadata"]["resourceVersion"])
        with self._lock:
            if version <= self._version:
                return  # a list has shown it already
            self._version = version
            if kind == "DELETED":
                self._items.pop(_key(item), None)
            else:
                self._items[_key(item)] = item


def _key(item: Json) -> tuple[str, str]:
    metadata = item["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def _versions(items: Mapping[tuple[str, str], Json]) -> dict[tuple[str, str], str]:
    return {key: item["metadata"]["resourceVersion"] for key, item in items.items()}
