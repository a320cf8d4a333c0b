"""GKE in one process on a manual clock: the real provider `gke` and the real provisioner, with an
emulated GKE API. This module plays JobSet's controller; a simulated scheduler binds the pods."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

from tests.kubernetes.fake_api_server import FakeApiServer, FakeConnection, copy_json
from tests.provisioner.harness import ProvisionerHarness
from tpufleet.clocks import ManualClock
from tpufleet.kubernetes.connections import EVENT, JOB, JOBSET, POD
from tpufleet.model.fleet.cloud_slices import CloudSlice, CloudState, ExpectedSlice
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job.pod_settings import PodSettings
from tpufleet.providers.base import Fault, Order
from tpufleet.providers.gke import keys, slice_slots
from tpufleet.providers.gke.provider import GkeProvider
from tpufleet.providers.gke.settings import GkeSettings
from tpufleet_gke.provisioner.kube.event_recorder import KubernetesEventRecorder
from tpufleet_gke.provisioner.model import label_keys

NAMESPACE = "tpu-training"
RECONCILE_EVERY = 2  # seconds


class JobConnection(FakeConnection):
    """Deletes the pods of a Job with it."""

    def delete(self, kind: Any, name: str, namespace: str = "") -> None:
        if kind is JOB:
            for key, pod in list(self.server.items.get(POD, {}).items()):
                if pod["metadata"]["ownerReferences"][0]["name"] == name:
                    self.server.drop(POD, key)
        super().delete(kind, name, namespace)


class GkeCloud:
    name = "gke"
    exposes_tokens = False
    outage = None  # always reachable

    def __init__(self, clock: ManualClock, zones: Sequence[str]) -> None:
        self.clock, self.zones = clock, tuple(zones)
        self.server = FakeApiServer()
        connection: Any = JobConnection(self.server)
        settings = GkeSettings(image="registry/tpufleet:1", namespace=NAMESPACE, zones=self.zones)
        self.provider = GkeProvider(
            connection, settings, fleet="test", zones=self.zones, clock=clock
        )
        recorder = KubernetesEventRecorder(connection, clock, source=label_keys.EVENT_SOURCE)
        self.provisioner = ProvisionerHarness(
            simulate_nodes=True, clock=clock, events=recorder, zones=self.zones
        )
        self.gke = self.provisioner.gke
        self.provisions = True  # the provisioner runs
        self._seconds = 0
        self._uids = itertools.count()

    def close(self) -> None:
        self.provider.close()
        self.provisioner.close()

    # Provider

    def slice_settings(self, accelerator: str, pod: PodSettings) -> str:
        return self.provider.slice_settings(accelerator, pod)

    def request(self, order: Order) -> None:
        self.provider.request(order)

    def release(self, slice_id: SliceId, zone: str) -> None:
        self.provider.release(slice_id, zone)

    def listing(self, expected: Collection[ExpectedSlice] = ()) -> Sequence[CloudSlice]:
        return self.provider.listing(expected)

    def inject(self, slice_id: SliceId, fault: Fault, host_index: int | None = None) -> None:
        self.provider.inject(slice_id, fault, host_index)

    def on_change(self, wake: Callable[[], None]) -> None:
        self.provider.on_change(wake)

    # Cloud

    def advance(self) -> None:
        self._run_jobset_controller()
        self._seconds += 1
        if self._seconds % RECONCILE_EVERY == 0:
            pods = [copy_json(pod) for pod in self._items(POD)]
            before = copy_json(pods)
            self.provisioner.jobsets = self._items(JOBSET)
            self.provisioner.pod_list = pods
            if self.provisions:
                self.provisioner.reconcile(every=timedelta(0))
            else:
                self.provisioner.simulated.schedule(pods)
            for pod, old in zip(pods, before, strict=True):
                if pod != old:
                    self.server.put(POD, pod)
        self.provider.advance()

    def existing(self) -> list[SliceId]:
        slots = [slot for one in self._items(JOBSET) for slot in slice_slots.slots_of(one).slots]
        return [slot.slice_id for slot in slots if slot.slice_id is not None]

    def is_up(self, slice_id: SliceId) -> bool:
        return any(
            one.id == slice_id and one.state is CloudState.UP for one in self.provider.listing()
        )

    def warnings(self) -> list[str]:
        return [event["message"] for event in self._items(EVENT) if event["type"] == "Warning"]

    def _items(self, kind: Any) -> list[Any]:
        return list(self.server.items.get(kind, {}).values())

    def _run_jobset_controller(self) -> None:
        wanted = {pod["metadata"]["name"]: pod for one in self._items(JOBSET) for pod in pods(one)}
        existing = {pod["metadata"]["name"] for pod in self._items(POD)}
        for name in existing - wanted.keys():
            self.server.drop(POD, (NAMESPACE, name))
        for name in wanted.keys() - existing:
            created = self.clock.now().isoformat().replace("+00:00", "Z")
            wanted[name]["metadata"]["creationTimestamp"] = created
            wanted[name]["metadata"]["uid"] += f"-{next(self._uids)}"
            self.server.put(POD, wanted[name])


def pods(jobset: Any) -> list[Any]:
    """The pods that JobSet and Job would create."""
    metadata, (job,) = jobset["metadata"], jobset["spec"]["replicatedJobs"]
    template = job["template"]["spec"]["template"]
    created_pods = []
    for index in range(job["replicas"]):
        parent = f"{metadata['name']}-{job['name']}-{index}"
        key = hashlib.sha1(f"{NAMESPACE}/{parent}".encode()).hexdigest()
        for host in range(job["template"]["spec"]["completions"]):
            labels = {
                **template["metadata"]["labels"],
                keys.JOBSET_NAME: metadata["name"],
                keys.JOB_INDEX: str(index),
                label_keys.JOB_KEY: key,
            }
            annotations = {
                keys.JOBSET_NAME: metadata["name"],
                keys.COMPLETION_INDEX: str(host),
            }
            created_pods.append({
                "metadata": {
                    "name": f"{parent}-{host}-{metadata['uid']}",
                    "namespace": NAMESPACE,
                    "uid": f"uid-{parent}-{host}-{metadata['uid']}",
                    "labels": labels,
                    "annotations": annotations,
                    "ownerReferences": [{"kind": "Job", "name": parent, "controller": True}],
                },
                "spec": copy_json(template["spec"]),
                "status": {"phase": "Pending"},
            })  # fmt: skip
    return created_pods
