"""Removes the values of secrets from the log of a server."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict

from tpufleet.model.redaction import Redactor, redactable

_MAX_VALUES = 10_000

_lock = threading.Lock()
_values: OrderedDict[str, None] = OrderedDict()  # that this server has read or received
_redactor = Redactor(())


def remember(value: str) -> None:
    """It is removed from everything logged from now on."""
    global _redactor
    new = [part for part in redactable([value]) if part not in _values]
    if not new:
        return
    with _lock:
        _values.update(dict.fromkeys(new))
        while len(_values) > _MAX_VALUES:
            _values.popitem(last=False)
        _redactor = Redactor(tuple(_values))


def redact(text: str) -> str:
    return _redactor.text(text)


class RedactionFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if _values:
            record.msg, record.args = redact(record.getMessage()), ()
            if record.exc_info and not record.exc_text:
                record.exc_text = redact(logging.Formatter().formatException(record.exc_info))
        return True
