"""Preemption and maintenance notices for this host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event

from tpufleet.agent import threads
from tpufleet.agent.metadata import MetadataClient
from tpufleet.backoff import Backoff
from tpufleet.model.fleet.hosts import NoticeKind

POLL_SECONDS = 0.1
INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.5, 15.0


OnNotice = Callable[[NoticeKind], None]
# Calls the function for each notice until the event is set. Runs in its own thread.
WatchNotices = Callable[[OnNotice, Event], None]


def watch_file(path: Path, on_notice: OnNotice, stopped: Event) -> None:
    """Polls for a file that contains the notice kind (simulated slices, pods)."""
    last: NoticeKind | None = None
    while not stopped.wait(POLL_SECONDS):
        try:
            kind = NoticeKind(path.read_text().strip())
        except (OSError, ValueError):
            continue  # none, or it is partly written
        if kind is not last:
            last = kind
            on_notice(kind)


def watch_metadata(metadata: MetadataClient, on_notice: OnNotice, stopped: Event) -> None:
    """Watches the metadata values `preempted` and `maintenance-event` by hanging GET: the server
    answers when a value changes, so a notice arrives without polling delay."""

    def follow(path: str, parse: Callable[[str], NoticeKind | None]) -> None:
        etag, last = "", None
        backoff = Backoff(first=INITIAL_BACKOFF_SECONDS, longest=MAX_BACKOFF_SECONDS)
        while not stopped.is_set():
            try:
                value, etag = metadata.wait_for_change(path, etag)
            except (OSError, ValueError) as error:
                threads.log(f"cannot read {path} from the metadata server; retrying: {error}")
                stopped.wait(backoff.failed())
                continue
            backoff.succeeded()
            kind = parse(value.strip())
            if kind is not None and kind is not last:
                on_notice(kind)
            last = kind

    threads.start("maintenance notices", lambda: follow("maintenance-event", _maintenance))
    follow("preempted", _preempted)


def _preempted(value: str) -> NoticeKind | None:
    return NoticeKind.PREEMPTED if value.upper() == "TRUE" else None


def _maintenance(value: str) -> NoticeKind | None:
    return NoticeKind.MAINTENANCE if value and value.upper() != "NONE" else None
