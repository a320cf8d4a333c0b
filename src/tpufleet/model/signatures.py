"""Log signatures: what the last lines of a program that failed say about why.

Only the tail of a process that exited with a failure is read, and of it only the lines that
tell how it died (`tails`), so a line that merely quotes one of these strings causes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tpufleet.model import tails
from tpufleet.model.endings import EndReason


@dataclass(frozen=True, slots=True)
class Signature:
    reason: EndReason
    pattern: re.Pattern[str]


def _signatures(reason: EndReason, *patterns: str) -> list[Signature]:
    return [Signature(reason, re.compile(pattern)) for pattern in patterns]


# A status word counts where a status stands ("…: UNAVAILABLE: …"), not inside a sentence.
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

# Lines that look like trouble and are not: read past them.
BENIGN: tuple[re.Pattern[str], ...] = tuple(
    re.compile(pattern)
    for pattern in (
        r"MessageFactory.*GetPrototype",
        r"ERROR: pip's dependency",
        r"lead to an error eventually; if no error is raised",
        r"Failed to disconnect from coordination service",  # on the way out, after the cause
    )
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What the last lines of a failed process point to, and the line that says so."""

    reason: EndReason
    line: str


def find_evidence(lines: Iterable[str]) -> Evidence | None:
    """The most specific reason that the lines give, or None when they say nothing known."""
    told = tails.relevant_lines(
        [line for line in lines if not any(benign.search(line) for benign in BENIGN)]
    )
    for signature in SIGNATURES:
        for line in told:
            if signature.pattern.search(line):
                return Evidence(reason=signature.reason, line=line.strip()[:500])
    return None
