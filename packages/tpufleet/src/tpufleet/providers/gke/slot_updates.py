"""What the pods of a JobSet show that its slot table does not record yet. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
from msgspec.structs import replace

from tpufleet.model.fleet.cloud_slices import CloudSlice, CloudState
from tpufleet.providers.gke import slice_slots, states
from tpufleet.providers.gke.slice_slots import SliceSlot, SliceSlots

Json = dict[str, Any]


class SlotUpdate(msgspec.Struct, frozen=True, kw_only=True):
    jobset: Json
    slots: SliceSlots  # to be written
    lost_slots: tuple[int, ...] = ()  # slots whose slice is newly lost
    leftover_pods: tuple[Json, ...] = ()  # active pods of slices that have ended

    @property
    def has_changes(self) -> bool:
        return self.slots != slice_slots.slots_of(self.jobset)

    @property
    def is_due(self) -> bool:
        return self.has_changes or bool(self.leftover_pods)


def compute_update(
    jobset: Json, pods: Sequence[Json], now: datetime, workload: Json | None = None
) -> SlotUpdate:
    """`workload` tells why Kueue evicted it."""
    before = after = slice_slots.slots_of(jobset)
    lost: list[int] = []
    observed = {one.id: one for one in states.observed_slices(jobset, pods, workload, before, now)}
    for index, slot in enumerate(before.slots):
        if slot.slice_id is None or slot.loss_message:
            continue
        slot_pods = [pod for pod in pods if states.slot_index(pod) == index]
        updated = _updated(slot, observed[slot.slice_id], slot_pods)
        after = after.replace_slot(index, updated)
        if updated.loss_message:
            lost.append(index)
    leftovers = tuple(pod for pod in pods if _is_leftover(pod, after, lost))
    return SlotUpdate(jobset=jobset, slots=after, lost_slots=tuple(lost), leftover_pods=leftovers)


def _updated(slot: SliceSlot, observed: CloudSlice, pods: Sequence[Json]) -> SliceSlot:
    if observed.state is CloudState.UP and not slot.pods:
        hosts = states.current_pods(pods, slot)
        return replace(slot, pods=tuple(hosts[host]["metadata"]["uid"] for host in sorted(hosts)))
    if observed.state is CloudState.UP and observed.lost_hosts != slot.dead_hosts:
        return replace(slot, dead_hosts=observed.lost_hosts)
    if observed.state in (CloudState.PREEMPTED, CloudState.FAILED):
        return slot.mark_lost(
            observed.message or "lost",
            preempted=observed.state is CloudState.PREEMPTED,
            leaving=[pod["metadata"]["uid"] for pod in pods],
            loss=observed.loss,
        )
    return slot


def _is_leftover(pod: Json, slots: SliceSlots, lost: Sequence[int]) -> bool:
    """An active pod of an ended slice, whose server died before deleting it. Newly lost slots are
    excluded: their Jobs are deleted as a whole."""
    index = states.slot_index(pod)
    if index in lost or not 0 <= index < len(slots.slots):
        return False
    return pod["metadata"]["uid"] in slots.slots[index].retired_pods and states.is_active(pod)
