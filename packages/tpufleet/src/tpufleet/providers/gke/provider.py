"""The provider `gke`: requests, releases, listings and fault injection on JobSets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tpufleet.clocks import Clock, SystemClock
from tpufleet.errors import BadRequest
from tpufleet.kubernetes.connections import Connection, Json
from tpufleet.model.fleet.cloud_slices import CloudSlice, ExpectedSlice
from tpufleet.model.fleet.hosts import NoticeKind
from tpufleet.model.fleet.slices import SliceId, settings_digest
from tpufleet.model.job.pod_settings import PodSettings
from tpufleet.providers.base import (
    Fault,
    Order,
    no_such_slice,
    out_of_capacity,
    refuse_adoption,
)
from tpufleet.providers.gke import keys, manifests, settings, slice_slots, slot_updates, states
from tpufleet.providers.gke.capacity_events import CapacityEvent
from tpufleet.providers.gke.jobset_client import JobSetClient, JobSetSnapshot, fits_order, pod_uids
from tpufleet.providers.gke.settings import GkeSettings
from tpufleet.providers.gke.slice_slots import SliceSlots
from tpufleet.providers.gke.slot_updates import SlotUpdate

# A leader lists more often than this, and a failover takes longer.
MAX_LISTING_AGE = timedelta(seconds=10)
EVENTS_INTERVAL = timedelta(seconds=5)


class GkeProvider:
    name = "gke"
    exposes_tokens = False

    def __init__(
        self,
        connection: Connection,
        settings: GkeSettings,
        *,
        fleet: str,
        zones: Sequence[str],
        clock: Clock | None = None,
        most_slices: int | None = None,
        notice_period: timedelta = timedelta(seconds=30),
    ) -> None:
        """`most_slices` limits the slices of this fleet, in addition to Kueue's quota."""
        self.zones: Sequence[str] = tuple(zones)
        self._jobsets = JobSetClient(connection, settings, fleet)
        self._clock = clock or SystemClock()
        self._most, self._notice_period = most_slices, notice_period
        self._listeners: list[Callable[[], None]] = []
        self._lock = threading.RLock()
        self._listed_at: datetime | None = None
        self._capacity_events: tuple[datetime | None, Mapping[str, CapacityEvent]] = (None, {})
        self._jobset_of: dict[SliceId, str] = {}  # in the last listing, without those released

    # The Provider interface.

    def slice_settings(self, accelerator: str, pod: PodSettings) -> str:
        """Not the settings of the server, such as its image: an upgrade must not give up idle
        capacity, which may be scarce."""
        return settings_digest(pod)

    def request(self, order: Order) -> None:
        refuse_adoption(order, self.name)
        manifests.accelerator_of(order)
        with self._lock:
            jobsets = self._jobsets.all()
            known = {
                slot.slice_id for jobset in jobsets for slot in slice_slots.slots_of(jobset).slots
            }
            wanted = tuple(name for name in dict.fromkeys(order.slices) if name not in known)
            if not wanted:
                return
            self._check_room(order, wanted, len(known - {None}))
            order = replace(order, slices=wanted)
            if not self._reuse_slots(order, jobsets):
                self._jobsets.create(order)

    def release(self, slice_id: SliceId, zone: str) -> None:
        with self._lock:
            self._jobset_of.pop(slice_id, None)
            jobset = self._jobsets.find_by_slice(slice_id)
            if jobset is None:
                return
            others = [
                slot for slot in slice_slots.slots_of(jobset).slots
                if not slot.is_free and slot.slice_id != slice_id
            ]  # fmt: skip
            if others:
                self._clear_slot(jobset, slice_id)
            else:
                self._jobsets.delete(jobset)

    def listing(self, expected: Collection[ExpectedSlice] = ()) -> Sequence[CloudSlice]:
        now = self._clock.now()
        recent = self._listed_recently(now)
        snapshot = self._jobsets.snapshot() if recent else self._jobsets.list_from_server()
        changed = any(update.has_changes for update in _updates(snapshot, now))
        if changed:
            # Watches may lag: never report a change, least of all a loss, from them alone.
            snapshot = self._jobsets.confirmed(snapshot)
        workloads = self._jobsets.workloads(from_server=changed) if snapshot.jobsets else {}
        capacity_events = self._recent_capacity_events(snapshot, now)
        return self._deleted(snapshot, expected) + [
            observed
            for jobset, pods in snapshot.jobsets
            for observed in states.observed_slices(
                jobset,
                pods,
                workloads.get(jobset["metadata"]["uid"]),
                slice_slots.slots_of(jobset),
                now,
                capacity_events,
            )
        ]

    def _deleted(
        self, snapshot: JobSetSnapshot, expected: Collection[ExpectedSlice]
    ) -> list[CloudSlice]:
        """Slices whose JobSet somebody deleted since the last listing, once, to say so."""
        with self._lock:
            before, self._jobset_of = self._jobset_of, {
                SliceId(slot.slice_id): jobset["metadata"]["name"]
                for jobset, _ in snapshot.jobsets
                for slot in slice_slots.slots_of(jobset).slots
                if slot.slice_id is not None
            }  # fmt: skip
        names = {jobset["metadata"]["name"] for jobset, _ in snapshot.jobsets}
        return [
            states.deleted_slice(one, before[one.id])
            for one in expected
            if one.id in before and before[one.id] not in names
        ]

    def inject(self, slice_id: SliceId, fault: Fault, host_index: int | None = None) -> None:
        with self._lock:
            jobset = self._jobsets.find_by_slice(slice_id)
            if jobset is None:
                raise no_such_slice(slice_id)
            # Record first which pods make up the slice.
            self._write_updates(self._jobsets.list_from_server())
            match fault:
                case Fault.PREEMPT:
                    self._preempt(jobset, slice_id)
                case Fault.PREEMPT_NOTICE:
                    self._give_notice(jobset, slice_id, NoticeKind.PREEMPTED)
                case Fault.MAINTENANCE:
                    self._give_notice(jobset, slice_id, NoticeKind.MAINTENANCE)
                case Fault.KILL_HOST:
                    self._kill_host(jobset, slice_id, host_index or 0)
                case Fault.STALL_HOST:
                    raise BadRequest("stall-host is not supported on GKE; use kill-host")
        self._notify()

    def on_change(self, wake: Callable[[], None]) -> None:
        self._listeners.append(wake)

    def close(self) -> None:
        """Stop watching. The slices keep running."""
        self._jobsets.close()

    # Specific to GKE.

    def start(self) -> None:
        """Watch in the background: notify the controller, and record which pods make up a slice."""
        self._jobsets.start(on_poll=self.advance, on_change=self._notify)

    def advance(self) -> None:
        """Record slices that came up or were lost, before their pods disappear. Watches tell
        whether anything is due; what to write is decided from a list."""
        with self._lock:
            snapshot = self._jobsets.snapshot()
            if any(update.is_due for update in _updates(snapshot, self._clock.now())):
                self._write_updates(self._jobsets.confirmed(snapshot))

    def _write_updates(self, snapshot: JobSetSnapshot) -> None:
        now = self._clock.now()
        updates = _updates(snapshot, now)
        if any(update.lost_slots for update in updates):
            # The watch on Workloads may lag behind the one that told of the eviction.
            updates = _updates(snapshot, now, self._jobsets.workloads(from_server=True))
        for update in updates:
            self._write_update(update)

    def _write_update(self, update: SlotUpdate) -> None:
        """Optimistic: another server may observe the same JobSet. Only the server whose write
        succeeded cleans up after a loss."""
        jobset = update.jobset
        if update.has_changes and not self._jobsets.write_slots(jobset, update.slots):
            return  # the other server's change triggers another pass
        for index in update.lost_slots:
            self._jobsets.delete_job(jobset, index)
            self._jobsets.delete_token(jobset, index)
        for pod in update.leftover_pods:
            self._jobsets.delete_pod(pod)

    def _recent_capacity_events(
        self, snapshot: JobSetSnapshot, now: datetime
    ) -> Mapping[str, CapacityEvent]:
        """Events are not watched: a namespace has many, and few matter."""
        listed_at, events = self._capacity_events
        if listed_at is None or now - listed_at >= EVENTS_INTERVAL:
            if not self._jobsets.has_unschedulable_pods(snapshot):
                return {}
            events = self._jobsets.capacity_events()
            self._capacity_events = (now, events)
        return events

    def _listed_recently(self, now: datetime) -> bool:
        """If not, this server may have just become leader: its first listing must include what the
        previous leader requested, and its watches may lag."""
        previous, self._listed_at = self._listed_at, now
        return previous is not None and now - previous < MAX_LISTING_AGE

    def _check_room(self, order: Order, wanted: Sequence[SliceId], held: int) -> None:
        if self._most is not None and held + len(wanted) > self._most:
            detail = f"{held} of {self._most} slices in use (gke.most_slices)"
            raise out_of_capacity(order.accelerator, order.capacity, order.zone, detail)

    def _reuse_slots(self, order: Order, jobsets: Sequence[Json]) -> bool:
        """Use free slots of the same job, whose node pools still exist. True if all slices fit."""
        for jobset in jobsets:
            free = slice_slots.slots_of(jobset).free_indexes()
            if len(free) < len(order.slices) or not fits_order(jobset, order):
                continue
            assigned = dict(zip(free, order.slices, strict=False))
            entries = {
                index: manifests.slot_entry(slice_id, order.tokens[slice_id])
                for index, slice_id in assigned.items()
            }
            self._jobsets.write_tokens(jobset, entries)
            self._jobsets.update_slots(jobset, partial(_assign, assigned))
            return True
        return False

    def _clear_slot(self, jobset: Json, slice_id: SliceId) -> None:
        index = slice_slots.slots_of(jobset).index_of(slice_id)
        if index is None:
            return
        self._jobsets.delete_token(jobset, index)
        leaving: list[Json] = []
        # The pods of a lost slice have already been replaced.
        if not slice_slots.slots_of(jobset).slots[index].loss_message:
            leaving = self._jobsets.pods_of(jobset, slice_id)
            self._jobsets.delete_job(jobset, index)
        self._jobsets.update_slots(jobset, lambda table: table.replace_slot(
            index, table.slots[index].clear(pod_uids(leaving))))  # fmt: skip

    def _preempt(self, jobset: Json, slice_id: SliceId) -> None:
        index = slice_slots.slots_of(jobset).index_of(slice_id)
        assert index is not None
        self._jobsets.delete_token(jobset, index)
        pods = self._jobsets.pods_of(jobset, slice_id)
        self._jobsets.delete_job(jobset, index)
        self._jobsets.update_slot(jobset, slice_id, lambda slot: slot.mark_lost(
            "preempted", preempted=True, leaving=pod_uids(pods)))  # fmt: skip

    def _give_notice(self, jobset: Json, slice_id: SliceId, kind: NoticeKind) -> None:
        preempt_at = self._clock.now() + self._notice_period
        self._jobsets.update_slot(
            jobset, slice_id, lambda slot: replace(slot, notice=kind, preempt_at=preempt_at)
        )
        for pod in self._jobsets.pods_of(jobset, slice_id):
            self._jobsets.annotate_pod(pod, {keys.NOTICE: kind.value})

    def _kill_host(self, jobset: Json, slice_id: SliceId, host: int) -> None:
        self._jobsets.update_slot(jobset, slice_id, lambda slot: replace(
            slot, dead_hosts=tuple(sorted({*slot.dead_hosts, host}))))  # fmt: skip
        for pod in self._jobsets.pods_of(jobset, slice_id):
            if states.host_index(pod) == host:
                self._jobsets.delete_pod(pod)

    def _notify(self) -> None:
        for wake in self._listeners:
            wake()


def _updates(
    snapshot: JobSetSnapshot, now: datetime, workloads: Mapping[str, Json] | None = None
) -> list[SlotUpdate]:
    by_jobset = workloads or {}
    return [
        slot_updates.compute_update(jobset, pods, now, by_jobset.get(jobset["metadata"]["uid"]))
        for jobset, pods in snapshot.jobsets
    ]


def _assign(assigned: Mapping[int, SliceId], table: SliceSlots) -> SliceSlots:
    return SliceSlots(
        tuple(
            slot.assign(assigned[index]) if index in assigned else slot
            for index, slot in enumerate(table.slots)
        )
    )


def open_provider(config: Mapping[str, Any], *, fleet: str, clock: Clock) -> GkeProvider:
    """From the `gke` section of the config file; started."""
    gke = settings.parse(config)
    provider = GkeProvider(
        Connection(Path(gke.kubeconfig) if gke.kubeconfig else None),
        gke,
        fleet=fleet,
        zones=gke.zones,
        clock=clock,
        most_slices=gke.most_slices,
    )
    provider.start()
    return provider
