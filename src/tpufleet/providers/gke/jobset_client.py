"""The JobSets of one fleet, with their pods and Secrets: looked up, made, and marked with who sits
where. Which of them to touch is the provider's business."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tpufleet.errors import Conflict, NotFound
from tpufleet.kubernetes.connections import (
    JOB,
    JOBSET,
    POD,
    SECRET,
    WORKLOAD,
    Connection,
    Json,
    ResourceKind,
)
from tpufleet.model.slices import SliceId
from tpufleet.providers.base import Order
from tpufleet.providers.gke import keys, manifests, slice_slots, states
from tpufleet.providers.gke import pod_template as pods
from tpufleet.providers.gke.jobset_watch import JobSetWatch
from tpufleet.providers.gke.settings import GkeSettings
from tpufleet.providers.gke.slice_slots import SliceSlot, SliceSlots

log = logging.getLogger(__name__)

MAX_WRITE_ATTEMPTS = 5  # to change what others change too


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSetSnapshot:
    """JobSets, each with its pods."""

    jobsets: tuple[tuple[Json, tuple[Json, ...]], ...]
    # Whether the server was asked for both, JobSets first: then no pod is older than what is said
    # of it there. Watches go each its own pace.
    from_server: bool


class JobSetClient:
    def __init__(self, connection: Connection, settings: GkeSettings, fleet: str) -> None:
        self._connection, self._settings = connection, settings
        self._labels = {keys.FLEET: fleet}
        self.watch: JobSetWatch | None = None  # that shows what would have to be listed without it

    # Looking.

    def all(self) -> list[Json]:
        """Of the server itself, as is everything that is not `seen`."""
        return self._marked(self._read(JOBSET, ask=True))

    def find_by_slice(self, slice_id: SliceId) -> Json | None:
        for jobset in self.all():
            if slice_slots.slots_of(jobset).index_of(slice_id) is not None:
                return jobset
        return None

    def list_from_server(self) -> JobSetSnapshot:
        return self._look(ask=True)

    def snapshot(self) -> JobSetSnapshot:
        """Of the watches, as far as they work; our own writes included."""
        return self._look(ask=self.watch is None)

    def confirmed(self, seen: JobSetSnapshot) -> JobSetSnapshot:
        return seen if seen.from_server else self.list_from_server()

    def pods_of(self, jobset: Json, slice_id: SliceId) -> list[Json]:
        index, name = slice_slots.slots_of(jobset).index_of(slice_id), jobset["metadata"]["name"]
        return [
            pod for pod in self._read(POD, ask=True)
            if _jobset_of(pod) == name and states.slot_index(pod) == index
        ]  # fmt: skip

    def workloads(self) -> dict[str, Json]:
        """By the UID of the JobSet they stand for. They lend words alone, so the watch will do."""
        if not self._settings.queue:
            return {}
        return {
            owner["uid"]: workload
            for workload in self._read(WORKLOAD, ask=False)
            for owner in workload["metadata"].get("ownerReferences") or ()
        }

    def _look(self, *, ask: bool) -> JobSetSnapshot:
        jobsets = self._marked(self._read(JOBSET, ask=ask))
        if not jobsets:
            return JobSetSnapshot(jobsets=(), from_server=ask)
        pods: dict[str, list[Json]] = {}
        for pod in self._read(POD, ask=ask):
            pods.setdefault(_jobset_of(pod), []).append(pod)
        each = tuple((one, tuple(pods.get(one["metadata"]["name"], ()))) for one in jobsets)
        return JobSetSnapshot(jobsets=each, from_server=ask)

    def _marked(self, found: list[Json]) -> list[Json]:
        return [
            one for one in found if slice_slots.ANNOTATION in one["metadata"].get("annotations", {})
        ]

    def _read(self, kind: ResourceKind, *, ask: bool) -> list[Json]:
        watch = self.watch
        if watch is not None:
            return watch.list_from_server(kind) if ask else watch.read(kind)
        labels = None if kind is WORKLOAD else self._labels  # Kueue's own
        return self._connection.list(kind, self._settings.namespace, labels=labels)[0]

    @contextmanager
    def _writing(self, kind: ResourceKind) -> Iterator[None]:
        """A write whose answer was lost may have been done all the same."""
        try:
            yield
        finally:
            watch = self.watch
            if watch is not None:
                watch.invalidate(kind)

    # Making and ending.

    def create(self, order: Order) -> None:
        """The Secret first, for pods start at once. The JobSet owns it, and takes it along."""
        secret = manifests.secret(order, self._settings, slice_slots.initial_slots(order.slices))
        try:
            self._connection.create(SECRET, secret)
        except Conflict:
            log.info("the Secret of order %s is there already", order.id)
        try:
            with self._writing(JOBSET):
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

    def delete(self, jobset: Json) -> None:
        name, namespace = _address(jobset)
        with self._writing(JOBSET):
            self._connection.delete(JOBSET, name, namespace)
        self._connection.delete(SECRET, name, namespace)

    def delete_job(self, jobset: Json, index: int) -> None:
        """End all pods of a seat. JobSet makes the Job anew at once, where the Job itself would
        wait, longer with each pod that it lost, before it made new pods."""
        name, namespace = _address(jobset)
        with self._writing(POD):
            self._connection.delete(JOB, f"{name}-{keys.REPLICATED_JOB}-{index}", namespace)

    def delete_pod(self, pod: Json) -> None:
        with self._writing(POD):
            self._connection.delete(POD, *_address(pod))

    def annotate_pod(self, pod: Json, annotations: dict[str, str]) -> None:
        name, namespace = _address(pod)
        change = {"metadata": {"annotations": annotations}}
        with self._writing(POD):
            self._connection.patch(POD, name, change, namespace)

    # Tokens and seats.

    def write_tokens(self, jobset: Json, entries: dict[int, str]) -> None:
        """From now on pods of these seats can serve."""
        data = {str(index): entry for index, entry in entries.items()}
        self._patch_secret(jobset, {"stringData": data})

    def delete_token(self, jobset: Json, index: int) -> None:
        """New pods of this seat wait for its next slice."""
        try:
            self._patch_secret(jobset, {"data": {str(index): None}})
        except NotFound:
            return

    def update_slot(
        self, jobset: Json, slice_id: SliceId, change: Callable[[SliceSlot], SliceSlot]
    ) -> None:
        def apply(seated: SliceSlots) -> SliceSlots:
            index = seated.index_of(slice_id)
            return (
                seated if index is None else seated.replace_slot(index, change(seated.slots[index]))
            )

        self.update_slots(jobset, apply)

    def update_slots(self, jobset: Json, change: Callable[[SliceSlots], SliceSlots]) -> None:
        """Change the seats. JobSet's controller writes status alone, so conflicts are rare."""
        name, namespace = _address(jobset)
        for _ in range(MAX_WRITE_ATTEMPTS):
            fresh = self._connection.find(JOBSET, name, namespace)
            if fresh is None or self.write_slots(fresh, change(slice_slots.slots_of(fresh))):
                return
        raise Conflict(f"JobSet {name} changes too fast to be marked; trying again later")

    def write_slots(self, jobset: Json, slots: SliceSlots) -> bool:
        """These seats, unless somebody changed them since the JobSet was read. False: they are not
        written. JobSet's controller and Kueue change the rest of it at any time."""
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
                with self._writing(JOBSET):
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


def pod_uids(found: Sequence[Json]) -> list[str]:
    return [pod["metadata"]["uid"] for pod in found]


def fits_order(jobset: Json, order: Order) -> bool:
    """Whether a slice of this order could sit where one of the same job sat."""
    metadata = jobset["metadata"]
    annotations = metadata["annotations"]
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return (
        not metadata.get("deletionTimestamp")
        and order.job_id is not None
        and annotations.get(keys.JOB) == order.job_id
        and annotations.get(keys.ZONE) == order.zone
        and annotations.get(keys.ACCELERATOR) == manifests.accelerator_of(order).name
        and pods.capacity_of(pod["nodeSelector"]) is order.capacity
    )


def _jobset_of(pod: Json) -> str:
    return str(pod["metadata"]["labels"].get(keys.JOBSET_NAME, ""))


def _address(resource: Json) -> tuple[str, str]:
    return resource["metadata"]["name"], resource["metadata"]["namespace"]
