"""Validation of identifiers that come from clients and become part of a path or a row."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from datetime import timedelta
from typing import TypeVar

from tpufleet.errors import BadInput
from tpufleet.model.fleet.hosts import HostId
from tpufleet.model.job.attempts import AttemptId
from tpufleet.model.job.jobs import JobId
from tpufleet.model.values.durations import to_builtin

T = TypeVar("T", int, timedelta)
SECOND = timedelta(seconds=1)  # the shortest of most durations

# None of these can contain a slash, a leading dot or a control character.
_JOB = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?")
_ATTEMPT = re.compile(r"([a-z0-9][a-z0-9-]{0,63})\.([0-9]{1,6})")
_HOST = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]{0,127})/(0|[1-9][0-9]{0,4})")
_SECRET = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_USER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")


def parse_job_id(text: str) -> JobId:
    if not _JOB.fullmatch(text):
        raise BadInput(
            f"invalid job id {text[:80]!r}: use at most 64 lower-case letters, digits and dashes"
        )
    return JobId(text)


def parse_attempt_id(text: AttemptId | str) -> tuple[JobId, int]:
    match = _ATTEMPT.fullmatch(text)
    if match is None:
        raise BadInput(f"invalid attempt id {text[:80]!r}: expected JOB.NUMBER, such as train.0")
    return JobId(match[1]), int(match[2])


def parse_host_id(text: HostId | str) -> tuple[str, int]:
    match = _HOST.fullmatch(text)
    if match is None:
        raise BadInput(f"invalid host id {text[:80]!r}: expected SLICE/NUMBER, such as my-slice/0")
    return match[1], int(match[2])


def check_secret_name(text: str) -> str:
    return _check_name("secret", _SECRET, text, "dots, dashes and underscores")


def check_user_name(text: str) -> str:
    return _check_name("user", _USER, text, "dots, dashes, underscores and @")


def _check_name(kind: str, pattern: re.Pattern[str], text: str, signs: str) -> str:
    if not pattern.fullmatch(text):
        raise BadInput(
            f"invalid {kind} name {text[:80]!r}: use at most 64 letters, digits, {signs}, starting "
            "with a letter or digit"
        )
    return text


def check_range(field: str, value: T, least: T, most: T) -> None:
    """Of numbers, or durations."""
    if not least <= value <= most:
        shown = (to_builtin(x) if isinstance(x, timedelta) else x for x in (least, most, value))
        raise BadInput("{}: must be from {} to {}, not {}".format(field, *shown))


def check_text(field: str, text: str, limit: int) -> str:
    if len(text) > limit or "\0" in text:
        raise BadInput(f"{field}: must be at most {limit} characters, without null characters")
    return text


def suggestion(name: str, known: Iterable[str]) -> str:
    """Text to append to an error: `; did you mean …?`, or the known names, or nothing."""
    known = sorted(known)
    close = difflib.get_close_matches(name[:60], known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known: {', '.join(known[:10])}" if known else ""
