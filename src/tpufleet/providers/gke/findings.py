"""What a look at the pods of a JobSet shows that is not written on its seats yet. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from tpufleet.model.clouds import CloudSlice, CloudState
from tpufleet.providers.gke import seats, states
from tpufleet.providers.gke.seats import Seat, Seats

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    jobset: Json
    seats: Seats  # as they should be written
    losses: tuple[int, ...] = ()  # seats whose slice is found to be lost
    leftovers: tuple[Json, ...] = ()  # pods of slices that are over, which nobody ended

    @property
    def changes(self) -> bool:
        return self.seats != seats.of(self.jobset)

    @property
    def due(self) -> bool:
        return self.changes or bool(self.leftovers)


def of(jobset: Json, pods: Sequence[Json], now: datetime) -> Finding:
    before = after = seats.of(jobset)
    losses: list[int] = []
    found = {one.id: one for one in states.slices_of(jobset, pods, None, before, now)}
    for index, seat in enumerate(before.all):
        if seat.slice_id is None or seat.lost:
            continue
        mine = [pod for pod in pods if states.seat_of(pod) == index]
        changed = _seat(seat, found[seat.slice_id], mine)
        after = after.change(index, changed)
        if changed.lost:
            losses.append(index)
    leftovers = tuple(pod for pod in pods if _left_over(pod, after, losses))
    return Finding(jobset=jobset, seats=after, losses=tuple(losses), leftovers=leftovers)


def _seat(seat: Seat, found: CloudSlice, pods: Sequence[Json]) -> Seat:
    if found.state is CloudState.UP and not seat.pods:
        hosts = states.current(pods, seat)
        return replace(seat, pods=tuple(hosts[host]["metadata"]["uid"] for host in sorted(hosts)))
    if found.state is CloudState.UP and found.lost_hosts != seat.dead:
        return replace(seat, dead=found.lost_hosts)
    if found.state in (CloudState.PREEMPTED, CloudState.FAILED):
        leaving = [pod["metadata"]["uid"] for pod in pods]
        preempted = found.state is CloudState.PREEMPTED
        return seat.lose(found.words or "lost", preempted=preempted, leaving=leaving)
    return seat


def _left_over(pod: Json, seated: Seats, lost: Sequence[int]) -> bool:
    """Of a slice that is over, by a server that had no time to end it. The Jobs of slices that are
    found lost just now are ended as a whole."""
    index = states.seat_of(pod)
    if index in lost or not 0 <= index < len(seated.all):
        return False
    return pod["metadata"]["uid"] in seated.all[index].past and states.goes_on(pod)
