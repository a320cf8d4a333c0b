"""The provider itself: what requests, releases, listings and drills mean for JobSets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from tpufleet.clocks import Clock, SystemClock
from tpufleet.errors import BadRequest, NoCapacity
from tpufleet.kubernetes.connections import Connection, Json
from tpufleet.model.clouds import CloudSlice, CloudState
from tpufleet.model.hosts import NoticeKind
from tpufleet.model.slices import SliceId
from tpufleet.providers.base import Fault, Order
from tpufleet.providers.gke import keys, manifests, states
from tpufleet.providers.gke.jobsets import JobSets, seats_of, suits, uids
from tpufleet.providers.gke.seats import Seats
from tpufleet.providers.gke.settings import GkeSettings
from tpufleet.providers.gke.watching import Watch


class GkeProvider:
    name = "gke"
    tokens_are_open = False

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
        self._jobsets = JobSets(connection, settings, fleet)
        self._clock = clock or SystemClock()
        self._most, self._notice_period = most_slices, notice_period
        self._wakes: list[Callable[[], None]] = []
        self._lock = threading.RLock()
        self._make_watch = lambda: Watch(
            connection, settings.namespace, {keys.FLEET: fleet},
            look=self.advance, tell=self._tell,
        )  # fmt: skip
        self._watch: Watch | None = None

    # What every provider does.

    def request(self, order: Order) -> None:
        _check(order)
        manifests.accelerator_of(order)
        with self._lock:
            jobsets = self._jobsets.all()
            known = {seat.slice_id for jobset in jobsets for seat in seats_of(jobset).all}
            wanted = tuple(name for name in dict.fromkeys(order.slices) if name not in known)
            if not wanted:
                return
            self._check_room(order, wanted, len(known - {None}))
            order = replace(order, slices=wanted)
            if not self._sit_down(order, jobsets):
                self._jobsets.make(order)

    def release(self, slice_id: SliceId, zone: str) -> None:
        with self._lock:
            jobset = self._jobsets.holding(slice_id)
            if jobset is None:
                return
            others = [
                seat for seat in seats_of(jobset).all
                if not seat.free and seat.slice_id != slice_id
            ]  # fmt: skip
            if others:
                self._vacate(jobset, slice_id)
            else:
                self._jobsets.delete(jobset)

    def listing(self) -> Sequence[CloudSlice]:
        now = self._clock.now()
        jobsets = self._jobsets.all()
        if not jobsets:
            return []
        pods, workloads = self._jobsets.pods(), self._jobsets.workloads()
        return [
            found
            for jobset in jobsets
            for found in states.slices_of(
                jobset,
                pods.get(jobset["metadata"]["name"], ()),
                workloads.get(jobset["metadata"]["uid"]),
                seats_of(jobset),
                now,
            )
        ]

    def inject(self, slice_id: SliceId, fault: Fault, host_index: int | None = None) -> None:
        with self._lock:
            jobset = self._jobsets.holding(slice_id)
            if jobset is None:
                raise BadRequest(f"there is no slice {slice_id!r} to hurt")
            self.advance()  # so that who came up just now is known before it is hurt
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
        self._tell()

    def on_change(self, wake: Callable[[], None]) -> None:
        self._wakes.append(wake)

    def close(self) -> None:
        """Stop watching. The slices run on."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    # What only this one does.

    def start(self) -> None:
        """Watch in the background: wake the controller, and remember which pods made up a slice."""
        if self._watch is None:
            self._watch = self._make_watch().start()

    def advance(self) -> None:
        """Write down what would otherwise be forgotten: who came up, and who was lost."""
        with self._lock:
            now = self._clock.now()
            jobsets = self._jobsets.all()
            pods = self._jobsets.pods() if jobsets else {}
            for jobset in jobsets:
                self._advance(jobset, pods.get(jobset["metadata"]["name"], []), now)

    def _advance(self, jobset: Json, pods: list[Json], now: datetime) -> None:
        """Decided from what was seen, and written only if nobody changed it meanwhile: another
        server may look at the same JobSet. What follows from a loss is done by who wrote it."""
        seated = changed = seats_of(jobset)
        losses: list[int] = []
        found = {one.id: one for one in states.slices_of(jobset, pods, None, seated, now)}
        for index, seat in enumerate(seated.all):
            if seat.slice_id is None or seat.lost:
                continue
            one = found[seat.slice_id]
            mine = [pod for pod in pods if states.seat_of(pod) == index]
            if one.state is CloudState.UP and not seat.pods:
                hosts = states.current(mine, seat)
                came_up = tuple(hosts[host]["metadata"]["uid"] for host in sorted(hosts))
                changed = changed.change(index, replace(seat, pods=came_up))
            elif one.state is CloudState.UP and one.lost_hosts != seat.dead:
                changed = changed.change(index, replace(seat, dead=one.lost_hosts))
            elif one.state in (CloudState.PREEMPTED, CloudState.FAILED):
                preempted = one.state is CloudState.PREEMPTED
                lost = seat.lose(one.words or "lost", preempted=preempted, leaving=uids(mine))
                changed = changed.change(index, lost)
                losses.append(index)
        if changed != seated and not self._jobsets.write(jobset, changed):
            return  # that change is news, and all is looked at anew
        for index in losses:
            self._jobsets.end_job(jobset, index)
            self._jobsets.forget_token(jobset, index)
        self._end_leftovers(pods, changed, besides=losses)

    def _end_leftovers(self, pods: list[Json], seated: Seats, *, besides: Sequence[int]) -> None:
        """Pods of slices that are over, which a server that died had no time to end."""
        for pod in pods:
            index = states.seat_of(pod)
            if index in besides or not 0 <= index < len(seated.all):
                continue
            if pod["metadata"]["uid"] in seated.all[index].past and states.goes_on(pod):
                self._jobsets.end_pod(pod)

    def _check_room(self, order: Order, wanted: Sequence[SliceId], held: int) -> None:
        if self._most is not None and held + len(wanted) > self._most:
            raise NoCapacity(
                f"this fleet may hold {self._most} slices on GKE, and holds {held}; no room for "
                f"{len(wanted)} more {order.accelerator} in {order.zone}"
            )

    def _sit_down(self, order: Order, jobsets: Sequence[Json]) -> bool:
        """Take free seats of the same job, whose node pools are still there. True: all sit."""
        for jobset in jobsets:
            free = seats_of(jobset).free()
            if len(free) < len(order.slices) or not suits(jobset, order):
                continue
            taking = dict(zip(free, order.slices, strict=False))
            entries = {
                index: manifests.seat_entry(slice_id, order.tokens[slice_id])
                for index, slice_id in taking.items()
            }
            self._jobsets.give_tokens(jobset, entries)
            self._jobsets.change(jobset, lambda seated, taking=taking: Seats(tuple(
                seat.take(taking[index]) if index in taking else seat
                for index, seat in enumerate(seated.all)
            )))  # fmt: skip
            return True
        return False

    def _vacate(self, jobset: Json, slice_id: SliceId) -> None:
        index = seats_of(jobset).index_of(slice_id)
        if index is None:
            return
        self._jobsets.forget_token(jobset, index)
        leaving: list[Json] = []
        if not seats_of(jobset).all[index].lost:  # those of a lost slice are replaced already
            leaving = self._jobsets.pods_of(jobset, slice_id)
            self._jobsets.end_job(jobset, index)
        self._jobsets.change(jobset, lambda seated: seated.change(
            index, seated.all[index].vacate(uids(leaving))))  # fmt: skip

    def _lose(self, jobset: Json, slice_id: SliceId, why: str) -> None:
        index = seats_of(jobset).index_of(slice_id)
        assert index is not None
        self._jobsets.forget_token(jobset, index)
        ended = self._jobsets.pods_of(jobset, slice_id)
        self._jobsets.end_job(jobset, index)
        self._jobsets.mark(jobset, slice_id, lambda seat: seat.lose(
            why, preempted=True, leaving=uids(ended)))  # fmt: skip

    def _give_notice(self, jobset: Json, slice_id: SliceId, kind: NoticeKind) -> None:
        taken_at = self._clock.now() + self._notice_period
        self._jobsets.mark(
            jobset, slice_id, lambda seat: replace(seat, notice=kind, taken_at=taken_at)
        )
        for pod in self._jobsets.pods_of(jobset, slice_id):
            self._jobsets.annotate(pod, {keys.NOTICE: kind.value})

    def _kill_host(self, jobset: Json, slice_id: SliceId, host: int) -> None:
        self._jobsets.mark(jobset, slice_id, lambda seat: replace(
            seat, dead=tuple(sorted({*seat.dead, host}))))  # fmt: skip
        for pod in self._jobsets.pods_of(jobset, slice_id):
            if states.host_of(pod) == host:
                self._jobsets.end_pod(pod)

    def _tell(self) -> None:
        for wake in self._wakes:
            wake()


def _check(order: Order) -> None:
    for slice_id in order.slices:
        if slice_id not in order.tokens:
            raise BadRequest(f"the order holds no token for slice {slice_id}")
