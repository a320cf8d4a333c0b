"""Reads, watches and writes the JobSets, pods and Secrets of one fleet, and their slot tables."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import msgspec

from tpufleet.errors import Conflict, FleetError, NotFound, PermissionMissing, unexpected
from tpufleet.kubernetes.connections import (
    EVENT,
    JOB,
    JOBSET,
    POD,
    SECRET,
    WORKLOAD,
    Connection,
    Json,
    ResourceKind,
)
from tpufleet.kubernetes.watch_cache import WatchCache
from tpufleet.model.fleet.slices import SliceId
from tpufleet.providers.base import Order
from tpufleet.providers.gke import (
    capacity_events,
    keys,
    manifests,
    pod_template,
    slice_slots,
    states,
)
from tpufleet.providers.gke.capacity_events import CapacityEvent
from tpufleet.providers.gke.settings import GkeSettings
from tpufleet.providers.gke.slice_slots import SliceSlot, SliceSlots

log = logging.getLogger(__name__)

MAX_WRITE_ATTEMPTS = 5  # on conflicts with other writers
POLL_EVERY = timedelta(seconds=10)
MIN_INTERVAL = timedelta(milliseconds=200)  # changes come in bursts


class JobSetSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """JobSets, each with its pods."""

    jobsets: tuple[tuple[Json, tuple[Json, ...]], ...]
    # Both were listed from the server, JobSets first: then no pod is older than its slot table.
    # Watches of different kinds may lag differently.
    from_server: bool


class JobSetClient:
    def __init__(self, connection: Connection, settings: GkeSettings, fleet: str) -> None:
        self._connection, self._settings = connection, settings
        labels = {keys.FLEET: fleet}
        # Workloads carry Kueue's labels only.
        self._labels = {JOBSET: labels, POD: labels, WORKLOAD: None}
        # By kind and namespace; empty: list from the server each time.
        self._caches: dict[tuple[ResourceKind, str], WatchCache] = {}
        self._wakeup, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    # Watching.

    def start(self, on_poll: Callable[[], None], on_change: Callable[[], None]) -> None:
        """Watch in the background. `on_poll` is called after each change and every POLL_EVERY,
        `on_change` after changes. Idempotent."""
        if self._thread is not None:
            return
        self._wakeup, self._closing = threading.Event(), threading.Event()
        caches = {
            (kind, namespace): WatchCache(
                self._connection, kind, self._wakeup.set, namespace=namespace, labels=labels
            )
            for kind, labels in self._labels.items()
            if kind is not WORKLOAD or self._settings.has_queues
            for namespace in self._settings.namespaces
        }
        for cache in caches.values():
            cache.start()
        self._caches = caches
        self._thread = threading.Thread(
            target=self._poll, args=(on_poll, on_change), name="gke-slices", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        caches, self._caches = self._caches, {}
        thread, self._thread = self._thread, None
        self._closing.set()
        self._wakeup.set()
        for cache in caches.values():
            cache.close()
        if thread is not None:
            thread.join(timeout=5)

    def _poll(self, on_poll: Callable[[], None], on_change: Callable[[], None]) -> None:
        wakeup, closing = self._wakeup, self._closing
        while not closing.is_set():
            changed = wakeup.wait(POLL_EVERY.total_seconds())
            wakeup.clear()
            if closing.is_set():
                return
            try:
                on_poll()
            except FleetError as error:
                log.warning("cannot observe JobSets; continuing: %s", error)
            except Exception:
                log.exception(unexpected("observing JobSets"))
            if changed:
                on_change()
            closing.wait(MIN_INTERVAL.total_seconds())

    # Reading.

    def all(self) -> list[Json]:
        """From the server, like all reads but `snapshot` and `workloads`."""
        return self._with_slots(self._read(JOBSET, from_server=True))

    def find_by_slice(self, slice_id: SliceId) -> Json | None:
        for jobset in self.all():
            if slice_slots.slots_of(jobset).index_of(slice_id) is not None:
                return jobset
        return None

    def list_from_server(self) -> JobSetSnapshot:
        return self._take_snapshot(from_server=True)

    def snapshot(self) -> JobSetSnapshot:
        """From the watch caches while they are current; includes our own writes."""
        return self._take_snapshot(from_server=not self._caches)

    def confirmed(self, snapshot: JobSetSnapshot) -> JobSetSnapshot:
        return snapshot if snapshot.from_server else self.list_from_server()

    def pods_of(self, jobset: Json, slice_id: SliceId) -> list[Json]:
        index, owner = slice_slots.slots_of(jobset).index_of(slice_id), _address(jobset)
        return [
            pod for pod in self._read(POD, from_server=True)
            if _jobset_of(pod) == owner and states.slot_index(pod) == index
        ]  # fmt: skip

    def workloads(self, *, from_server: bool = False) -> dict[str, Json]:
        """By the UID of their JobSet. Only used for messages."""
        if not self._settings.has_queues:
            return {}
        jobs = {
            one["metadata"]["uid"]: one["metadata"]["annotations"].get(keys.JOB, "")
            or one["metadata"]["name"]
            for one in self._with_slots(self._read(JOBSET, from_server=False))
        }
        return {
            owner["uid"]: workload
            for workload in states.explained(self._read(WORKLOAD, from_server=from_server), jobs)
            for owner in workload["metadata"].get("ownerReferences") or ()
        }

    def has_unschedulable_pods(self, snapshot: JobSetSnapshot) -> bool:
        return any(states.is_unschedulable(pod) for _, pods in snapshot.jobsets for pod in pods)

    def capacity_events(self) -> dict[str, CapacityEvent]:
        """By the UID of the pod; from the server."""
        fields = {"involvedObject.kind": "Pod", "type": "Warning"}
        try:
            events = [
                event
                for namespace in self._settings.namespaces
                for event in self._connection.list(EVENT, namespace, fields=fields)[0]
            ]
        except PermissionMissing as error:
            log.warning("cannot see why node pools fail; apply deploy/k8s/queues: %s", error)
            return {}
        return capacity_events.latest_by_pod(events)

    def _take_snapshot(self, *, from_server: bool) -> JobSetSnapshot:
        jobsets = self._with_slots(self._read(JOBSET, from_server=from_server))
        if not jobsets:
            return JobSetSnapshot(jobsets=(), from_server=from_server)
        pods: dict[tuple[str, str], list[Json]] = {}
        for pod in self._read(POD, from_server=from_server):
            pods.setdefault(_jobset_of(pod), []).append(pod)
        with_pods = tuple((one, tuple(pods.get(_address(one), ()))) for one in jobsets)
        return JobSetSnapshot(jobsets=with_pods, from_server=from_server)

    def _with_slots(self, jobsets: list[Json]) -> list[Json]:
        return [
            one
            for one in jobsets
            if slice_slots.ANNOTATION in one["metadata"].get("annotations", {})
        ]

    def _read(self, kind: ResourceKind, *, from_server: bool) -> list[Json]:
        found: list[Json] = []
        for namespace in self._settings.namespaces:
            cache = self._caches.get((kind, namespace))
            if cache is None:
                labels = self._labels[kind]
                found += self._connection.list(kind, namespace, labels=labels)[0]
            else:
                found += cache.list_from_server() if from_server else cache.read()
        return found

    @contextmanager
    def _writing(self, kind: ResourceKind, namespace: str) -> Iterator[None]:
        """Invalidates the cache also on errors: a write without a response may have succeeded."""
        try:
            yield
        finally:
            if (cache := self._caches.get((kind, namespace))) is not None:
                cache.invalidate()

    # Creating and deleting.

    def create(self, order: Order) -> None:
        """The Secret first, because pods start at once. The JobSet owns it, so they go together."""
        jobset = manifests.jobset(order, self._settings)
        namespace = jobset["metadata"]["namespace"]
        secret = manifests.secret(order, namespace, slice_slots.initial_slots(order.slices))
        with suppress(Conflict):  # it exists already
            self._connection.create(SECRET, secret)
        try:
            with self._writing(JOBSET, namespace):
                created = self._connection.create(JOBSET, jobset)
        except Conflict as error:
            raise Conflict(
                f"the JobSet of order {order.id} is still being deleted; retry later"
            ) from error
        owner = {
            "apiVersion": JOBSET.api_version, "kind": JOBSET.name, "controller": True,
            "name": created["metadata"]["name"], "uid": created["metadata"]["uid"],
        }  # fmt: skip
        change = {"metadata": {"ownerReferences": [owner]}}
        self._connection.patch(SECRET, secret["metadata"]["name"], change, namespace)

    def delete(self, jobset: Json) -> None:
        name, namespace = _address(jobset)
        with self._writing(JOBSET, namespace):
            self._connection.delete(JOBSET, name, namespace)
        self._connection.delete(SECRET, name, namespace)

    def delete_job(self, jobset: Json, index: int) -> None:
        """Delete all pods of a slot. JobSet recreates the Job at once, whereas the Job itself would
        replace its pods with a growing backoff."""
        name, namespace = _address(jobset)
        with self._writing(POD, namespace):
            self._connection.delete(JOB, f"{name}-{keys.REPLICATED_JOB}-{index}", namespace)

    def delete_pod(self, pod: Json) -> None:
        name, namespace = _address(pod)
        with self._writing(POD, namespace):
            self._connection.delete(POD, name, namespace)

    def annotate_pod(self, pod: Json, annotations: dict[str, str]) -> None:
        name, namespace = _address(pod)
        change = {"metadata": {"annotations": annotations}}
        with self._writing(POD, namespace):
            self._connection.patch(POD, name, change, namespace)

    # Tokens and slots.

    def write_tokens(self, jobset: Json, entries: dict[int, str]) -> None:
        """Let the pods of these slots start their agents."""
        data = {str(index): entry for index, entry in entries.items()}
        self._patch_secret(jobset, {"stringData": data})

    def delete_token(self, jobset: Json, index: int) -> None:
        """New pods of this slot wait for its next slice."""
        try:
            self._patch_secret(jobset, {"data": {str(index): None}})
        except NotFound:
            return

    def update_slot(
        self, jobset: Json, slice_id: SliceId, change: Callable[[SliceSlot], SliceSlot]
    ) -> None:
        def apply(table: SliceSlots) -> SliceSlots:
            index = table.index_of(slice_id)
            return table if index is None else table.replace_slot(index, change(table.slots[index]))

        self.update_slots(jobset, apply)

    def update_slots(self, jobset: Json, change: Callable[[SliceSlots], SliceSlots]) -> None:
        """Read, change, write. JobSet's controller only writes status, so conflicts are rare."""
        name, namespace = _address(jobset)
        for _ in range(MAX_WRITE_ATTEMPTS):
            fresh = self._connection.find(JOBSET, name, namespace)
            if fresh is None or self.write_slots(fresh, change(slice_slots.slots_of(fresh))):
                return
        raise Conflict(
            f"JobSet {name} kept changing during {MAX_WRITE_ATTEMPTS} writes; retry later"
        )

    def write_slots(self, jobset: Json, slots: SliceSlots) -> bool:
        """Write, unless the slots changed since the JobSet was read; False if they did. Retries if
        JobSet's controller or Kueue changed something else."""
        name, namespace = _address(jobset)
        now: Json | None = jobset
        for _ in range(MAX_WRITE_ATTEMPTS):
            if now is None or slice_slots.slots_of(now) != slice_slots.slots_of(jobset):
                return False
            metadata = {
                "annotations": {slice_slots.ANNOTATION: slots.to_json()},
                "resourceVersion": now["metadata"]["resourceVersion"],
            }
            try:
                with self._writing(JOBSET, namespace):
                    self._connection.patch(JOBSET, name, {"metadata": metadata}, namespace)
                return True
            except NotFound:
                return False
            except Conflict:
                now = self._connection.find(JOBSET, name, namespace)
        return False

    def _patch_secret(self, jobset: Json, change: dict[str, Any]) -> None:
        name, namespace = _address(jobset)
        self._connection.patch(SECRET, name, change, namespace)


def pod_uids(pods: Sequence[Json]) -> list[str]:
    return [pod["metadata"]["uid"] for pod in pods]


def fits_order(jobset: Json, order: Order) -> bool:
    """Whether the order can use free slots of the JobSet: same job, zone and hardware."""
    metadata = jobset["metadata"]
    annotations = metadata["annotations"]
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return (
        not metadata.get("deletionTimestamp")
        and order.job_id is not None
        and annotations.get(keys.JOB) == order.job_id
        and annotations.get(keys.ZONE) == order.zone
        and annotations.get(keys.ACCELERATOR) == manifests.accelerator_of(order).name
        and (
            keys.COMPUTE_CLASS in pod["nodeSelector"]  # which chooses the kind of capacity
            or manifests.is_dynamic(jobset)  # of a reservation, whose label is not selected
            or pod_template.capacity_of(pod["nodeSelector"]) is order.capacity
        )
    )


def _jobset_of(pod: Json) -> tuple[str, str]:
    metadata = pod["metadata"]
    return str(metadata["labels"].get(keys.JOBSET_NAME, "")), metadata["namespace"]


def _address(resource: Json) -> tuple[str, str]:
    return resource["metadata"]["name"], resource["metadata"]["namespace"]
