"""Which slice uses which replica of a JobSet. Each replica is a slot for one slice; the table is an
annotation on the JobSet, so that it survives the server. Pure.

A slot outlives its slice: when a slice is lost, its Job creates new pods and thereby keeps the node
pool, and the next slice that the same job requests takes the slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
from msgspec.structs import replace

from tpufleet.model.fleet.hosts import NoticeKind
from tpufleet.model.fleet.slices import LossReason, SliceId
from tpufleet.model.values import encoding

ANNOTATION = "tpufleet.dev/seats"


class SliceSlot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    slice_id: SliceId | None = None  # None: free
    pods: tuple[str, ...] = ()  # UIDs by host, as of when all pods first ran together
    retired_pods: tuple[str, ...] = ()  # UIDs of pods that served an earlier slice
    loss_message: str = ""  # why the slice was lost; empty while it is not
    loss: LossReason | None = None  # where it is known more precisely than `preempted` tells
    preempted: bool = False
    dead_hosts: tuple[int, ...] = ()
    notice: NoticeKind | None = None
    preempt_at: datetime | None = None  # when the notice period ends

    @property
    def is_free(self) -> bool:
        return self.slice_id is None

    def clear(self, leaving: Iterable[str] = ()) -> SliceSlot:
        """Free again. `leaving`: UIDs of pods that must not serve the next slice."""
        return SliceSlot(retired_pods=tuple(sorted({*self.retired_pods, *self.pods, *leaving})))

    def assign(self, slice_id: SliceId) -> SliceSlot:
        return SliceSlot(slice_id=slice_id, retired_pods=self.retired_pods)

    def mark_lost(
        self,
        message: str,
        *,
        preempted: bool,
        leaving: Iterable[str],
        loss: LossReason | None = None,
    ) -> SliceSlot:
        """`leaving`: UIDs of all current pods of this slot. Earlier ones never come back and are
        forgotten, so a slot that is lost a thousand times does not grow. Another server may have
        noted the loss first, with pods that have come since and go with their Job."""
        known = self.retired_pods if self.loss_message else ()
        return replace(
            self,
            loss_message=message,
            loss=loss,
            preempted=preempted,
            retired_pods=tuple(sorted({*known, *leaving})),
        )


class SliceSlots(msgspec.Struct, frozen=True):
    slots: tuple[SliceSlot, ...] = ()

    def index_of(self, slice_id: SliceId) -> int | None:
        indexes = (index for index, slot in enumerate(self.slots) if slot.slice_id == slice_id)
        return next(indexes, None)

    def free_indexes(self) -> list[int]:
        return [index for index, slot in enumerate(self.slots) if slot.is_free]

    def replace_slot(self, index: int, slot: SliceSlot) -> SliceSlots:
        return SliceSlots((*self.slots[:index], slot, *self.slots[index + 1 :]))

    def to_json(self) -> str:
        return encoding.to_json(self.slots).decode()


def initial_slots(slices: Sequence[SliceId]) -> SliceSlots:
    return SliceSlots(tuple(SliceSlot(slice_id=slice_id) for slice_id in slices))


def parse_slots(text: str) -> SliceSlots:
    return SliceSlots(encoding.from_json(text, tuple[SliceSlot, ...]))


def slots_of(jobset: Mapping[str, Any]) -> SliceSlots:
    return parse_slots(jobset["metadata"]["annotations"][ANNOTATION])
