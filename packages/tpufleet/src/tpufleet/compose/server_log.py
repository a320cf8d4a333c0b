"""The log of a server: as text or JSON, limited in rate and size, so that no client can fill the
disk, and without the values of secrets."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

from tpufleet.linux import stderr_rotation
from tpufleet.service.operations.log_redaction import RedactionFilter
from tpufleet.service.operations.recent_errors import RecentErrors

MAX_PER_MESSAGE = 60
MAX_MESSAGES = 1_000
WINDOW_SECONDS = 60.0
UVICORN_LOGGER = "uvicorn.error"  # of its messages of every level


def set_up(log_format: str) -> RecentErrors:
    """Log to standard error. Called once."""
    handler = _StderrHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    handler.addFilter(RepeatFilter())
    handler.addFilter(RedactionFilter())
    recent = RecentErrors()
    # `recent` first: the filters of the other one change the record.
    logging.basicConfig(level=logging.INFO, handlers=[recent, handler])
    logging.getLogger(UVICORN_LOGGER).addFilter(ClientErrorFilter())
    for client in ("httpx", "httpx2"):  # ours, and that of the Kubernetes client
        logging.getLogger(client).setLevel(logging.WARNING)
    return recent


class JsonFormatter(logging.Formatter):
    """One object per line, with the names that Cloud Logging reads: `severity`, `time`, `message`.
    https://cloud.google.com/logging/docs/structured-logging"""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "severity": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = record.exc_text or self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class _StderrHandler(logging.StreamHandler):
    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        stderr_rotation.rotate()


class RepeatFilter(logging.Filter):
    """Passes a message a number of times per minute; the first one after that says how many were
    left out. Messages are the same when their format is, whatever the arguments."""

    most = MAX_PER_MESSAGE

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._lock = threading.Lock()
        self._started = now()
        self._counts: dict[tuple[str, str], int] = {}
        self._left_out: dict[tuple[str, str], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key = (record.name, str(record.msg)[:200])
        with self._lock:
            now = self._now()
            if now - self._started >= WINDOW_SECONDS:
                self._started = now
                self._left_out = {
                    each: count - self.most
                    for each, count in self._counts.items()
                    if count > self.most
                }
                self._counts = {}
            if key not in self._counts and len(self._counts) >= MAX_MESSAGES:
                key = ("", "")  # a format of its own for each message: count them together
            count = self._counts[key] = self._counts.get(key, 0) + 1
            left_out = self._left_out.pop(key, 0) if count == 1 else 0
        if left_out:
            _append_count(record, left_out)
        return count <= self.most


class ClientErrorFilter(RepeatFilter):
    """For uvicorn's warnings, such as those of invalid requests, which every client can cause
    without a token: each of them once per minute."""

    most = 1

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        if "No supported WebSocket library" in str(record.msg):
            return False  # advises to install one, which would change nothing: see `make_server`
        return super().filter(record)


def _append_count(record: logging.LogRecord, left_out: int) -> None:
    """As an argument: messages are the same when their format is, also for `RecentErrors`."""
    if not isinstance(record.args, tuple):  # a mapping
        record.msg, record.args = record.getMessage(), ()
    text = str(record.msg) if record.args else str(record.msg).replace("%", "%%")
    record.msg = f"{text} (%s more like this were left out)"
    record.args = (*record.args, left_out)
