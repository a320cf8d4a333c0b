"""Forms the Slices that pods wait for, replaces those that fail, deletes those of ended owners."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from datetime import datetime, timedelta
from typing import Any, Protocol

from tpufleet.errors import BadInput, FleetError
from tpufleet_gke.provisioner.kube.observations import OwnedPod
from tpufleet_gke.provisioner.kube.pool_events import SLICE_FAILED, EventReporter
from tpufleet_gke.provisioner.model import dynamic_slices
from tpufleet_gke.provisioner.model.cluster_state import FailureCause, PodRef
from tpufleet_gke.provisioner.model.dynamic_slices import DynamicSlice, SliceDemand
from tpufleet_gke.provisioner.model.pod_owners import OwnerStatus
from tpufleet_gke.provisioner.model.pods import Json
from tpufleet_gke.provisioner.planning import slice_plan

log = logging.getLogger("tpufleet_gke.provisioner")

# Until when a Slice that was created must be listed.
LISTED_WITHIN = timedelta(seconds=10)
# A partition of a slice that failed is chosen last for so long, however healthy it looks.
SUSPECT_FOR = timedelta(minutes=30)


class SliceCluster(Protocol):
    def tpu_slices(self) -> Sequence[Json]: ...
    def partition_nodes(self) -> Sequence[Json]: ...
    def create_slice(self, manifest: Mapping[str, Any]) -> None: ...
    def delete_slice(self, name: str) -> None: ...
    def fetch_owner(self, namespace: str, name: str) -> OwnerStatus | None: ...
    def completed_jobs(self) -> Mapping[tuple[str, str], datetime]: ...


class SliceReconciler:
    def __init__(
        self, cluster: SliceCluster, reporter: EventReporter, executor: Executor, resource: str
    ) -> None:
        self._cluster, self._reporter, self._executor = cluster, reporter, executor
        self._resource = resource
        self._suspects: dict[str, datetime] = {}  # until when, by partition
        self._in_flight: set[str] = set()
        self._created: dict[str, tuple[DynamicSlice, datetime]] = {}  # and not listed yet

    def reconcile(
        self,
        owned: Iterable[OwnedPod],
        owners: Mapping[tuple[str, str], OwnerStatus],
        now: datetime,
        *,
        dry_run: bool = False,
    ) -> set[str]:
        """Returns the UIDs of pods that wait for slices."""
        demands, rejected = self._demands(owned, owners)
        slices = dynamic_slices.observed_slices(self._cluster.tpu_slices())
        listed = {one.name for one in slices}
        self._created = {
            name: (one, until)
            for name, (one, until) in self._created.items()
            if name not in listed and until > now
        }
        slices += [one for one, _ in self._created.values()]
        for one in slices:
            if one.failed:
                self._suspects |= dict.fromkeys(one.partitions, now + SUSPECT_FOR)
        self._suspects = {name: until for name, until in self._suspects.items() if until > now}
        plan = slice_plan.plan_slices(
            demands, slices, dynamic_slices.partitions(self._cluster.partition_nodes()), owners,
            self._cluster.completed_jobs(), self._suspects,
        )  # fmt: skip
        for demand, reason in plan.waiting:
            self._reporter.report_on_pod(demand.pod, SLICE_FAILED, reason, FailureCause.TRANSIENT)
        if not dry_run:
            by_name = {one.name: one for one in slices}
            for name in plan.deletes:
                self._start(f"delete Slice {name}", name, self._delete(by_name[name], owners))
            for demand, taken in plan.creates:
                what = f"create Slice {demand.name} of {', '.join(taken)}"
                self._start(what, demand.name, self._create(demand, taken))
                owner = demand.pod.namespace, demand.pod.owner_name
                made = DynamicSlice(name=demand.name, partitions=taken, owner=owner)
                self._created[demand.name] = made, now + LISTED_WITHIN
        return rejected | {demand.pod.uid for demand in demands}

    def _demands(
        self, owned: Iterable[OwnedPod], owners: Mapping[tuple[str, str], OwnerStatus]
    ) -> tuple[list[SliceDemand], set[str]]:
        """And the UIDs of pods that ask for what cannot be."""
        demands, rejected = [], set()
        for one in owned:
            try:
                demand = dynamic_slices.demand(one.pod, one.owner, owners, self._resource)
            except BadInput as error:
                metadata = one.pod["metadata"]
                pod = PodRef(
                    namespace=metadata["namespace"], name=metadata["name"], uid=metadata["uid"]
                )
                self._reporter.report_on_pod(
                    pod, SLICE_FAILED, str(error), FailureCause.INVALID_REQUEST
                )
                rejected.add(pod.uid)
                continue
            if demand is not None:
                demands.append(demand)
        return demands, rejected

    def _create(self, demand: SliceDemand, partitions: Sequence[str]) -> Callable[[], None]:
        return lambda: self._cluster.create_slice(demand.manifest(partitions))

    def _delete(
        self, one: DynamicSlice, owners: Mapping[tuple[str, str], OwnerStatus]
    ) -> Callable[[], None]:
        """A watch may lag: the API server is asked whether an owner is gone."""

        def delete() -> None:
            gone = one.owner is not None and one.owner not in owners
            found = self._cluster.fetch_owner(*one.owner) if gone and one.owner else None
            if found is None or found.uid != one.owner_uid:
                self._cluster.delete_slice(one.name)

        return delete

    def _start(self, what: str, name: str, call: Callable[[], None]) -> None:
        if name in self._in_flight:
            return
        log.info("%s", what)
        self._in_flight.add(name)

        def send() -> None:
            try:
                call()
            except FleetError as error:
                log.warning("%s", error)
            finally:
                self._in_flight.discard(name)

        self._executor.submit(send)
