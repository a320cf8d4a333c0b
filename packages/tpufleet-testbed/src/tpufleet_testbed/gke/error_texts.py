"""Texts with which GKE reports errors, in the words that its users see.

Sources, because the API reference gives only codes:
- stock-out: https://cloud.google.com/compute/docs/resource-error and reports such as
  https://github.com/akka/akka-core/issues/32992
- quota of a refused call: https://github.com/kubeflow/pipelines/issues/10907 and
  https://github.com/kubeflow/examples/issues/597 (PERMISSION_DENIED, not RESOURCE_EXHAUSTED);
  the older wording: https://github.com/kubeflow/kubeflow/issues/842
- quota that instances exceed later: https://github.com/GoogleCloudPlatform/ai-on-gke/issues/849 and
  "Insufficient quota to satisfy the request" in public logs of `gcloud container`
- names of quotas: v4 and v5e are in the reference of Compute Engine (regions, `Quota.metric`). The
  others are those that users of Cloud Quotas see: TPU-V5P-per-project-region,
  TPUS-PER-TPU-FAMILY-per-project-region (with tpu_family: CT6E) and the PREEMPTIBLE-… of each
- single hosts with a topology: https://github.com/AI-Hypercomputer/xpk/pull/825
- tpu7x with a compact policy: https://github.com/vllm-project/ci-infra/pull/547
- names of pools: https://github.com/pulumi/pulumi-gcp/issues/1510
- machine types and reservations:
  https://cloud.google.com/kubernetes-engine/docs/troubleshooting/node-pools and the cluster
  autoscaler for Compute Engine, https://github.com/kubernetes/autoscaler
- flex-start and the size of slices: https://github.com/vllm-project/ci-infra/pull/545 and notes on
  training MaxText on tpu7x
- release channels: https://github.com/nkoson/gke-tutorial/issues/8 and
  https://github.com/terraform-google-modules/terraform-google-kubernetes-engine/pull/682
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


# By accelerator label: of on-demand, and of spot. v6e and tpu7x have none of their own on demand.
QUOTA_METRICS = {
    "tpu-v4-podslice": ("TPU_PODSLICE_V4", "PREEMPTIBLE_TPU_PODSLICE_V4"),
    "tpu-v5-lite-podslice": ("TPU_LITE_PODSLICE_V5", "PREEMPTIBLE_TPU_LITE_PODSLICE_V5"),
    "tpu-v5p-slice": ("TPU_V5P", "PREEMPTIBLE_TPU_V5P"),
    "tpu-v6e-slice": ("TPUS_PER_TPU_FAMILY", "PREEMPTIBLE_TPU_V6E"),
    "tpu7x": ("TPUS_PER_TPU_FAMILY", "PREEMPTIBLE_TPU7X"),
}


def quota_metric(label: str, *, spot: bool) -> str:
    return QUOTA_METRICS[label][spot]


SINGLE_HOST_TOPOLOGY = (
    "TPU topology can't be specified with single-host TPU slice pool; please remove the "
    "tpu_topology from the node pool creation request if the node pool is intented to run with "
    "single-host TPU slice nodes."
)  # "intented": as GKE writes it


FLEX_START_WITHOUT_AUTOSCALING = "Flex start node pools require autoscaling enabled."
FLEX_START_WITH_NODES = "Flex start node pools require initial node count to be set to 0."


def invalid_slice_size(nodes: int, topology: str) -> str:
    """The limit per zone, whatever the limit for all zones."""
    return (
        f"Maximum node count {nodes} is not a valid size of TPU pod slice with topology "
        f'"{topology}"'
    )


def workload_policy_required(machine_type: str) -> str:
    return (
        f"Google Compute Engine: Creation of a managed instance group with {machine_type} machine "
        "type with placement policy is not supported. Use workload policy instead."
    )


def release_channel(channel: str) -> str:
    return f"Auto_upgrade cannot be false when release_channel {channel} is set."


def disk(disk_type: str, machine_type: str) -> str:
    return (
        f"Google Compute Engine: {disk_type} disk type cannot be used by {machine_type} machine "
        "type."
    )


def invalid_name(name: str) -> str:
    return (
        f'Invalid value for field "node_pool.name": "{name}". Must be a match of regex '
        "'(?:[a-z](?:[-a-z0-9]{0,38}[a-z0-9])?)' (only lowercase alphanumerics and '-' allowed, "
        "must start with a letter and end with an alphanumeric, and must be no longer than 40 "
        "characters)."
    )


def no_machine_type(machine_type: str, zone: str) -> str:
    return f"Machine type with name '{machine_type}' does not exist in zone '{zone}'."


def no_reservation(name: str) -> str:
    return (
        "Google Compute Engine: Could not find the given reservation with the following name: "
        f"{name}."
    )


def full_reservation(name: str) -> str:
    return (
        f"Google Compute Engine: Reservation {name} does not have sufficient capacity for the "
        "requested resources."
    )


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
