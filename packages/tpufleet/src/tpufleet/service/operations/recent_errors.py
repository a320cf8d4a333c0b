"""The warnings and errors that a server logged lately, for `tpu status`."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from tpufleet.model.fleet.server_status import LoggedError
from tpufleet.service.operations import log_redaction

MAX_ERRORS = 20
MAX_AGE = timedelta(hours=1)
MAX_MESSAGE = 500


class RecentErrors(logging.Handler):
    """Messages are the same when their format is."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._entries_lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, str], LoggedError] = OrderedDict()

    def emit(self, record: logging.LogRecord) -> None:
        message = log_redaction.redact(record.getMessage())
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            message += f": {log_redaction.redact(repr(error))}"
        key = (record.name, str(record.msg)[:200])
        entry = LoggedError(
            at=datetime.fromtimestamp(record.created, UTC),
            level=record.levelname.lower(),
            message=message[:MAX_MESSAGE],
        )
        with self._entries_lock:
            before = self._entries.pop(key, None)
            if before is not None:
                entry = replace(entry, count=before.count + 1)
            self._entries[key] = entry
            while len(self._entries) > MAX_ERRORS:
                self._entries.popitem(last=False)

    def list(self, now: datetime) -> tuple[LoggedError, ...]:
        """Newest first."""
        with self._entries_lock:
            entries = list(self._entries.values())
        return tuple(entry for entry in reversed(entries) if now - entry.at <= MAX_AGE)
