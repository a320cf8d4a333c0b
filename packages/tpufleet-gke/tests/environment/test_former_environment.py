"""Every variable of the former environment has its place, and its faults do not come back.

The former environment: three Terraform stages with a variable for each of the following, and
sixteen known faults, C1 to C16.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from msgspec.structs import fields

from tests.environment.environments import environment, example, tpu
from tests.environment.provider_checks import node_pool, resources
from tpufleet.model.tpu import type_lookup
from tpufleet_gke.environment.config import capacity, names, sections
from tpufleet_gke.environment.terraform import bootstrap, stages

# Former variable → field of cluster.yaml, and a value for it.
VARIABLES: dict[str, tuple[str, Any]] = {
    "project_id": ("project", "my-project"),
    "region": ("region", "us-central1"),
    "prefix": ("name", "lab"),
    "env_name": ("name", "lab"),
    "deletion_protection": ("deletion_protection", False),
    "automation_bucket": ("automation.bucket", "lab-state"),
    "automation_bucket.location": ("automation.location", "us"),
    "automation_sa_name": ("automation.service_account", "lab-automation"),
    "services": ("automation.services", ["pubsub.googleapis.com"]),
    "roles": ("automation.roles", ["roles/container.admin"]),
    "create_automation_bucket": ("automation.create_bucket", False),
    "create_automation_sa": ("automation.create_service_account", False),
    "enable_apis": ("automation.enable_apis", False),
    "automation.outputs_bucket": ("automation.bucket", "lab-state"),
    "node_pool_sa.name": ("nodes.service_account", "lab-nodes"),
    "node_pool_sa.roles": ("nodes.roles", ["roles/logging.logWriter"]),
    "create_artifact_registry": ("registry.create", False),
    "registry_config.name": ("registry.name", "lab-images"),
    "registry_config.location": ("registry.location", "us"),
    "gcs_configs": ("buckets.artifacts.versioning", True),
    "gcs_configs.storage_class": ("buckets.artifacts.storage_class", "NEARLINE"),
    "cluster_config.name": ("cluster.name", "lab-cluster"),
    "cluster_config.release_channel": ("cluster.channel", "RAPID"),
    "cluster_config.version": ("cluster.version", "1.33"),
    "cluster_config.description": ("cluster.description", "lab"),
    "cluster_config.gcs_fuse_csi_driver": ("cluster.gcs_fuse", False),
    "cluster_config.gce_persistent_disk_csi_driver": ("cluster.persistent_disk", False),
    "cluster_config.enable_*_logs": ("cluster.logging", ["SYSTEM_COMPONENTS", "APISERVER"]),
    "cluster_config.workloads_namespace": ("teams.training.namespace", "lab"),
    "cpu_node_pools": ("cpu_pools.cpu.machine_type", "n1-standard-16"),
    "cpu_node_pools.min": ("cpu_pools.cpu.min_nodes", 3),
    "cpu_node_pools.disk_size_gb": ("cpu_pools.cpu.disk_gb", 200),
    "gpu_node_pools": (
        "gpu_pools.gpu", {"accelerator": "nvidia-tesla-t4", "machine_type": "n1-standard-8"}),
    "tpu_node_pools": ("tpu_pools.tpu.type", "v5e-16"),
    "tpu_node_pools.autoscaling": (
        "tpu_pools.tpu", {"type": "v5e-16", "managed_by": "terraform", "autoscaling": True}),
    "tpu_node_pools.spot": ("tpu_pools.tpu", {"type": "v5e-16", "capacity": "spot"}),
    "tpu_node_pools.reservation_affinity": (
        "tpu_pools.tpu", {"type": "v5e-16", "capacity": "reserved", "reservation": "lab"}),
    "vpc_config.network": ("name", "lab"),
    "vpc_config.ip_range_pods": ("network.pods", "10.200.0.0/16"),
    "vpc_config.ip_range_services": ("network.services", "10.100.0.0/20"),
    "vpc_config.subnet_ip_cidr_range": ("network.nodes", "10.129.0.0/20"),
    "vpc_config.nat_router_name": ("network.nat", False),
    "vpc_ref": ("network.existing", {
        "host_project": "host-project", "network": "n", "subnetwork": "s", "pods_range": "p",
        "services_range": "v"}),
    "tensorboard_config": ("tensorboard.name", "Lab"),
    "tensorboard_config.region": ("tensorboard.region", "us-east1"),
    "cluster_location": ("region", "us-central1"),
    "namespace": ("teams.training.namespace", "lab"),
    "ksa_name": ("teams.training.service_account", "lab"),
    "wid_sa_name": ("teams.training.service_account", "lab"),
    "wid_sa_roles": ("teams.training.roles", ["roles/logging.logWriter"]),
    "cluster_queue_name": ("teams.training.queue", "lab"),
    "local_queue_name": ("teams.training.queue", "lab"),
    "tpu_resources": ("tpu_pools.tpu.type", "v5e-16"),
    "_JOBSET_API_VERSION": ("addons.jobset", "v0.12.0"),
    "_KUEUE_API_VERSION": ("addons.kueue", "v0.18.3"),
}  # fmt: skip


@pytest.mark.parametrize(("path", "value"), VARIABLES.values(), ids=VARIABLES)
def test_a_former_variable_has_its_place(path, value):
    document: Any = value
    for key in reversed(path.split(".")):
        document = {key: document}
    if "tpu_pools" in document and isinstance(value, str):
        document = {"tpu_pools": {"tpu": {"type": value}}}
    built: Any = environment(**document)
    for key in path.split("."):
        built = built[key] if isinstance(built, dict) else getattr(built, key)
    expected = tuple(value) if isinstance(value, list) else value
    if isinstance(expected, dict):
        kept = {name: getattr(built, name) for name in expected if name != "type"}
        assert kept == {name: item for name, item in expected.items() if name != "type"}
    elif path.endswith(".type"):
        assert built == type_lookup.find(expected).name
    else:
        assert built == expected


@pytest.mark.parametrize(("slices", "kind", "pools", "most"), [
    (8, "v5e-8", ["pool"], 8),  # single host: one pool of up to 8 nodes
    (2, "v5e-16", ["pool-0", "pool-1"], 4),  # multi-host: each pool is a slice of 4 nodes
])  # fmt: skip
def test_c1_autoscaling_reaches_every_host_of_a_slice(slices, kind, pools, most):
    """Was: single-host pools of at most 1 node; multi-host pools of at most 1 in total."""
    built = environment(**tpu(kind, slices=slices, autoscaling=True))
    for name in pools:
        scaling = node_pool(built, name)["autoscaling"]
        assert scaling["max_node_count"] == most
        assert scaling["min_node_count"] == 0
        assert "node_count" not in node_pool(built, name)


def test_c2_taints_of_tpu_pools_have_key_value_and_effect():
    taint = {"key": "dedicated", "value": "lab", "effect": "NO_EXECUTE"}
    built = environment(**tpu("v5e-16", taints=[taint]))
    assert node_pool(built, "pool-0")["node_config"]["taint"] == [taint]


def test_c3_topologies_are_right():
    assert type_lookup.find("v5p-3072").topology == "8x12x16"
    assert type_lookup.find("v4-8").topology == "2x2x1"
    for kind in type_lookup.all_types().values():
        sizes = [int(size) for size in kind.topology.split("x")]
        product = 1
        for size in sizes:
            product *= size
        assert product == kind.chips == kind.hosts * kind.chips_per_host, kind.name


def test_c4_repair_and_upgrade_reach_every_pool():
    """Was: written under a misspelt name, and dropped. The schema check finds any other."""
    off = {"auto_repair": False}
    static = {"type": "v5e-8", "managed_by": "terraform", **off}
    built = environment(cpu_pools={"c": off}, gpu_pools={"g": off}, tpu_pools={"t": static})
    for name in ("c", "g", "t"):
        assert node_pool(built, name)["management"] == {**off, "auto_upgrade": True}
    # In a release channel, GKE refuses pools without upgrades.
    flexible = environment(**tpu("v6e-16", capacity="flex-start"))
    for default, name in ((environment(**tpu("v5e-8")), "pool"), (flexible, "pool-0")):
        assert node_pool(default, name)["management"]["auto_upgrade"] is True
    logs = environment(cluster={"logging": ["SYSTEM_COMPONENTS", "APISERVER"]})
    (cluster,) = resources(logs, "google_container_cluster")
    assert "APISERVER" in cluster.body["logging_config"]["enable_components"]


# Fields that only choose what is generated, checked elsewhere.
INDIRECT = {"zones", "zone", "slices", "type", "managed_by", "reservation", "min_nodes",
            "topology_aware", "fallback"}  # fmt: skip
CHANGED: dict[str, Any] = {
    "machine_type": "n1-standard-16", "max_nodes": 7, "disk_type": "pd-ssd", "disk_gb": 321,
    "spot": True, "image_type": "UBUNTU_CONTAINERD", "image_streaming": False, "gvnic": False,
    "auto_repair": False, "labels": {"a": "b"}, "taints": [{"key": "a"}],
    "accelerator": "nvidia-tesla-v100", "accelerator_count": 2, "local_ssds": 3, "capacity": "spot",
    "autoscaling": True,
}  # fmt: skip


@pytest.mark.parametrize(("group", "section", "base"), [
    ("cpu_pools", sections.CpuPool, {}),
    ("gpu_pools", sections.GpuPool,
     {"machine_type": "n1-standard-8", "accelerator": "nvidia-tesla-t4"}),
    ("tpu_pools", sections.TpuPool, {"type": "v5e-8", "managed_by": "terraform"}),
])  # fmt: skip
def test_c5_every_field_of_a_pool_changes_the_pool(group, section, base):
    """Was: declared and never used, or hard-coded over."""
    plain = node_pool(environment(**{group: {"x": base}}), "x")
    for item in fields(section):
        if item.name in INDIRECT:
            continue
        changed = environment(**{group: {"x": {**base, item.name: CHANGED[item.name]}}})
        assert node_pool(changed, "x") != plain, item.name


def test_c7_names_agree_between_the_stages():
    """Was: defaults of one stage named what another stage called differently."""
    built = example()
    created = {
        kind: {block.body[key] for block in resources(built, kind)}
        for kind, key in (("google_storage_bucket", "name"),
                          ("google_service_account", "account_id"))
    }  # fmt: skip
    for block in resources(built, "google_storage_bucket_iam_member"):
        bucket = block.body["bucket"]
        assert not isinstance(bucket, str) or bucket in created["google_storage_bucket"]
    for block in resources(built, "google_service_account_iam_member"):
        account = block.body["service_account_id"]
        if isinstance(account, str):
            assert account.rpartition("/")[2].partition("@")[0] in created["google_service_account"]
    members = [
        block.body["member"]
        for block in resources(built, "google_service_account_iam_member")
        if "workloadIdentity" in block.body["role"]
    ]
    for name, team in built.teams.items():
        subject = f"[{names.team_namespace(name, team)}/{team.service_account}]"
        assert f"serviceAccount:my-project.svc.id.goog{subject}" in members


def test_c9_nodes_have_no_project_wide_storage_role():
    assert not [role for role in sections.NODE_ROLES if "storage" in role]


def test_c10_pods_of_a_v5p_1024_fit():
    built = environment(tpu_pools={"big": {"type": "v5p-1024"}})
    assert capacity.max_nodes(built) >= 128
    prefix = int(capacity.pods_range(built).partition("/")[2])
    assert 2 ** (32 - prefix) >= capacity.pod_addresses(built)


def test_c11_everything_is_pinned():
    for name, text in stages.all_files(example()).items():
        assert "ref=main" not in text and ":latest" not in text, name
        for version in re.findall(r'\bversion\s*=\s*"([^"]+)"', text):
            assert re.fullmatch(r"[0-9]+\.[0-9]+\.[0-9]+", version), (name, version)
    addons = sections.AddOns()
    for item in fields(addons):
        assert re.fullmatch(r"v[0-9]+\.[0-9]+\.[0-9]+", getattr(addons, item.name))


def test_c12_no_file_is_patched_after_it_was_generated():
    """Was: `<FOLDER-NAME>` in the backend, replaced with sed."""
    for name, text in stages.all_files(example()).items():
        assert not re.search(r"<[A-Z-]+>|\bPROJECT\b|TODO", text), name


def test_c14_newer_types_and_capacities_are_offered():
    for kind in ("v6e-256", "tpu7x-128"):
        environment(**tpu(kind))
    pool = node_pool(environment(**tpu("v6e-16", capacity="flex-start")), "pool-0")
    assert pool["node_config"]["flex_start"] is True
    assert pool["queued_provisioning"] == {"enabled": True}
    reserved = environment(**tpu("v6e-16", capacity="reserved", reservation="lab"))
    affinity = node_pool(reserved, "pool-0")["node_config"]["reservation_affinity"]
    assert affinity["values"] == ["lab"]


def test_c15_state_is_never_in_git():
    assert "*.tfstate" in stages.GITIGNORE and "*.tfstate.*" in stages.GITIGNORE


@pytest.mark.parametrize("kind", ["v5e-4", "v5e-8", "v5e-256", "v4-64", "v6e-8", "tpu7x-64"])
def test_c16_autoscaling_counts_machines_not_chips(kind):
    shape = type_lookup.find(kind)
    built = environment(**tpu(kind, autoscaling=True))
    pool = node_pool(built, "pool" if shape.hosts == 1 else "pool-0")
    # Of a slice of several hosts GKE accepts only the limit per zone.
    assert pool["autoscaling"]["max_node_count"] == shape.hosts


def test_bootstrap_enables_what_the_environment_uses():
    services = bootstrap.services(example())
    assert {"container.googleapis.com", "aiplatform.googleapis.com"} <= set(services)
    assert "aiplatform.googleapis.com" not in bootstrap.services(environment())
