"""Preemption and maintenance notices for this host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Protocol

from tpufleet.agent import threads
from tpufleet.agent.metadata import MetadataClient
from tpufleet.backoff import Backoff
from tpufleet.model.fleet.hosts import NoticeKind

POLL_SECONDS = 0.1
INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.5, 15.0


class NoticeWatcher(Protocol):
    def watch(self, on_notice: Callable[[NoticeKind], None], stopped: Event) -> None:
        """Call `on_notice` for each notice until `stopped` is set. Runs in its own thread."""
        ...


class NoNoticeWatcher:
    """For hosts that receive no notices."""

    def watch(self, on_notice: Callable[[NoticeKind], None], stopped: Event) -> None:
        stopped.wait()


class NoticeFileWatcher:
    """Polls for a file that contains the notice kind (simulated slices)."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def watch(self, on_notice: Callable[[NoticeKind], None], stopped: Event) -> None:
        last: NoticeKind | None = None
        while not stopped.wait(POLL_SECONDS):
            kind = self._read()
            if kind is not None and kind is not last:
                last = kind
                on_notice(kind)

    def _read(self) -> NoticeKind | None:
        """None also while the file is partly written or unreadable."""
        try:
            return NoticeKind(self._path.read_text().strip())
        except (OSError, ValueError):
            return None


class MetadataNoticeWatcher:
    """Watches the metadata values `preempted` and `maintenance-event` by hanging GET: the server
    answers when a value changes, so a notice arrives without polling delay."""

    def __init__(self, metadata: MetadataClient) -> None:
        self._metadata = metadata

    def watch(self, on_notice: Callable[[NoticeKind], None], stopped: Event) -> None:
        threads.start(
            "maintenance notices",
            lambda: self._follow("maintenance-event", _maintenance, on_notice, stopped),
        )
        self._follow("preempted", _preempted, on_notice, stopped)

    def _follow(
        self,
        path: str,
        parse: Callable[[str], NoticeKind | None],
        on_notice: Callable[[NoticeKind], None],
        stopped: Event,
    ) -> None:
        etag, last = "", None
        backoff = Backoff(first=INITIAL_BACKOFF_SECONDS, longest=MAX_BACKOFF_SECONDS)
        while not stopped.is_set():
            try:
                value, etag = self._metadata.wait_for_change(path, etag)
            except (OSError, ValueError) as error:
                threads.log(f"cannot read {path} from the metadata server; retrying: {error}")
                stopped.wait(backoff.failed())
                continue
            backoff.succeeded()
            kind = parse(value.strip())
            if kind is not None and kind is not last:
                on_notice(kind)
            last = kind


def _preempted(value: str) -> NoticeKind | None:
    return NoticeKind.PREEMPTED if value.upper() == "TRUE" else None


def _maintenance(value: str) -> NoticeKind | None:
    return NoticeKind.MAINTENANCE if value and value.upper() != "NONE" else None
