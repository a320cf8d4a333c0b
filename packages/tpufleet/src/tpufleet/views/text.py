"""How values are displayed: ages, amounts, colours of states."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta, tzinfo

from tpufleet.model.api_types import JobExplanation, JobRow
from tpufleet.model.events import Event
from tpufleet.model.fleet.hosts import Progress
from tpufleet.model.job.jobs import JobState
from tpufleet.model.people.costs import Badput

GOOD, BUSY, AMBER, BAD, QUIET = "green", "cyan", "dark_orange", "red", "dim"

# States and end reasons share names, so that a name has one colour everywhere.
COLOURS: dict[str, str] = {
    state: colour
    for colour, states in {
        QUIET: ("queued", "waiting", "submitted", "requested", "releasing", "gone", "cancelled"),
        BUSY: ("booting", "starting", "setup"),
        "bold cyan": ("running",),
        GOOD: ("ready", "finished"),
        "bold green": ("succeeded",),
        AMBER: ("recovering", "stopping", "doomed", "preempted", "maintenance", "superseded",
                "resized", "host_lost", "lost"),
        BAD: ("hung", "user_error", "timeout", "out_of_hbm", "out_of_host_memory", "disk_full",
              "setup_failed"),
        "bold red": ("failed",),
    }.items()
    for state in states
}  # fmt: skip

BADPUT = {
    Badput.PROGRAM_STARTUP: "start",
    Badput.TPU_INITIALIZATION: "connecting",
    Badput.CHECKPOINT_RESTORE: "restoring",
    Badput.CHECKPOINT_SAVE: "saving",
    Badput.WASTED_PROGRESS: "steps again",
    Badput.INFRASTRUCTURE_RECOVERY: "recovery",
    Badput.OTHER: "idle",
    Badput.UNKNOWN: "unknown",
}

# Control characters but tab and newline; line separators; and the bidirectional controls of Unicode
# (UAX #9), which show a text in another order than it has.
_CONTROLS = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
_CONTROL = re.compile(f"[{_CONTROLS}]")
# In the output of a program: colours and carriage returns, and sequences that do anything else
# (ECMA-48).
_COLOUR = r"\x1b\[[0-9;:]*m"
_SEQUENCE = re.compile(
    rf"(?P<kept>{_COLOUR}|\r)"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\r\n]*(?:\x07|\x1b\\|\x9c|)"  # strings
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|\x1b[ -/]*[0-~]?"
    rf"|[{_CONTROLS}]"
)
_HOST = re.compile(r"\[\d+\] ")  # before a line
# What jax.distributed prints on CPU devices, up to 80 lines for each process; threads interleave
# these pieces.
_CONNECTIONS = re.compile(
    r"(?:\[\d+\] )?(?=.*peer ranks)(?:\[Gloo\] Rank |\d+ is connected to \d+ peer ranks\. "
    r"|Expected number of connected peer ranks is : \d+\s*)+"
)


def colour(state: str) -> str:
    """The style of a state or end reason; empty if it has none."""
    return COLOURS.get(state, "")


def without_control_characters(text: str) -> str:
    """Untrusted text, without control sequences for the terminal."""
    return _CONTROL.sub("�", text)


def program_output(line: str) -> str | None:
    """A line of untrusted output as people read it, also from a pipe: it keeps its colours and its
    progress bars, each state of which begins with the host, and can do nothing else to a terminal.
    None: nobody needs it."""
    if _CONNECTIONS.fullmatch(line):
        return None
    shown = _SEQUENCE.sub(lambda found: found["kept"] or "", line)
    if host := _HOST.match(shown):
        shown = shown.replace("\r", f"\r{host[0]}")
    return f"{shown}\x1b[0m" if "\x1b" in shown else shown


def program_lines(pieces: Iterable[str]) -> Iterator[str]:
    """The same for a text in pieces, which may end within a sequence. Newlines are kept."""
    rest = ""
    for piece in pieces:
        *lines, rest = (rest + piece).split("\n")
        shown = map(program_output, lines)
        yield "".join(f"{line}\n" for line in shown if line is not None)
    yield program_output(rest) or ""


def one_line(text: str) -> str:
    return without_control_characters(" ".join(text.split()))


def duration(length: timedelta) -> str:
    """The two largest units: `1 d 4 h`, `3 min`, `12 s`."""
    seconds = max(int(length.total_seconds()), 0)
    if seconds < 60:
        return f"{seconds} s"
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if minutes < 60:
        return f"{minutes} min"
    if hours < 24:
        return f"{hours} h {minutes % 60} min" if minutes % 60 else f"{hours} h"
    return f"{days} d {hours % 24} h" if hours % 24 else f"{days} d"


def age(at: datetime | None, now: datetime | None = None) -> str:
    """`3 min ago`, `in 5 min`, `just now`; a dash for never."""
    if at is None:
        return "-"
    since = (now or datetime.now(UTC)) - at
    if abs(since) < timedelta(seconds=1):
        return "just now"
    return f"{duration(since)} ago" if since > timedelta(0) else f"in {duration(-since)}"


SILENT_AFTER = timedelta(minutes=10)  # longer than a step and most checkpoints

_time_zone: ContextVar[tzinfo | None] = ContextVar("time_zone", default=None)


def show_times_in(zone: tzinfo | None) -> None:
    """None: the time zone of this machine."""
    _time_zone.set(zone)


def local_time(at: datetime, now: datetime | None = None) -> str:
    """Local time, with the date when that is not today: `14:03:11`, `2026-01-01 14:03:11`."""
    zone = _time_zone.get()
    local = at.astimezone(zone)
    today = (now or datetime.now().astimezone()).astimezone(zone).date()
    return local.strftime("%H:%M:%S" if local.date() == today else "%Y-%m-%d %H:%M:%S")


def progress(reported: Progress | None) -> str:
    if reported is None:
        return "-"
    if reported.step is None:
        at = reported.checkpoint_step
        return reported.message or ("-" if at is None else f"checkpoint {at}")
    if not reported.total:
        return f"step {reported.step}"
    return f"{reported.step}/{reported.total} ({min(reported.step / reported.total, 1):.0%})"


def job_progress(row: JobRow, now: datetime | None = None) -> str:
    """With the age of the last step, or else of the last output, of a running job that has been
    silent for long."""
    shown, reported = progress(row.progress), row.progress or Progress()
    at = reported.at or reported.output_at
    if at is None or row.state is not JobState.RUNNING:
        return shown
    silence = (now or datetime.now(UTC)) - at
    if silence <= SILENT_AFTER:
        return shown
    return f"{shown}, {age(at, now)}" if reported.at else f"no output for {duration(silence)}"


# By what programs print. `compiled` is over.
_ACTIVITIES = {
    "compiling": re.compile(r"\b[Cc]ompil(?:ing|ation|e)\b"),
    "sampling": re.compile(r"\b[Ss]ampling\b"),
    "running": re.compile(r"\b(?:[Ee]poch\s|ep\s*=\s*)(\d{1,6}(?:\.\d+)?)"),
    "initializing": re.compile(r"\b[Ii]nitializing\b"),
    "staging": re.compile(r"\b[Ss]taging\b"),
}


def activity(output: str) -> str:
    """What the newest line that names an activity says, for people: `compiling`, `running, epoch
    3`; empty when no line does."""
    for line in reversed(output.splitlines()):
        for name, pattern in _ACTIVITIES.items():
            if match := pattern.search(line):
                return f"{name}, epoch {match[1]}" if match.groups() else name
    return ""


def metrics(reported: Progress | None) -> str:
    """`loss 0.1234, lr 0.01`."""
    values = (reported.metrics or {}) if reported is not None else {}
    return ", ".join(f"{one_line(name)} {value:.4g}" for name, value in values.items())


def event(occurred: Event, now: datetime | None = None, *, about: bool = False) -> str:
    """`14:03:11  preempted  slice a-1 was preempted (by ada)`; with `about`, what it happened to,
    for a list of several things."""
    message = one_line(occurred.message)
    by = f" (by {occurred.by})" if occurred.by and occurred.by not in message else ""
    subject = occurred.job_id or occurred.slice_id or occurred.pool or "-"
    shown = f"{one_line(subject):<12}  " if about else ""
    return f"{local_time(occurred.at, now)}  {occurred.state:<10}  {shown}{message}{by}"


def attempt_heading(number: int) -> str:
    """Between the output of two attempts."""
    return f"--- attempt {number} ---"


def size(count: float) -> str:
    """`312 B`, `4.2 MB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} PB"


def counted(count: int, noun: str) -> str:
    """`1 job`, `3 jobs`, `2 slices`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def explanation_lines(explanation: JobExplanation) -> Iterator[tuple[str, str]]:
    """What `tpu why` says, each line with its style."""
    yield one_line(explanation.message), colour(explanation.state)
    for detail in explanation.details:
        yield f"  - {one_line(detail)}", ""
    if explanation.until is not None:
        when = age(explanation.until)
        yield f"  - next change {when} ({local_time(explanation.until)})", ""
    for attempt in explanation.attempts[:-1]:  # the details cover the latest one
        state = str(attempt.end_reason or attempt.state)
        message = f"  - earlier: attempt {attempt.number}: {one_line(attempt.message)}"
        yield message, colour(state)
    if explanation.advice:
        yield f"  next: {one_line(explanation.advice)}", ""
