"""Checks of what comes from clients and becomes part of a path or a row."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

from tpufleet import schema
from tpufleet.errors import must_be, too_long
from tpufleet.model.fleet.hosts import HostId
from tpufleet.model.job.attempts import AttemptId
from tpufleet.model.job.jobs import JobId
from tpufleet.model.values.durations import to_builtin

T = TypeVar("T", int, timedelta)
SECOND = timedelta(seconds=1)  # the shortest of most durations

# None of these can contain a slash, a leading dot or a control character, but the one of a host.
_JOB = schema.text(
    "job id",
    r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?",
    example="train-1",
    rule="a-z, 0-9 and -, at most 64",
)
_ATTEMPT = schema.text("attempt id", r"[a-z0-9][a-z0-9-]{0,63}\.[0-9]{1,6}", example="train-1.0")
_HOST = schema.text(
    "host id", r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}/(?:0|[1-9][0-9]{0,4})", example="my-slice/0"
)
_SECRET = schema.text(
    "secret name",
    r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}",
    example="hf-token",
    rule="letters, digits, . _ and -, at most 64",
)
_USER = schema.text(
    "user name",
    r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}",
    example="ada",
    rule="letters, digits, . _ @ and -, at most 64",
)


def parse_job_id(text: str) -> JobId:
    return JobId(schema.check(_JOB, text))


def parse_attempt_id(text: AttemptId | str) -> tuple[JobId, int]:
    job, _, number = schema.check(_ATTEMPT, text).rpartition(".")
    return JobId(job), int(number)


def parse_host_id(text: HostId | str) -> tuple[str, int]:
    tpu_slice, _, index = schema.check(_HOST, text).rpartition("/")
    return tpu_slice, int(index)


def check_secret_name(text: str) -> str:
    return str(schema.check(_SECRET, text))


def check_user_name(text: str) -> str:
    return str(schema.check(_USER, text))


def check_range(field: str, value: T, least: T, most: T) -> None:
    """Of numbers, or durations."""
    if not least <= value <= most:
        shown = (to_builtin(x) if isinstance(x, timedelta) else x for x in (least, most, value))
        shortest, longest, given = shown
        raise must_be(f"from {shortest} to {longest}", given, field)


def check_text(field: str, text: str, limit: int) -> str:
    if len(text) > limit or "\0" in text:
        raise too_long(limit, field=field)
    return text
