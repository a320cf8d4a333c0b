"""The index of commits while units are being committed: workers write parts, readers join them.

Objects below `index/`: `commits.bin` has all commits of some moment, `part-….bin` some commits of
one worker, and `reopened-….json` the units whose commits, up to a number, no longer count. That is
written before they are reopened, so no part is wrong, however late it is written.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from zlib import crc32

from tpufleet.errors import FleetError
from tpufleet.runtime import commit_index
from tpufleet.runtime.commit_index import Commit, CommitIndex, IndexedOutcome
from tpufleet.runtime.object_store import PARALLEL_READS, ObjectStore

FOLDER = "index/"
INDEX = f"{FOLDER}commits.bin"
PART = f"{FOLDER}part-"
REOPENED = f"{FOLDER}reopened-"
# The names that are given below, and no others.
_OBSOLETE = re.compile(
    rf"{PART}(.+-\d+-\d{{6,}}|found-\d+-[0-9a-f]{{8}})\.bin|{REOPENED}[0-9a-f]{{32}}\.json"
)
# A part is written after so many commits, or with the first one after so many seconds. What a
# killed worker has not written is read from its records.
PART_UNITS = 128
PART_SECONDS = 30.0
MERGED_UNITS = 1_024  # so many commits of a worker are merged into one part
PART_READ = 64 << 10  # the table of a merged part, in one request

log = logging.getLogger(__name__)


class IndexReader:
    """Commits in the index, as of the last `refresh`."""

    def __init__(self, objects: ObjectStore, count: int, read: Callable[[int, int], Any]):
        """`read(unit, number)` returns a record: for outcomes that are no longer in the index."""
        self._objects, self._count, self._read = objects, count, read
        self._commits: dict[int, Commit] = {}
        self._reopened: dict[int, int] = {}  # unit: the last record that does not count
        self._seen: set[str] = set()
        self.whole = False  # whether `commits.bin` alone has a commit of every unit

    def refresh(self) -> None:
        """Read what was written since the last call."""
        for _ in range(2):  # a part may be merged into another one after it was listed
            names = set(self._objects.names(FOLDER)) - self._seen
            for name in sorted(names):
                if name.startswith(REOPENED):
                    for unit, number in json.loads(self._objects.read(name)).items():
                        self._reopened[int(unit)] = max(number, self._reopened.get(int(unit), -1))
            if INDEX in names:
                index = commit_index.open_index(self._objects, INDEX)
                self._add(index)
                self.whole = index is not None and len(index.tokens) == self._count == len(
                    self.commits()
                )
            parts = sorted(name for name in names if name.startswith(PART))
            if len(self.commits()) == self._count:
                parts = []
            opened = self._open(parts)
            for index in opened:
                self._add(index)
            self._seen |= names
            if all(opened):
                return

    def has(self, name: str) -> bool:
        return name in self._seen

    def commits(self) -> Mapping[int, Commit]:
        """Those that count, by unit."""
        if not self._reopened:
            return self._commits
        return {unit: one for unit, one in self._commits.items() if self.counts(one)}

    def counts(self, commit: Commit) -> bool:
        """Whether the unit was not reopened since this commit."""
        return commit.token + 1 > self._reopened.get(commit.unit, -1)

    def _open(self, names: list[str]) -> list[CommitIndex | None]:
        if len(names) < 2 or not getattr(self._objects, "far", False):
            return list(map(self._open_part, names))
        with ThreadPoolExecutor(PARALLEL_READS) as pool:
            return list(pool.map(self._open_part, names))

    def _open_part(self, name: str) -> CommitIndex | None:
        return commit_index.open_index(self._objects, name, PART_READ)

    def _add(self, index: CommitIndex | None) -> None:
        if index is None:
            return

        def load(unit: int) -> dict[str, Any]:
            outcome = index.outcome(unit)
            # The object was replaced or merged since it was opened: the record says the same.
            return outcome or self._read(unit, int(index.tokens[unit]) + 1)["outcome"]

        for unit, token, worker, at in index.entries():
            known = self._commits.get(unit)
            if known is None or known.token < token:
                self._commits[unit] = Commit(
                    unit=unit, token=token, worker=worker, at=at, outcome=IndexedOutcome(load, unit)
                )


class IndexWriter:
    """Writes the commits of one worker, some at a time. From several threads."""

    def __init__(self, objects: ObjectStore, owner: str, clock: Callable[[], float]):
        self._objects, self._owner, self._clock = objects, owner, clock
        self._pending: list[Commit] = []
        self._pending_since = 0.0
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._number = 0
        # Parts that are not merged yet, and their commits.
        self._small: list[str] = []
        self._small_commits: list[Commit] = []

    def add(self, commit: Commit) -> None:
        now = self._clock()
        with self._lock:
            if not self._pending:
                self._pending_since = now
            self._pending.append(commit)
            due = len(self._pending) >= PART_UNITS or now - self._pending_since >= PART_SECONDS
        if due:
            self.flush()

    def flush(self) -> None:
        """Write what is pending. A failure is not one of the commits, which are recorded."""
        with self._writing:
            with self._lock:
                new, self._pending = self._pending, []
            try:
                self._write(new)
            except (FleetError, OSError) as error:
                log.warning("the index was not written: %s; retrying with the next commits", error)
                with self._lock:
                    self._pending = new + self._pending

    def add_found(self, commits: Iterable[Commit], reader: IndexReader) -> None:
        """Commits of workers that were killed before they could write them."""
        found = sorted(commits, key=lambda commit: commit.unit)
        # Workers that start together find the same.
        numbers = json.dumps([(commit.unit, commit.token) for commit in found]).encode()
        name = f"{PART}found-{len(found)}-{crc32(numbers):08x}.bin"
        if not reader.has(name):
            self._objects.replace(name, commit_index.encode({c.unit: c for c in found}))

    def _write(self, new: list[Commit]) -> None:
        if not new:
            return
        commits = self._small_commits + new
        merge = len(commits) >= MERGED_UNITS
        name = f"{PART}{self._owner}-{self._number:06d}.bin"
        written = commits if merge else new
        self._objects.replace(name, commit_index.encode({c.unit: c for c in written}))
        self._number += 1
        if not merge:
            self._small.append(name)
            self._small_commits = commits
            return
        merged, self._small, self._small_commits = self._small, [], []
        for small in merged:
            self._objects.delete(small)


def announce_reopened(objects: ObjectStore, numbers: Mapping[int, int]) -> None:
    """Before units are reopened. `numbers` are those of their last records."""
    body = json.dumps({str(unit): number for unit, number in numbers.items()})
    objects.replace(f"{REOPENED}{uuid.uuid4().hex}.json", body.encode())


def obsolete(objects: ObjectStore) -> list[str]:
    """Files that are obsolete once the index has all commits and no worker runs."""
    return [name for name in objects.names(FOLDER) if _OBSOLETE.fullmatch(name)]
