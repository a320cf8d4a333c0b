"""Notices that this host is about to be taken away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Protocol

from tpufleet.model.hosts import NoticeKind

POLL_SECONDS = 0.1


class NoticeWatcher(Protocol):
    def watch(self, seen: Callable[[NoticeKind], None], ended: Event) -> None:
        """Call `seen` for each notice until `ended` is set. Runs in a thread of its own."""
        ...


class NoNoticeWatcher:
    """For hosts that nobody warns."""

    def watch(self, seen: Callable[[NoticeKind], None], ended: Event) -> None:
        ended.wait()


class NoticeFileWatcher:
    """A file whose appearance is the notice; it holds the kind."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def watch(self, seen: Callable[[NoticeKind], None], ended: Event) -> None:
        told: NoticeKind | None = None
        while not ended.wait(POLL_SECONDS):
            kind = self._read()
            if kind is not None and kind is not told:
                told = kind
                seen(kind)

    def _read(self) -> NoticeKind | None:
        """None also while the file is still being written, or cannot be read just now."""
        try:
            return NoticeKind(self._path.read_text().strip())
        except (OSError, ValueError):
            return None
