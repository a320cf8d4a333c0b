"""The environment variables of the provisioner."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tpufleet.errors import BadInput
from tpufleet_gke.provisioner import settings
from tpufleet_gke.provisioner.settings import Limit, NodeNetwork, ProvisionerSettings


def test_without_variables_the_defaults_are_upstreams():
    assert settings.from_environ({}) == ProvisionerSettings()
    assert ProvisionerSettings().node_min_lifespan == timedelta(seconds=10)
    assert (ProvisionerSettings().concurrency, ProvisionerSettings().pod_resource) == (
        3,
        "google.com/tpu",
    )


KEY = "projects/p/locations/l/keyRings/r/cryptoKeys/k"
VARIABLES = [
    ("PROVIDER", "mock", {"provider": "mock"}),
    ("GCP_PROJECT_ID", "p", {"project": "p"}),
    ("GCP_CLUSTER_LOCATION", "us", {"cluster_location": "us"}),
    ("GCP_ZONE", "us-a", {"zones": ("us-a",)}),
    ("GCP_ZONES", "us-a, us-b", {"zones": ("us-a", "us-b")}),
    ("GCP_CLUSTER", "c", {"cluster": "c"}),
    ("GCP_NODE_SERVICE_ACCOUNT", "a@p", {"service_account": "a@p"}),
    ("GCP_NODE_TAGS", "x,y", {"tags": ("x", "y")}),
    ("GCP_POD_TO_NODE_LABELS", "x, y", {"pod_to_node_labels": ("x", "y")}),
    ("GCP_NODE_SECONDARY_DISK", "img", {"secondary_disk": "img"}),
    ("GCP_NODE_SECURE_BOOT", "false", {"secure_boot": False}),
    (
        "GCP_NODE_ADDITIONAL_NETWORKS",
        "v:s, w:t",
        {
            "additional_networks": (
                NodeNetwork(network="v", subnetwork="s"),
                NodeNetwork(network="w", subnetwork="t"),
            )
        },
    ),
    ("GCP_NODE_DISK_TYPE", "hyperdisk-balanced", {"disk_type": "hyperdisk-balanced"}),
    ("GCP_NODE_CONFIDENTIAL_STORAGE", "true", {"confidential_storage": True}),
    ("GCP_NODE_BOOT_DISK_KMS_KEY", KEY, {"boot_disk_kms_key": KEY}),
    ("GCP_FORCE_ON_DEMAND", "true", {"force_on_demand": True}),
    ("NODE_MIN_LIFESPAN", "1m30s", {"node_min_lifespan": timedelta(seconds=90)}),
    ("NODEPOOL_DELETION_DELAY", "30s", {"deletion_delay": timedelta(seconds=30)}),
    ("POD_RESOURCE_TYPE", "x/y", {"pod_resource": "x/y"}),
    ("CONCURRENCY", "8", {"concurrency": 8}),
    ("BUDGET_CHIPS", "512, a=1, *=2", {"budget_chips": Limit(512, {"a": 1, "*": 2})}),
    ("BUDGET_POOLS", "*=3", {"budget_pools": Limit(namespaces={"*": 3})}),
    ("BUDGET_DOLLARS", "99.50", {"budget_dollars": Limit(99.5)}),
    ("CHIP_HOUR_DOLLARS", "v5e=0.9", {"chip_hour_dollars": {"v5e": 0.9}}),
    ("ALLOWED_NODE_NETWORKS", "a, b", {"allowed_networks": ("a", "b")}),
    ("NOT_SERVING_TIMEOUT", "20m", {"not_serving_timeout": timedelta(minutes=20)}),
]


@pytest.mark.parametrize(
    ("name", "value", "changed"), [pytest.param(*row, id=row[0]) for row in VARIABLES]
)
def test_each_variable_sets_its_field(name, value, changed):
    assert settings.from_environ({name: value}) == ProvisionerSettings(**changed)


INVALID = [
    ("NODE_MIN_LIFESPAN", "0s"),
    ("NODE_MIN_LIFESPAN", "soon"),
    ("PROVIDER", "aws"),
    ("CONCURRENCY", "many"),
    ("GCP_FORCE_ON_DEMAND", "maybe"),
    ("BUDGET_CHIPS", "a"),
    ("BUDGET_CHIPS", "=1"),
    ("BUDGET_DOLLARS", "-1"),
    ("BUDGET_DOLLARS", "nan"),
    ("BUDGET_DOLLARS", "a=many"),
    ("CHIP_HOUR_DOLLARS", "=1"),
    ("CHIP_HOUR_DOLLARS", "v5=1"),
    ("GCP_ZONE", "us-central1"),
    ("GCP_ZONES", "us-central1-a us-central1-b"),
    ("GCP_NODE_ADDITIONAL_NETWORKS", "only-a-network"),
    # What GKE would refuse in every node pool.
    ("GCP_NODE_TAGS", "Team_A"),
    ("GCP_NODE_BOOT_DISK_KMS_KEY", "my-key"),
    ("GCP_MAX_PODS_PER_NODE", "7"),
    ("GCP_MAX_PODS_PER_NODE", "257"),
]


@pytest.mark.parametrize(("name", "value"), INVALID)
def test_an_invalid_value_is_rejected_with_the_variable_name(name, value):
    with pytest.raises(BadInput, match=name):
        settings.from_environ({name: value})


def test_all_invalid_variables_are_reported_at_once():
    with pytest.raises(BadInput) as caught:
        settings.from_environ({"CONCURRENCY": "many", "BUDGET_CHIPS": "a", "PROVIDER": "aws"})
    assert len(str(caught.value).splitlines()) == 3


def test_a_zone_in_another_region_than_the_cluster_is_rejected():
    """GKE creates nodes of a cluster only in its region."""
    environ = {"GCP_CLUSTER_LOCATION": "us-central1", "GCP_ZONES": "us-central1-a,us-east5-a"}
    with pytest.raises(BadInput, match=r"^GCP_ZONES: us-east5-a .* us-central1"):
        settings.from_environ(environ)


@pytest.mark.parametrize("location", ["us-central1", "us-central1-c"], ids=["regional", "zonal"])
def test_zones_of_the_region_of_the_cluster_are_accepted(location):
    zones = ("us-central1-a", "us-central1-ai1a")
    environ = {"GCP_CLUSTER_LOCATION": location, "GCP_ZONES": ",".join(zones)}
    assert settings.from_environ(environ).zones == zones
