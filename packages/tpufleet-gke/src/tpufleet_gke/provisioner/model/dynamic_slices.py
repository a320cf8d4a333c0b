"""Dynamic slicing: the Slices that GKE forms of sub-blocks of an all-capacity reservation, their
partitions, and the pods that wait for one. Pure.

https://docs.cloud.google.com/kubernetes-engine/docs/reference/crds/slice
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tpufleet.errors import BadInput, must_be
from tpufleet_gke.provisioner.model import label_keys, pod_owners, pods, pool_shapes, pool_specs
from tpufleet_gke.provisioner.model.cluster_state import PodRef
from tpufleet_gke.provisioner.model.pod_owners import OwnerStatus, PodOwner
from tpufleet_gke.provisioner.model.pods import Json

ACCELERATOR = "tpu7x"
CHIPS_PER_NODE, PARTITION_NODES = 4, 16  # a sub-block is 4x4x4
HEALTHY, UNKNOWN = "HEALTHY", "UNSET"
# Reasons of the condition Ready. Of the others, GKE still works on the slice.
FAILED_REASONS = ("SliceCreationFailed", "FAILED", "INCOMPLETE")


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A sub-block: a node pool of 16 nodes."""

    id: str
    block: str
    ready_nodes: int
    state: str

    @property
    def usable(self) -> bool:
        return self.state == HEALTHY and self.ready_nodes >= PARTITION_NODES


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicSlice:
    """A Slice as the API server has it."""

    name: str
    partitions: tuple[str, ...]
    ready: bool = False
    reason: str = ""  # of the condition Ready
    message: str = ""
    deleting: bool = False
    owner: tuple[str, str] | None = None  # None: not made by the provisioner
    owner_uid: str = ""
    job: str = ""

    @property
    def failed(self) -> bool:
        return not self.ready and self.reason in FAILED_REASONS


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceDemand:
    """A leader pod that waits for the slice which it selects."""

    name: str
    topology: str
    pod: PodRef

    @property
    def partitions(self) -> int:
        nodes = pool_shapes.find_shape(ACCELERATOR, self.topology, CHIPS_PER_NODE).nodes
        return nodes // PARTITION_NODES

    def manifest(self, partitions: Iterable[str]) -> dict[str, object]:
        labels = {
            label_keys.MANAGER: label_keys.MANAGER_NAME,
            label_keys.OWNER_NAMESPACE: self.pod.namespace,
            label_keys.OWNER_NAME: self.pod.owner_name,
            label_keys.OWNER_UID: self.pod.owner_uid,
            label_keys.PARENT_NAME: self.pod.job,
        }
        return {
            "metadata": {"name": self.name, "labels": labels},
            "spec": {
                "type": ACCELERATOR,
                "topology": self.topology,
                "partitionIds": list(partitions),
            },
        }


def slice_name(job: str, job_key: str) -> str:
    """Of a Job: unique in the cluster, and within the 49 characters of a Slice."""
    return pool_specs.pool_name(
        job, job_key, pool_specs.LONG_NAME_PREFIX_LENGTH, pool_specs.LONG_NAME_KEY_LENGTH
    )


def demand(pod: Json, owner: PodOwner, owners: Mapping[tuple[str, str], OwnerStatus],
           resource: str) -> SliceDemand | None:  # fmt: skip
    """None where the pod waits for no slice, or its owner is not known yet. BadInput where no slice
    can be as it wants."""
    metadata, annotations = pod["metadata"], pod["metadata"].get("annotations") or {}
    topology = annotations.get(label_keys.SLICE_TOPOLOGY)
    status = owners.get((metadata["namespace"], owner.name))
    if not topology or status is None or not pods.waits_for_nodes(pod, owner, resource):
        return None
    name = (pod["spec"].get("nodeSelector") or {}).get(label_keys.TPU_SLICE)
    if not name:
        raise BadInput(
            f"the pod asks for a slice of {topology} and selects none ({label_keys.TPU_SLICE}); "
            "install the admission webhook, which sets the selector"
        )
    if pool_shapes.find_shape(ACCELERATOR, topology, CHIPS_PER_NODE).nodes < PARTITION_NODES:
        raise must_be("4x4x4 or larger", topology, label_keys.SLICE_TOPOLOGY)
    ref = PodRef(
        namespace=metadata["namespace"], name=metadata["name"], uid=metadata["uid"],
        owner_name=owner.name, owner_uid=status.uid,
        job=pod_owners.parent_name(pod, owner),
    )  # fmt: skip
    return SliceDemand(name=name, topology=topology, pod=ref)


def observed_slices(resources: Iterable[Json]) -> list[DynamicSlice]:
    return [_observed_slice(resource) for resource in resources]


def partitions(nodes: Iterable[Json]) -> dict[str, Partition]:
    """By id."""
    found: dict[str, Partition] = {}
    for node in nodes:
        metadata = node["metadata"]
        labels = metadata.get("labels") or {}
        marks = {**(metadata.get("annotations") or {}), **labels}  # where GKE's pages have it
        name = labels.get(label_keys.PARTITION)
        if not name:
            continue
        state = marks.get(label_keys.PARTITION_STATE, UNKNOWN)
        before = found.get(name)
        if before is not None and before.state != HEALTHY:
            state = before.state
        found[name] = Partition(
            id=name,
            block=f"{labels.get(label_keys.RESERVATION, '')}/{labels.get(label_keys.BLOCK, '')}",
            ready_nodes=(before.ready_nodes if before else 0) + pods.is_ready(node),
            state=state,
        )
    return found


def _observed_slice(resource: Json) -> DynamicSlice:
    metadata, status = resource["metadata"], resource.get("status") or {}
    labels = metadata.get("labels") or {}
    ours = labels.get(label_keys.MANAGER) == label_keys.MANAGER_NAME
    conditions = {one["type"]: one for one in status.get("conditions") or ()}
    ready = conditions.get("Ready", {})
    return DynamicSlice(
        name=metadata["name"],
        partitions=tuple(resource["spec"].get("partitionIds") or ()),
        ready=ready.get("status") == "True",
        reason=ready.get("reason", ""),
        message=ready.get("message", ""),
        deleting=bool(metadata.get("deletionTimestamp")),
        owner=pod_owners.owner_from_labels(labels) if ours else None,
        owner_uid=labels.get(label_keys.OWNER_UID, ""),
        job=labels.get(label_keys.PARENT_NAME, ""),
    )
