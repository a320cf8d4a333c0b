"""What people read when GKE refuses: the cause in few words, and what to do."""

from __future__ import annotations

import pytest

from tpufleet_gke.provisioner.gke import failures
from tpufleet_testbed.gke import api_errors

QUOTAS = "raise it at https://console.cloud.google.com/iam-admin/quotas"
INSTANCES = (
    "Google Compute Engine: Not all instances running in IGM after 32.252902304s. Expected 1, "
    "running 0, transitioning 1. Current errors: "
)
# Texts of Google's troubleshooting pages and of reports by users.
SUMMARIES = {
    "stockout of an operation": (
        api_errors.text(
            "stockout", project="p", zone="us-central1-a", cluster="c", pool="pool", nodes=4,
            seconds=35.2,
        ),
        "GCE_STOCKOUT: no capacity in us-central1-a; it is tried again, also in other zones of "
        "GCP_ZONES",
    ),
    "stockout, short": (
        "resource pool exhausted",
        "GCE_STOCKOUT: no capacity; it is tried again, also in other zones of GCP_ZONES",
    ),
    "no such machines": (
        api_errors.text("no-machine-type", machine="ct6e-standard-4t", zone="us-west4-c"),
        "us-west4-c has no ct6e-standard-4t; allow a zone that has it in GCP_ZONES: `tpu types "
        "--zones`",
    ),
    "no such machines, as GKE also puts it": (
        'Invalid machine type "ct4p-hightpu-4t" in zone "us-central1-b": GCE_NOT_FOUND',
        "us-central1-b has no ct4p-hightpu-4t; allow a zone that has it in GCP_ZONES: `tpu types "
        "--zones`",
    ),
    "no such reservation": (
        api_errors.text("no-reservation", name="lab"),
        "reservation lab does not exist in this zone; check its name, zone and project: `gcloud "
        "compute reservations list`",
    ),
    "full reservation": (
        api_errors.text("full-reservation", name="lab"),
        "reservation lab is full or not ready; free some of it or wait; it is tried again",
    ),
    "quota of a call": (
        api_errors.quota("p", "TPU_LITE_PODSLICE_V5", 16, 24, 8),
        f"quota TPU_LITE_PODSLICE_V5: 16 needed, 8 of 24 left; {QUOTAS}",
    ),
    "several quotas of a call": (
        "(1) insufficient regional quota to satisfy request: resource \"CPUS\": request requires "
        "'320.0' and is short '251.0'. project has a quota of '72.0' with '69.0' available. View "
        "and manage quotas at https://console.cloud.google.com/iam-admin/quotas?usage=USED (2) "
        "insufficient regional quota to satisfy request: resource \"IN_USE_ADDRESSES\": …",
        f"quota CPUS: 320 needed, 69 of 72 left; {QUOTAS}",
    ),
    "quota of instances": (
        api_errors.text("late-quota", cluster="c", pool="pool", metric="CPUS", nodes=4, limit=8),
        f"quota CPUS: the limit is 8 in region us-central1; {QUOTAS}",
    ),
    "quota, cut short": (
        "Insufficient quota to satisfy the request: Not all instances",
        f"quota used up; {QUOTAS}",
    ),
    "addresses": (
        INSTANCES + "[IP_SPACE_EXHAUSTED]: Instance 'gke-c-pool-4813919b-4f9v' creation failed: IP "
        "space of 'projects/p/regions/europe-west1/subnetworks/nodes' is exhausted.",
        "no free IP addresses for nodes or pods: projects/p/regions/europe-west1/subnetworks/nodes;"
        " add a pod range to the cluster or enlarge its subnetwork",
    ),
    "policy of the organisation": (
        INSTANCES + "[CONDITION_NOT_MET]: Instance 'gke-c-pool-06948ca8-1xpd' creation failed: "
        "Constraint constraints/compute.requireShieldedVm violated for project projects/p. Secure "
        "Boot is not enabled in the 'shielded_instance_config' field. See https://cloud.google.com/"
        "resource-manager/docs/organization-policy/org-policy-constraints for more information.",
        "policy compute.requireShieldedVm of the organisation forbids it; set "
        "GCP_NODE_SECURE_BOOT=true",
    ),
    "another policy": (
        "Failed precondition: Constraint `constraints/compute.trustedImageProjects` violated for "
        "`projects/p`.",
        "policy compute.trustedImageProjects of the organisation forbids it; ask the administrator "
        "of your organisation",
    ),
    "service account of others": (
        'The user does not have access to service account "nodes@p.iam.gserviceaccount.com". Ask a '
        "project owner to grant you the iam.serviceAccountUser role on the service account.",
        "the provisioner may not use service account nodes@p.iam.gserviceaccount.com; grant it "
        "roles/iam.serviceAccountUser on that account",
    ),
    "no such service account": (
        "Service account nodes@p.iam.gserviceaccount.com does not exist.",
        "service account nodes@p.iam.gserviceaccount.com does not exist; create it, or change "
        "GCP_NODE_SERVICE_ACCOUNT",
    ),
    "GKE's service agent": (
        "Google Compute Engine: Required 'compute.instances.create' permission for 'projects/p'",
        "GKE's own service account lacks permissions compute.instances.create; grant "
        "roles/container.serviceAgent to "
        "service-PROJECT_NUMBER@container-engine-robot.iam.gserviceaccount.com",
    ),
    "instances without permission": (
        INSTANCES + "[PERMISSIONS_ERROR]: Instance 'gke-c-pool-1' creation failed: Required …",
        "GKE's own service account lacks permissions; grant roles/container.serviceAgent to "
        "service-PROJECT_NUMBER@container-engine-robot.iam.gserviceaccount.com",
    ),
    "the provisioner's permission": (
        'Required "container.clusters.update" permission(s) for '
        '"projects/p/locations/us-central1/clusters/c".',
        "the provisioner lacks container.clusters.update; grant it roles/container.clusterAdmin "
        "on the project",
    ),
    "disabled API": (
        "Kubernetes Engine API has not been used in project 123 before or it is disabled. Enable "
        "it by visiting https://console.developers.google.com/apis/api/container.googleapis.com/"
        "overview?project=123 then retry. If you enabled this API recently, wait a few minutes.",
        "the API of Kubernetes Engine is disabled; run `gcloud services enable "
        "container.googleapis.com compute.googleapis.com`",
    ),
    "no such cluster": (
        "Not found: projects/p/locations/us-central1/clusters/c.\nDetails:\n[\n  {\n    \"@type\": "
        '"type.googleapis.com/google.rpc.RequestInfo",\n    "requestId": "0x1fa1bf49"\n  }\n]\n',
        "cluster c does not exist in us-central1 of project p; check GCP_PROJECT_ID, "
        "GCP_CLUSTER_LOCATION and GCP_CLUSTER",
    ),
    "disks": (
        "Google Compute Engine: pd-ssd disk type cannot be used by ct6e-standard-4t machine type.",
        "these machines cannot have pd-ssd disks; set GCP_NODE_DISK_TYPE (v6e and tpu7x: "
        "hyperdisk-balanced)",
    ),
    "no such policy": (
        "The resource 'projects/p/regions/us-central1/resourcePolicies/tpu-provisioner-2x2x4' was "
        "not found",
        "workload policy tpu-provisioner-2x2x4 does not exist; create it with `tpu provisioner "
        "--make-policies REGION`",
    ),
    "no such subnetwork": (
        "Google Compute Engine: The resource 'projects/p/regions/r/subnetworks/fast' was not found",
        "subnetwork fast does not exist; check GCP_NODE_ADDITIONAL_NETWORKS",
    ),
    "operations": (
        api_errors.text("too-many-operations", cluster="c", limit=5),
        "other operations run on the cluster; it is tried again",
    ),
    "busy": (
        api_errors.text("busy", operation="operation-1-2", doing="deleting", cluster="c"),
        "other operations run on the cluster; it is tried again",
    ),
    # https://cloud.google.com/kubernetes-engine/docs/troubleshooting/concurrent-operations
    "an operation on the cluster": (
        "Operation operation-1-2 is currently upgrading cluster c. Please wait and try again once "
        "it is done.",
        "other operations run on the cluster; it is tried again",
    ),
    "a cluster that changes": (
        "Cluster is currently being created, deleted, updated or repaired and cannot be updated.",
        "other operations run on the cluster; it is tried again",
    ),
    "several instances": (
        INSTANCES + "[SOME_CODE]: Instance 'a' creation failed: No luck.; [SOME_CODE]: Instance "
        "'b' creation failed: No luck.",
        "SOME_CODE: No luck",
    ),
    "unknown": ("GKE has a bad day.", "GKE has a bad day"),
    "unknown and long": ("First sentence. " + "Second. " * 100, None),
}  # fmt: skip


@pytest.mark.parametrize(("text", "short"), SUMMARIES.values(), ids=SUMMARIES)
def test_a_refusal_is_told_in_few_words_with_a_remedy(text, short):
    result = failures.summarize(text)
    assert len(result) <= 300
    assert short is None or result == short
