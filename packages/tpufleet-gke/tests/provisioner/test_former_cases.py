"""The cases of the former provisioner's own table tests (github.com/ai-on-gke/tpu-provisioner,
internal/cloud/gke_test.go), with its expectations; where ours is another, the row says why. Cases
of node counts and machine types are in test_pool_shapes.py."""

from __future__ import annotations

import pytest

pytest.importorskip("google.cloud.container_v1", reason="needs the extra `gke`")

from tests.provisioner import builders
from tests.provisioner.harness import ProvisionerHarness
from tpufleet.errors import BadInput
from tpufleet_gke.provisioner.model import label_keys, pool_specs
from tpufleet_gke.provisioner.settings import NodeNetwork, parse_networks

V5P = {label_keys.ACCELERATOR: "tpu-v5p-slice", label_keys.TOPOLOGY: "8x16x16"}
SPOT = {label_keys.SPOT: "true"}
RESERVED = {label_keys.RESERVATION: "tpu-rsv"}
DISK = "projects/my-gcp-project/global/images/my-disk-image"
NETWORKS = "network-1:subnet-1, network-2:subnet-2"
BOTH = (NodeNetwork("network-1", "subnet-1"), NodeNetwork("network-2", "subnet-2"))


def request(node_selector=None, chips=4, jobset="jobset-test", pod=None, **with_settings):
    """What is asked of GKE, without our own labels: of the owner's uid, and the hash."""
    selector = node_selector if label_keys.TOPOLOGY in (node_selector or {}) else None
    spec = builders.pool_spec(
        builders.settings(zones=("us-east5-a",), **with_settings),
        jobset=jobset, node_selector=selector or V5P | (node_selector or {}), chips=chips,
        **(pod or {}),
    )  # fmt: skip
    wanted = spec.create_request(spec.locations[0])
    assert wanted["config"]["labels"].pop(label_keys.HASH)
    assert wanted["config"]["labels"].pop(label_keys.OWNER_UID)
    return wanted


def expected(config=None, labels=None, **pool):
    """The whole node pool of the first case, with what another has instead."""
    standard = {
        "initialNodeCount": 512,
        "locations": ["us-east5-a"],
        "management": {"autoRepair": True, "autoUpgrade": False},
        # 16 there since its version 1.0; it is GCP_MAX_PODS_PER_NODE.
        "maxPodsConstraint": {"maxPodsPerNode": 15},
        "placementPolicy": {"type": "COMPACT", "tpuTopology": "8x16x16"},
        "upgradeSettings": {"maxSurge": 1},
        "config": {
            "machineType": "ct5p-hightpu-4t",
            "shieldedInstanceConfig": {
                "enableIntegrityMonitoring": True,
                "enableSecureBoot": True,
            },
            "labels": {
                "google.com/nodepool-manager": "tpu-provisioner",
                "google.com/tpu-provisioner-jobset-name": "jobset-test",
                "google.com/tpu-provisioner-jobset-namespace": "default",
                "google.com/tpu-provisioner-parent-kind": "job",
                "google.com/tpu-provisioner-parent-name": "jobset-test-slice-0",
                "google.com/tpu-provisioner-parent-namespace": "default",
                **(labels or {}),
            },
            **(config or {}),
        },
        **pool,
    }
    return {key: value for key, value in standard.items() if value is not None}


def affinity(value):
    return {
        "consumeReservationType": "SPECIFIC_RESERVATION",
        "key": "compute.googleapis.com/reservation-name",
        "values": [value],
    }


TAINT = {"key": label_keys.SPOT, "value": "true", "effect": "NO_SCHEDULE"}
TOLERATES = [{"key": label_keys.SPOT, "operator": "Exists"}]
CACHE = [{"diskImage": DISK, "mode": "CONTAINER_IMAGE_CACHE"}]
ANNOTATED = {label_keys.ADDITIONAL_NETWORKS: NETWORKS}
ON_NETWORKS = {
    "additionalNodeNetworkConfigs": [
        {"network": "network-1", "subnetwork": "subnet-1"},
        {"network": "network-2", "subnetwork": "subnet-2"},
    ]
}
POOLS = [
    pytest.param({}, expected(), id="simple"),
    pytest.param(
        {
            "node_selector": {
                label_keys.ACCELERATOR: "tpu-v5-lite-podslice",
                label_keys.TOPOLOGY: "1x1",
            },
            "chips": 1,
        },
        expected({"machineType": "ct5lp-hightpu-1t"}, initialNodeCount=1, placementPolicy=None),
        id="1x1",
    ),
    pytest.param(
        {"node_selector": {label_keys.ACCELERATOR: "tpu-v6e-slice", label_keys.TOPOLOGY: "2x2"}},
        expected({"machineType": "ct6e-standard-4t"}, initialNodeCount=1, placementPolicy=None),
        id="2x2 without placement policy",
    ),
    # There, with 16 chips on each of 4 machines of a type that does not exist.
    pytest.param(
        {"node_selector": {label_keys.ACCELERATOR: "tpu-v6e-slice", label_keys.TOPOLOGY: "4x4"}},
        expected(
            {"machineType": "ct6e-standard-4t"},
            initialNodeCount=4,
            placementPolicy={"type": "COMPACT", "tpuTopology": "4x4"},
        ),
        id="4x4 with placement policy",
    ),
    # There, without the toleration that its pods need to run on the pool.
    pytest.param(
        {"node_selector": SPOT, "pod": {"tolerations": TOLERATES}},
        expected({"spot": True, "taints": [TAINT]}),
        id="spot",
    ),
    pytest.param(
        {"node_selector": RESERVED},
        expected({"reservationAffinity": affinity("tpu-rsv")}),
        id="reservation",
    ),
    pytest.param(
        {"node_selector": RESERVED | {label_keys.RESERVATION_PROJECT: "tpu-rsv-project"}},
        expected(
            {"reservationAffinity": affinity("projects/tpu-rsv-project/reservations/tpu-rsv")}
        ),
        id="reservation of another project",
    ),
    pytest.param(
        {"node_selector": {label_keys.ICI_RESILIENCY: "false"}},
        expected(labels={label_keys.ICI_RESILIENCY: "false"}),
        id="ICI resiliency",
    ),
    pytest.param(
        {"secondary_disk": DISK},
        expected({"secondaryBootDisks": CACHE, "gcfsConfig": {"enabled": True}}),
        id="secondary boot disk",
    ),
    pytest.param(
        {"node_selector": {label_keys.LOCATION_HINT: "test-location-hint"}},
        expected(labels={label_keys.LOCATION_HINT: "test-location-hint"}),
        id="location hint",
    ),
    pytest.param(
        {
            "pod_to_node_labels": ("should-be-copied",),
            "pod": {"labels": {"should-be-copied": "val-a", "should-not-be-copied": "val-b"}},
        },
        expected(labels={"should-be-copied": "val-a"}),
        id="labels copied by setting",
    ),
    pytest.param(
        {
            "pod": {
                "labels": {"copy-me": "val-x", "dont-copy-me": "val-y"},
                "annotations": {label_keys.COPY_LABELS: "copy-me"},
            },
        },
        expected(labels={"copy-me": "val-x"}),
        id="labels copied by annotation",
    ),
    pytest.param(
        {"additional_networks": BOTH}, expected(networkConfig=ON_NETWORKS), id="networks by setting"
    ),
    pytest.param(
        {
            "additional_networks": (NodeNetwork("overridden-1", "overridden-2"),),
            "pod": {"annotations": ANNOTATED},
        },
        expected(networkConfig=ON_NETWORKS),
        id="networks by annotation",
    ),
    pytest.param(
        {
            "confidential_storage": True,
            "disk_type": "hyperdisk-balanced",
            "boot_disk_kms_key": "my-kms-key",
        },
        expected(
            {
                "enableConfidentialStorage": True,
                "bootDiskKmsKey": "my-kms-key",
                "diskType": "hyperdisk-balanced",
            }
        ),
        id="confidential disk",
    ),
    pytest.param(
        {"max_pods_per_node": 20},
        expected(maxPodsConstraint={"maxPodsPerNode": 20}),
        id="pods per node",
    ),
]


@pytest.mark.parametrize(("case", "pool"), POOLS)
def test_the_node_pool_of_a_pod(case, pool):
    wanted = request(**case)
    assert wanted.pop("name").startswith("jobset-test-")
    assert wanted == pool


@pytest.mark.parametrize("selector", [SPOT, RESERVED], ids=["spot", "reservation"])
def test_a_selector_that_forced_on_demand_overrides_is_refused(selector):
    """There, it made a pool whose nodes lack the label that the pod selects."""
    with pytest.raises(BadInput, match="GCP_FORCE_ON_DEMAND"):
        request(node_selector=selector, pod={"tolerations": TOLERATES}, force_on_demand=True)


def test_one_pool_for_each_job_of_a_jobset_and_a_new_one_when_its_capacity_changes():
    harness = ProvisionerHarness(simulate_nodes=True)
    try:
        harness.submit("train")
        harness.reconcile(3)
        (first,) = harness.gke.pools
        harness.submit("train")  # the same pod once more
        harness.reconcile(3)
        assert list(harness.gke.pools) == [first]
        harness.pod_list = []
        harness.submit("train", node_selector=SPOT, tolerations=TOLERATES)
        harness.advance(by=harness.settings.not_serving_timeout)
        (second,) = harness.gke.pools
        assert second == first and harness.gke.pools[second].config.spot
        harness.submit("train-2")
        harness.advance(by=harness.settings.not_serving_timeout)
        assert len(harness.gke.pools) == 2
    finally:
        harness.close()


JOB_KEY = "759730a97e4373f3a0ee12805db065e3a4a649a5"


@pytest.mark.parametrize(
    ("jobset", "name"),
    [("myjobset", "myjobset-75973"), ("myjobset-" + 34 * "a", f"myjobset-{25 * 'a'}-75973")],
    ids=["short", "more than 34 characters"],
)
def test_the_name_of_a_pool(jobset, name):
    lengths = pool_specs.PREFIX_LENGTH, pool_specs.KEY_LENGTH
    assert pool_specs.pool_name(jobset, JOB_KEY, *lengths) == name


HASHES = [
    pytest.param({}, {}, True, id="the same"),
    pytest.param(
        {"pod": {"labels": {"a": "b"}}}, {"pod": {"labels": {"a": "c"}}}, False, id="label"
    ),
    pytest.param(
        {"node_selector": {"a": "b", "c": "d"}}, {"node_selector": {"c": "d", "a": "b"}}, True,
        id="order of labels",
    ),
    pytest.param(
        {"node_selector": V5P},
        {"node_selector": V5P | {label_keys.TOPOLOGY: "2x2x1"}}, False, id="machines",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other", "same"), HASHES)
def test_the_hash_of_a_pool(one, other, same):
    def hash_of(case):
        selector = V5P | case.get("node_selector", {})
        with_settings = builders.settings(pod_to_node_labels=("a",))
        return builders.pool_spec(
            with_settings, node_selector=selector, **case.get("pod", {})
        ).hash  # fmt: skip

    assert (hash_of(one) == hash_of(other)) is same


ONE = NodeNetwork("vpc1", "subnet1")
TWO = NodeNetwork("vpc2", "subnet2")


@pytest.mark.parametrize(
    ("text", "networks"),
    [
        ("", ()),
        ("vpc1:subnet1", (ONE,)),
        ("vpc1:subnet1,vpc2:subnet2", (ONE, TWO)),
        ("  vpc1:subnet1,  vpc2:subnet2  ", (ONE, TWO)),
        (",", ()),
        ("vpc1:subnet1,", (ONE,)),
        (",vpc1:subnet1", (ONE,)),
    ],
)
def test_additional_networks(text, networks):
    assert parse_networks(text, "networks") == networks


@pytest.mark.parametrize("text", ["vpc1subnet1", "vpc1:", ":subnet1"])
def test_an_additional_network_is_a_network_and_its_subnetwork(text):
    """There, half a network was sent to GKE, which refuses it."""
    with pytest.raises(BadInput, match="NETWORK:SUBNETWORK"):
        parse_networks(text, "networks")
