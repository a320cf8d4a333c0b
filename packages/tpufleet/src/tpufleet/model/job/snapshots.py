"""Snapshots: the files of a folder at submit, identified by a digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tpufleet import schema
from tpufleet.errors import BadInput

EXECUTABLE = 0o755
REGULAR = 0o644
LINK = 0o777
# Of Linux, in bytes.
MAX_NAME, MAX_PATH = 255, 4095
MAX_DEPTH = 200  # parts of a path; checking a path takes as many steps
# Links that Linux follows for one path.
MAX_LINKS = 40
# Parts of paths that are looked at for all links of a snapshot: some seconds.
MAX_LINK_STEPS = 1_000_000

_DIGEST = schema.text("digest", r"[0-9a-f]{64}", example="e3b0c442…", rule="64 hexadecimal digits")


class SnapshotEntry(msgspec.Struct, frozen=True, kw_only=True):
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


def require_digest(text: str) -> None:
    """Raises BadInput unless this is a digest, which can become part of a path."""
    schema.check(_DIGEST, text)


def require_path(path: str) -> str:
    """Raises BadInput unless this is a path inside a snapshot."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in path:
        raise _outside("path", path)
    too_deep = len(parts) > MAX_DEPTH
    if too_deep or max(map(_bytes, parts)) > MAX_NAME or _bytes(path) > MAX_PATH:
        raise BadInput(f"snapshot: the path {path[:200]!r}… is too long")
    return path


def require_unpackable(entries: Sequence[SnapshotEntry], folders: Iterable[str] = ()) -> None:
    """Raises BadInput unless they can be unpacked, and lead nowhere else. The server asks before it
    stores a snapshot, and hosts ask before they use one. `folders`: those with entries of their
    own."""
    paths: set[str] = set()
    for entry in entries:
        if require_path(entry.path) in paths:
            raise duplicate(entry.path)
        paths.add(entry.path)
    for folder in _folders((*paths, *(f"{each}/" for each in folders))):
        if folder in paths:
            raise BadInput(f"snapshot: {folder[:200]!r} is a file and a folder")
    links = {entry.path: entry.target for entry in entries if entry.target is not None}
    steps = 0
    for path, target in links.items():
        if not target or "\0" in target or _bytes(target) > MAX_PATH:
            raise _outside("link", path)
        outside, taken = _leads_outside(path, links)
        steps += taken
        if outside:
            raise _outside("link", path)
        if steps > MAX_LINK_STEPS:
            raise BadInput("snapshot: its links take too long to follow; replace them by files")


def duplicate(path: str) -> BadInput:
    return BadInput(f"snapshot: {path[:200]!r} is a duplicate")


def not_stored(path: str) -> BadInput:
    return BadInput(f"snapshot: {path[:200]!r} is neither a file nor a folder or symbolic link")


def _outside(kind: str, path: str) -> BadInput:
    return BadInput(f"snapshot: the {kind} {path[:200]!r} points outside the snapshot")


def _folders(paths: Iterable[str]) -> set[str]:
    """All folders that the paths imply."""
    folders: set[str] = set()
    for path in paths:
        folder = path.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    return folders


def _leads_outside(path: str, links: Mapping[str, str]) -> tuple[bool, int]:
    """And how many parts of paths were looked at."""
    left = path.split("/")[::-1]
    inside: list[str] = []
    followed = steps = 0
    while left:
        steps += 1
        part = left.pop()
        if part == "..":
            if not inside:
                return True, steps
            inside.pop()
        elif part not in ("", "."):
            inside.append(part)
            target = links.get("/".join(inside))
            if target is not None:
                followed += 1
                if target.startswith("/"):
                    return True, steps
                if followed > MAX_LINKS:
                    return False, steps  # nothing can be opened through it
                inside.pop()
                left += target.split("/")[::-1]
    return False, steps


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))


def _kind(entry: SnapshotEntry) -> str:
    if entry.target is not None:
        return "link"
    return "executable" if entry.mode & 0o100 else "file"
