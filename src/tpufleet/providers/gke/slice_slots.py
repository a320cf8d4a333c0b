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
class SliceSlot:
    slice_id: SliceId | None = None  # None: free
    pods: tuple[str, ...] = ()  # UIDs by host, from when all of them ran; a later pod is another
    retired_pods: tuple[str, ...] = ()  # UIDs of pods that sat here for an earlier slice
    loss_message: str = ""  # why the slice was lost; empty while it is not
    preempted: bool = False
    dead_hosts: tuple[int, ...] = ()  # hosts that we know to be dead
    notice: NoticeKind | None = None
    preempt_at: datetime | None = None  # when the notice runs out

    @property
    def is_free(self) -> bool:
        return self.slice_id is None

    def clear(self, leaving: Iterable[str] = ()) -> SliceSlot:
        """Free again. `leaving`: UIDs of pods that must not serve the next slice."""
        return SliceSlot(retired_pods=tuple(sorted({*self.retired_pods, *self.pods, *leaving})))

    def assign(self, slice_id: SliceId) -> SliceSlot:
        return SliceSlot(slice_id=slice_id, retired_pods=self.retired_pods)

    def mark_lost(self, message: str, *, preempted: bool, leaving: Iterable[str]) -> SliceSlot:
        """`leaving`: UIDs of all pods of this seat that there are. Others never come back, so they
        need not be remembered, and a seat that is lost a thousand times does not grow."""
        return replace(self, lost=message, preempted=preempted, past=tuple(sorted(set(leaving))))


@dataclass(frozen=True, slots=True)
class SliceSlots:
    slots: tuple[SliceSlot, ...] = field(default_factory=tuple)

    def index_of(self, slice_id: SliceId) -> int | None:
        found = (index for index, seat in enumerate(self.slots) if seat.slice_id == slice_id)
        return next(found, None)

    def free_indexes(self) -> list[int]:
        return [index for index, seat in enumerate(self.slots) if seat.is_free]

    def replace_slot(self, index: int, slot: SliceSlot) -> SliceSlots:
        return SliceSlots((*self.slots[:index], slot, *self.slots[index + 1 :]))

    def to_json(self) -> str:
        return json.dumps([_written(seat) for seat in self.slots], separators=(",", ":"))


def initial_slots(slices: Sequence[SliceId]) -> SliceSlots:
    return SliceSlots(tuple(SliceSlot(slice_id=slice_id) for slice_id in slices))


def parse_slots(text: str) -> SliceSlots:
    return SliceSlots(tuple(_read(row) for row in json.loads(text)))


def slots_of(jobset: Mapping[str, Any]) -> SliceSlots:
    return parse_slots(jobset["metadata"]["annotations"][ANNOTATION])


def _written(seat: SliceSlot) -> dict[str, Any]:
    row = {
        "slice": seat.slice_id,
        "pods": list(seat.pods),
        "past": list(seat.retired_pods),
        "lost": seat.loss_message,
        "preempted": seat.preempted,
        "dead": list(seat.dead_hosts),
        "notice": seat.notice.value if seat.notice else None,
        "takenAt": seat.preempt_at.isoformat() if seat.preempt_at else None,
    }
    return {key: value for key, value in row.items() if value}


def _read(row: dict[str, Any]) -> SliceSlot:
    slice_id = row.get("slice")
    return replace(
        SliceSlot(),
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
