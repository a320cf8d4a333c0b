"""Progress reports, written to `progress.json`; cheap enough to call at every step. With them goes
how long this process was busy with other things: connecting, restoring, compiling, saving."""

from __future__ import annotations

import atexit
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, SupportsFloat

from tpufleet.errors import unwritable
from tpufleet.runtime.context import context

WRITE_SECONDS = 0.25  # between two writes; the last report is always written
# Reports of the last moments are written with the latest, so that a short program leaves a curve.
# The agent reads the file twice a second.
RECENT_SECONDS = 5.0
MAX_RECENT = 50
MAX_RECENT_BYTES = 32 * 1024  # the agent ignores a file of more than 64 kB
CONNECT, RESTORE, SAVE = "connect_seconds", "restore_seconds", "save_seconds"
# What JAX and Orbax say themselves. Without tracing: functions in functions would count twice.
_JAX_EVENTS = {
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "compile_seconds",
    "/jax/core/compile/backend_compile_duration": "compile_seconds",
    "/jax/orbax/read/blocking_duration_secs": RESTORE,
    "/jax/orbax/write/blocking_duration_secs": SAVE,
    "/jax/orbax/write/async/blocking_duration_secs": SAVE,
}


def progress(
    step: int,
    total: int | None = None,
    checkpoint_step: int | None = None,
    message: str = "",
    **metrics: SupportsFloat,
) -> None:
    """Report progress. `total` and `checkpoint_step` keep their last value when omitted.

    At most a few writes a second reach the disk, but the last report and every new
    `checkpoint_step` always do. Does nothing outside tpufleet.

    Each of `metrics` is a number, or an array with one element: `progress(step, loss=loss)`.
    """
    for name, value in metrics.items():
        _require_number(name, value)
    report: dict[str, Any] = {"step": int(step), "message": message}
    if total is not None:
        report["total"] = int(total)
    if checkpoint_step is not None:
        report["checkpoint_step"] = int(checkpoint_step)
    report["metrics"] = metrics  # converted when written: converting a JAX array waits for it
    _report(report)


def report_checkpoint(step: int) -> None:
    """Report that the checkpoint of this step is complete."""
    _report({"checkpoint_step": step})


_timings: dict[str, Any] = {}
_timings_lock = threading.Lock()


def report_imported() -> None:
    """The program has imported what it needs; from now on JAX is listened to, if it is there."""
    with _timings_lock:
        if "imported_at" in _timings:
            return
        _timings["imported_at"] = datetime.now(UTC).isoformat()
    if "jax" in sys.modules:
        import jax.monitoring

        jax.monitoring.register_event_duration_secs_listener(_on_jax_event)


@contextmanager
def timed(what: str) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        _add(what, time.monotonic() - began)


def _current_timings() -> dict[str, Any]:
    with _timings_lock:
        return dict(_timings)


def _on_jax_event(event: str, duration_secs: float, **_: object) -> None:
    if event in _JAX_EVENTS:
        _add(_JAX_EVENTS[event], duration_secs)


def _add(what: str, seconds: float) -> None:
    with _timings_lock:
        _timings[what] = round(_timings.get(what, 0.0) + seconds, 6)


def _require_number(name: str, value: object) -> None:
    """By its type: converting a JAX array would wait for it."""
    if not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        hint = "; pass each metric by name: progress(step, loss=loss)" if name == "metrics" else ""
        raise TypeError(f"progress: {name} is not a number but {type(value).__name__}{hint}")


def _numbers(metrics: dict[str, SupportsFloat]) -> dict[str, float]:
    """The finite numbers; JSON has neither NaN nor infinity."""
    numbers = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: an array deleted meanwhile
            continue
        if math.isfinite(number):
            numbers[name] = number
    return numbers


def _report(report: dict[str, Any]) -> None:
    here = context()
    if here.run_dir is not None and here.local_process_id == 0:  # one speaks for its host
        _reporter_for(here.run_dir).report(report)


class _Reporter:
    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / "progress.json"
        self._lock = threading.Lock()
        self._current: dict[str, Any] = {}
        self._recent: list[tuple[float, dict[str, Any]]] = []  # when, and what
        self._unwritten = False  # the current report is not written yet
        self._written_at = -math.inf
        self._timer: threading.Timer | None = None

    def report(self, report: dict[str, Any]) -> None:
        with self._lock:
            previous = self._current.get("checkpoint_step")
            self._current |= report | {"at": datetime.now(UTC).isoformat()}
            self._unwritten = True
            if "step" in report:
                self._remember()
            delay = self._written_at + WRITE_SECONDS - time.monotonic()
            if delay <= 0 or self._current.get("checkpoint_step") != previous:
                self._write()
            elif self._timer is None:
                self._timer = threading.Timer(delay, self.flush)
                self._timer.daemon = True
                self._timer.start()

    def flush(self) -> None:
        with self._lock:
            self._timer = None
            if self._unwritten:
                self._write()

    def _remember(self) -> None:
        now = time.monotonic()
        point = {name: self._current[name] for name in ("at", "step", "metrics")}
        self._recent = [each for each in self._recent if now - each[0] < RECENT_SECONDS]
        self._recent.append((now, point))
        if len(self._recent) > MAX_RECENT:
            self._recent = self._recent[:-1:2] + self._recent[-1:]

    def _recent_points(self) -> list[dict[str, Any]]:
        """Thinned until they are small enough. Each is converted once."""
        for _, point in self._recent:
            point["metrics"] = _numbers(point["metrics"] or {}) or None
        points = [point for _, point in self._recent]
        while points and len(json.dumps(points)) > MAX_RECENT_BYTES:
            points = points[1::2]
        return points

    def _write(self) -> None:
        report = self._current | {
            "metrics": _numbers(self._current.get("metrics", {})) or None,
            "recent": self._recent_points(),
            "timings": _current_timings(),
        }
        temporary = self._file.with_name(f".progress.{os.getpid()}.tmp")
        self._unwritten = False
        self._written_at = time.monotonic()
        try:
            temporary.write_text(json.dumps(report))
            temporary.replace(self._file)
        except OSError as error:  # a full disk must not end the program
            print(f"tpufleet: {unwritable('progress', error)}", file=sys.stderr)


_reporters: dict[Path, _Reporter] = {}
_reporters_lock = threading.Lock()


def _reporter_for(run_dir: Path) -> _Reporter:
    with _reporters_lock:
        reporter = _reporters.get(run_dir)
        if reporter is None:
            reporter = _reporters[run_dir] = _Reporter(run_dir)
            atexit.register(reporter.flush)
        return reporter
