"""Metrics of programs that report none: regular expressions of the job, applied to its output."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tpufleet.agent.workload import processes
from tpufleet.agent.workload.exit_diagnosis import AGENT_LINE_PREFIX
from tpufleet.agent.workload.output import metric_matcher
from tpufleet.agent.workload.output.logs import LogFile

READ_BYTES = 1024 * 1024  # in one poll; more is skipped
MAX_LINE = 2000  # characters that are searched
# CPU time for one pattern and the output of one poll. Most need milliseconds.
PATTERN_SECONDS = 5.0
# By pattern: number of a line, and the value, or None for nan and inf.
_Matches = dict[str, list[tuple[int, float | None]]]
MATCHER = (sys.executable, "-I", "-S", metric_matcher.__file__)


class LogMetrics:
    """Reads what was added to the log. Every match becomes part of a point: the values of one line,
    with those of the lines after it until one of them changes. `values` has the last of each,
    unless that is nan or inf: an earlier one would hide that the program diverges."""

    def __init__(
        self,
        log: LogFile,
        patterns: Mapping[str, str],
        pattern_seconds: float = PATTERN_SECONDS,
    ) -> None:
        self._log = log
        self._patterns = dict(patterns)
        self._pattern_seconds = pattern_seconds
        self._matcher: _Matcher | None = None
        self._offset = 0
        self._rest = b""
        self.values: dict[str, float] = {}
        self._open: dict[str, float] = {}  # the newest point; the next lines may add to it
        self._settled = False
        self._points: list[dict[str, float]] = []

    def take_points(self, *, last: bool = False) -> list[dict[str, float]]:
        """Those found since the last call; the newest one once a poll has found nothing more of it,
        or at the end."""
        if self._open and (last or self._settled):
            self._points.append(self._open)
            self._open = {}
        points, self._points = self._points, []
        return points

    def poll(self) -> bool:
        """Whether a value was found."""
        found = self._read()
        self._settled = not found
        return found

    def _read(self) -> bool:
        if not self._patterns:
            return False
        if self._log.size - self._offset > READ_BYTES:
            self._offset, self._rest = self._log.size - READ_BYTES, b""
        data = self._log.read(self._offset, READ_BYTES)
        self._offset += len(data)
        # A progress bar ends its lines with a carriage return.
        *lines, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        self._rest = self._rest[-MAX_LINE:]
        texts = [line[:MAX_LINE].decode(errors="replace") for line in lines if line]
        by_name = self._search([text for text in texts if not text.startswith(AGENT_LINE_PREFIX)])
        by_line: dict[int, dict[str, float | None]] = {}
        for name, matches in by_name.items():
            for number, value in matches:
                by_line.setdefault(number, {})[name] = value
        for _, values in sorted(by_line.items()):
            self._add(values)
        return bool(by_line)

    def _add(self, found: dict[str, float | None]) -> None:
        values = {name: value for name, value in found.items() if value is not None}
        for name in found.keys() - values.keys():
            self.values.pop(name, None)
        if any(self._open.get(name, value) != value for name, value in values.items()):
            self._points.append(self._open)
            self._open = {}
        self._open = {**self._open, **values}
        self.values |= values

    def close(self) -> None:
        if self._matcher is not None:
            self._matcher.close()
            self._matcher = None

    def _search(self, lines: Sequence[str]) -> _Matches:
        """Without the patterns that take too long, which are switched off."""
        while lines and self._patterns:
            if self._matcher is None:
                self._matcher = _Matcher(self._patterns, self._pattern_seconds)
            values, failed = self._matcher.search(lines)
            if values is not None:
                return values
            self._switch_off(failed)
        return {}

    def _switch_off(self, name: str) -> None:
        assert self._matcher is not None
        timed_out = self._matcher.timed_out()
        self.close()
        if name not in self._patterns:
            self._patterns.clear()
            self._log.note("metrics: switched off: the process that searches the output failed")
            return
        pattern = self._patterns.pop(name)
        reason = (
            f"took more than {self._pattern_seconds:g} s; avoid repetitions within repetitions"
            if timed_out
            else "cannot be searched for"
        )
        self._log.note(f"metrics: {name} is switched off: its pattern {pattern!r} {reason}")


class _Matcher:
    def __init__(self, patterns: Mapping[str, str], seconds: float) -> None:
        with processes.agent_children() as register:
            self._process = subprocess.Popen(
                MATCHER,
                stdin=subprocess.PIPE,  # its end ends the process
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
            )
            register(self._process.pid)
        self._first = {"patterns": dict(patterns), "seconds": seconds}
        self._started = False

    def search(self, lines: Sequence[str]) -> tuple[_Matches | None, str]:
        """The values; None when the process ended, with the name of the pattern at which it did."""
        assert self._process.stdin and self._process.stdout
        messages = [lines] if self._started else [self._first, lines]
        self._started, name = True, ""
        try:
            for message in messages:
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None, name
        for answer in map(json.loads, self._process.stdout):
            if isinstance(answer, dict):
                return answer, name
            name = answer
        return None, name

    def timed_out(self) -> bool:
        """Once it has ended."""
        return self._process.wait() == -signal.SIGPROF

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        processes.forget_agent_child(self._process.pid)
