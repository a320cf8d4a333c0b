"""Searches lines for the patterns of a job, in a process of its own.

A regular expression can take years on a short line (`(a+)+b`). The kernel then ends this process,
and the agent, whose threads would have waited, goes on. Run as a script, with the standard library
alone. Lines of JSON on its standard input: first the patterns by name and the seconds that each may
take, then lists of lines. For each list it answers with the name of each pattern before it is
searched for, and then with the values by pattern, each with the number of its line.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import resource
import signal
import sys

MAX_MEMORY = 2**30  # of address space; Python itself needs about 30 MB
MAX_MATCHES = 500  # of one pattern and one list: the last ones


def matches(pattern: re.Pattern[str], lines: list[str]) -> list[tuple[int, float | None]]:
    """The number of each line with a value, and the value. None: nan or inf, which JSON lacks."""
    found: list[tuple[int, float | None]] = []
    for number in range(len(lines) - 1, -1, -1):
        match = pattern.search(lines[number])
        if match is None:
            continue
        try:
            value = float(match[1].replace(",", ""))
        except (ValueError, AttributeError, IndexError):
            continue  # not a number on this line
        found.append((number, value if math.isfinite(value) else None))
        if len(found) == MAX_MATCHES:
            break
    return found[::-1]


def serve(patterns: dict[str, str], seconds: float) -> None:
    for text in sys.stdin:
        lines, values = json.loads(text), {}
        for name, pattern in patterns.items():
            _answer(name)
            signal.setitimer(signal.ITIMER_PROF, seconds)  # of CPU time; SIGPROF ends the process
            values[name] = matches(re.compile(pattern), lines)
            signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(values)


def _answer(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with contextlib.suppress(OSError, ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    settings = json.loads(sys.stdin.readline())
    serve(settings["patterns"], settings["seconds"])
