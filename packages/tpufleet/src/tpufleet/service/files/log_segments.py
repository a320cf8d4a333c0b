"""One log on disk. It begins with a file; once that is full, it goes on in segments, in a folder
beside the file. The oldest segments can be deleted, so that the newest output is kept."""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FOLDER_SUFFIX = ".d"
# A folder that was changed this recently may change again without a new time of change.
_SETTLED_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSegment:
    """Bytes of the log from `start`."""

    path: Path
    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass(slots=True)
class SegmentedLog:
    """`path` is the first file, which always stays: it is locked while the log is written."""

    path: Path
    _starts: tuple[int, ...] = ()  # of the segments in the folder
    _listed_at: int = field(default=-1)  # time of change of the folder, in nanoseconds

    def segments(self) -> list[LogSegment]:
        """Oldest first. Those that are deleted meanwhile are left out."""
        found = (self._segment(start) for start in self._all_starts())
        return [each for each in found if each is not None]

    def last(self) -> LogSegment:
        """The one that is written to."""
        for start in reversed(self._all_starts()):
            if (segment := self._segment(start)) is not None:
                return segment
        return LogSegment(path=self.path, start=0, size=0)

    def path_from(self, start: int) -> Path:
        """Of the segment that begins there; its folder is created."""
        if start == 0:
            return self.path
        self._folder.mkdir(exist_ok=True)
        return self._path(start)

    def covering(self, offset: int) -> LogSegment | None:
        """The segment that has the byte at this offset."""
        starts = self._all_starts()
        segment = self._segment(starts[max(0, bisect_right(starts, offset) - 1)])
        if segment is None or not segment.start <= offset < segment.end:
            return None
        return segment

    def next_stored(self, offset: int) -> int:
        """The first offset from this one on that is stored; this one at the end of the log."""
        if self.covering(offset) is not None:
            return offset
        later = [each for each in self._all_starts() if each > offset]
        found = (self._segment(start) for start in later)
        return next((each.start for each in found if each is not None and each.size), offset)

    def read(self, offset: int, count: int) -> bytes:
        """Fewer bytes only at the end, or before what is no longer stored."""
        parts: list[bytes] = []
        while count > 0 and (segment := self.covering(offset)) is not None:
            try:
                with segment.path.open("rb") as file:
                    file.seek(offset - segment.start)
                    part = file.read(count)
            except FileNotFoundError:  # deleted meanwhile
                break
            if not part:
                break
            parts.append(part)
            offset, count = offset + len(part), count - len(part)
        return b"".join(parts)

    @property
    def _folder(self) -> Path:
        return self.path.with_name(self.path.name + FOLDER_SUFFIX)

    def _path(self, start: int) -> Path:
        return self._folder / f"{start:015d}" if start else self.path

    def _segment(self, start: int) -> LogSegment | None:
        path = self._path(start)
        try:
            return LogSegment(path=path, start=start, size=path.stat().st_size)
        except FileNotFoundError:
            return None

    def _all_starts(self) -> tuple[int, ...]:
        try:
            changed = self._folder.stat().st_mtime_ns
        except FileNotFoundError:
            return (0,)
        if changed != self._listed_at:
            names = (name for name in os.listdir(self._folder) if name.isdecimal())
            self._starts = (0, *sorted(map(int, names)))
            settled = time.time() - changed / 1e9 > _SETTLED_SECONDS
            self._listed_at = changed if settled else -1
        return self._starts


def logs_below(folder: Path) -> Iterator[SegmentedLog]:
    """Those of a job."""
    for path in folder.glob("*/*.log"):
        yield SegmentedLog(path)


def drop_oldest(folder: Path, size: int) -> int:
    """Delete at least `size` bytes of the logs of a job, as far as there are so many; returns how
    many. The beginning of each log is the last to go, and the end, which is written to, stays."""
    inner: list[tuple[float, LogSegment]] = []
    first: list[tuple[float, LogSegment]] = []
    for log in logs_below(folder):
        segments = log.segments()
        for segment in segments[:-1]:
            changed = segment.path.stat().st_mtime
            (inner if segment.start else first).append((changed, segment))
    dropped = 0
    for _, segment in (*sorted(inner, key=_by_age), *sorted(first, key=_by_age)):
        if dropped >= size:
            break
        if segment.start:
            segment.path.unlink(missing_ok=True)
        else:
            os.truncate(segment.path, 0)
        dropped += segment.size
    return dropped


def _by_age(item: tuple[float, LogSegment]) -> tuple[float, int]:
    return item[0], item[1].start
