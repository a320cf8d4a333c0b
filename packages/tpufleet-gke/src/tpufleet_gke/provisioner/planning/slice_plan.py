"""Which Slices to create of which sub-blocks, and which to delete. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from tpufleet_gke.provisioner.model.dynamic_slices import DynamicSlice, Partition, SliceDemand
from tpufleet_gke.provisioner.model.pod_owners import OwnerStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class SlicePlan:
    creates: Sequence[tuple[SliceDemand, tuple[str, ...]]] = ()  # with its partitions
    deletes: Collection[str] = ()  # names
    waiting: Sequence[tuple[SliceDemand, str]] = ()  # and why


def plan_slices(
    demands: Sequence[SliceDemand],
    slices: Sequence[DynamicSlice],
    partitions: Mapping[str, Partition],
    owners: Mapping[tuple[str, str], OwnerStatus],
    completed_jobs: Mapping[tuple[str, str], datetime],
    suspects: Collection[str] = (),
) -> SlicePlan:
    """All slices of an owner, or none: part of a gang would hold sub-blocks for nothing. A slice
    that failed is replaced when there are others to form it of. `suspects` are partitions of slices
    that failed lately: they come last."""
    free = _Free(partitions, slices, suspects)
    by_name = {one.name: one for one in slices}
    deletes = [
        one.name
        for one in slices
        if not one.deleting and not _is_needed(one, owners, completed_jobs)
    ]
    creates: list[tuple[SliceDemand, tuple[str, ...]]] = []
    waiting: list[tuple[SliceDemand, str]] = []
    gangs: dict[tuple[str, str], list[SliceDemand]] = defaultdict(list)
    for demand in demands:
        gangs[demand.pod.namespace, demand.pod.owner_name].append(demand)
    for gang in gangs.values():
        trial, chosen = free.copy(), []
        for demand in gang:
            existing = by_name.get(demand.name)
            if existing is None:
                chosen.append((demand, trial.take(demand.partitions)))
            elif existing.owner != (demand.pod.namespace, demand.pod.owner_name):
                waiting.append((demand, f"Slice {demand.name} belongs to another"))
            elif existing.deleting:
                waiting.append((demand, f"Slice {demand.name} is being deleted"))
            elif existing.failed:
                problem = f"Slice {demand.name}: {existing.reason}"
                problem += f": {existing.message}" if existing.message else ""
                others = free.copy(also=existing.partitions).take(demand.partitions)
                if others and {*others} != {*existing.partitions}:
                    deletes.append(demand.name)
                    waiting.append((demand, f"{problem}; it is formed of other sub-blocks"))
                else:
                    lack = free.lack(demand.partitions)
                    waiting.append((demand, f"{problem}; there are no spare sub-blocks: {lack}"))
        if all(taken for _, taken in chosen):
            creates += [(demand, taken) for demand, taken in chosen if taken]
            free = trial
        else:
            total = sum(demand.partitions for demand, _ in chosen)
            waiting += [(demand, free.lack(demand.partitions, total)) for demand, _ in chosen]
    return SlicePlan(creates=creates, deletes=deletes, waiting=waiting)


def _is_needed(
    one: DynamicSlice,
    owners: Mapping[tuple[str, str], OwnerStatus],
    completed_jobs: Mapping[tuple[str, str], datetime],
) -> bool:
    """Also: not ours."""
    if one.owner is None:
        return True
    status = owners.get(one.owner)
    return (
        status is not None
        and status.uid == (one.owner_uid or status.uid)
        and status.ended_at is None
        and status.suspended_at is None
        and (one.owner[0], one.job) not in completed_jobs
    )


class _Free:
    """Partitions that no slice uses, by block."""

    def __init__(
        self,
        partitions: Mapping[str, Partition],
        slices: Sequence[DynamicSlice],
        suspects: Collection[str],
    ) -> None:
        self._all, self._suspects = partitions, suspects
        used = {name for one in slices for name in one.partitions}
        self._free = [
            one for name, one in sorted(partitions.items()) if one.usable and name not in used
        ]

    def copy(self, also: Collection[str] = ()) -> _Free:
        other = _Free({}, (), self._suspects)
        other._all = self._all
        more = [self._all[name] for name in also if name in self._all and self._all[name].usable]
        other._free = self._free + more
        return other

    def take(self, count: int) -> tuple[str, ...]:
        """Of the block with the fewest that has enough; empty when none has."""
        blocks: dict[str, list[Partition]] = defaultdict(list)
        for one in sorted(self._free, key=lambda one: one.id in self._suspects):
            blocks[one.block].append(one)
        fitting = [block for block in blocks.values() if len(block) >= count]
        if not fitting:
            return ()
        best = min(
            fitting, key=lambda block: (any(self._suspected(block[:count])), len(block))
        )  # fmt: skip
        taken = tuple(one.id for one in best[:count])
        self._free = [one for one in self._free if one.id not in taken]
        return taken

    def _suspected(self, block: Sequence[Partition]) -> list[bool]:
        return [one.id in self._suspects for one in block]

    def lack(self, count: int, of_gang: int = 0) -> str:
        states = Counter(one.state for one in self._all.values() if not one.usable)
        listed = "".join(f", {number} {state}" for state, number in sorted(states.items()))
        gang = f" ({of_gang} for all slices of its owner)" if of_gang > count else ""
        return (
            f"needs {count} sub-blocks of one block{gang}; of {len(self._all)} in the cluster, "
            f"{len(self._free)} are healthy and free{listed}"
        )
