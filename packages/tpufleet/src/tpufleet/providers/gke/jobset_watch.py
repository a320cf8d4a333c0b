"""Watches JobSets, their pods and Kueue Workloads in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta

from tpufleet.errors import FleetError
from tpufleet.kubernetes.connections import JOBSET, POD, WORKLOAD, Connection, Json, ResourceKind
from tpufleet.kubernetes.watch_cache import WatchCache

log = logging.getLogger(__name__)

POLL_EVERY = timedelta(seconds=10)
MIN_INTERVAL = timedelta(milliseconds=200)  # changes come in bursts


class JobSetWatch:
    def __init__(
        self,
        connection: Connection,
        namespace: str,
        labels: dict[str, str],
        *,
        queued: bool,
        on_poll: Callable[[], None],
        on_change: Callable[[], None],
    ) -> None:
        """`on_poll` is called after each change and every POLL_EVERY, `on_change` after changes."""
        self._on_poll, self._on_change = on_poll, on_change
        self._wakeup, self._closing = threading.Event(), threading.Event()
        labels_by_kind: dict[ResourceKind, dict[str, str] | None] = {JOBSET: labels, POD: labels}
        if queued:
            labels_by_kind[WORKLOAD] = None  # they do not carry our labels
        self._caches = {
            kind: WatchCache(
                connection, kind, self._wakeup.set, namespace=namespace, labels=selected
            )
            for kind, selected in labels_by_kind.items()
        }
        self._thread = threading.Thread(target=self._run, name="gke-slices", daemon=True)

    def start(self) -> JobSetWatch:
        for cache in self._caches.values():
            cache.start()
        self._thread.start()
        return self

    def close(self) -> None:
        self._closing.set()
        self._wakeup.set()
        for cache in self._caches.values():
            cache.close()
        self._thread.join(timeout=5)

    # See WatchCache.

    def read(self, kind: ResourceKind) -> list[Json]:
        return self._caches[kind].read()

    def list_from_server(self, kind: ResourceKind) -> list[Json]:
        return self._caches[kind].list_from_server()

    def invalidate(self, kind: ResourceKind) -> None:
        self._caches[kind].invalidate()

    def _run(self) -> None:
        while not self._closing.is_set():
            changed = self._wakeup.wait(POLL_EVERY.total_seconds())
            self._wakeup.clear()
            if self._closing.is_set():
                return
            try:
                self._on_poll()
            except FleetError as error:
                log.warning("cannot observe JobSets; continuing: %s", error)
            except Exception:
                log.exception("unexpected error while observing JobSets; continuing")
            if changed:
                self._on_change()
            self._closing.wait(MIN_INTERVAL.total_seconds())
