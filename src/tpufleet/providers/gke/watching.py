"""Watches JobSets, their pods and what Kueue says of them in the background: whenever one changes,
and now and then, somebody is to look at all of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta

from tpufleet.errors import FleetError
from tpufleet.kubernetes.connections import JOBSET, POD, WORKLOAD, Connection, Json, Kind
from tpufleet.kubernetes.mirrors import Mirror

log = logging.getLogger(__name__)

LOOK_EVERY = timedelta(seconds=10)
AT_MOST_EVERY = timedelta(milliseconds=200)  # news comes in bursts


class Watch:
    def __init__(
        self,
        connection: Connection,
        namespace: str,
        labels: dict[str, str],
        *,
        queued: bool,
        look: Callable[[], None],
        tell: Callable[[], None],
    ) -> None:
        """`look` is called after each change and now and then, `tell` only after a change."""
        self._look, self._tell = look, tell
        self._stir, self._closing = threading.Event(), threading.Event()
        chosen: dict[Kind, dict[str, str] | None] = {JOBSET: labels, POD: labels}
        if queued:
            chosen[WORKLOAD] = None  # they carry no labels of ours
        self._mirrors = {
            kind: Mirror(connection, kind, self._stir.set, namespace=namespace, labels=selected)
            for kind, selected in chosen.items()
        }
        self._thread = threading.Thread(target=self._run, name="gke-slices", daemon=True)

    def start(self) -> Watch:
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

    def read(self, kind: Kind) -> list[Json]:
        return self._mirrors[kind].read()

    def ask(self, kind: Kind) -> list[Json]:
        return self._mirrors[kind].ask()

    def doubt(self, kind: Kind) -> None:
        self._mirrors[kind].doubt()

    def _run(self) -> None:
        while not self._closing.is_set():
            stirred = self._stir.wait(LOOK_EVERY.total_seconds())
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
            self._closing.wait(AT_MOST_EVERY.total_seconds())
