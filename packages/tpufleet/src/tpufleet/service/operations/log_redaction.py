"""Removes the values of secrets from the log of a server."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict

from tpufleet.model.values.redaction import Redactor

MIN_LENGTH = 8  # shorter values are in ordinary messages by chance
MAX_CHARACTERS = 1 << 20  # of one user, or shared; a value has at most 64 KiB

Owner = str | None  # None: shared by all users


class SecretValues:
    """Those that a server has read or received. The limit is per user, so that nobody can displace
    the values of others; of too many, the newest are kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[Owner, OrderedDict[str, str]] = {}  # by owner and source
        self._redactor: Redactor | None = None  # None: they have changed

    def remember(self, owner: Owner, source: str, value: str) -> None:
        """It is masked from now on, instead of the former value of this source."""
        with self._lock:
            known = self._values.setdefault(owner, OrderedDict())
            if known.get(source) != value:
                known[source] = value
                self._redactor = None
            known.move_to_end(source)
            while self._redactor is None and sum(map(len, known.values())) > MAX_CHARACTERS:
                known.popitem(last=False)

    def forget(self, owner: Owner, source: str) -> None:
        with self._lock:
            if owner in self._values and self._values[owner].pop(source, None) is not None:
                self._redactor = None

    def forget_all(self, owner: Owner) -> None:
        with self._lock:
            if self._values.pop(owner, None):
                self._redactor = None

    def redact(self, text: str) -> str:
        with self._lock:
            if self._redactor is None:
                values = [value for known in self._values.values() for value in known.values()]
                self._redactor = Redactor(each for each in values if len(each) >= MIN_LENGTH)
            redactor = self._redactor
        return redactor.text(text)


_values = SecretValues()
remember = _values.remember
forget = _values.forget
forget_all = _values.forget_all
redact = _values.redact


class RedactionFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact(record.getMessage()), ()
        if record.exc_info and not record.exc_text:
            record.exc_text = redact(logging.Formatter().formatException(record.exc_info))
        return True
