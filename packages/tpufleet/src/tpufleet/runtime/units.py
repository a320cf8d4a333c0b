"""Units of batch work: claimed under a lease, committed exactly once, taken over after a failure.

Each unit has a chain of immutable records, `units/<unit>-<number>.json`. A record is a claim or,
as the last one, a commit. The first writer of record n+1 wins, so a commit and a take-over compete
for one name and the loser is fenced. Safety needs only create-if-absent, which folders, GCS and S3
all have. Clocks decide only when to take over, so clock skew costs time, never correctness.
A unit whose commit or result is damaged is reopened by one more claim, which has no worker.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import quote
from zlib import crc32

from tpufleet.errors import BadInput, Fenced, FleetError, NotFound, Permanent
from tpufleet.runtime import commit_index, index_parts
from tpufleet.runtime.commit_index import Commit as Commit
from tpufleet.runtime.index_parts import INDEX as INDEX
from tpufleet.runtime.object_store import PARALLEL_READS, ObjectStore

# Tolerates a stalled upload, yet reassigns the units of a dead worker within a minute.
LEASE = timedelta(seconds=60)
REOPENED = "reopened"  # the worker of the claim that reopens a unit
CLAIM_KEYS = frozenset({"worker", "nonce", "at", "incarnation"})
INDEXED_UNITS = 1_000  # with so many units an index is worth it
LISTED = 1_000  # names in the answer of a bucket
_RECORD_NAME = re.compile(r"units/(\d{8,})-(\d{4,})\.json")
RECORD_KEYS = {"claim": CLAIM_KEYS, "commit": (CLAIM_KEYS - {"incarnation"}) | {"outcome"}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """The right to commit one unit. `token` grows with each claim of that unit."""

    unit: int
    token: int
    worker: str
    nonce: str
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldUnit:
    """A unit that this worker cannot take yet, because another one holds it."""

    unit: int
    worker: str
    silent: float  # seconds since the last heartbeat of its worker, or since its claim
    lease_left: float  # seconds until it may be taken over, without another heartbeat


class DamagedRecord(FleetError, Permanent):
    """A record of a unit cannot be read: its storage has lost or changed bytes."""


class Units:
    """One worker's view of units 0 … count-1."""

    def __init__(
        self,
        objects: ObjectStore,
        *,
        count: int,
        worker: str,
        incarnation: int = 0,
        lease: timedelta = LEASE,
        steal_after: timedelta | None = None,
        tolerant: bool = False,
        indexed: bool = False,
        clock: Callable[[], float] = time.time,
    ):
        """`worker` is unique among running workers. A later `incarnation` of the same worker
        immediately takes over the claims of an earlier one, and its heartbeats count only for its
        own claims. With `steal_after`, a unit that a live worker has held longer than that may be
        taken over too; each take-over doubles the delay. With `tolerant`, damaged records do not
        raise: they are listed in `damaged`. With `indexed`, commits are read from the index as far
        as it has them, and their records are neither listed nor read; a worker adds its own."""
        if not worker:
            raise BadInput("worker must not be empty")
        self.objects = objects
        self.count = count
        self.worker = worker
        self.incarnation = incarnation
        self._lease = lease.total_seconds()
        self._steal_after = steal_after.total_seconds() if steal_after else None
        self._clock = clock
        self._committed: dict[int, Commit] = {}
        self._tolerant = tolerant
        self._index = index_parts.IndexReader(objects, count, self._read) if indexed else None
        owner = f"{quote(worker, safe='')}-{incarnation}"
        self._index_writer = (
            index_parts.IndexWriter(objects, owner, clock)
            if indexed and count >= INDEXED_UNITS
            else None
        )
        self._found: list[Commit] = []  # when records were first read
        self.damaged: dict[int, tuple[int, str]] = {}  # unit: number of its last record, the error
        self._claims: dict[tuple[int, int], dict[str, Any]] = {}
        self.held: list[HeldUnit] = []  # by others, when `claim` last returned None
        self._unclaimed: list[int] = []
        # Workers start at different units, so that they seldom compete for the same one.
        self._start = crc32(worker.encode()) % max(count, 1)
        self._heartbeat_at = float("-inf")
        self._announced: set[int] = set()

    def heartbeat(self) -> None:
        """Renew this worker's lease. Call it several times within each lease period."""
        now = self._clock()
        body = {"worker": self.worker, "incarnation": self.incarnation, "at": now}
        self.objects.replace(_heartbeat_name(self.worker), _encode(body))
        self._heartbeat_at = now

    def leave(self) -> None:
        """End this worker's lease: other workers may take over its claims immediately."""
        if self._index_writer is not None:
            self._index_writer.flush()
        body = {"worker": self.worker, "incarnation": self.incarnation, "left": True, "at": 0.0}
        self.objects.replace(_heartbeat_name(self.worker), _encode(body))

    def claim(self) -> Claim | None:
        """A unit to work on, or None when all are committed or held by live workers."""
        # Not on every call: units may be short, and GCS allows one write per second to an object.
        if not 0 <= self._clock() - self._heartbeat_at < self._lease / 4:
            self.heartbeat()
        while self._unclaimed or self._find_unclaimed():
            for unit in self._unclaimed[:3]:
                self._unclaimed.remove(unit)
                claim = self._append_claim(unit, 0)
                if claim is not None:
                    return claim
            self._unclaimed = []  # this view is outdated
        return next(filter(None, map(self._take_over, self._abandoned())), None)

    def commit(self, claim: Claim, outcome: Mapping[str, Any]) -> None:
        """Record the unit as done. Raises Fenced when another worker has taken it over."""
        record = self._record("commit", claim.nonce, outcome=dict(outcome))
        if not self._append(claim.unit, claim.token + 1, record):
            other = self._read(claim.unit, claim.token + 1)
            raise Fenced(
                f"unit {claim.unit} was taken over by {other['worker']}; "
                "the result of this worker is discarded"
            )
        if self._index_writer is not None:
            self._index_writer.add(_commit(claim.unit, claim.token + 1, record))

    def committed(self) -> dict[int, Commit]:
        """Every commit so far, by unit, derived from the records; with `indexed` from the index,
        and from the records that it lacks: a bucket takes minutes to return those of 100,000
        units."""
        self._load(self._last_records())
        return {unit: self._committed[unit] for unit in sorted(self._committed)}

    def index_found(self) -> None:
        """Add commits to the index that `committed` had to read from records: their workers were
        killed before they could. For a worker that starts."""
        if self._index is not None and self._index_writer is not None:
            if len(self._found) >= index_parts.PART_UNITS:
                self._index_writer.add_found(self._found, self._index)
            self._found = []

    def write_index(self) -> None:
        """Write the index of all commits so far, as the records have it now."""
        last = self._last_records()
        for unit, commit in list(self._committed.items()):
            if last.get(unit) != commit.token + 1:  # reopened by another process
                del self._committed[unit]
        if self._index is not None and self._index.whole:
            return  # another worker has written it
        self.objects.replace(INDEX, commit_index.encode(self.committed()))

    def reopen(self, unit: int, reason: str) -> bool:
        """Return a unit to the queue, whose commit (as last read) or last record is damaged. Its
        next commit replaces the result. False if another process was faster."""
        number = self._last_number(unit)
        record = self._record("claim", uuid.uuid4().hex, incarnation=0, reason=reason)
        if unit not in self._announced:
            self.announce_reopened([unit])
        # It has no heartbeats, so that any worker may take it over at once.
        record |= {"worker": REOPENED, "at": 0.0}
        if not self._append(unit, number + 1, record):
            return False
        self._committed.pop(unit, None)
        self.damaged.pop(unit, None)
        return True

    def announce_reopened(self, units: Sequence[int]) -> None:
        """Before several are reopened: tells readers of the index, for all of them at once."""
        if self.count >= INDEXED_UNITS or self.objects.names(index_parts.FOLDER):
            numbers = {unit: self._last_number(unit) for unit in units}
            index_parts.announce_reopened(self.objects, numbers)
        self._announced.update(units)

    def _last_number(self, unit: int) -> int:
        return self.damaged[unit][0] if unit in self.damaged else self._committed[unit].token + 1

    def finished(self) -> bool:
        return len(self._committed) >= self.count or len(self.committed()) >= self.count

    def open_claims(self) -> dict[int, Claim]:
        """Claims that are not committed yet, by unit."""
        last = self._last_records()
        self._load(last)
        return {
            unit: _claim(unit, number, self._claims[unit, number])
            for unit, number in last.items()
            if (unit, number) in self._claims
        }

    def heartbeats(self) -> dict[str, float]:
        """The time of each worker's last heartbeat."""
        heartbeats = (self._read_heartbeat(name) for name in self.objects.names("workers/"))
        return {heartbeat["worker"]: heartbeat["at"] for heartbeat in heartbeats if heartbeat}

    # Records

    def _append_claim(self, unit: int, number: int) -> Claim | None:
        record = self._record("claim", uuid.uuid4().hex, incarnation=self.incarnation)
        return _claim(unit, number, record) if self._append(unit, number, record) else None

    def _append(self, unit: int, number: int, record: dict[str, Any]) -> bool:
        if self.objects.create(record_name(unit, number), _encode(record)):
            return True
        # A client library that retried may collide with its own first write.
        existing = self._read(unit, number)
        return (existing["kind"], existing["nonce"]) == (record["kind"], record["nonce"])

    def _record(self, kind: str, nonce: str, **more: Any) -> dict[str, Any]:
        return {"kind": kind, "worker": self.worker, "nonce": nonce, "at": self._clock(), **more}

    def _read(self, unit: int, number: int) -> dict[str, Any]:
        name = record_name(unit, number)
        try:
            record = json.loads(self.objects.read(name))
            missing = RECORD_KEYS[record["kind"]] - record.keys()
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedRecord(f"{self._location(name)} is damaged: {error}") from error
        if missing:
            raise DamagedRecord(f"{self._location(name)} is damaged: no {', '.join(missing)}")
        return record

    def _read_or_error(self, key: tuple[int, int]) -> dict[str, Any] | DamagedRecord:
        try:
            return self._read(*key)
        except DamagedRecord as error:
            return error

    def _location(self, name: str) -> str:
        url = getattr(self.objects, "url", "")
        return f"{url}/{name}" if url else name

    def _last_records(self) -> dict[int, int]:
        """The number of the last record of each unit that has one."""
        if self._index is None:
            return _last_numbers(self.objects.names("units/"))
        self._index.refresh()
        for unit, commit in list(self._committed.items()):
            if not self._index.counts(commit):
                del self._committed[unit]
        known = {**self._index.commits(), **self._committed}
        last = {unit: commit.token + 1 for unit, commit in known.items()}
        if len(last) == self.count:
            return last
        return {**_last_numbers(self._list_others(last)), **last}

    def _list_others(self, known: Mapping[int, int]) -> list[str]:
        """Names of the records of at least all units but the known ones. Only a bucket can list
        ranges, which takes it a request each."""
        ranges: list[list[int]] = []  # [first, end)
        for unit in range(self.count):
            if unit in known:
                continue
            if ranges and ranges[-1][1] == unit:
                ranges[-1][1] = unit + 1
            else:
                ranges.append([unit, unit + 1])
        pages = 2 * self.count // LISTED  # a unit has two records, a claim and a commit
        if not getattr(self.objects, "far", False) or len(ranges) > pages:
            return self.objects.names("units/")
        bounds = [(f"units/{first:08d}", f"units/{end:08d}") for first, end in ranges]
        with ThreadPoolExecutor(PARALLEL_READS) as pool:
            listed = pool.map(lambda bound: self.objects.names("units/", *bound), bounds)
            return [name for names in listed for name in names]

    def _load(self, last: Mapping[int, int]) -> None:
        """Read and cache these records. They are immutable, so each is read once."""
        self.damaged = {}  # they are read again: they may have been repaired
        index = self._index.commits() if self._index is not None else {}
        unread: list[tuple[int, int]] = []
        for unit, number in last.items():
            if unit in self._committed or (unit, number) in self._claims:
                continue
            indexed = index.get(unit)
            if indexed is not None and indexed.token + 1 == number:
                self._committed[unit] = indexed
            else:
                unread.append((unit, number))
        found: list[Commit] = []
        for key, record in zip(unread, self._read_all(unread), strict=True):
            if isinstance(record, DamagedRecord):
                if not self._tolerant:
                    raise record
                self.damaged[key[0]] = (key[1], str(record))
            elif record["kind"] == "claim":
                self._claims[key] = record
            else:
                found.append(_commit(*key, record))
                self._committed[key[0]] = found[-1]
        self._found = self._found or found

    def _read_all(
        self, keys: Sequence[tuple[int, int]]
    ) -> Iterator[dict[str, Any] | DamagedRecord]:
        if len(keys) < PARALLEL_READS or not getattr(self.objects, "far", False):
            yield from map(self._read_or_error, keys)
            return
        with ThreadPoolExecutor(PARALLEL_READS) as pool:
            yield from pool.map(self._read_or_error, keys)

    # Choosing a unit

    def _find_unclaimed(self) -> bool:
        """Refresh the list of units without any record; False when there is none."""
        claimed = self._last_records()
        order = (*range(self._start, self.count), *range(self._start))
        self._unclaimed = [unit for unit in order if unit not in claimed]
        return bool(self._unclaimed)

    def _abandoned(self) -> Iterator[Claim]:
        """Claims that may be taken over, oldest first."""
        now = self._clock()
        self.held = []
        heartbeats: dict[str, dict[str, Any] | None] = {}
        for claim in sorted(self.open_claims().values(), key=lambda claim: claim.at):
            if claim.worker not in heartbeats:
                heartbeats[claim.worker] = self._read_heartbeat(_heartbeat_name(claim.worker))
            if self._may_take(claim, heartbeats[claim.worker], now):
                yield claim
            elif claim.worker != self.worker:
                self.held.append(self._held(claim, heartbeats[claim.worker], now))

    def _may_take(self, claim: Claim, heartbeat: Mapping[str, Any] | None, now: float) -> bool:
        incarnation = self._claims[claim.unit, claim.token]["incarnation"]
        if claim.worker == self.worker and incarnation <= self.incarnation:
            return incarnation < self.incarnation
        if now - _last_seen(claim, incarnation, heartbeat) > self._lease:
            return True
        delay = self._steal_after
        return delay is not None and now - claim.at > delay * 2**claim.token

    def _held(self, claim: Claim, heartbeat: Mapping[str, Any] | None, now: float) -> HeldUnit:
        incarnation = self._claims[claim.unit, claim.token]["incarnation"]
        silent = max(now - _last_seen(claim, incarnation, heartbeat), 0.0)
        left = max(self._lease - silent, 0.0)
        return HeldUnit(unit=claim.unit, worker=claim.worker, silent=silent, lease_left=left)

    def _take_over(self, claim: Claim) -> Claim | None:
        return self._append_claim(claim.unit, claim.token + 1)

    def _read_heartbeat(self, name: str) -> dict[str, Any] | None:
        try:
            return json.loads(self.objects.read(name))
        except (NotFound, ValueError):  # a damaged one is replaced by the next
            return None


def _last_seen(claim: Claim, incarnation: int, heartbeat: Mapping[str, Any] | None) -> float:
    if heartbeat is None or heartbeat["incarnation"] != incarnation:
        return claim.at  # another incarnation is alive; the one that made this claim is not
    return float("-inf") if heartbeat.get("left") else max(heartbeat["at"], claim.at)


def _claim(unit: int, number: int, record: Mapping[str, Any]) -> Claim:
    return Claim(
        unit=unit, token=number, worker=record["worker"], nonce=record["nonce"], at=record["at"]
    )


def _commit(unit: int, number: int, record: Mapping[str, Any]) -> Commit:
    return Commit(
        unit=unit,
        token=number - 1,
        worker=record["worker"],
        at=record["at"],
        outcome=record["outcome"],
    )


def _last_numbers(names: Iterable[str]) -> dict[int, int]:
    last: dict[int, int] = {}
    for name in names:
        if match := _RECORD_NAME.fullmatch(name):  # another file is not ours
            unit, number = map(int, match.groups())
            last[unit] = max(last.get(unit, -1), number)
    return last


def record_name(unit: int, number: int) -> str:
    return f"units/{unit:08d}-{number:04d}.json"


def _heartbeat_name(worker: str) -> str:
    return f"workers/{quote(worker, safe='')}.json"


def _encode(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True).encode()
