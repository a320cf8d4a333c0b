"""How facts read on a screen: ages, amounts, colours of states. "Preempted is amber" lives here."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from tpufleet.model.events import Event
from tpufleet.model.hosts import Progress

GOOD, BUSY, AMBER, BAD, QUIET = "green", "cyan", "dark_orange", "red", "dim"

# States and reasons share their words, so that one word has one colour wherever it stands.
COLOURS: dict[str, str] = {
    "queued": QUIET,
    "waiting": QUIET,
    "submitted": QUIET,
    "requested": QUIET,
    "booting": BUSY,
    "starting": BUSY,
    "setup": BUSY,
    "running": "bold cyan",
    "ready": GOOD,
    "recovering": AMBER,
    "stopping": AMBER,
    "doomed": AMBER,
    "preempted": AMBER,
    "maintenance": AMBER,
    "superseded": AMBER,
    "releasing": QUIET,
    "gone": QUIET,
    "cancelled": QUIET,
    "succeeded": "bold green",
    "finished": GOOD,
    "failed": "bold red",
    "host_lost": AMBER,
    "lost": AMBER,
    "hung": BAD,
    "user_error": BAD,
    "timeout": BAD,
    "out_of_hbm": BAD,
    "out_of_host_memory": BAD,
    "disk_full": BAD,
    "setup_failed": BAD,
}

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def colour(word: str) -> str:
    """The style of a state; empty where it has none."""
    return COLOURS.get(word, "")


def without_control_characters(text: str) -> str:
    """Text from elsewhere, unable to move the cursor or change the terminal."""
    return _CONTROL.sub("�", text)


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


def age(at: datetime | None, now: datetime) -> str:
    """`3 min ago`, `in 5 min`, `just now`; a dash for never."""
    if at is None:
        return "-"
    since = now - at
    if abs(since) < timedelta(seconds=1):
        return "just now"
    return f"{duration(since)} ago" if since > timedelta(0) else f"in {duration(-since)}"


def time_of_day(at: datetime) -> str:
    """Time of day where the reader is."""
    return at.astimezone().strftime("%H:%M:%S")


def progress(reported: Progress | None) -> str:
    if reported is None or reported.step is None:
        return reported.message if reported is not None and reported.message else "-"
    if not reported.total:
        return f"step {reported.step}"
    return f"{reported.step}/{reported.total} ({min(reported.step / reported.total, 1):.0%})"


def metrics(reported: Progress | None) -> str:
    """`loss 0.1234, lr 0.01`."""
    found = (reported.metrics or {}) if reported is not None else {}
    return ", ".join(f"{one_line(name)} {value:.4g}" for name, value in found.items())


def event(happened: Event) -> str:
    """`14:03:11  preempted  slice a-1 was preempted by the provider`."""
    by = f" (by {happened.by})" if happened.by and happened.by not in happened.message else ""
    return f"{time_of_day(happened.at)}  {happened.state:<10}  {one_line(happened.message)}{by}"


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
