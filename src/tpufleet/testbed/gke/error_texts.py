"""Texts with which GKE reports errors, in the words that its users see.

Sources, because the API reference gives only codes:
- stock-out: https://cloud.google.com/compute/docs/resource-error and reports such as
  https://github.com/akka/akka-core/issues/32992
- quota of a refused call: https://github.com/kubeflow/pipelines/issues/10907 and
  https://github.com/kubeflow/examples/issues/597 (PERMISSION_DENIED, not RESOURCE_EXHAUSTED);
  the older wording: https://github.com/kubeflow/kubeflow/issues/842
- quota that instances exceed later: https://github.com/GoogleCloudPlatform/ai-on-gke/issues/849 and
  "Insufficient quota to satisfy the request" in public logs of `gcloud container`
- names of quotas: `gcloud compute regions describe` lists TPU_LITE_PODSLICE_V5 for v5e. It does not
  list other generations, whose names here follow their labels
- busy pools: https://github.com/prometheus/test-infra/pull/84,
  https://github.com/hashicorp/terraform-provider-google/issues/10366,
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


QUOTA_METRICS = {"tpu-v5-lite-podslice": "TPU_LITE_PODSLICE_V5"}  # by accelerator label


def quota_metric(label: str, *, spot: bool) -> str:
    metric = QUOTA_METRICS.get(label, label.upper().replace("-", "_"))
    return f"PREEMPTIBLE_{metric}" if spot else metric


def quota(project: str, metric: str, requested: int, limit: int, available: int) -> str:
    """Of a refused call."""
    return (
        f'Insufficient regional quota to satisfy request: resource "{metric}": request requires '
        f"'{requested:.1f}' and is short '{requested - available:.1f}'. project has a quota of "
        f"'{limit:.1f}' with '{available:.1f}' available. View and manage quotas at "
        f"https://console.cloud.google.com/iam-admin/quotas?usage=USED&project={project}."
    )


def late_quota(cluster: str, pool: str, metric: str, nodes: int, limit: int) -> str:
    """Of an operation, when the instances exceed a quota that the call did not check."""
    return (
        "Insufficient quota to satisfy the request: Not all instances running in IGM after "
        f"43.560778184s. Expected {nodes}, running 0, transitioning {nodes}. Current errors: "
        f"[GCE_QUOTA_EXCEEDED]: Instance 'gke-{cluster}-{pool}-1490dbfa-qtlc' creation failed: "
        f"Quota '{metric}' exceeded.  Limit: {limit:.1f} in region us-central1."
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
