"""Labels, annotations and selectors that users and GKE rely on. Their spelling is fixed."""

from __future__ import annotations

from tpufleet.model.fleet import compute_reservations

# Set on pods by JobSet, LeaderWorkerSet and Kubernetes.
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"  # label and annotation
JOB_KEY = "jobset.sigs.k8s.io/job-key"
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
LWS_NAME = "leaderworkerset.sigs.k8s.io/name"
LWS_GROUP = "leaderworkerset.sigs.k8s.io/group-index"
LWS_WORKER = "leaderworkerset.sigs.k8s.io/worker-index"
LWS_SUBGROUP = "leaderworkerset.sigs.k8s.io/subgroup-index"
LWS_SIZE = "leaderworkerset.sigs.k8s.io/size"  # annotation, as are the next two
LWS_SUBGROUP_SIZE = "leaderworkerset.sigs.k8s.io/subgroup-size"
LWS_SUBGROUP_EXCLUSIVE = "leaderworkerset.sigs.k8s.io/subgroup-exclusive-topology"
LWS_LEADER_REQUESTS_TPUS = "leaderworkerset.sigs.k8s.io/leader-requests-tpus"  # annotation
JOB_NAME = "batch.kubernetes.io/job-name"

# Set on pods by users.
_DOMAIN = "tpu-provisioner.cloud.google.com"
DISABLE = f"{_DOMAIN}/disable-autoprovisioning"  # label or annotation
COPY_LABELS = f"{_DOMAIN}/copy-labels"
ADDITIONAL_NETWORKS = f"{_DOMAIN}/additional-node-networks"
FAILURE_CAUSE = f"{_DOMAIN}/failure-cause"  # on events: see FailureCause
GKE_MESSAGE = f"{_DOMAIN}/gke-message"  # on events: Google's whole text
NODE_SERVICE_ACCOUNT = f"{_DOMAIN}/node-service-account"

# Node selectors.
TOPOLOGY = "cloud.google.com/gke-tpu-topology"
ACCELERATOR = "cloud.google.com/gke-tpu-accelerator"
COMPUTE_CLASS = "cloud.google.com/compute-class"
SPOT = "cloud.google.com/gke-spot"
FLEX_START = "cloud.google.com/gke-flex-start"
RESERVATION = compute_reservations.NAME_LABEL
RESERVATION_PROJECT = compute_reservations.PROJECT_LABEL
RESERVATION_BLOCK = compute_reservations.BLOCK_LABEL
RESERVATION_SUB_BLOCK = compute_reservations.SUB_BLOCK_LABEL
ICI_RESILIENCY = "cloud.google.com/gke-tpu-ici-resiliency"
LOCATION_HINT = "cloud.google.com/gke-location-hint"
ZONE = "topology.kubernetes.io/zone"
REGION = "topology.kubernetes.io/region"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
MACHINE_FAMILY = "cloud.google.com/machine-family"
CHIP_COUNT = "cloud.google.com/gke-accelerator-count"
PROVISIONING = "cloud.google.com/gke-provisioning"

# Set on nodes by GKE and by the provisioner.
CORDONED_AT = f"{_DOMAIN}/cordoned-at"  # annotation, with unschedulable: about to be deleted
CORDONED_BEFORE = f"{_DOMAIN}/cordoned-before"  # annotation: by someone else, who also lifts it
NODE_POOL = "cloud.google.com/gke-nodepool"
MANAGER = "google.com/nodepool-manager"
MANAGER_NAME = "tpu-provisioner"
PARENT_KIND = "google.com/tpu-provisioner-parent-kind"
PARENT_NAME = "google.com/tpu-provisioner-parent-name"
PARENT_NAMESPACE = "google.com/tpu-provisioner-parent-namespace"
OWNER_NAME = "google.com/tpu-provisioner-jobset-name"
OWNER_NAMESPACE = "google.com/tpu-provisioner-jobset-namespace"
HASH = "google.com/tpu-provisioner-nodepool-hash"
# Not in upstream: distinguishes a JobSet from an earlier one of the same name.
OWNER_UID = "google.com/tpu-provisioner-jobset-uid"
LEGACY_OWNER = "provisioner-nodepool-id"  # name of a JobSet in the namespace `default`
LEGACY_NAMESPACE = "default"

# Dynamic slicing: https://docs.cloud.google.com/kubernetes-engine/docs/how-to/create-dynamic-slices
TPU_SLICE = "cloud.google.com/gke-tpu-slice"  # selector of pods, label of nodes
SLICE_TOPOLOGY = "cloud.google.com/gke-tpu-slice-topology"  # annotation of pods
PARTITION = "cloud.google.com/gke-tpu-partition-4x4x4-id"  # of nodes: their sub-block
PARTITION_STATE = "cloud.google.com/gke-tpu-partition-4x4x4-state"  # of nodes; HEALTHY, …
BLOCK = "cloud.google.com/gce-topology-block"

TPU = "google.com/tpu"
LEASE = "ecaf1259.google.com"
NAMESPACE = "tpu-provisioner-system"
EVENT_SOURCE = "tpu-provisioner"
