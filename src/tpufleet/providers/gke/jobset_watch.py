"""Watches JobSets, their pods and what Kueue says of them in the background: whenever one changes,
and now and then, somebody is to look at all of them."""

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
MIN_INTERVAL = timedelta(milliseconds=200)  # news comes in bursts


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
        """`look` is called after each change and now and then, `tell` only after a change."""
        self._look, self._tell = on_poll, on_change
        self._stir, self._closing = threading.Event(), threading.Event()
        chosen: dict[ResourceKind, dict[str, str] | None] = {JOBSET: labels, POD: labels}
        if queued:
            chosen[WORKLOAD] = None  # they carry no labels of ours
        self._mirrors = {
            kind: WatchCache(connection, kind, self._stir.set, namespace=namespace, labels=selected)
            for kind, selected in chosen.items()
        }
        self._thread = threading.Thread(target=self._run, name="gke-slices", daemon=True)

    def start(self) -> JobSetWatch:
        for mirror in self._mirrors.values():
            mirror.start()
        self._thread.start()
        return self

    def close(self) -> None:
        self._closing.set()
        self._stir.set()
        for mirror in self._mirrors.values():
            mirror.close()
        self._thread.join(timeout=5)

    # What was seen; Mirror has more to say about each of these.

    def read(self, kind: ResourceKind) -> list[Json]:
        return self._mirrors[kind].read()

    def list_from_server(self, kind: ResourceKind) -> list[Json]:
        return self._mirrors[kind].list_from_server()

    def invalidate(self, kind: ResourceKind) -> None:
        self._mirrors[kind].invalidate()

    def _run(self) -> None:
        while not self._closing.is_set():
            stirred = self._stir.wait(POLL_EVERY.total_seconds())
            self._stir.clear()
            if self._closing.is_set():
                return
            try:
                self._look()
            except FleetError as error:
                log.warning("a look at the JobSets failed: %s", error)
            except Exception:
                log.exception("a look at the JobSets failed; the next follows")
            if stirred:
                self._tell()
            self._closing.wait(MIN_INTERVAL.total_seconds())
