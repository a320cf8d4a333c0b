"""Telling how far the program is, cheaply enough to be called at every step."""

from __future__ import annotations

import atexit
import json
import math
import os
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, SupportsFloat

from tpufleet.runtime.context import context

WRITE_SECONDS = 0.25  # between two writes; the last word is written all the same


def progress(
    step: int,
    total: int | None = None,
    checkpoint_step: int | None = None,
    message: str = "",
    **metrics: SupportsFloat,
) -> None:
    """Report. What is not given again (total, checkpoint_step) stays as it was reported last.

    At most a few writes a second reach the disk, but the last report and every new
    `checkpoint_step` always do. Outside the platform nothing happens.
    """
    facts: dict[str, Any] = {"step": int(step), "message": message}
    if total is not None:
        facts["total"] = int(total)
    if checkpoint_step is not None:
        facts["checkpoint_step"] = int(checkpoint_step)
    facts["metrics"] = metrics  # numbers only when written: asking JAX for one waits for it
    _report(facts)


def report_checkpoint(step: int) -> None:
    """A checkpoint of this step is complete."""
    _report({"checkpoint_step": step})


def _numbers(metrics: dict[str, SupportsFloat]) -> dict[str, float]:
    """What is a finite number; JSON knows neither NaN nor infinity."""
    found = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: an array deleted meanwhile
            continue
        if math.isfinite(number):
            found[name] = number
    return found


def _report(facts: dict[str, Any]) -> None:
    run_dir = context().run_dir
    if run_dir is not None:
        _reporter_for(run_dir).report(facts)


class _Reporter:
    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / "progress.json"
        self._lock = threading.Lock()
        self._facts: dict[str, Any] = {}
        self._waiting = False  # something is not written yet
        self._written_at = -math.inf
        self._timer: threading.Timer | None = None

    def report(self, facts: dict[str, Any]) -> None:
        with self._lock:
            before = self._facts.get("checkpoint_step")
            self._facts |= facts | {"at": datetime.now(UTC).isoformat()}
            self._waiting = True
            early = self._written_at + WRITE_SECONDS - time.monotonic()
            if early <= 0 or self._facts.get("checkpoint_step") != before:
                self._write()
            elif self._timer is None:
                self._timer = threading.Timer(early, self.flush)
                self._timer.daemon = True
                self._timer.start()

    def flush(self) -> None:
        with self._lock:
            self._timer = None
            if self._waiting:
                self._write()

    def _write(self) -> None:
        facts = self._facts | {"metrics": _numbers(self._facts.get("metrics", {})) or None}
        temporary = self._file.with_name(f".progress.{os.getpid()}.tmp")
        self._waiting = False
        self._written_at = time.monotonic()
        try:
            temporary.write_text(json.dumps(facts))
            temporary.replace(self._file)
        except OSError as error:  # a full disk must not end a training run by its progress bar
            print(f"tpufleet: progress could not be written: {error}", file=sys.stderr)


_reporters: dict[Path, _Reporter] = {}
_reporters_lock = threading.Lock()


def _reporter_for(run_dir: Path) -> _Reporter:
    with _reporters_lock:
        reporter = _reporters.get(run_dir)
        if reporter is None:
            reporter = _reporters[run_dir] = _Reporter(run_dir)
            atexit.register(reporter.flush)
        return reporter
