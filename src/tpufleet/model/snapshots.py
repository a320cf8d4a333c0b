"""Snapshots: the files of a working directory at submit, identified by a digest."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

EXECUTABLE = 0o755
REGULAR = 0o644
LINK = 0o777

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotEntry:
    """A file, or a link when it has a target. Folders are implied by the paths below them."""

    path: str  # relative, with forward slashes
    mode: int = REGULAR  # only the executable bit matters
    size: int = 0
    sha256: str = ""  # of the content; empty for a link
    target: str | None = None


def snapshot_digest(entries: Iterable[SnapshotEntry]) -> str:
    """Depends on the content only: not on order, times or owners."""
    listing = sorted(
        (entry.path, _kind(entry), entry.size, entry.sha256, entry.target or "")
        for entry in entries
    )
    # JSON delimits fields whatever a path contains; undecodable bytes survive as escapes.
    return hashlib.sha256(json.dumps(listing, ensure_ascii=True).encode()).hexdigest()


def is_digest(text: str) -> bool:
    """Whether this is a valid digest. Anything else must never become part of a path."""
    return _DIGEST.fullmatch(text) is not None


def _kind(entry: SnapshotEntry) -> str:
    if entry.target is not None:
        return "link"
    return "executable" if entry.mode & 0o100 else "file"
