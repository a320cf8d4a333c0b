"""Failure signatures: the end reason that the last log lines of a failed program point to.

Only the tail of a process that exited with a failure is searched, and of it only the lines that
show how it failed, so a line that merely quotes a signature has no effect. An uncaught Python
exception decides, whatever was printed before it and whatever the runtime prints at shutdown. A
traceback after which the program continued was handled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from tpufleet.model.job.end_reasons import EndReason

# Some launchers prefix each line with the rank.
_PREFIX = re.compile(r"^\[(?:rank|host|worker|task)?[ :]?\d+\]:?\s?")
_TRACEBACK = re.compile(r"^\s*Traceback \(most recent call last\):")
_CHAINED = re.compile(
    r"^(The above exception was the direct cause of|During handling of the above exception)"
)
# A secondary failure during shutdown, never the cause.
_AT_SHUTDOWN = re.compile(
    r"^(Exception ignored|Error in (atexit|sys\.excepthook)|Exception in thread)"
)
# Lines of the C++ runtime and its crash reports: "E0101 12:00:00.1  7 client.cc:80] …".
_RUNTIME = re.compile(
    r"^([IWEF]\d{4} \d\d:\d\d:|\d{4}-\d\d-\d\d[ T][\d:.,]+:? [IWEF] "
    r"|\*\*\* |\s+@\s+0x|Fatal Python error|(Current t|T)hread 0x|Extension modules"
    r"|terminate called|Aborted|Segmentation fault|wandb: |--------+$"
    r"|For simplicity, JAX has removed)"
)
_NOT_AN_ERROR = re.compile(
    r"^([IW]\d{4} \d\d:\d\d:|\d{4}-\d\d-\d\d[ T][\d:.,]+:? [IW] )"
    r"|\b(DEBUG|INFO|WARN|WARNING)\b|^\s*(warning|info|debug)\b|Warning: ",
    re.ASCII,
)


def relevant_lines(lines: Sequence[str]) -> list[str]:
    """The lines that show how the program failed, the most relevant first."""
    plain = [_PREFIX.sub("", line.rstrip("\n")) for line in lines]
    start = _last_uncaught(plain)
    if start is None:
        return _error_lines(plain)
    frames_end = _exception_line(plain, start)
    after, output = plain[frames_end + 1 :], _output_after(plain, frames_end)
    relevant = _exceptions_of_chain(plain, start, frames_end) + _error_lines(output)
    if any(line.strip() and not line[0].isspace() for line in output):
        # Either the message has several lines, or the program continued.
        relevant += _error_lines(after)
    return relevant


def uncaught_exception(lines: Sequence[str]) -> str:
    """The line of the Python exception that ended the program; empty if none did."""
    plain = [_PREFIX.sub("", line.rstrip("\n")) for line in lines]
    start = _last_uncaught(plain)
    if start is None:
        return ""
    at = _exception_line(plain, start)
    continued = any(line.strip() for line in _output_after(plain, at))
    return "" if continued else plain[at].strip()[:500]


def _output_after(plain: Sequence[str], exception: int) -> list[str]:
    """What the program itself printed between its exception and its shutdown."""
    after = plain[exception + 1 :]
    shutdown = next((at for at, line in enumerate(after) if _AT_SHUTDOWN.match(line)), len(after))
    return [line for line in after[:shutdown] if not _RUNTIME.match(line)]


def _error_lines(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if line.strip() and not _NOT_AN_ERROR.search(line)]


def _last_uncaught(lines: Sequence[str]) -> int | None:
    starts = [at for at, line in enumerate(lines) if _TRACEBACK.match(line)]
    for at in reversed(starts):
        before = next((line for line in reversed(lines[:at]) if line.strip()), "")
        if not _AT_SHUTDOWN.match(before):
            return at
    return None


def _exception_line(lines: Sequence[str], start: int) -> int:
    """Index of the "ValueError: …" that closes the traceback."""
    for at in range(start + 1, len(lines)):
        if lines[at].strip() and not lines[at][0].isspace():
            return at
    return len(lines) - 1


def _exceptions_of_chain(lines: Sequence[str], start: int, closing: int) -> list[str]:
    """The exception, and those it was raised from, the root first."""
    chain = [lines[closing]]
    at = start
    while at > 0:
        before = [index for index in range(at) if lines[index].strip()]
        if not before or not _CHAINED.match(lines[before[-1]]):
            break
        at = next(
            (index for index in reversed(range(before[-1])) if _TRACEBACK.match(lines[index])), 0
        )
        chain.append(lines[_exception_line(lines, at)])
    return chain[::-1]


class Signature(msgspec.Struct, frozen=True):
    reason: EndReason
    pattern: re.Pattern[str]


def _signatures(reason: EndReason, *patterns: str) -> list[Signature]:
    return [Signature(reason, re.compile(pattern)) for pattern in patterns]


# A status name counts in the position of a status ("…: UNAVAILABLE: …"), not inside a sentence.
_STATUS = r"(?:^|[:;\]=>]\s*|\bstatus:?\s+)"

# Most specific first: the first that matches any line decides.
SIGNATURES: tuple[Signature, ...] = tuple(
    _signatures(EndReason.DISK_FULL, r"RESOURCE_EXHAUSTED.*(ENOSPC|No space left on device)")
    + _signatures(
        EndReason.OUT_OF_HOST_MEMORY,
        r"RESOURCE_EXHAUSTED: Out of memory allocating \d+ bytes",  # XLA on CPU
    )
    + _signatures(
        EndReason.OUT_OF_HBM,
        r"Allocation type: HLO",
        r"Ran out of memory in memory space hbm",
        r"RESOURCE_EXHAUSTED.*(?i:\bHBM|hbm\b|_HBM\d)",
        r"RESOURCE_EXHAUSTED: .*\bAttempting to (reserve|allocate)\b",
        r"RESOURCE_EXHAUSTED: (Out of memory|Error allocating|Failed to allocate)",
    )
    + _signatures(
        EndReason.DISK_FULL,
        r"No space left on device",
        r"\bENOSPC\b",
        r"Disk quota exceeded",
        r"database or disk is full",
    )
    + _signatures(
        EndReason.DEVICE_BUSY,
        r"The TPU is already in use",
        r"Could not open any log file",
        r"libtpu(\.so)?.*(lockfile|already in use)",
        r"Unable to initialize backend 'tpu'.*(in use|busy)",
        r"open\(/dev/(accel|vfio/)\S*\).*(?i:busy|not permitted)",
    )
    + _signatures(
        EndReason.OUT_OF_HOST_MEMORY,
        r"^(\w+\.)*\w*MemoryError\b",
        r"std::bad_alloc",
        r"Cannot allocate memory",
        r"DefaultCPUAllocator: (can't|not enough) ",
    )
    + _signatures(
        EndReason.CONNECTION_LOST,
        r"(?i)(?<!['\"`])\bgRPC error\b(?!['\"`])",
        _STATUS + r"(UNAVAILABLE|DEADLINE_EXCEEDED): ",
        r"StatusCode\.(UNAVAILABLE|DEADLINE_EXCEEDED)",
        r"(?i)coordination (service|agent).*(heartbeat|error|unavailable|shut ?down|connect)",
        r"(?i)(/task:\d+|coordination|failed to send).*\bheartbeats?\b",
        r"Terminating process because the JAX distributed service detected fatal errors",
        r"(?i)\bgloo\b.*(failed|reset by peer|closed by peer|refused|time(d )? ?out|broken pipe)",
        r"(?i)connection (reset|closed) by (peer|remote)",
    )
)

# Lines that look like errors, or are the last ones, and say nothing about the end.
BENIGN: tuple[re.Pattern[str], ...] = tuple(
    re.compile(pattern)
    for pattern in (
        r"MessageFactory.*GetPrototype",
        r"ERROR: pip's dependency",
        r"lead to an error eventually; if no error is raised",
        r"^\[Gloo\] Rank \d+ is connected to ",
        r"Failed to disconnect from coordination service",  # at shutdown, after the cause
    )
)


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """The reason that the last log lines point to, with the line."""

    reason: EndReason
    line: str


def is_benign(line: str) -> bool:
    return any(benign.search(line) for benign in BENIGN)


def find_evidence(lines: Iterable[str]) -> Evidence | None:
    """The most specific reason that the lines point to; None without a known signature."""
    relevant = relevant_lines([line for line in lines if not is_benign(line)])
    for signature in SIGNATURES:
        for line in relevant:
            if signature.pattern.search(line):
                return Evidence(reason=signature.reason, line=line.strip()[:500])
    return None
