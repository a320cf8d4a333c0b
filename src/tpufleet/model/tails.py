"""The shape of a failed program's last lines: which of them tell how it died.

An uncaught Python exception decides, whatever was printed before it, and whatever the runtime
says after it while it shuts down. A traceback after which the program went on was handled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Some launchers put the rank before each line.
_PREFIX = re.compile(r"^\[(?:rank|host|worker|task)?[ :]?\d+\]:?\s?")
_TRACEBACK = re.compile(r"^\s*Traceback \(most recent call last\):")
_CHAINED = re.compile(
    r"^(The above exception was the direct cause of|During handling of the above exception)"
)
# A second failure, on the way out: never the reason for going.
_ON_THE_WAY_OUT = re.compile(
    r"^(Exception ignored|Error in (atexit|sys\.excepthook)|Exception in thread)"
)
# Lines of the C++ runtime and of its crash reports: "E0101 12:00:00.1  7 client.cc:80] …".
_RUNTIME = re.compile(
    r"^([IWEF]\d{4} \d\d:\d\d:|\d{4}-\d\d-\d\d[ T][\d:.,]+:? [IWEF] "
    r"|\*\*\* |\s+@\s+0x|Fatal Python error|(Current t|T)hread 0x|Extension modules"
    r"|terminate called|Aborted|Segmentation fault|wandb: |--------+$"
    r"|For simplicity, JAX has removed)"
)
_NOT_TROUBLE = re.compile(
    r"^([IW]\d{4} \d\d:\d\d:|\d{4}-\d\d-\d\d[ T][\d:.,]+:? [IW] )"
    r"|\b(DEBUG|INFO|WARN|WARNING)\b|^\s*(warning|info|debug)\b|Warning: ",
    re.ASCII,
)


def relevant_lines(lines: Sequence[str]) -> list[str]:
    """The lines to believe, the most telling first."""
    plain = [_PREFIX.sub("", line.rstrip("\n")) for line in lines]
    start = _last_uncaught(plain)
    if start is None:
        return _troubled(plain)
    frames_end = _exception_line(plain, start)
    after = plain[frames_end + 1 :]
    out = next((at for at, line in enumerate(after) if _ON_THE_WAY_OUT.match(line)), len(after))
    said = [line for line in after[:out] if not _RUNTIME.match(line)]
    told = _exceptions_of_chain(plain, start, frames_end) + _troubled(said)
    if any(line.strip() and not line[0].isspace() for line in said):
        # Either the message has several lines, or the program went on.
        told += _troubled(after)
    return told


def _troubled(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if line.strip() and not _NOT_TROUBLE.search(line)]


def _last_uncaught(lines: Sequence[str]) -> int | None:
    starts = [at for at, line in enumerate(lines) if _TRACEBACK.match(line)]
    for at in reversed(starts):
        before = next((line for line in reversed(lines[:at]) if line.strip()), "")
        if not _ON_THE_WAY_OUT.match(before):
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
