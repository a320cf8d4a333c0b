"""Labels, annotations and container names of JobSets, pods and Secrets."""

from __future__ import annotations

from tpufleet.model.fleet import compute_reservations

# tpufleet's.
FLEET = "tpufleet.dev/fleet"
ZONE = "tpufleet.dev/zone"
ORDER = "tpufleet.dev/order"
JOB = "tpufleet.dev/job"  # the job's id; the label job-id may be its number in another queue
NOTICE = "tpufleet.dev/notice"  # on pods: preempted or maintenance
ACCELERATOR = "tpufleet.dev/accelerator"
REPLICATED_JOB = "slice"
CONTAINER, SLOT_CONTAINER = "agent", "seat"

# Kubernetes', JobSet's, Kueue's and GKE's.
JOB_INDEX = "jobset.sigs.k8s.io/job-index"
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"
POOL = "cloud.google.com/gke-nodepool"
SPOT = "cloud.google.com/gke-spot"
COMPUTE_CLASS = "cloud.google.com/compute-class"
FLEX_START = "cloud.google.com/gke-flex-start"
# Taint of nodes that queued provisioning brings.
QUEUED = "cloud.google.com/gke-queued"
# Dynamic slicing; the admission webhook of the provisioner sets the selector of each slice.
TPU_SLICE = "cloud.google.com/gke-tpu-slice"
SLICE_TOPOLOGY = "cloud.google.com/gke-tpu-slice-topology"
SAFE_TO_EVICT = "cluster-autoscaler.kubernetes.io/safe-to-evict"
RESERVATION = compute_reservations.NAME_LABEL
TPU = "google.com/tpu"
