"""Texts with which GKE reports errors, in the words that its users see.

Sources, because the API reference gives only codes:
- stock-out: https://cloud.google.com/compute/docs/resource-error and reports such as
  https://github.com/akka/akka-core/issues/32992
- quota: https://cloud.google.com/kubernetes-engine/docs/troubleshooting/tpus and
  https://github.com/kubeflow/kubeflow/issues/842 (PERMISSION_DENIED, not RESOURCE_EXHAUSTED)
- busy pools: https://github.com/prometheus/test-infra/pull/84,
  https://github.com/kubernetes-sigs/cluster-api-provider-gcp/issues/1363
- concurrent operations: https://github.com/hashicorp/terraform-provider-google/issues/15205
"""

from __future__ import annotations


def stockout(project: str, zone: str, cluster: str, pool: str, nodes: int, seconds: float) -> str:
    return (
        f"Google Compute Engine: Not all instances running in IGM after {seconds:.9f}s. "
        f"Expected {nodes}, running 0, transitioning {nodes}. Current errors: [GCE_STOCKOUT]: "
        f"Instance 'gke-{cluster}-{pool}-34b6625e-k7xw' creation failed: The zone "
        f"'projects/{project}/zones/{zone}' does not have enough resources available to fulfill "
        "the request.  '(resource type:compute)'."
    )


def quota(metric: str, requested: int, limit: int, available: int) -> str:
    return (
        f'Insufficient regional quota to satisfy request for resource: "{metric}". The request '
        f"requires '{requested:.1f}' and is short '{requested - available:.1f}'. The regional "
        f"quota is '{limit:.1f}' with '{available:.1f}' available."
    )


def busy(operation: str, doing: str, cluster: str) -> str:
    """`doing` is `creating`, `deleting` or `upgrading`."""
    return (
        f"Operation {operation} is currently {doing} a node pool for cluster {cluster}. Please "
        "wait and try again once it is done."
    )


def too_many_operations(cluster: str, limit: int) -> str:
    return (
        f'Too many operations: cluster "{cluster}" hits the concurrent operations quota {limit}, '
        "please try again later."
    )
