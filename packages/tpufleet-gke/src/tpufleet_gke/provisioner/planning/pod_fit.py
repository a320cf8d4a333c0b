"""Whether the nodes of the pool that would be created for a pod have room for it. Pure."""

from __future__ import annotations

from tpufleet.errors import BadInput
from tpufleet.model.tpu import machine_types
from tpufleet_gke.provisioner.model import label_keys, pod_owners, pods
from tpufleet_gke.provisioner.model.pods import Json
from tpufleet_gke.provisioner.model.pool_specs import PoolSpec


def check_pod_fits(pod: Json, spec: PoolSpec) -> None:
    """BadInput when it would not: the pool would be paid for and never used."""
    _check_subgroups(pod, spec)
    _check_resources(pod, spec)


def _check_resources(pod: Json, spec: PoolSpec) -> None:
    machine = spec.shape.machine_type
    if machine not in machine_types.MACHINE_RESOURCES:
        return
    cpus, gibibytes = machine_types.allocatable(machine)
    requested = pods.requested_resources(pod)
    for resource, unit, amount, available in (
        ("cpu", "", requested.get("cpu", 0), cpus),
        ("memory", " GiB", requested.get("memory", 0) / 2**30, gibibytes),
    ):
        if amount > available:
            raise BadInput(
                f"the pod requests {amount:g}{unit} of {resource}; a node of {machine} has "
                f"{available:.5g}{unit} for pods, as GKE reserves some"
            )


def _check_subgroups(pod: Json, spec: PoolSpec) -> None:
    """A group whose subgroups each need a slice must not get one slice for the whole group."""
    annotations = pod["metadata"].get("annotations") or {}
    labels = pod["metadata"].get("labels") or {}
    count = pod_owners.subgroup_count(annotations)
    size = annotations.get(label_keys.LWS_SUBGROUP_SIZE)
    if count is None or count < 2 or pod_owners.has_slice_per_subgroup(labels, annotations):
        return
    if str(spec.shape.nodes) == size:
        raise BadInput(
            f"the group has subgroups of {size} pods, and a slice has {size} hosts; for a slice "
            f"per subgroup, annotate the LeaderWorkerSet with "
            f"{label_keys.LWS_SUBGROUP_EXCLUSIVE}: {label_keys.NODE_POOL}"
        )
