"""Whether a pod could run on the pool that would be made for it. Pure."""

from __future__ import annotations

from tpufleet.errors import BadInput
from tpufleet.provisioner.gke_api.pool_specs import PoolCapacity, PoolSpec
from tpufleet.provisioner.kube import label_keys, pod_owners, pods
from tpufleet.provisioner.kube.pods import Json


def check_pod_fits(pod: Json, wanted: PoolSpec) -> None:
    """A pool whose nodes the pod does not select would be paid for and never used."""
    _check_subgroups(pod, wanted)
    chosen = pods.required_labels(pod)
    kinds = {place.capacity for place in wanted.locations}
    for key, kind, selected in (
        (label_keys.SPOT, PoolCapacity.SPOT, chosen.get(label_keys.SPOT) == "true"),
        (
            label_keys.FLEX_START,
            PoolCapacity.FLEX_START,
            chosen.get(label_keys.FLEX_START) == "true",
        ),
        (label_keys.RESERVATION, PoolCapacity.RESERVED, bool(chosen.get(label_keys.RESERVATION))),
    ):
        if selected and kinds == {PoolCapacity.ON_DEMAND}:
            raise BadInput(
                f"the pod selects {key}, but GCP_FORCE_ON_DEMAND is set; the admission webhook "
                "with FORCE_ON_DEMAND=true takes the selector away: install it"
            )
        if selected and kind not in kinds:
            raise BadInput(f"the pod selects {key} and another kind of capacity; it can have one")
    natural = {
        "kubernetes.io/os": {"linux"},
        "kubernetes.io/arch": {"amd64"},
        label_keys.INSTANCE_TYPE: {wanted.shape.machine_type},
        label_keys.ZONE: {place.zone for place in wanted.locations},
        label_keys.REGION: {place.zone.rpartition("-")[0] for place in wanted.locations},
        label_keys.NODE_POOL: {wanted.name},
    }
    for key, value in chosen.items():
        if key in natural and value not in natural[key]:
            raise BadInput(f"no node of a new pool would carry the selected {key}={value}")
        domain = key.rpartition("/")[0]
        unknown = domain == "k8s.io" or domain.endswith((".k8s.io", "kubernetes.io"))
        if key not in natural and unknown:
            raise BadInput(f"GKE sets {key} itself; no pool can be made that carries it")


def _check_subgroups(pod: Json, wanted: PoolSpec) -> None:
    """One slice for the whole of a group whose subgroups need one each would serve the first."""
    annotations = pod["metadata"].get("annotations") or {}
    labels = pod["metadata"].get("labels") or {}
    count, size = (
        pod_owners.subgroup_count(annotations),
        annotations.get(label_keys.LWS_SUBGROUP_SIZE),
    )
    if count is None or count < 2 or pod_owners.has_slice_per_subgroup(labels, annotations):
        return
    if str(wanted.shape.nodes) == size:
        raise BadInput(
            f"its group is divided into subgroups of {size} pods, and a slice has {size} hosts; "
            f"with the annotation {label_keys.LWS_SUBGROUP_EXCLUSIVE}: {label_keys.NODE_POOL} on the "
            "LeaderWorkerSet each subgroup gets a slice of its own"
        )
