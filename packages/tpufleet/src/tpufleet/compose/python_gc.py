"""Keeps full garbage collections short. Each looks at every object that may be part of a cycle,
and all threads wait: in a large fleet, tenths of a second several times a minute."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

# Python's default is (700, 10, 10): fewer collections of new objects, and each still short.
THRESHOLDS = (2_000, 5, 20)
LONGEST_SECONDS = 0.01
FULL_INTERVAL_SECONDS = 3600.0


class ShortCollections:
    """What survives a full collection that took long is left out of the next ones. Objects that are
    no longer used are freed as ever; cycles among those that were left out, once an hour."""

    def __init__(self, longest_seconds: float = LONGEST_SECONDS) -> None:
        self._longest_seconds = longest_seconds
        self._started = 0.0
        self._stopping = threading.Event()

    def start(self) -> None:
        gc.set_threshold(*THRESHOLDS)
        gc.callbacks.append(self._on_collection)
        threading.Thread(target=self._run, name="garbage collection", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()
        gc.callbacks.remove(self._on_collection)
        gc.unfreeze()

    def collect_all(self) -> None:
        gc.unfreeze()
        gc.collect()

    def _run(self) -> None:
        while not self._stopping.wait(FULL_INTERVAL_SECONDS):
            self.collect_all()

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._started = time.perf_counter()
        elif info["generation"] == 2 and (
            time.perf_counter() - self._started > self._longest_seconds
        ):
            gc.freeze()
