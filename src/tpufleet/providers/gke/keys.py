"""Names that the JobSets, pods and Secrets of an order go by: labels, annotations, containers."""

from __future__ import annotations

# Ours.
FLEET = "tpufleet.dev/fleet"
ZONE = "tpufleet.dev/zone"
ORDER = "tpufleet.dev/order"
JOB = "tpufleet.dev/job"  # whose slices sit here; the label job-id may be another queue's number
NOTICE = "tpufleet.dev/notice"  # on pods: preempted or maintenance
ACCELERATOR = "tpufleet.dev/accelerator"
REPLICATED_JOB = "slice"
CONTAINER, SLOT_CONTAINER = "agent", "seat"

# Of Kubernetes, JobSet, Kueue and GKE.
JOB_INDEX = "jobset.sigs.k8s.io/job-index"
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"
POOL = "cloud.google.com/gke-nodepool"
SPOT = "cloud.google.com/gke-spot"
FLEX_START = "cloud.google.com/gke-flex-start"
RESERVATION = "cloud.google.com/reservation-name"
TPU = "google.com/tpu"
