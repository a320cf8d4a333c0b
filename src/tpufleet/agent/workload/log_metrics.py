"""Metrics of programs that report none: regular expressions of the job, applied to its output."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from tpufleet.agent.workload.exit_diagnosis import AGENT_LINE_PREFIX
from tpufleet.agent.workload.logs import LogFile

READ_BYTES = 1024 * 1024  # in one poll; more is skipped
MAX_LINE = 2000  # characters that are searched


class LogMetrics:
    """Reads what was added to the log, and keeps the last match of each pattern."""

    def __init__(self, log: LogFile, patterns: Mapping[str, str]) -> None:
        self._log = log
        self._patterns = {name: re.compile(pattern) for name, pattern in patterns.items()}
        self._offset = 0
        self._rest = b""
        self.values: dict[str, float] = {}

    def poll(self) -> bool:
        """Whether a value was found."""
        if not self._patterns:
            return False
        if self._log.size - self._offset > READ_BYTES:
            self._offset, self._rest = self._log.size - READ_BYTES, b""
        data = self._log.read(self._offset, READ_BYTES)
        self._offset += len(data)
        # A progress bar ends its lines with a carriage return.
        *lines, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        self._rest = self._rest[-MAX_LINE:]
        found = [self._read(line) for line in lines]
        return any(found)

    def _read(self, line: bytes) -> bool:
        text = line[:MAX_LINE].decode(errors="replace")
        found = False
        for name, pattern in self._patterns.items():
            match = pattern.search(text)
            if match is None or text.startswith(AGENT_LINE_PREFIX):
                continue
            try:
                value = float(match[1].replace(",", ""))
            except (ValueError, AttributeError):
                continue  # not a number on this line
            if math.isfinite(value):  # JSON has no others
                self.values[name] = value
                found = True
        return found
