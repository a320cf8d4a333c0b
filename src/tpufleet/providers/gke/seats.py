"""Who sits where: each replica of a JobSet is a seat for one slice. Kept on the JobSet itself, so
that a server that died loses nothing. Pure.

A seat outlives its slice: when a slice is lost, its Job makes new pods and so keeps its node pool,
and the next slice that the same job asks for takes the seat.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from tpufleet.model.hosts import NoticeKind
from tpufleet.model.slices import SliceId

ANNOTATION = "tpufleet.dev/seats"


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    slice_id: SliceId | None = None  # None: free
    pods: tuple[str, ...] = ()  # UIDs by host, from when all of them ran; a later pod is another
    past: tuple[str, ...] = ()  # UIDs of pods that sat here for an earlier slice
    lost: str = ""  # why the slice was lost; empty while it is not
    preempted: bool = False
    dead: tuple[int, ...] = ()  # hosts that we know to be dead
    notice: NoticeKind | None = None
    taken_at: datetime | None = None  # when the notice runs out

    @property
    def free(self) -> bool:
        return self.slice_id is None

    def vacate(self, leaving: Iterable[str] = ()) -> Seat:
        """Free again. `leaving`: UIDs of pods that must not serve the next slice."""
        return Seat(past=tuple(sorted({*self.past, *self.pods, *leaving})))

    def take(self, slice_id: SliceId) -> Seat:
        return Seat(slice_id=slice_id, past=self.past)

    def lose(self, why: str, *, preempted: bool, leaving: Iterable[str]) -> Seat:
        """`leaving`: UIDs of all pods of this seat that there are. Others never come back, so they
        need not be remembered, and a seat that is lost a thousand times does not grow."""
        return replace(self, lost=why, preempted=preempted, past=tuple(sorted(set(leaving))))


@dataclass(frozen=True, slots=True)
class Seats:
    all: tuple[Seat, ...] = field(default_factory=tuple)

    def index_of(self, slice_id: SliceId) -> int | None:
        found = (index for index, seat in enumerate(self.all) if seat.slice_id == slice_id)
        return next(found, None)

    def free(self) -> list[int]:
        return [index for index, seat in enumerate(self.all) if seat.free]

    def change(self, index: int, seat: Seat) -> Seats:
        return Seats((*self.all[:index], seat, *self.all[index + 1 :]))

    def written(self) -> str:
        return json.dumps([_written(seat) for seat in self.all], separators=(",", ":"))


def fresh(slices: Sequence[SliceId]) -> Seats:
    return Seats(tuple(Seat(slice_id=slice_id) for slice_id in slices))


def read(text: str) -> Seats:
    return Seats(tuple(_read(row) for row in json.loads(text)))


def of(jobset: Mapping[str, Any]) -> Seats:
    return read(jobset["metadata"]["annotations"][ANNOTATION])


def _written(seat: Seat) -> dict[str, Any]:
    row = {
        "slice": seat.slice_id,
        "pods": list(seat.pods),
        "past": list(seat.past),
        "lost": seat.lost,
        "preempted": seat.preempted,
        "dead": list(seat.dead),
        "notice": seat.notice.value if seat.notice else None,
        "takenAt": seat.taken_at.isoformat() if seat.taken_at else None,
    }
    return {key: value for key, value in row.items() if value}


def _read(row: dict[str, Any]) -> Seat:
    slice_id = row.get("slice")
    return replace(
        Seat(),
        slice_id=SliceId(slice_id) if slice_id else None,
        pods=tuple(row.get("pods", ())),
        past=tuple(row.get("past", ())),
        lost=row.get("lost", ""),
        preempted=bool(row.get("preempted")),
        dead=tuple(row.get("dead", ())),
        notice=NoticeKind(row["notice"]) if row.get("notice") else None,
        taken_at=_moment(row.get("takenAt")),
    )


def _moment(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
