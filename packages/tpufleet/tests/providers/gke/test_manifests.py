"""The JobSet and Secret manifests of an order."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
from msgspec import structs

from tpufleet.errors import BadRequest
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.job import job_file
from tpufleet.model.job.jobs import Capacity, JobId
from tpufleet.model.job.pod_settings import PodSettings
from tpufleet.providers.base import Order
from tpufleet.providers.gke import keys, manifests, slice_slots
from tpufleet.providers.gke.jobset_client import fits_order
from tpufleet.providers.gke.settings import GkeSettings, GkeTeam
from tpufleet_firestore.bridge import jobs
from tpufleet_firestore.bridge.documents import CodeRequest
from tpufleet_firestore.bridge.jobs import JobTemplate

SETTINGS = GkeSettings(namespace="training", image="registry/agent:1")


def order(*slices, **changed):
    names = tuple(SliceId(name) for name in slices or ("a", "b"))
    fields = {
        "id": "order-1", "slices": names, "accelerator": "v5e-16", "zone": "us-central1-a",
        "capacity": Capacity.ON_DEMAND, "tokens": {name: f"secret of {name}" for name in names},
        "server_url": "https://fleet", "fleet": "f1", "job_id": "j1",
    }  # fmt: skip
    return Order(**fields | changed)


def job(manifest):
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]


def pod(manifest):
    return job(manifest)["template"]["spec"]


def container(manifest):
    (one,) = pod(manifest)["containers"]
    return one


def test_slices_are_replicas_and_hosts_are_completions():
    manifest = manifests.jobset(order("a", "b", "c"), SETTINGS)
    replicated = manifest["spec"]["replicatedJobs"][0]
    assert (replicated["name"], replicated["replicas"]) == ("slice", 3)
    assert (job(manifest)["completions"], job(manifest)["parallelism"]) == (4, 4)


SHAPES = [
    ("v5e-1", "tpu-v5-lite-podslice", "1x1", 1, "1"),
    ("v5e-8", "tpu-v5-lite-podslice", "2x4", 1, "8"),
    ("v5e-16", "tpu-v5-lite-podslice", "4x4", 4, "4"),
    ("v4-16", "tpu-v4-podslice", "2x2x2", 2, "4"),
    ("v5p-32", "tpu-v5p-slice", "2x2x4", 4, "4"),
    ("v6e-256", "tpu-v6e-slice", "16x16", 64, "4"),
    ("tpu7x-16", "tpu7x", "2x2x2", 2, "4"),
]


@pytest.mark.parametrize(("accelerator", "label", "topology", "hosts", "chips"), SHAPES)
def test_selectors_and_chips_follow_from_the_topology(accelerator, label, topology, hosts, chips):
    manifest = manifests.jobset(order(accelerator=accelerator), SETTINGS)
    selector = pod(manifest)["nodeSelector"]
    assert selector["cloud.google.com/gke-tpu-accelerator"] == label
    assert selector["cloud.google.com/gke-tpu-topology"] == topology
    assert job(manifest)["completions"] == hosts
    assert container(manifest)["resources"]["limits"]["google.com/tpu"] == chips
    assert (
        container(manifest)["resources"]["requests"] == container(manifest)["resources"]["limits"]
    )


def test_a_slice_has_exclusive_use_of_its_node_pool_and_orders_add_labels():
    metadata = manifests.jobset(order(labels={"challenge": "7"}), SETTINGS)["metadata"]
    exclusive = metadata["annotations"]["alpha.jobset.sigs.k8s.io/exclusive-topology"]
    assert exclusive == "cloud.google.com/gke-nodepool"
    assert metadata["labels"] == {
        "app": "tpu-worker", "job-id": "j1", "challenge": "7", "tpufleet.dev/fleet": "f1",
    }  # fmt: skip


def test_single_host_slices_share_a_node_pool():
    metadata = manifests.jobset(order(accelerator="v5litepod-8"), SETTINGS)["metadata"]
    assert "alpha.jobset.sigs.k8s.io/exclusive-topology" not in metadata["annotations"]


CAPACITY = [
    pytest.param(Capacity.ON_DEMAND, {}, set(), id="on-demand"),
    pytest.param(
        Capacity.SPOT,
        {"cloud.google.com/gke-spot": "true"},
        {"cloud.google.com/gke-spot"},
        id="spot",
    ),
    pytest.param(
        Capacity.RESERVED, {"cloud.google.com/reservation-name": "mine"}, set(), id="reserved"
    ),
    pytest.param(
        Capacity.QUEUED,
        {"cloud.google.com/gke-flex-start": "true"},
        {"cloud.google.com/gke-queued"},
        id="queued",
    ),
]


@pytest.mark.parametrize(("capacity", "extra", "taints"), CAPACITY)
def test_each_capacity_type_has_its_selector_and_toleration(capacity, extra, taints):
    settings = GkeSettings(namespace="n", image="i", reservations={"v5litepod-16": "mine"})
    manifest = pod(manifests.jobset(order(capacity=capacity), settings))
    assert {key: manifest["nodeSelector"].get(key) for key in extra} == extra
    tolerated = {toleration["key"] for toleration in manifest["tolerations"]}
    assert tolerated == {"google.com/tpu"} | taints


def test_reserved_capacity_without_a_reservation_is_rejected():
    with pytest.raises(BadRequest, match="no reservation"):
        manifests.jobset(order(capacity=Capacity.RESERVED), SETTINGS)


def test_pods_of_a_compute_class_select_nothing_that_it_chooses():
    """GKE rejects pods that also select spot."""
    settings = structs.replace(SETTINGS, compute_classes={"v5litepod-16": "ml-v5e"})
    manifest = manifests.jobset(order(capacity=Capacity.SPOT), settings)
    assert pod(manifest)["nodeSelector"] == {
        "cloud.google.com/compute-class": "ml-v5e", "topology.kubernetes.io/zone": "us-central1-a"
    }  # fmt: skip
    tolerated = {each["key"] for each in pod(manifest)["tolerations"]}
    assert tolerated == {"google.com/tpu", "cloud.google.com/gke-spot"}
    assert fits_order(manifest, order("c", capacity=Capacity.ON_DEMAND))
    assert "compute-class" not in json.dumps(manifests.jobset(order(accelerator="v5e-8"), settings))


def test_pods_of_a_dynamic_slice_ask_for_its_topology_and_select_no_node_pool():
    """https://docs.cloud.google.com/kubernetes-engine/docs/how-to/create-dynamic-slices"""
    settings = structs.replace(SETTINGS, dynamic_slices=("tpu7x-256",))
    wanted = order(accelerator="tpu7x-4x4x8", capacity=Capacity.RESERVED)
    manifest = manifests.jobset(wanted, settings)
    assert pod(manifest)["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu7x",
        "topology.kubernetes.io/zone": "us-central1-a",
    }
    annotations = job(manifest)["template"]["metadata"]["annotations"]
    assert annotations["cloud.google.com/gke-tpu-slice-topology"] == "4x4x8"
    assert manifest["metadata"]["annotations"][keys.EXCLUSIVE] == "cloud.google.com/gke-tpu-slice"
    assert fits_order(manifest, wanted)


PRIORITIES = [(1000, "veryhigh"), (100, "veryhigh"), (10, "high"), (1, "medium"), (0, "medium"),
              (-1, "low"), (-99, "low"), (-100, "verylow")]  # fmt: skip


@pytest.mark.parametrize(("priority", "name"), PRIORITIES)
def test_job_priorities_map_to_kueue_priority_classes(priority, name):
    settings = GkeSettings(namespace="n", image="i", queue="tpu-training-jobs")
    labels = manifests.jobset(order(priority=priority), settings)["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "tpu-training-jobs"
    assert labels["kueue.x-k8s.io/priority-class"] == name


def test_without_a_queue_the_manifest_does_not_mention_kueue():
    assert "kueue" not in json.dumps(manifests.jobset(order(), SETTINGS))


def test_pods_are_locked_down():
    manifest = manifests.jobset(order(), SETTINGS)
    assert pod(manifest)["automountServiceAccountToken"] is False
    assert pod(manifest)["securityContext"]["runAsNonRoot"] is True
    assert pod(manifest)["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert "hostNetwork" not in pod(manifest)
    assert container(manifest)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_tokens_are_in_the_secret_by_slot_and_not_in_the_jobset():
    gang = order("a", "b")
    assert "secret of" not in json.dumps(manifests.jobset(gang, SETTINGS))
    secret = manifests.secret(gang, SETTINGS.namespace, slice_slots.initial_slots(gang.slices))
    assert {key: json.loads(value) for key, value in secret["stringData"].items()} == {
        "0": {"slice": "a", "token": "secret of a"},
        "1": {"slice": "b", "token": "secret of b"},
    }


def test_jobset_never_restarts_and_is_deleted_an_hour_after_it_ends():
    manifest = manifests.jobset(order(grace=timedelta(seconds=90)), SETTINGS)
    assert manifest["spec"]["failurePolicy"] == {"maxRestarts": 0}
    assert manifest["spec"]["ttlSecondsAfterFinished"] == 3600
    assert pod(manifest)["restartPolicy"] == "Never"
    assert pod(manifest)["terminationGracePeriodSeconds"] == 120
    actions = [rule["action"] for rule in job(manifest)["podFailurePolicy"]["rules"]]
    assert actions == ["FailJob", "Ignore", "Ignore"]


def test_hosts_find_each_other_by_jobset_dns_names():
    manifest = manifests.jobset(order(id="run-7"), SETTINGS)
    environment = {one["name"]: one.get("value") for one in container(manifest)["env"]}
    assert environment["TPUFLEET_ADDRESS"] == (
        "j1-run-7-slice-$(TPUFLEET_SEAT)-$(TPUFLEET_HOST_INDEX).j1-run-7"
    )
    names = [one["name"] for one in container(manifest)["env"]]
    assert names.index("TPUFLEET_SEAT") < names.index("TPUFLEET_ADDRESS")


NAMES = [
    pytest.param("order-1", "order-1", id="fits"),
    pytest.param("Order_1", None, id="other letters"),
    pytest.param("9lives", None, id="begins with a digit"),
    pytest.param("x" * 80, None, id="too long"),
]


@pytest.mark.parametrize(("order_id", "name"), NAMES)
def test_names_are_kept_where_valid_and_made_valid_and_unique_otherwise(order_id, name):
    found = manifests.kubernetes_name(order_id)
    assert name is None or found == name
    assert len(found) <= manifests.MAX_NAME_LENGTH
    assert found[0].isalpha() and found.replace("-", "").isalnum() and found == found.lower()
    assert len(f"{found}-slice-100-1023-abcde") <= 63
    assert manifests.kubernetes_name(order_id + "y") != found


def test_a_jobset_is_named_after_its_job_or_else_its_order():
    assert manifests.jobset_name(order(id="run-7", job_id="j1")) == "j1-run-7"
    assert manifests.jobset_name(order(id="run-7", job_id=None)) == "run-7"


@pytest.mark.parametrize("accelerator", ["v2-8", "v3-32"])
def test_accelerators_that_gke_lacks_are_rejected(accelerator):
    with pytest.raises(BadRequest, match="tpu-vm"):
        manifests.jobset(order(accelerator=accelerator), SETTINGS)


def test_pods_of_a_firestore_job_carry_upstream_labels():
    """The Firestore bridge submits tags, which become labels."""
    request = CodeRequest(code="result = 1", challenge_number=7, timeout=60)
    offer = JobTemplate(accelerator="v5e-16", program_dir=Path("/nowhere"))
    written = jobs.job_spec(offer, JobId("fs-abcdefghijkl"), "Weird id/with spaces", request)
    labels = job_file.parse_job(written).labels
    manifest = manifests.jobset(order(job_id="fs-abcdefghijkl", labels=labels), SETTINGS)
    labels = {"app": "tpu-worker", "challenge": "7", "job-id": "Weird-id-with-spaces"}
    for found in (manifest["metadata"]["labels"], job(manifest)["template"]["metadata"]["labels"]):
        assert labels.items() <= found.items()
    assert manifest["metadata"]["annotations"][keys.JOB] == "fs-abcdefghijkl"


def test_tags_cannot_override_reserved_labels():
    tags = {
        "app": "x", "tpufleet.dev/fleet": "x", "kueue.x-k8s.io/queue-name": "x", "-bad": "x",
        "fine": "y",
    }  # fmt: skip
    manifest = manifests.jobset(order(labels=tags), SETTINGS)
    assert "x" not in manifest["metadata"]["labels"].values()
    assert manifest["metadata"]["labels"]["fine"] == "y"


def test_only_the_init_container_mounts_the_tokens_of_the_gang():
    manifest = pod(manifests.jobset(order(), SETTINGS))
    (secret,) = [volume["name"] for volume in manifest["volumes"] if "secret" in volume]
    (first,), (agent,) = manifest["initContainers"], manifest["containers"]
    assert secret in [mount["name"] for mount in first["volumeMounts"]]
    assert secret not in [mount["name"] for mount in agent["volumeMounts"]]
    assert first["securityContext"] == agent["securityContext"]


def test_pods_get_the_private_ca_and_the_egress_proxy():
    settings = GkeSettings(image="registry/agent:1", https_proxy="http://p:1", no_proxy=".svc")
    manifest = manifests.jobset(order(ca_certificates="-----BEGIN CERTIFICATE-----"), settings)
    env = {item["name"]: item.get("value") for item in container(manifest)["env"]}
    assert env["TPUFLEET_CA_CERTIFICATES"] == "-----BEGIN CERTIFICATE-----"
    assert (env["HTTPS_PROXY"], env["NO_PROXY"]) == ("http://p:1", ".svc")
    plain = {item["name"] for item in container(manifests.jobset(order(), SETTINGS))["env"]}
    assert not plain & {"TPUFLEET_CA_CERTIFICATES", "HTTPS_PROXY", "NO_PROXY"}


def test_pods_have_the_service_account_of_the_job_else_that_of_the_server():
    with_default = structs.replace(SETTINGS, service_account="tpu-worker")
    named = PodSettings(service_account="trainer")
    assert "serviceAccountName" not in pod(manifests.jobset(order(), SETTINGS))
    for settings, own, expected in (
        (with_default, PodSettings(), "tpu-worker"),
        (with_default, named, "trainer"),
        (SETTINGS, named, "trainer"),
    ):
        spec = pod(manifests.jobset(order(pod=own), settings))
        assert spec["serviceAccountName"] == expected
        assert spec["automountServiceAccountToken"] is False


def test_a_service_account_that_is_not_allowed_is_rejected():
    settings = structs.replace(SETTINGS, service_accounts=("trainer",))
    manifests.jobset(order(pod=PodSettings(service_account="trainer")), settings)
    with pytest.raises(BadRequest, match=r"admin is not allowed .*: trainer"):
        manifests.jobset(order(pod=PodSettings(service_account="admin")), settings)


def test_a_job_chooses_image_resources_labels_and_tolerations():
    own = PodSettings(
        image="registry/train:7",
        cpu="24",
        memory="96Gi",
        labels={"team": "nlp"},
        tolerations=("dedicated=research:NoSchedule", "maintenance:NoExecute", "any"),
    )
    manifest = manifests.jobset(order(pod=own), SETTINGS)
    spec = pod(manifest)
    assert {each["image"] for each in spec["containers"] + spec["initContainers"]} == {
        "registry/train:7"
    }
    limits = container(manifest)["resources"]["limits"]
    assert (limits["cpu"], limits["memory"]) == ("24", "96Gi")
    labels = job(manifest)["template"]["metadata"]["labels"]
    assert labels["team"] == "nlp" and labels["app"] == "tpu-worker"
    assert spec["tolerations"][-3:] == [
        {"key": "dedicated", "operator": "Equal", "value": "research", "effect": "NoSchedule"},
        {"key": "maintenance", "operator": "Exists", "effect": "NoExecute"},
        {"key": "any", "operator": "Exists"},
    ]


def test_volumes_are_claims_or_buckets_mounted_by_gcs_fuse():
    settings = structs.replace(SETTINGS, volumes={"/shared": "everyone"})
    own = PodSettings(volumes={"/data": "my-claim", "/weights": "gs://my-bucket/a/b/"})
    manifest = manifests.jobset(order(pod=own), settings)
    by_name = {each["name"]: each for each in pod(manifest)["volumes"]}
    mounted = {
        each["mountPath"]: by_name[each["name"]] for each in container(manifest)["volumeMounts"]
    }
    assert mounted["/shared"]["persistentVolumeClaim"] == {"claimName": "everyone"}
    assert mounted["/data"]["persistentVolumeClaim"] == {"claimName": "my-claim"}
    assert mounted["/weights"]["csi"] == {
        "driver": "gcsfuse.csi.storage.gke.io",
        "volumeAttributes": {
            "bucketName": "my-bucket",
            "mountOptions": "implicit-dirs,uid=65532,gid=65532,only-dir=a/b",
        },
    }
    template = job(manifest)["template"]["metadata"]
    assert template["annotations"]["gke-gcsfuse/volumes"] == "true"
    without = job(manifests.jobset(order(), SETTINGS))["template"]["metadata"]
    assert "gke-gcsfuse/volumes" not in without["annotations"]


def test_the_cluster_autoscaler_does_not_evict_a_job_to_remove_its_node():
    template = job(manifests.jobset(order(), SETTINGS))["template"]["metadata"]
    key = "cluster-autoscaler.kubernetes.io/safe-to-evict"
    assert template["annotations"][key] == "false"


TEAMS = structs.replace(
    SETTINGS,
    teams={
        "red": GkeTeam(queue="red-jobs", service_account="red-worker", users=("ada", "cy")),
        "blue": GkeTeam(namespace="lab-blue", queue="q", users=("ben", "cy")),
        "all": GkeTeam(),
    },
)


@pytest.mark.parametrize(
    ("owner", "team", "namespace"),
    [
        ("ada", None, "red"),
        ("ben", None, "lab-blue"),
        ("dan", None, "all"),  # the only one that is open to everybody
        ("ada", "all", "all"),
        ("cy", "blue", "lab-blue"),
        ("", "blue", "lab-blue"),  # the slices of a pool
    ],
)
def test_a_job_runs_in_the_namespace_and_queue_of_its_team(owner, team, namespace):
    manifest = manifests.jobset(order(owner=owner, pod=PodSettings(team=team)), TEAMS)
    queue = {"red": "red-jobs", "lab-blue": "q", "all": None}[namespace]
    assert manifest["metadata"]["namespace"] == namespace
    assert manifest["metadata"]["labels"].get(keys.QUEUE) == queue
    account = "red-worker" if namespace == "red" else None
    assert pod(manifest).get("serviceAccountName") == account


@pytest.mark.parametrize(
    ("owner", "team", "message"),
    [
        ("ada", "blue", "pod.team: blue is not a team of ada; write one of red, all"),
        ("cy", None, "pod.team: more than one team of cy; write one of red, blue, all"),
        ("", None, "pod.team: more than one team of this server"),
    ],
)
def test_a_job_never_runs_in_another_team(owner, team, message):
    with pytest.raises(BadRequest, match=message):
        manifests.jobset(order(owner=owner, pod=PodSettings(team=team)), TEAMS)


def test_a_server_without_teams_says_who_configures_them():
    with pytest.raises(BadRequest, match=r"red is not a team of ada; .*gke\.teams"):
        manifests.jobset(order(owner="ada", pod=PodSettings(team="red")), SETTINGS)
