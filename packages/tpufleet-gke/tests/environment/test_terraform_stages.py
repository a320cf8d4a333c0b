"""The generated stages: valid for Google's provider, formatted, pinned, least privilege."""

from __future__ import annotations

import re

import pytest
import yaml
from msgspec.structs import replace

from tests.environment import terraform_programs
from tests.environment.environments import environment, example, tpu
from tests.environment.provider_checks import errors, node_pool, resources
from tests.repository import ROOT
from tpufleet.model.tpu import type_lookup
from tpufleet_gke.environment.addons import helm_values, queues, team_manifests
from tpufleet_gke.environment.config import names
from tpufleet_gke.environment.terraform import hcl, stages, versions
from tpufleet_gke.environment.terraform.hcl import Nested
from tpufleet_testbed.terraform.google_provider import provider_schema

EVERYTHING = {
    "labels": {"team": "lab"},
    "network": {
        "private_endpoint": True, "authorized_networks": {"office": "203.0.113.0/24"},
    },
    "cluster": {"version": "1.33", "channel": "RAPID"},
    "gpu_pools": {"l4": {"local_ssds": 1, "spot": True, "taints": [{"key": "gpu"}]}},
    "tpu_pools": {
        "plain": {"type": "v5e-16", "managed_by": "terraform", "labels": {"a": "b"},
                  "taints": [{"key": "dedicated", "value": "lab", "effect": "NO_EXECUTE"}]},
        "single": {"type": "v5e-8", "slices": 8, "managed_by": "terraform", "autoscaling": True},
        "spot": {"type": "v6e-16", "capacity": "spot", "managed_by": "terraform"},
        "reserved": {"type": "v5p-128", "capacity": "reserved", "reservation": "r",
                     "managed_by": "terraform"},
        "flex": {"type": "v6e-32", "capacity": "flex-start", "managed_by": "terraform"},
        "ironwood": {"type": "tpu7x-128", "slices": 2, "managed_by": "terraform"},
    },
    "buckets": {"a": {"versioning": True, "delete_after_days": 9, "teams": ["training"]},
                "b": {"hierarchical": True}},
    "tensorboard": {},
    "budget": {"billing_account": "012345-567890-ABCDEF", "monthly_usd": 5},
}  # fmt: skip
SHARED_VPC = {
    "network": {
        "existing": {
            "host_project": "host-project",
            "network": "shared",
            "subnetwork": "gke",
            "pods_range": "pods",
            "services_range": "services",
        }
    }
}
ENVIRONMENTS = {
    "the example": example(),
    "the smallest": environment(),
    "everything": environment(**EVERYTHING),
    "a shared VPC": environment(**SHARED_VPC),
    "a private endpoint": environment(network={"private_endpoint": True}),
    "nothing created": environment(
        automation={"create_bucket": False, "create_service_account": False, "enable_apis": False},
        registry={"create": False}, network={"private_nodes": False, "nat": False},
        cluster={"cloud_dns": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize("built", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_every_resource_matches_the_schema_of_googles_provider(built):
    assert [line for block in resources(built) for line in errors(block)] == []


def test_the_schema_check_finds_the_former_typos():
    """C4: `managment` and `enable_enable_api_server_logs` were dropped silently."""
    misspelt = hcl.resource(
        "google_container_node_pool", "x", cluster="c", managment=Nested(auto_repair=True)
    )
    assert errors(misspelt) == ["google_container_node_pool.x.managment: unknown argument"]


def test_the_schema_is_that_of_the_pinned_provider():
    assert provider_schema()["provider"] == versions.GOOGLE_PROVIDER_VERSION


@pytest.mark.parametrize("built", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_the_files_are_formatted(built, tmp_path):
    program = terraform_programs.opentofu()
    for name, text in stages.all_files(built).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = terraform_programs.run(program, "fmt", "-check", "-recursive", "-diff", str(tmp_path))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("kind", [name for name, t in type_lookup.all_types().items()
                                  if t.gke_accelerator])  # fmt: skip
def test_a_node_pool_has_the_shape_of_its_tpu_type(kind):
    built = environment(**tpu(kind))
    shape = type_lookup.find(kind)
    pool = node_pool(built, "pool" if shape.hosts == 1 else "pool-0")
    assert pool["node_count"] == shape.hosts
    assert pool["node_config"]["machine_type"] == shape.machine_type
    # https://cloud.google.com/tpu/docs/attach-durable-block-storage
    disk = "hyperdisk-balanced" if shape.generation in ("v6e", "tpu7x") else "pd-balanced"
    assert pool["node_config"]["disk_type"] == disk
    if shape.hosts == 1:
        assert "placement_policy" not in pool  # GKE rejects a topology for a single host
    elif shape.generation == "tpu7x":
        (policy,) = resources(built, "google_compute_resource_policy")
        assert policy.body["workload_policy"]["accelerator_topology"] == shape.topology
        placement = pool["placement_policy"]
        assert (placement["type"], placement["tpu_topology"]) == ("", shape.topology)
    else:
        assert pool["placement_policy"] == {"type": "COMPACT", "tpu_topology": shape.topology}


def test_slices_left_to_the_provisioner_have_no_node_pool():
    built = environment(tpu_pools={"later": {"type": "v5e-16", "slices": 9}})
    assert len(resources(built, "google_container_node_pool")) == 1  # the CPU pool


def test_versions_are_pinned_and_no_module_is_fetched():
    for name, text in stages.all_files(example()).items():
        assert 'module "' not in text, name
        if name.endswith("versions.tf"):
            assert f'version = "{versions.GOOGLE_PROVIDER_VERSION}"' in text
    assert re.fullmatch(r"\d+\.\d+\.\d+", versions.GOOGLE_PROVIDER_VERSION)


def test_nodes_have_no_access_to_buckets_of_the_project():
    roles = {
        block.body["role"]
        for block in resources(example(), "google_project_iam_member")
        if block.labels[1].startswith(("nodes_", "team_"))
    }
    assert roles and not [role for role in roles if "storage" in role or role.endswith("editor")]


def test_a_change_of_the_fewest_nodes_does_not_create_the_pool_anew():
    pool = node_pool(environment(cpu_pools={"cpu": {"min_nodes": 3, "max_nodes": 9}}), "cpu")
    assert pool["initial_node_count"] == 3
    (ignored,) = pool["lifecycle"]["ignore_changes"]
    assert ignored.text == "initial_node_count"


def test_the_first_stage_enables_the_apis_that_it_calls():
    """In a new project, a service account cannot be created before the IAM API is enabled."""
    services = {block.labels[1] for block in resources(example(), "google_project_service")}
    for block in resources(example(), "google_service_account"):
        if block.labels[1] == "automation":
            needed = {item.text.partition(".")[2] for item in block.body["depends_on"]}
            assert "iam" in needed and needed <= services


def test_billing_uses_the_quota_of_the_project_with_the_credentials_of_a_person():
    """Was: 403, "end user credentials … are not supported by the billingbudgets.googleapis.com"."""
    built = environment(**EVERYTHING)
    billing = [block for block in resources(built) if "billing" in block.labels[0]]
    assert len(billing) == 2
    for block in billing:
        assert block.body["provider"] == hcl.BILLING
    for stage in ("0-bootstrap", "1-infrastructure"):
        text = stages.stage_files(built, stages.StageName(stage))["versions.tf"]
        [aliased] = [part for part in text.split("\n\n") if '= "billing"' in part]
        assert "user_project_override = true" in aliased
        assert re.search(r'billing_project +\= "my-project"', aliased)
    enabled = {block.labels[1] for block in resources(built, "google_project_service")}
    assert {"billingbudgets", "cloudbilling"} <= enabled


def test_no_grant_is_authoritative():
    """A binding or policy would remove members that others added."""
    kinds = {block.labels[0] for block in resources(environment(**EVERYTHING))}
    assert not [kind for kind in kinds if kind.endswith(("_iam_binding", "_iam_policy"))]


def test_a_team_reaches_only_its_buckets():
    built = environment(
        teams={"red": {}, "blue": {}}, buckets={"common": {}, "secret": {"teams": ["red"]}}
    )
    granted = {
        (block.labels[1].split("_")[1], block.body["bucket"])
        for block in resources(built, "google_storage_bucket_iam_member")
        if block.labels[1].startswith("team_")
    }
    common, secret = names.bucket(built, "common"), names.bucket(built, "secret")
    assert granted == {("red", common), ("red", secret), ("blue", common)}


def test_deletion_protection_covers_the_cluster_and_the_buckets():
    for protected in (True, False):
        built = replace(example(), deletion_protection=protected)
        (cluster,) = resources(built, "google_container_cluster")
        assert cluster.body["deletion_protection"] is protected
        for bucket in resources(built, "google_storage_bucket"):
            assert bucket.body["force_destroy"] is not protected


def test_state_and_plans_are_ignored_by_git():
    ignored = stages.all_files(example())[".gitignore"].split()
    assert {"*.tfstate", "*.tfplan", ".terraform/"} <= set(ignored)


def test_state_is_kept_in_the_automation_bucket():
    for stage in stages.StageName:
        text = stages.stage_files(example(), stage)["versions.tf"]
        assert f'prefix = "tfstate/{stage}"' in text
        assert 'bucket = "my-project-ml-automation"' in text


def test_the_names_of_the_network_and_of_the_folder_of_state_may_be_chosen():
    chosen = environment(
        automation={"state_prefix": "ml-state"},
        network={"name": "lab-vpc", "subnetwork": "lab-nodes"},
    )
    named = lambda kind: [block.body["name"] for block in resources(chosen, kind)]
    assert named("google_compute_network") == ["lab-vpc"]
    assert named("google_compute_subnetwork") == ["lab-nodes"]
    for stage in stages.StageName:
        text = stages.stage_files(chosen, stage)["versions.tf"]
        assert f'prefix = "ml-state/{stage}"' in text


def test_the_names_of_all_service_accounts_may_be_chosen():
    chosen = {"server": "lab-server", "bridge": "lab-bridge", "provisioner": "lab-pools",
              "training": "lab-training"}  # fmt: skip
    built = environment(
        nodes={"service_account": "lab-nodes"}, automation={"service_account": "lab-apply"},
        server={"firestore_bridge": True}, service_accounts=chosen,
    )  # fmt: skip
    accounts = {block.body["account_id"] for block in resources(built, "google_service_account")}
    assert accounts == {*chosen.values(), "lab-nodes", "lab-apply"}
    emails = {f"{name}@my-project.iam.gserviceaccount.com" for name in chosen.values()}
    manifests = helm_values.text(built) + yaml.safe_dump(team_manifests.teams(built))
    assert [email for email in emails if email not in manifests] == []
    [uses] = [
        block.body["service_account_id"]
        for block in resources(built, "google_service_account_iam_member")
        if block.labels[1] == "provisioner_uses_nodes"
    ]
    assert uses.endswith("/lab-nodes@my-project.iam.gserviceaccount.com")


@pytest.mark.parametrize("kind", ["v5e-8", "v5e-16"])
@pytest.mark.parametrize("managed_by", ["terraform", "provisioner"])
def test_a_pool_may_have_no_slices_for_now(kind, managed_by):
    none = environment(tpu_pools={"later": {"type": kind, "slices": 0, "managed_by": managed_by}})
    pools = [block.labels[1] for block in resources(none, "google_container_node_pool")]
    assert not any("later" in name for name in pools)
    assert [flavor.slices for flavor in queues.flavors(none)] == [0]
    assert all(stages.all_files(none).values())


def test_the_control_plane_of_a_private_cluster_reaches_webhooks():
    """GKE itself opens 443 and 10250, which cert-manager has."""
    [rule] = resources(environment(), "google_compute_firewall")
    assert rule.body["source_ranges"] == ["172.16.0.0/28"]
    deployment = (ROOT / "deploy/k8s/base/admission/deployment.yaml").read_text()
    [server] = [
        container
        for document in yaml.safe_load_all(deployment)
        if document["kind"] == "Deployment"
        for container in document["spec"]["template"]["spec"]["containers"]
    ]
    [port] = [each["containerPort"] for each in server["ports"] if each["name"] == "https"]
    # JobSet and Kueue: webhooks on 9443; Kueue: the API of pending workloads on 8082.
    assert set(rule.body["allow"]["ports"]) == {str(port), "9443", "8082"}


def test_a_cluster_with_public_nodes_gets_no_firewall_rule():
    built = environment(network={"private_nodes": False})
    assert not resources(built, "google_compute_firewall")


@pytest.mark.parametrize("create", [True, False])
def test_the_firewall_and_the_grants_of_a_shared_vpc_are_the_host_projects(create):
    existing = {**SHARED_VPC["network"]["existing"], "create_grants": create}
    built = environment(network={"existing": existing})
    rules = resources(built, "google_compute_firewall")
    assert [rule.body["project"] for rule in rules] == ["host-project"] * create
    assert len(resources(built, "google_compute_subnetwork_iam_member")) == 3 * create
