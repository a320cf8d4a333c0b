"""Which pods get their nodes from GKE itself, so that no pool is bought twice. Pure.

Compute classes: https://cloud.google.com/kubernetes-engine/docs/concepts/about-custom-compute-classes
Node auto-provisioning, its limits, and which labels and reservations it does not serve:
https://cloud.google.com/kubernetes-engine/docs/concepts/node-auto-provisioning
"""

from __future__ import annotations

from collections.abc import Collection

from tpufleet_gke.provisioner.model import label_keys, pool_specs, scheduling
from tpufleet_gke.provisioner.model.pods import Json
from tpufleet_gke.provisioner.model.scheduling import Taint


def left_to_gke(pod: Json, auto_provisioned: Collection[str]) -> str:
    """Why GKE creates the nodes of this pod; empty when it does not. `auto_provisioned` are the
    accelerators that the limits of the cluster's node auto-provisioning cover."""
    terms = scheduling.affinity_terms(pod["spec"])
    selectors = scheduling.wanted_labels(pod["spec"], terms[0] if len(terms) == 1 else {})
    compute_class = selectors.get(label_keys.COMPUTE_CLASS)
    if compute_class is not None:
        return (
            f"left to GKE: the pod selects the compute class {compute_class}; "
            f"for a node pool of the provisioner, remove the selector {label_keys.COMPUTE_CLASS}"
        )
    accelerator = selectors.get(label_keys.ACCELERATOR, "")
    if accelerator not in auto_provisioned or selectors.get(label_keys.RESERVATION):
        return ""
    own = [Taint(*label) for label in selectors.items() if not pool_specs.is_reserved(label[0])]
    if not all(scheduling.tolerates(pod["spec"], taint) for taint in own):
        return ""  # auto-provisioned nodes have such labels only together with taints
    return (
        f"left to GKE: node auto-provisioning of this cluster covers {accelerator}; for node pools "
        "of the provisioner, remove that limit or set RESPECT_NODE_AUTO_PROVISIONING=false"
    )
