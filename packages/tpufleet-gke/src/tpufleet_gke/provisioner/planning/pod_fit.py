"""Whether a pod could be scheduled on the pool that would be created for it. Pure."""

from __future__ import annotations

from tpufleet.errors import BadInput
from tpufleet.model.tpu import machine_types
from tpufleet_gke.provisioner.model import label_keys, pod_owners, pods
from tpufleet_gke.provisioner.model.pods import Json
from tpufleet_gke.provisioner.model.pool_specs import PoolCapacity, PoolSpec


def check_pod_fits(pod: Json, spec: PoolSpec) -> None:
    """BadInput when the pod's selectors exclude the pool: it would be paid for and never used."""
    _check_subgroups(pod, spec)
    _check_resources(pod, spec)
    selectors = pods.required_labels(pod)
    offered = {location.capacity for location in spec.locations}
    for key, capacity in (
        (label_keys.SPOT, PoolCapacity.SPOT),
        (label_keys.FLEX_START, PoolCapacity.FLEX_START),
        (label_keys.RESERVATION, PoolCapacity.RESERVED),
    ):
        value = selectors.get(key)
        selected = bool(value) if key == label_keys.RESERVATION else value == "true"
        if selected and offered == {PoolCapacity.ON_DEMAND}:
            raise BadInput(
                f"the pod selects {key}, but GCP_FORCE_ON_DEMAND is set; install the admission "
                "webhook with FORCE_ON_DEMAND=true, which removes the selector"
            )
        if selected and capacity not in offered:
            raise BadInput(f"the pod selects {key} and another kind of capacity; select only one")
    if offered == {PoolCapacity.SPOT} and not pods.tolerates(pod, label_keys.SPOT):
        raise BadInput(
            f"the pod selects {label_keys.SPOT} but does not tolerate the taint of spot nodes; add "
            f"the toleration {label_keys.SPOT}=true:NoSchedule"
        )
    # Labels that GKE or Kubernetes sets on every node, with the values a new pool would have.
    implied = {
        "kubernetes.io/os": {"linux"},
        "kubernetes.io/arch": {"amd64"},
        label_keys.INSTANCE_TYPE: {spec.shape.machine_type},
        label_keys.ZONE: {location.zone for location in spec.locations},
        label_keys.REGION: {location.zone.rpartition("-")[0] for location in spec.locations},
        label_keys.NODE_POOL: {spec.name},
    }
    for key, value in selectors.items():
        domain = key.rpartition("/")[0]
        set_by_gke = domain == "k8s.io" or domain.endswith((".k8s.io", "kubernetes.io"))
        if value not in implied.get(key, () if set_by_gke else (value,)):
            raise BadInput(f"no node of a new pool would have the selected label {key}={value}")


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
