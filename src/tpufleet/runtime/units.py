"""Units of batch work: claimed under a lease, committed exactly once, taken over from the dead.

Each unit has a chain of immutable records, `units/<unit>-<number>.json`. A record is a claim or,
as the last one, a commit. Whoever writes record n+1 first has it, so a commit and a take-over
compete for one name and the loser is fenced. Safety needs only "create if absent", which folders,
GCS and S3 all have; clocks decide only when to take over, so skew costs time, never correctness.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import quote
from zlib import crc32

from tpufleet.errors import BadInput, Fenced, NotFound
from tpufleet.runtime.object_store import ObjectStore

# Long enough for a stalled upload, short enough that a dead worker's unit is soon redone.
LEASE = timedelta(seconds=60)
# Records read at once: a bucket takes as long for one as for many.
READERS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """The right to commit one unit. `token` grows with each claim of that unit."""

    unit: int
    token: int
    worker: str
    nonce: str
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """A unit that is done, for good, and what its worker recorded about it."""

    unit: int
    token: int
    worker: str
    at: float
    outcome: Mapping[str, Any]


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
        clock: Callable[[], float] = time.time,
    ):
        """`worker` is unique among the living. A later `incarnation` of the same worker takes back
        at once what an earlier one held, and beats for itself alone. With `steal_after`, a unit
        that a live worker has held longer than that may be taken over too; each take-over doubles
        the patience."""
        if not worker:
            raise BadInput("a worker needs a name")
        self.objects = objects
        self.count = count
        self.worker = worker
        self.incarnation = incarnation
        self._lease = lease.total_seconds()
        self._steal_after = steal_after.total_seconds() if steal_after else None
        self._clock = clock
        self._committed: dict[int, Commit] = {}
        self._claims: dict[tuple[int, int], dict[str, Any]] = {}
        self._free: list[int] = []
        # Workers start at different places, so that they seldom want the same unit.
        self._start = crc32(worker.encode()) % max(count, 1)
        self._beaten = float("-inf")

    def heartbeat(self) -> None:
        """Say that this worker lives. Call it several times within each lease."""
        now = self._clock()
        body = {"worker": self.worker, "incarnation": self.incarnation, "at": now}
        self.objects.replace(_beat_name(self.worker), _encode(body))
        self._beaten = now

    def leave(self) -> None:
        """Say that this worker is going: others may take over what it holds at once."""
        body = {"worker": self.worker, "incarnation": self.incarnation, "left": True, "at": 0.0}
        self.objects.replace(_beat_name(self.worker), _encode(body))

    def claim(self) -> Claim | None:
        """A unit to do now, or None when all are committed or held by living workers."""
        # Not each time: units may be short, and a bucket takes one write a second of an object.
        if not 0 <= self._clock() - self._beaten < self._lease / 4:
            self.heartbeat()
        while self._free or self._look():
            for unit in self._free[:3]:
                self._free.remove(unit)
                claim = self._append_claim(unit, 0)
                if claim is not None:
                    return claim
            self._free = []  # others are ahead of this view
        return next(filter(None, map(self._take_over, self._abandoned())), None)

    def is_held(self, claim: Claim) -> bool:
        """Whether nobody has taken the unit over; a cheap look, `commit` is what decides."""
        return not self.objects.names(_record_name(claim.unit, claim.token + 1))

    def commit(self, claim: Claim, outcome: Mapping[str, Any]) -> None:
        """Record the unit as done. Raises Fenced when another worker has taken it over."""
        record = self._record("commit", claim.nonce, outcome=dict(outcome))
        if not self._append(claim.unit, claim.token + 1, record):
            other = self._read(claim.unit, claim.token + 1)
            raise Fenced(
                f"unit {claim.unit} was taken over by {other['worker']}; "
                "this worker's result for it is dropped"
            )

    def committed(self) -> dict[int, Commit]:
        """Every commit so far, by unit; read from the records, never from a counter."""
        self._learn(self._last_records())
        return dict(sorted(self._committed.items()))

    def finished(self) -> bool:
        return len(self._committed) >= self.count or len(self.committed()) >= self.count

    def open_claims(self) -> dict[int, Claim]:
        """Units that are claimed and not committed, by unit: who works on what."""
        last = self._last_records()
        self._learn(last)
        return {
            unit: _claim(unit, number, self._claims[unit, number])
            for unit, number in last.items()
            if unit not in self._committed
        }

    def heartbeats(self) -> dict[str, float]:
        """When each worker was last heard of."""
        beats = (self._beat_of(name) for name in self.objects.names("workers/"))
        return {beat["worker"]: beat["at"] for beat in beats if beat}

    # -- the chain ------------------------------------------------------------------------------

    def _append_claim(self, unit: int, number: int) -> Claim | None:
        record = self._record("claim", uuid.uuid4().hex, incarnation=self.incarnation)
        return _claim(unit, number, record) if self._append(unit, number, record) else None

    def _append(self, unit: int, number: int, record: dict[str, Any]) -> bool:
        if self.objects.create(_record_name(unit, number), _encode(record)):
            return True
        # A client that retried by itself may find its own first write in the way.
        there = self._read(unit, number)
        return (there["kind"], there["nonce"]) == (record["kind"], record["nonce"])

    def _record(self, kind: str, nonce: str, **more: Any) -> dict[str, Any]:
        return {"kind": kind, "worker": self.worker, "nonce": nonce, "at": self._clock(), **more}

    def _read(self, unit: int, number: int) -> dict[str, Any]:
        return json.loads(self.objects.read(_record_name(unit, number)))

    def _last_records(self) -> dict[int, int]:
        last: dict[int, int] = {}
        for name in self.objects.names("units/"):
            unit, _, number = name.removeprefix("units/").removesuffix(".json").partition("-")
            last[int(unit)] = max(last.get(int(unit), -1), int(number))
        return last

    def _learn(self, last: Mapping[int, int]) -> None:
        """Remember these records. They never change, so each is read once."""
        unread = [
            (unit, number)
            for unit, number in last.items()
            if unit not in self._committed and (unit, number) not in self._claims
        ]
        for place, record in zip(unread, self._read_all(unread), strict=True):
            if record["kind"] == "claim":
                self._claims[place] = record
            else:
                self._committed[place[0]] = _commit(*place, record)

    def _read_all(self, places: Sequence[tuple[int, int]]) -> Iterator[dict[str, Any]]:
        if len(places) < READERS or not getattr(self.objects, "far", False):
            yield from (self._read(*place) for place in places)
            return
        with ThreadPoolExecutor(READERS) as pool:
            yield from pool.map(lambda place: self._read(*place), places)

    # -- choosing -------------------------------------------------------------------------------

    def _look(self) -> bool:
        """Fill the list of units that nobody has begun; False when there is none."""
        begun = self._last_records()
        order = (*range(self._start, self.count), *range(self._start))
        self._free = [unit for unit in order if unit not in begun]
        return bool(self._free)

    def _abandoned(self) -> Iterator[Claim]:
        """Claims that may be taken over, the oldest first."""
        now = self._clock()
        beats: dict[str, dict[str, Any] | None] = {}
        for claim in sorted(self.open_claims().values(), key=lambda claim: claim.at):
            if claim.worker not in beats:
                beats[claim.worker] = self._beat_of(_beat_name(claim.worker))
            if self._may_take(claim, beats[claim.worker], now):
                yield claim

    def _may_take(self, claim: Claim, beat: Mapping[str, Any] | None, now: float) -> bool:
        incarnation = self._claims[claim.unit, claim.token]["incarnation"]
        if claim.worker == self.worker and incarnation <= self.incarnation:
            return incarnation < self.incarnation
        if now - _heard(claim, incarnation, beat) > self._lease:
            return True
        patience = self._steal_after
        return patience is not None and now - claim.at > patience * 2**claim.token

    def _take_over(self, claim: Claim) -> Claim | None:
        return self._append_claim(claim.unit, claim.token + 1)

    def _beat_of(self, name: str) -> dict[str, Any] | None:
        try:
            return json.loads(self.objects.read(name))
        except NotFound:
            return None


def _heard(claim: Claim, incarnation: int, beat: Mapping[str, Any] | None) -> float:
    if beat is None or beat["incarnation"] != incarnation:
        return claim.at  # a namesake lives; whoever claimed this does not beat any more
    return float("-inf") if beat.get("left") else max(beat["at"], claim.at)


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


def _record_name(unit: int, number: int) -> str:
    return f"units/{unit:08d}-{number:04d}.json"


def _beat_name(worker: str) -> str:
    return f"workers/{quote(worker, safe='')}.json"


def _encode(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True).encode()
