"""The provider itself: requests, releases and listings, by way of the API server."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from tpufleet.clocks import Clock, SystemClock
from tpufleet.errors import BadRequest, Conflict, FleetError, NoCapacity, NotFound
from tpufleet.kubernetes.connections import (
    JOB,
    JOBSET,
    POD,
    SECRET,
    WORKLOAD,
    Connection,
    Json,
)
from tpufleet.kubernetes.mirrors import Mirror
from tpufleet.model.clouds import CloudSlice, CloudState
from tpufleet.model.hosts import NoticeKind
from tpufleet.model.slices import SliceId
from tpufleet.providers.base import Fault, Order
from tpufleet.providers.gke import manifests, seats, states
from tpufleet.providers.gke.manifests import GkeSettings
from tpufleet.providers.gke.seats import Seat, Seats

log = logging.getLogger(__name__)

LOOK_EVERY = timedelta(seconds=1)
TRIES = 5  # to change what others change too


class GkeProvider:
    name = "gke"

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
        self._connection, self._settings, self._fleet = connection, settings, fleet
        self._clock = clock or SystemClock()
        self._most, self._notice_period = most_slices, notice_period
        self._wakes: list[Callable[[], None]] = []
        self._lock = threading.RLock()
        self._stir, self._closing = threading.Event(), threading.Event()
        self._mirrors: list[Mirror] = []
        self._thread: threading.Thread | None = None

    # What every provider does.

    def request(self, order: Order) -> None:
        _check(order)
        manifests.accelerator_of(order)
        with self._lock:
            known = {
                seat.slice_id for jobset in self._jobsets() for seat in _seats(jobset).all
            }
            wanted = tuple(name for name in dict.fromkeys(order.slices) if name not in known)
            if not wanted:
                return
            self._check_room(order, wanted, len(known - {None}))
            if self._sit_down(replace(order, slices=wanted)):
                return
            self._make(replace(order, slices=wanted))

    def release(self, slice_id: SliceId, zone: str) -> None:
        with self._lock:
            jobset = self._holding(slice_id)
            if jobset is None:
                return
            others = [
                seat for seat in _seats(jobset).all
                if not seat.free and seat.slice_id != slice_id
            ]  # fmt: skip
            if not others:
                metadata = jobset["metadata"]
                self._connection.delete(JOBSET, metadata["name"], metadata["namespace"])
                self._connection.delete(SECRET, metadata["name"], metadata["namespace"])
                return
            self._vacate(jobset, slice_id)

    def listing(self) -> Sequence[CloudSlice]:
        now = self._clock.now()
        jobsets = self._jobsets()
        if not jobsets:
            return []
        pods, workloads = self._pods(), self._workloads()
        return [
            found
            for jobset in jobsets
            for found in states.slices_of(
                jobset,
                pods.get(jobset["metadata"]["name"], ()),
                workloads.get(jobset["metadata"]["uid"]),
                _seats(jobset),
                now,
            )
        ]

    def inject(self, slice_id: SliceId, fault: Fault, host_index: int | None = None) -> None:
        with self._lock:
            jobset = self._holding(slice_id)
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
                    host = host_index or 0
                    self._mark(jobset, slice_id, lambda seat: replace(
                        seat, dead=tuple(sorted({*seat.dead, host}))))  # fmt: skip
                    self._end_pod(jobset, slice_id, host)
                case Fault.STALL_HOST:
                    raise BadRequest("Kubernetes cannot stall a host; `kill-host` is near to it")
        self._tell()

    def on_change(self, wake: Callable[[], None]) -> None:
        self._wakes.append(wake)

    def close(self) -> None:
        """Stop watching. The slices run on."""
        self._closing.set()
        self._stir.set()
        for mirror in self._mirrors:
            mirror.close()
        if self._thread is not None:
            self._thread.join(timeout=5)
            self._thread = None

    # What only this one does.

    def start(self) -> None:
        """Watch in the background: wake the controller, and remember which pods made up a slice."""
        if self._thread is not None:
            return
        labels = {manifests.FLEET: self._fleet}
        for kind in (JOBSET, POD):
            mirror = Mirror(
                self._connection, kind, self._noticed,
                namespace=self._settings.namespace, labels=labels,
            )  # fmt: skip
            self._mirrors.append(mirror.start())
        self._thread = threading.Thread(target=self._watch, name="gke-slices", daemon=True)
        self._thread.start()

    def advance(self) -> None:
        """Write down what would otherwise be forgotten: who came up, and who was lost."""
        with self._lock:
            now = self._clock.now()
            jobsets = self._jobsets()
            pods = self._pods() if jobsets else {}
            for jobset in jobsets:
                self._advance(jobset, pods.get(jobset["metadata"]["name"], []), now)

    def _advance(self, jobset: Json, pods: list[Json], now: datetime) -> None:
        seated = changed = _seats(jobset)
        found = {one.id: one for one in states.slices_of(jobset, pods, None, seated, now)}
        for index, seat in enumerate(seated.all):
            if seat.slice_id is None or seat.lost:
                continue
            one = found[seat.slice_id]
            mine = [pod for pod in pods if states.seat_of(pod) == index]
            if one.state is CloudState.UP and not seat.pods:
                hosts = states.current(mine, seat)
                uids = tuple(hosts[host]["metadata"]["uid"] for host in sorted(hosts))
                changed = changed.change(index, replace(seat, pods=uids))
            elif one.state is CloudState.UP and one.lost_hosts != seat.dead:
                changed = changed.change(index, replace(seat, dead=one.lost_hosts))
            elif one.state in (CloudState.PREEMPTED, CloudState.FAILED):
                preempted = one.state is CloudState.PREEMPTED
                self._end_job(jobset, index)
                lost = seat.lose(one.words or "lost", preempted=preempted, leaving=_uids(mine))
                changed = changed.change(index, lost)
                self._forget_token(jobset, index)
        if changed != seated:
            self._write(jobset, lambda _: changed)

    def _check_room(self, order: Order, wanted: Sequence[SliceId], held: int) -> None:
        if self._most is not None and held + len(wanted) > self._most:
            raise NoCapacity(
                f"this fleet may hold {self._most} slices on GKE, and holds {held}; no room for "
                f"{len(wanted)} more {order.accelerator} in {order.zone}"
            )

    def _sit_down(self, order: Order) -> bool:
        """Take free seats of the same job, whose node pools are still there. True: all sit."""
        for jobset in self._jobsets():
            metadata = jobset["metadata"]
            free = _seats(jobset).free()
            if len(free) < len(order.slices) or not _suits(jobset, order):
                continue
            taking = dict(zip(free, order.slices, strict=False))
            data = {
                str(index): manifests.seat_entry(slice_id, order.tokens[slice_id])
                for index, slice_id in taking.items()
            }
            self._connection.patch(
                SECRET, metadata["name"], {"stringData": data}, metadata["namespace"]
            )
            self._write(jobset, lambda seated, taking=taking: Seats(tuple(
                seat.take(taking[index]) if index in taking else seat
                for index, seat in enumerate(seated.all)
            )))  # fmt: skip
            return True
        return False

    def _make(self, order: Order) -> None:
        """The Secret first, for pods start at once. The JobSet owns it, and takes it along."""
        secret = manifests.secret(order, self._settings, seats.fresh(order.slices))
        try:
            self._connection.create(SECRET, secret)
        except Conflict:
            log.info("the Secret of order %s is there already", order.id)
        try:
            made = self._connection.create(JOBSET, manifests.jobset(order, self._settings))
        except Conflict as error:
            raise Conflict(
                f"order {order.id} was released and is not gone yet; ask again later"
            ) from error
        owner = {
            "apiVersion": JOBSET.api_version, "kind": JOBSET.name, "controller": True,
            "name": made["metadata"]["name"], "uid": made["metadata"]["uid"],
        }  # fmt: skip
        change = {"metadata": {"ownerReferences": [owner]}}
        name, namespace = secret["metadata"]["name"], secret["metadata"]["namespace"]
        self._connection.patch(SECRET, name, change, namespace)

    def _vacate(self, jobset: Json, slice_id: SliceId) -> None:
        index = _seats(jobset).index_of(slice_id)
        if index is None:
            return
        self._forget_token(jobset, index)
        leaving: list[Json] = []
        if not _seats(jobset).all[index].lost:  # those of a lost slice have been replaced already
            leaving = self._pods_of(jobset, slice_id)
            self._end_job(jobset, index)
        self._write(jobset, lambda seated: seated.change(
            index, seated.all[index].vacate(_uids(leaving))))  # fmt: skip

    def _lose(self, jobset: Json, slice_id: SliceId, why: str) -> None:
        index = _seats(jobset).index_of(slice_id)
        assert index is not None
        self._forget_token(jobset, index)
        ended = self._pods_of(jobset, slice_id)
        self._end_job(jobset, index)
        self._mark(jobset, slice_id, lambda seat: seat.lose(
            why, preempted=True, leaving=_uids(ended)))  # fmt: skip

    def _end_job(self, jobset: Json, index: int) -> None:
        """End all pods of a seat. JobSet makes the Job anew at once, where the Job itself would
        wait, longer with each pod that it lost, before it made new pods."""
        metadata = jobset["metadata"]
        name = f"{metadata['name']}-{manifests.REPLICATED_JOB}-{index}"
        self._connection.delete(JOB, name, metadata["namespace"])

    def _forget_token(self, jobset: Json, index: int) -> None:
        """New pods of this seat wait for its next slice."""
        metadata = jobset["metadata"]
        try:
            self._connection.patch(
                SECRET, metadata["name"], {"data": {str(index): None}}, metadata["namespace"]
            )
        except NotFound:
            return

    def _give_notice(self, jobset: Json, slice_id: SliceId, kind: NoticeKind) -> None:
        taken_at = self._clock.now() + self._notice_period
        self._mark(jobset, slice_id, lambda seat: replace(seat, notice=kind, taken_at=taken_at))
        change = {"metadata": {"annotations": {manifests.NOTICE: kind.value}}}
        for pod in self._pods_of(jobset, slice_id):
            metadata = pod["metadata"]
            self._connection.patch(POD, metadata["name"], change, metadata["namespace"])

    def _end_pod(self, jobset: Json, slice_id: SliceId, host: int) -> None:
        for pod in self._pods_of(jobset, slice_id):
            if states.host_of(pod) == host:
                metadata = pod["metadata"]
                self._connection.delete(POD, metadata["name"], metadata["namespace"])

    def _pods_of(self, jobset: Json, slice_id: SliceId) -> list[Json]:
        index = _seats(jobset).index_of(slice_id)
        pods = self._pods().get(jobset["metadata"]["name"], [])
        return [pod for pod in pods if states.seat_of(pod) == index]

    def _mark(self, jobset: Json, slice_id: SliceId, change: Callable[[Seat], Seat]) -> None:
        def apply(seated: Seats) -> Seats:
            index = seated.index_of(slice_id)
            return seated if index is None else seated.change(index, change(seated.all[index]))

        self._write(jobset, apply)

    def _write(self, jobset: Json, change: Callable[[Seats], Seats]) -> None:
        """Change the seats. JobSet's controller writes status alone, so conflicts are rare."""
        name, namespace = jobset["metadata"]["name"], jobset["metadata"]["namespace"]
        for _ in range(TRIES):
            fresh = self._connection.find(JOBSET, name, namespace)
            if fresh is None:
                return
            annotations = {seats.ANNOTATION: change(_seats(fresh)).written()}
            metadata = {
                "annotations": annotations,
                "resourceVersion": fresh["metadata"]["resourceVersion"],
            }
            try:
                self._connection.patch(JOBSET, name, {"metadata": metadata}, namespace)
                return
            except Conflict:
                continue
        raise Conflict(f"JobSet {name} changes too fast to be marked; trying again later")

    def _holding(self, slice_id: SliceId) -> Json | None:
        for jobset in self._jobsets():
            if _seats(jobset).index_of(slice_id) is not None:
                return jobset
        return None

    def _jobsets(self) -> list[Json]:
        found, _ = self._connection.list(
            JOBSET, self._settings.namespace, labels={manifests.FLEET: self._fleet}
        )
        return [one for one in found if seats.ANNOTATION in one["metadata"].get("annotations", {})]

    def _pods(self) -> dict[str, list[Json]]:
        listed, _ = self._connection.list(
            POD, self._settings.namespace, labels={manifests.FLEET: self._fleet}
        )
        found: dict[str, list[Json]] = {}
        for pod in listed:
            name = pod["metadata"]["labels"].get(manifests.JOBSET_NAME, "")
            found.setdefault(name, []).append(pod)
        return found

    def _workloads(self) -> dict[str, Json]:
        """By the UID of the JobSet they stand for."""
        if not self._settings.queue:
            return {}
        listed, _ = self._connection.list(WORKLOAD, self._settings.namespace)
        return {
            owner["uid"]: workload
            for workload in listed
            for owner in workload["metadata"].get("ownerReferences") or ()
        }

    def _noticed(self) -> None:
        self._stir.set()

    def _tell(self) -> None:
        for wake in self._wakes:
            wake()

    def _watch(self) -> None:
        while not self._closing.is_set():
            self._stir.wait(LOOK_EVERY.total_seconds() * 10)
            stirred = self._stir.is_set()
            self._stir.clear()
            if self._closing.is_set():
                return
            try:
                self.advance()
            except FleetError as error:
                log.warning("a look at the JobSets failed: %s", error)
            except Exception:
                log.exception("a look at the JobSets failed; the next follows")
            if stirred:
                self._tell()
            self._closing.wait(0.2)


def _seats(jobset: Json) -> Seats:
    return seats.read(jobset["metadata"]["annotations"][seats.ANNOTATION])


def _uids(pods: Sequence[Json]) -> list[str]:
    return [pod["metadata"]["uid"] for pod in pods]


def _suits(jobset: Json, order: Order) -> bool:
    metadata = jobset["metadata"]
    annotations, labels = metadata["annotations"], metadata["labels"]
    spot = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    same_kind = (manifests.SPOT in spot["nodeSelector"]) == (order.capacity.value == "spot")
    return (
        not metadata.get("deletionTimestamp")
        and order.job_id is not None
        and labels.get("job-id") == order.job_id
        and annotations.get(manifests.ZONE) == order.zone
        and annotations.get(manifests.ACCELERATOR) == manifests.accelerator_of(order).name
        and same_kind
    )


def _check(order: Order) -> None:
    for slice_id in order.slices:
        if slice_id not in order.tokens:
            raise BadRequest(f"the order holds no token for slice {slice_id}")
