"""The index of a dataset's commits: one object with a small table, and the outcomes behind it.

A reader takes the table, a few megabytes for 100,000 units, and the outcomes of the units that it
uses. Layout: a line with the size of the table and its checksum; the table, as JSON lists; then the
outcomes, whose offsets, sizes and checksums are in the table.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from zlib import crc32

from tpufleet.errors import NotFound
from tpufleet.runtime.object_store import ObjectStore

FIRST_READ = 256 << 10  # the table of a few thousand units, in one request
BLOCK = 4 << 20  # outcomes are read in blocks, since neighbours are often used together
BLOCKS = 8  # kept in memory
HEADER = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """A completed unit and the outcome that its worker recorded. Final."""

    unit: int
    token: int
    worker: str
    at: float
    outcome: Mapping[str, Any]


class IndexedOutcome(Mapping[str, Any]):
    """An outcome that is read when it is first used: few of many units are."""

    # There is one for each unit: a dictionary in each would be work for the garbage collector.
    __slots__ = ("_load", "_outcome", "_unit")

    def __init__(self, load: Callable[[int], dict[str, Any]], unit: int):
        self._load, self._unit = load, unit
        self._outcome: dict[str, Any] | None = None

    def _read(self) -> dict[str, Any]:
        if self._outcome is None:
            self._outcome = self._load(self._unit)
        return self._outcome

    def __getitem__(self, key: str) -> Any:
        return self._read()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


def encode(commits: Mapping[int, Commit]) -> bytes:
    ordered = [commits[unit] for unit in sorted(commits)]
    outcomes = [json.dumps(dict(c.outcome), sort_keys=True).encode() for c in ordered]
    workers = sorted({commit.worker for commit in ordered})
    numbers = {worker: number for number, worker in enumerate(workers)}
    table = {
        "units": [commit.unit for commit in ordered],
        "tokens": [commit.token for commit in ordered],
        "at": [commit.at for commit in ordered],
        "worker": [numbers[commit.worker] for commit in ordered],
        "workers": workers,
        "sizes": [len(outcome) for outcome in outcomes],
        "checksums": [crc32(outcome) for outcome in outcomes],
    }
    text = json.dumps(table, separators=(",", ":")).encode()
    header = b"%d %08x" % (len(text), crc32(text))
    return b"".join([header.ljust(HEADER - 1), b"\n", text, *outcomes])


def open_index(objects: ObjectStore, name: str, first_read: int = FIRST_READ) -> CommitIndex | None:
    """The index, or None if there is none or it is damaged: the records have it all."""
    try:
        start = objects.read_range(name, 0, first_read)
        size, checksum = start[:HEADER].split()
        text = start[HEADER : HEADER + int(size)]
        if len(text) < int(size):
            text += objects.read_range(name, HEADER + len(text), int(size) - len(text))
        if crc32(text) != int(checksum, 16):
            return None
        return CommitIndex(objects, name, HEADER + int(size), json.loads(text))
    except (NotFound, ValueError):
        return None


class CommitIndex:
    def __init__(self, objects: ObjectStore, name: str, base: int, table: Mapping[str, Any]):
        self._objects, self._name, self._base, self._table = objects, name, base, table
        self._places = {unit: number for number, unit in enumerate(table["units"])}
        self._offsets = list(accumulate(table["sizes"], initial=0))
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self.tokens: dict[int, int] = dict(zip(table["units"], table["tokens"], strict=True))

    def entries(self) -> Iterator[tuple[int, int, str, float]]:
        """(unit, token, worker, time) of each commit, in the order of units."""
        table = self._table
        workers = map(table["workers"].__getitem__, table["worker"])
        return zip(table["units"], table["tokens"], workers, table["at"], strict=True)

    def outcome(self, unit: int) -> dict[str, Any] | None:
        """None if the object has changed since it was opened."""
        number = self._places[unit]
        text = self._read(self._offsets[number], self._table["sizes"][number])
        if crc32(text) != self._table["checksums"][number]:
            return None
        return json.loads(text)

    def _read(self, start: int, size: int) -> bytes:
        blocks = range(start // BLOCK, (start + size - 1) // BLOCK + 1)
        parts = []
        for number in blocks:
            low = max(start - number * BLOCK, 0)
            parts.append(self._block(number)[low : start + size - number * BLOCK])
        return b"".join(parts)

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            end = min((number + 1) * BLOCK, self._offsets[-1])
            begin = number * BLOCK
            try:
                data = self._objects.read_range(self._name, self._base + begin, end - begin)
            except NotFound:
                data = b""
            self._blocks[number] = data
            while len(self._blocks) > BLOCKS:
                self._blocks.popitem(last=False)
        return self._blocks[number]
