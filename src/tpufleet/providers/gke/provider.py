"""The provider itself: what requests, releases, listings and drills mean for JobSets.

The provider from settings: what `compose` calls when GKE is set up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from tpufleet.clocks import Clock, SystemClock
from tpufleet.errors import BadRequest, NoCapacity
from tpufleet.kubernetes.connections import Connection, Json
from tpufleet.model.cloud_slices import CloudSlice
from tpufleet.model.hosts import NoticeKind
from tpufleet.model.slices import SliceId
from tpufleet.providers.base import Fault, Order
from tpufleet.providers.gke import keys, manifests, settings, slice_slots, slot_updates, states
from tpufleet.providers.gke.jobset_client import JobSetClient, JobSetSnapshot, fits_order, pod_uids
from tpufleet.providers.gke.jobset_watch import JobSetWatch
from tpufleet.providers.gke.settings import GkeSettings
from tpufleet.providers.gke.slice_slots import SliceSlots
from tpufleet.providers.gke.slot_updates import SlotUpdate

# Who leads lists more often, and nobody comes to lead faster.
MAX_LISTING_AGE = timedelta(seconds=10)


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
        """`most_slices` bounds what this fleet holds at a time; Kueue's quota bounds it besides."""
        self.zones = tuple(zones)
        self._jobsets = JobSetClient(connection, settings, fleet)
        self._clock = clock or SystemClock()
        self._most, self._notice_period = most_slices, notice_period
        self._listeners: list[Callable[[], None]] = []
        self._lock = threading.RLock()
        self._listed_at: datetime | None = None
        self._make_watch = lambda: JobSetWatch(
            connection, settings.namespace, {keys.FLEET: fleet}, queued=bool(settings.queue),
            on_poll=self.advance, on_change=self._notify,
        )  # fmt: skip
        self._watch: JobSetWatch | None = None

    # What every provider does.

    def request(self, order: Order) -> None:
        _validate(order)
        manifests.accelerator_of(order)
        with self._lock:
            jobsets = self._jobsets.all()
            known = {
                seat.slice_id for jobset in jobsets for seat in slice_slots.slots_of(jobset).slots
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
            jobset = self._jobsets.find_by_slice(slice_id)
            if jobset is None:
                return
            others = [
                seat for seat in slice_slots.slots_of(jobset).slots
                if not seat.is_free and seat.slice_id != slice_id
            ]  # fmt: skip
            if others:
                self._vacate(jobset, slice_id)
            else:
                self._jobsets.delete(jobset)

    def listing(self) -> Sequence[CloudSlice]:
        now = self._clock.now()
        seen = (
            self._jobsets.snapshot()
            if self._listed_lately(now)
            else self._jobsets.list_from_server()
        )
        if any(found.has_changes for found in _updates(seen, now)):
            seen = self._jobsets.confirmed(seen)  # a loss above all is not believed of watches
        workloads = self._jobsets.workloads() if seen.jobsets else {}
        return [
            found
            for jobset, pods in seen.jobsets
            for found in states.observed_slices(
                jobset,
                pods,
                workloads.get(jobset["metadata"]["uid"]),
                slice_slots.slots_of(jobset),
                now,
            )
        ]

    def inject(self, slice_id: SliceId, fault: Fault, host_index: int | None = None) -> None:
        with self._lock:
            jobset = self._jobsets.find_by_slice(slice_id)
            if jobset is None:
                raise BadRequest(f"there is no slice {slice_id!r} to hurt")
            self._write_down(
                self._jobsets.list_from_server()
            )  # who came up just now, before it is hurt
            match fault:
                case Fault.PREEMPT:
                    self._lose(jobset, slice_id, "preempted")
                case Fault.PREEMPT_NOTICE:
                    self._give_notice(jobset, slice_id, NoticeKind.PREEMPTED)
                case Fault.MAINTENANCE:
                    self._give_notice(jobset, slice_id, NoticeKind.MAINTENANCE)
                case Fault.KILL_HOST:
                    self._kill_host(jobset, slice_id, host_index or 0)
                case Fault.STALL_HOST:
                    raise BadRequest("Kubernetes cannot stall a host; `kill-host` is near to it")
        self._notify()

    def on_change(self, wake: Callable[[], None]) -> None:
        self._listeners.append(wake)

    def close(self) -> None:
        """Stop watching. The slices run on."""
        watch, self._watch, self._jobsets.watch = self._watch, None, None
        if watch is not None:
            watch.close()

    # What only this one does.

    def start(self) -> None:
        """Watch in the background: wake the controller, and remember which pods made up a slice."""
        if self._watch is None:
            self._watch = self._jobsets.watch = self._make_watch().start()

    def advance(self) -> None:
        """Write down what would otherwise be forgotten: who came up, and who was lost. The watches
        show whether there is anything to write; what it is, the server is asked."""
        with self._lock:
            seen = self._jobsets.snapshot()
            if any(found.is_due for found in _updates(seen, self._clock.now())):
                self._write_down(self._jobsets.confirmed(seen))

    def _write_down(self, seen: JobSetSnapshot) -> None:
        for finding in _updates(seen, self._clock.now()):
            self._write(finding)

    def _write(self, finding: SlotUpdate) -> None:
        """Decided from what was seen, and written only if nobody changed it meanwhile: another
        server may look at the same JobSet. What follows from a loss is done by who wrote it."""
        jobset = finding.jobset
        if finding.has_changes and not self._jobsets.write_slots(jobset, finding.slots):
            return  # that change is news, and all is looked at anew
        for index in finding.lost_slots:
            self._jobsets.delete_job(jobset, index)
            self._jobsets.delete_token(jobset, index)
        for pod in finding.leftover_pods:
            self._jobsets.delete_pod(pod)

    def _listed_lately(self, now: datetime) -> bool:
        """Else this server may lead since a moment ago: what the one before it asked for must be
        in its first listing, and its watches may be behind."""
        before, self._listed_at = self._listed_at, now
        return before is not None and now - before < MAX_LISTING_AGE

    def _check_room(self, order: Order, wanted: Sequence[SliceId], held: int) -> None:
        if self._most is not None and held + len(wanted) > self._most:
            raise NoCapacity(
                f"this fleet may hold {self._most} slices on GKE, and holds {held}; no room for "
                f"{len(wanted)} more {order.accelerator} in {order.zone}"
            )

    def _reuse_slots(self, order: Order, jobsets: Sequence[Json]) -> bool:
        """Take free seats of the same job, whose node pools are still there. True: all sit."""
        for jobset in jobsets:
            free = slice_slots.slots_of(jobset).free_indexes()
            if len(free) < len(order.slices) or not fits_order(jobset, order):
                continue
            taking = dict(zip(free, order.slices, strict=False))
            entries = {
                index: manifests.slot_entry(slice_id, order.tokens[slice_id])
                for index, slice_id in taking.items()
            }
            self._jobsets.write_tokens(jobset, entries)
            self._jobsets.update_slots(jobset, lambda seated, taking=taking: SliceSlots(tuple(
                seat.assign(taking[index]) if index in taking else seat
                for index, seat in enumerate(seated.slots)
            )))  # fmt: skip
            return True
        return False

    def _vacate(self, jobset: Json, slice_id: SliceId) -> None:
        index = slice_slots.slots_of(jobset).index_of(slice_id)
        if index is None:
            return
        self._jobsets.delete_token(jobset, index)
        leaving: list[Json] = []
        if (
            not slice_slots.slots_of(jobset).slots[index].loss_message
        ):  # those of a lost slice are replaced already
            leaving = self._jobsets.pods_of(jobset, slice_id)
            self._jobsets.delete_job(jobset, index)
        self._jobsets.update_slots(jobset, lambda seated: seated.replace_slot(
            index, seated.slots[index].clear(pod_uids(leaving))))  # fmt: skip

    def _lose(self, jobset: Json, slice_id: SliceId, why: str) -> None:
        index = slice_slots.slots_of(jobset).index_of(slice_id)
        assert index is not None
        self._jobsets.delete_token(jobset, index)
        ended = self._jobsets.pods_of(jobset, slice_id)
        self._jobsets.delete_job(jobset, index)
        self._jobsets.update_slot(jobset, slice_id, lambda seat: seat.mark_lost(
            why, preempted=True, leaving=pod_uids(ended)))  # fmt: skip

    def _give_notice(self, jobset: Json, slice_id: SliceId, kind: NoticeKind) -> None:
        taken_at = self._clock.now() + self._notice_period
        self._jobsets.update_slot(
            jobset, slice_id, lambda seat: replace(seat, notice=kind, taken_at=taken_at)
        )
        for pod in self._jobsets.pods_of(jobset, slice_id):
            self._jobsets.annotate_pod(pod, {keys.NOTICE: kind.value})

    def _kill_host(self, jobset: Json, slice_id: SliceId, host: int) -> None:
        self._jobsets.update_slot(jobset, slice_id, lambda seat: replace(
            seat, dead=tuple(sorted({*seat.dead_hosts, host}))))  # fmt: skip
        for pod in self._jobsets.pods_of(jobset, slice_id):
            if states.host_index(pod) == host:
                self._jobsets.delete_pod(pod)

    def _notify(self) -> None:
        for wake in self._listeners:
            wake()


def _updates(seen: JobSetSnapshot, now: datetime) -> list[SlotUpdate]:
    return [slot_updates.compute_update(jobset, pods, now) for jobset, pods in seen.jobsets]


def _validate(order: Order) -> None:
    for slice_id in order.slices:
        if slice_id not in order.tokens:
            raise BadRequest(f"the order holds no token for slice {slice_id}")


def open_provider(written: Mapping[str, Any], *, fleet: str, clock: Clock) -> GkeProvider:
    given = settings.parse(written)
    provider = GkeProvider(
        Connection(Path(given.kubeconfig) if given.kubeconfig else None),
        given,
        fleet=fleet,
        zones=given.zones,
        clock=clock,
        most_slices=given.most_slices,
    )
    provider.start()
    return provider
