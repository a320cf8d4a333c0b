"""Kueue objects derived from the pools and teams of an environment."""

from __future__ import annotations

import pytest
import yaml

from tests.environment.environments import environment, example, tpu
from tpufleet.errors import BadInput
from tpufleet_gke.environment.addons import example_jobsets, helm_values, queues, team_manifests
from tpufleet_gke.environment.config.sections import Environment

TWO_TEAMS = {
    "tpu_pools": {"v5e": {"type": "v5e-16", "slices": 4}},
    "teams": {"red": {"quota": {"v5e-16": 3}}, "blue": {"quota": {"v5e-16": 1}, "weight": 2}},
}


def by_kind(built: Environment, kind: str) -> dict[str, dict]:
    return {
        manifest["metadata"]["name"]: manifest
        for manifest in queues.manifests(built)
        if manifest["kind"] == kind
    }


def quota(queue: dict) -> dict[str, dict[str, object]]:
    (group,) = queue["spec"]["resourceGroups"]
    return {
        flavor["name"]: {item["name"]: item["nominalQuota"] for item in flavor["resources"]}
        for flavor in group["flavors"]
    }


def test_c6_quota_counts_all_slices_of_all_hosts():
    """Was: one node for a single-host pool, whatever its size."""
    built = environment(tpu_pools={"single": {"type": "v5e-8", "slices": 8}})
    (queue,) = by_kind(built, "ClusterQueue").values()
    assert quota(queue)["v5litepod-8"]["google.com/tpu"] == 64


def test_c6_cpu_and_memory_are_covered_too():
    built = environment(**TWO_TEAMS)
    red = quota(by_kind(built, "ClusterQueue")["red"])["v5litepod-16"]
    # 3 slices of 4 hosts of ct5lp-hightpu-4t: 112 CPUs, 192 GiB
    assert red == {"google.com/tpu": 48, "cpu": 3 * 4 * 112, "memory": f"{3 * 4 * 192}Gi"}


def test_c6_teams_share_one_cohort_with_preemption_and_weights():
    found = by_kind(environment(**TWO_TEAMS), "ClusterQueue")
    for name, queue in found.items():
        assert queue["spec"]["cohortName"] == queues.SHARED_COHORT
        assert queue["spec"]["preemption"]["reclaimWithinCohort"] == "Any"
        selector = queue["spec"]["namespaceSelector"]["matchLabels"]
        assert selector == {"kubernetes.io/metadata.name": name}
    assert found["blue"]["spec"]["fairSharing"] == {"weight": "2"}


def test_c6_the_five_priorities_are_workload_priority_classes():
    values = {
        name: item["value"]
        for name, item in by_kind(example(), "WorkloadPriorityClass").items()
    }  # fmt: skip
    assert values == {"verylow": 100, "low": 250, "medium": 500, "high": 750, "veryhigh": 1000}


def test_slices_that_no_team_is_guaranteed_belong_to_the_cohort():
    teams = {"red": {"quota": {"v5e-16": 1}}, "blue": {}}
    built = environment(tpu_pools=TWO_TEAMS["tpu_pools"], teams=teams)
    (cohort,) = by_kind(built, "Cohort").values()
    assert quota(cohort)["v5litepod-16"]["google.com/tpu"] == 3 * 16


def test_without_quotas_slices_are_shared_by_weight():
    built = environment(
        tpu_pools={"v5e": {"type": "v5e-16", "slices": 4}}, teams={"red": {"weight": 3}, "blue": {}}
    )
    assert queues.quota_shares(built) == {
        "red": {"v5litepod-16": 3}, "blue": {"v5litepod-16": 1},
    }  # fmt: skip


@pytest.mark.parametrize("built", [example(), environment(**TWO_TEAMS)], ids=["example", "two"])
def test_all_quotas_together_are_exactly_the_pools(built):
    objects = [*by_kind(built, "ClusterQueue").values(), *by_kind(built, "Cohort").values()]
    for flavor in queues.flavors(built):
        chips = sum(quota(item)[flavor.name]["google.com/tpu"] for item in objects)
        assert chips == flavor.slices * flavor.kind.chips


def test_a_team_that_may_not_borrow_is_limited():
    built = environment(
        tpu_pools=TWO_TEAMS["tpu_pools"], teams={"red": {"borrow": False, "lend": False}}
    )
    (queue,) = by_kind(built, "ClusterQueue").values()
    (flavor,) = queue["spec"]["resourceGroups"][0]["flavors"]
    assert [item["borrowingLimit"] for item in flavor["resources"]] == [0, 0, "0Gi"]
    assert [item["lendingLimit"] for item in flavor["resources"]] == [0, 0, "0Gi"]


def test_flex_start_slices_are_provisioned_before_a_workload_starts():
    built = environment(**tpu("v6e-16", capacity="flex-start"))
    (queue,) = by_kind(built, "ClusterQueue").values()
    (rule,) = queue["spec"]["admissionChecksStrategy"]["admissionChecks"]
    assert rule == {"name": "flex-start", "onFlavors": ["v6e-16-flex-start"]}
    (config,) = by_kind(built, "ProvisioningRequestConfig").values()
    assert config["spec"]["provisioningClassName"] == "queued-provisioning.gke.io"
    # Else pods may take the nodes of another request.
    assert config["spec"]["podSetUpdates"]["nodeSelector"] == [
        {
            "key": "autoscaling.gke.io/provisioning-request",
            "valueFromProvisioningClassDetail": "ResizeRequestName",
        }
    ]


def test_flex_start_slices_of_the_provisioner_are_not_waited_for():
    """It creates node pools for pods, which exist only once the job is admitted."""
    built = environment(tpu_pools={"flex": {"type": "v6e-16", "capacity": "flex-start"}})
    (queue,) = by_kind(built, "ClusterQueue").values()
    assert "admissionChecksStrategy" not in queue["spec"]
    assert not by_kind(built, "AdmissionCheck")


def test_workloads_tolerate_the_taint_of_queued_provisioning():
    """GKE puts it on the nodes of every pool with queued provisioning:
    https://github.com/GoogleCloudPlatform/cluster-toolkit (GKE consumption options)."""
    built = environment(**tpu("v6e-16", capacity="flex-start"))
    (flavor,) = by_kind(built, "ResourceFlavor").values()
    assert {
        "key": "cloud.google.com/gke-queued", "operator": "Equal", "value": "true",
        "effect": "NoSchedule",
    } in flavor["spec"]["tolerations"]  # fmt: skip


def test_c7_the_service_account_of_a_team_is_the_one_that_terraform_binds():
    accounts = [
        (item["metadata"]["namespace"], item["metadata"]["name"],
         item["metadata"]["annotations"]["iam.gke.io/gcp-service-account"])
        for item in team_manifests.teams(example()) if item["kind"] == "ServiceAccount"
    ]  # fmt: skip
    assert accounts == [
        ("research", "tpu-worker", "ml-research-jobs@my-project.iam.gserviceaccount.com"),
        ("serving", "tpu-worker", "ml-serving-jobs@my-project.iam.gserviceaccount.com"),
    ]


def test_the_files_are_a_kustomization():
    files = team_manifests.files(example())
    listed = yaml.safe_load(files["kustomization.yaml"])["resources"]
    assert {*listed, "kustomization.yaml"} == set(files)
    assert list(yaml.safe_load_all(files["queues.yaml"])) == queues.manifests(example())


# Topology-aware scheduling

ALWAYS_THERE = {"type": "v5p-128", "slices": 2, "managed_by": "terraform", "topology_aware": True}


def test_a_pool_that_is_topology_aware_has_a_flavor_with_a_topology():
    built = environment(tpu_pools={"a": ALWAYS_THERE, "b": {"type": "v5p-128", "capacity": "spot"}})
    flavors = by_kind(built, "ResourceFlavor")
    assert {name: flavor["spec"].get("topologyName") for name, flavor in flavors.items()} == {
        "v5p-128": "tpu-slices", "v5p-128-spot": None,
    }  # fmt: skip
    levels = by_kind(built, "Topology")["tpu-slices"]["spec"]["levels"]
    assert [level["nodeLabel"].rpartition("/")[2] for level in levels] == [
        "zone", "gke-nodepool", "hostname",
    ]  # fmt: skip
    assert by_kind(example(), "Topology") == {}


def test_jobs_on_such_a_pool_ask_for_whole_slices():
    built = environment(tpu_pools={"a": ALWAYS_THERE}, teams={"red": {}})
    jobset = example_jobsets.hello_world(built, "red", "v5p-128", slices=2, image="i")
    template = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert template["metadata"]["annotations"] == {
        "kueue.x-k8s.io/podset-preferred-topology": "topology.kubernetes.io/zone",
        "kueue.x-k8s.io/podset-slice-required-topology": "cloud.google.com/gke-nodepool",
        "kueue.x-k8s.io/podset-slice-size": "16",
    }
    assert "TPUFLEET_GKE_TOPOLOGY_AWARE=v5p-128\n" in helm_values.settings_env(built)


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ({"a": {"type": "v5e-16", "topology_aware": True}}, "must see the nodes"),
        ({"a": {**ALWAYS_THERE, "autoscaling": True}}, "must see the nodes"),
        (
            {"a": ALWAYS_THERE, "b": {**ALWAYS_THERE, "topology_aware": False}},
            "write the same in both",
        ),
    ],
    ids=["provisioner", "autoscaling", "mixed"],
)
def test_kueue_cannot_place_on_slices_that_it_does_not_see(pools, message):
    with pytest.raises(BadInput, match=message):
        environment(tpu_pools=pools)


CLASS = {
    "zones": ["us-central1-a", "us-central1-b"],
    "tpu_pools": {
        "v5e": {
            "type": "v5e-16", "slices": 3, "managed_by": "compute-class", "capacity": "reserved",
            "reservation": "projects/other-project/reservations/mine/reservationBlocks/b1",
            "fallback": ["on-demand", "spot"], "labels": {"team": "x"},
            "taints": [{"key": "dedicated"}],
        },
        "single": {"type": "v5e-8"},
    },
}  # fmt: skip


def test_a_compute_class_tries_one_kind_of_capacity_after_the_other():
    """https://cloud.google.com/kubernetes-engine/docs/reference/crds/computeclass: `count` is that
    of a node, and zones do not go with a reservation."""
    (found,) = by_kind(environment(**CLASS), "ComputeClass").items()
    tpus = {"type": "tpu-v5-lite-podslice", "count": 4, "topology": "4x4"}
    shared = {"tpu": tpus, "storage": {"bootDiskType": "pd-balanced", "bootDiskSize": 200}}
    zones = {"location": {"zones": ["us-central1-a"]}}  # the one that has the type
    reservation = {"name": "mine", "project": "other-project", "reservationBlock": {"name": "b1"}}
    name, manifest = found
    assert name == "ml-v5e" and manifest["apiVersion"] == "cloud.google.com/v1"
    assert manifest["spec"] == {
        "priorities": [
            {**shared, "reservations": {"affinity": "Specific", "specific": [reservation]}},
            {**shared, **zones},
            {**shared, "spot": True, **zones},
        ],
        "nodePoolAutoCreation": {"enabled": True},
        "nodePoolConfig": {
            "serviceAccount": "ml-gke-nodes@my-project.iam.gserviceaccount.com",
            "nodeLabels": {"team": "x"},
            "taints": [{"key": "dedicated", "value": "true", "effect": "NoSchedule"}],
        },
        "whenUnsatisfiable": "DoNotScaleUp",
    }


def test_kueue_admits_to_a_compute_class_by_its_selector():
    built = environment(**CLASS)
    found = by_kind(built, "ResourceFlavor")
    labels = {name: flavor["spec"]["nodeLabels"] for name, flavor in found.items()}
    assert labels["v5litepod-16"] == {"cloud.google.com/compute-class": "ml-v5e"}
    assert "cloud.google.com/compute-class" not in labels["v5litepod-8"]
    queue = by_kind(built, "ClusterQueue")["training"]
    cohort = by_kind(built, "Cohort")["tpufleet"]
    slices = [quota(one)["v5litepod-16"]["google.com/tpu"] for one in (queue, cohort)]
    assert sum(slices) == 3 * 16


def test_the_server_and_the_examples_select_the_compute_class():
    built = environment(**CLASS)
    assert "TPUFLEET_GKE_COMPUTE_CLASSES=v5litepod-16=ml-v5e\n" in helm_values.settings_env(built)
    jobset = example_jobsets.hello_world(built, "training", "v5e-16", slices=1, image="image:1")
    template = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert template["spec"]["nodeSelector"] == {"cloud.google.com/compute-class": "ml-v5e"}
