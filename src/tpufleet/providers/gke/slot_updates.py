"""What a look at the pods of a JobSet shows that is not written on its seats yet. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from tpufleet.model.cloud_slices import CloudSlice, CloudState
from tpufleet.providers.gke import slice_slots, states
from tpufleet.providers.gke.slice_slots import SliceSlot, SliceSlots

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotUpdate:
    jobset: Json
    slots: SliceSlots  # as they should be written
    lost_slots: tuple[int, ...] = ()  # seats whose slice is found to be lost
    leftover_pods: tuple[Json, ...] = ()  # pods of slices that are over, which nobody ended

    @property
    def has_changes(self) -> bool:
        return self.slots != slice_slots.slots_of(self.jobset)

    @property
    def is_due(self) -> bool:
        return self.has_changes or bool(self.leftover_pods)


def compute_update(jobset: Json, pods: Sequence[Json], now: datetime) -> SlotUpdate:
    before = after = slice_slots.slots_of(jobset)
    losses: list[int] = []
    found = {one.id: one for one in states.observed_slices(jobset, pods, None, before, now)}
    for index, seat in enumerate(before.slots):
        if seat.slice_id is None or seat.loss_message:
            continue
        mine = [pod for pod in pods if states.slot_index(pod) == index]
        changed = _seat(seat, found[seat.slice_id], mine)
        after = after.replace_slot(index, changed)
        if changed.loss_message:
            losses.append(index)
    leftovers = tuple(pod for pod in pods if _left_over(pod, after, losses))
    return SlotUpdate(jobset=jobset, slots=after, lost_slots=tuple(losses), leftover_pods=leftovers)


def _seat(seat: SliceSlot, found: CloudSlice, pods: Sequence[Json]) -> SliceSlot:
    if found.state is CloudState.UP and not seat.pods:
        hosts = states.current_pods(pods, seat)
        return replace(seat, pods=tuple(hosts[host]["metadata"]["uid"] for host in sorted(hosts)))
    if found.state is CloudState.UP and found.lost_hosts != seat.dead_hosts:
        return replace(seat, dead=found.lost_hosts)
    if found.state in (CloudState.PREEMPTED, CloudState.FAILED):
        leaving = [pod["metadata"]["uid"] for pod in pods]
        preempted = found.state is CloudState.PREEMPTED
        return seat.mark_lost(found.message or "lost", preempted=preempted, leaving=leaving)
    return seat


def _left_over(pod: Json, seated: SliceSlots, lost: Sequence[int]) -> bool:
    """Of a slice that is over, by a server that had no time to end it. The Jobs of slices that are
    found lost just now are ended as a whole."""
    index = states.slot_index(pod)
    if index in lost or not 0 <= index < len(seated.slots):
        return False
    return pod["metadata"]["uid"] in seated.slots[index].retired_pods and states.is_active(pod)
