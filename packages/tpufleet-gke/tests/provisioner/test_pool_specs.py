"""The create request for the pool that a pod needs."""

from __future__ import annotations

import re

import pytest

from tests.provisioner import builders
from tests.provisioner.builders import pool_spec, settings
from tpufleet.errors import BadInput
from tpufleet_gke.provisioner.model import label_keys, pool_specs
from tpufleet_gke.provisioner.model.pool_specs import PoolCapacity, PoolLocation
from tpufleet_gke.provisioner.planning import pod_fit
from tpufleet_gke.provisioner.settings import NodeNetwork

V5P = {label_keys.ACCELERATOR: "tpu-v5p-slice"}
V6E = {label_keys.ACCELERATOR: "tpu-v6e-slice"}


def request(with_settings=None, **pod_options):
    spec = pool_spec(with_settings, **pod_options)
    return spec.create_request(spec.locations[0])


def labels(spec):
    return {
        key: value
        for key, value in spec["config"]["labels"].items()
        if key not in (label_keys.HASH, label_keys.OWNER_UID)
    }


OWN_LABELS = {
    "google.com/nodepool-manager": "tpu-provisioner",
    "google.com/tpu-provisioner-parent-kind": "job",
    "google.com/tpu-provisioner-parent-name": "train-slice-0",
    "google.com/tpu-provisioner-parent-namespace": "default",
    "google.com/tpu-provisioner-jobset-name": "train",
    "google.com/tpu-provisioner-jobset-namespace": "default",
}


def test_the_whole_request_is_upstreams():
    spec = request(node_selector={**V5P, label_keys.TOPOLOGY: "8x16x16"})
    assert re.fullmatch(r"v2-[0-9a-f]{16}", spec["config"]["labels"].pop(label_keys.HASH))
    assert spec == {
        "name": f"train-{builders.job_key('default', 'train-slice-0')[:5]}",
        "initialNodeCount": 512,
        "locations": ["us-central1-a"],
        "config": {
            "machineType": "ct5p-hightpu-4t",
            "labels": {
                **OWN_LABELS,
                "google.com/tpu-provisioner-jobset-uid": "uid-default-train",
            },
            "shieldedInstanceConfig": {"enableIntegrityMonitoring": True, "enableSecureBoot": True},
        },
        "placementPolicy": {"type": "COMPACT", "tpuTopology": "8x16x16"},
        "management": {"autoRepair": True, "autoUpgrade": False},
        "upgradeSettings": {"maxSurge": 1},
        "maxPodsConstraint": {"maxPodsPerNode": 15},
    }


@pytest.mark.parametrize(
    ("node_selector", "chips", "nodes", "machine"),
    [
        pytest.param({label_keys.TOPOLOGY: "1x1"}, 1, 1, "ct5lp-hightpu-1t", id="1x1"),
        pytest.param({**V6E, label_keys.TOPOLOGY: "2x2"}, 4, 1, "ct6e-standard-4t", id="v6e 2x2"),
        pytest.param(
            {**V6E, label_keys.TOPOLOGY: "2x4"}, 8, 1, "ct6e-standard-8t", id="v6e 2x4 8t"
        ),
    ],
)
def test_single_host_slices_have_no_placement_policy(node_selector, chips, nodes, machine):
    spec = request(node_selector=node_selector, chips=chips)
    assert (spec["initialNodeCount"], spec["config"]["machineType"]) == (nodes, machine)
    assert "placementPolicy" not in spec


def test_v6e_4x4_is_four_machines_of_four_chips():
    spec = request(node_selector={**V6E, label_keys.TOPOLOGY: "4x4"})
    assert (spec["initialNodeCount"], spec["config"]["machineType"]) == (4, "ct6e-standard-4t")
    with pytest.raises(BadInput, match="16 chips"):
        pool_spec(node_selector={**V6E, label_keys.TOPOLOGY: "4x4"}, chips=16)


def test_a_host_of_tpu7x_may_have_a_container_for_each_numa_node():
    """https://cloud.google.com/kubernetes-engine/docs/concepts/tpu-ironwood"""
    half = {"resources": {"requests": {label_keys.TPU: "2"}}}
    selector = {label_keys.ACCELERATOR: "tpu7x", label_keys.TOPOLOGY: "2x2x2"}
    spec = request(node_selector=selector, containers=[half, half])
    assert (spec["initialNodeCount"], spec["config"]["machineType"]) == (2, "tpu7x-standard-4t")


SPOT = {label_keys.SPOT: "true"}
RESERVED = {label_keys.RESERVATION: "mine"}
TOLERATES_SPOT = [{"key": label_keys.SPOT, "operator": "Exists"}]
TAINT = {"key": "cloud.google.com/gke-spot", "value": "true", "effect": "NO_SCHEDULE"}


def affinity(value):
    return {
        "consumeReservationType": "SPECIFIC_RESERVATION",
        "key": "compute.googleapis.com/reservation-name",
        "values": [value],
    }


FLEX = {label_keys.FLEX_START: "true"}
CAPACITY = [
    pytest.param({}, True, {}, id="on-demand forced"),
    pytest.param(SPOT, False, {"spot": True, "taints": [TAINT]}, id="spot"),
    pytest.param(RESERVED, False, {"reservationAffinity": affinity("mine")}, id="reservation"),
    pytest.param(
        {**RESERVED, label_keys.RESERVATION_PROJECT: "other"},
        False,
        {"reservationAffinity": affinity("projects/other/reservations/mine")},
        id="reservation of another project",
    ),
    pytest.param(
        {**RESERVED, label_keys.RESERVATION_BLOCK: "b1"},
        False,
        {"reservationAffinity": affinity("mine/reservationBlocks/b1")},
        id="block of a reservation",
    ),
    pytest.param(
        {
            **RESERVED,
            label_keys.RESERVATION_PROJECT: "other",
            label_keys.RESERVATION_BLOCK: "b1",
            label_keys.RESERVATION_SUB_BLOCK: "s2",
        },
        False,
        {
            "reservationAffinity": affinity(
                "projects/other/reservations/mine/reservationBlocks/b1/reservationSubBlocks/s2"
            )
        },
        id="sub-block of a reservation of another project",
    ),
]


@pytest.mark.parametrize(("node_selector", "forced", "capacity"), CAPACITY)
def test_the_capacity_kind_follows_the_selectors(node_selector, forced, capacity):
    config = request(
        settings(force_on_demand=forced), node_selector=node_selector, tolerations=TOLERATES_SPOT
    )["config"]
    spec = {key: config[key] for key in ("spot", "taints", "reservationAffinity") if key in config}
    assert spec == capacity


NODE_LABELS = [
    pytest.param(
        {label_keys.ICI_RESILIENCY: "false"}, {label_keys.ICI_RESILIENCY: "false"}, id="ICI"
    ),
    pytest.param(
        {label_keys.LOCATION_HINT: "cell-1"}, {label_keys.LOCATION_HINT: "cell-1"}, id="hint"
    ),
    pytest.param({"abc": "xyz", "job-key": "k"}, {"abc": "xyz", "job-key": "k"}, id="own"),
    pytest.param({"cloud.google.com/machine-family": "ct5lp"}, {}, id="GKE labels are not copied"),
    pytest.param({"kubernetes.io/os": "linux"}, {}, id="Kubernetes labels are not copied"),
    pytest.param({"iam.gke.io/gke-metadata-server-enabled": "true"}, {}, id="metadata server"),
    pytest.param({label_keys.ZONE: "us-central1-a"}, {}, id="the zone is not copied"),
]


@pytest.mark.parametrize(("node_selector", "extra"), NODE_LABELS)
def test_selectors_become_node_labels_where_gke_allows_them(node_selector, extra):
    assert labels(request(node_selector=node_selector)) == OWN_LABELS | extra


def test_pod_labels_are_copied_by_setting_and_by_annotation():
    by_setting = request(settings(pod_to_node_labels=("team", "absent")), labels={"team": "a"})
    by_annotation = request(
        labels={"team": "a", "cost": "b"}, annotations={label_keys.COPY_LABELS: "team, cost"}
    )
    assert labels(by_setting) == OWN_LABELS | {"team": "a"}
    assert labels(by_annotation) == OWN_LABELS | {"team": "a", "cost": "b"}


@pytest.mark.parametrize(
    "key",
    [label_keys.OWNER_NAME, label_keys.OWNER_NAMESPACE, "kubernetes.io/os"],
)
def test_labels_of_gke_and_of_the_provisioner_are_not_copied(key):
    """A Job's pool would otherwise belong to the JobSet that its pod names."""
    copied = request(labels={key: "other"}, annotations={label_keys.COPY_LABELS: key})
    assert labels(copied) == OWN_LABELS


def test_disks_tags_and_accounts_come_from_the_settings():
    with_settings = settings(
        secondary_disk="projects/p/global/images/img",
        disk_type="hyperdisk-balanced",
        confidential_storage=True,
        boot_disk_kms_key="key",
        tags=("a", "b"),
        service_account="nodes@p",
        secure_boot=False,
    )
    config = request(with_settings)["config"]
    assert config["secondaryBootDisks"] == [
        {"diskImage": "projects/p/global/images/img", "mode": "CONTAINER_IMAGE_CACHE"}
    ]
    assert config["diskType"] == "hyperdisk-balanced"
    assert config["enableConfidentialStorage"] is True
    assert config["bootDiskKmsKey"] == "key"
    assert config["tags"] == ["a", "b"]
    assert config["serviceAccount"] == "nodes@p"
    assert config["shieldedInstanceConfig"]["enableSecureBoot"] is False


def networks(spec):
    return spec["networkConfig"]["additionalNodeNetworkConfigs"]


def test_an_allowed_annotation_overrides_the_additional_networks():
    with_settings = settings(
        additional_networks=(NodeNetwork(network="v1", subnetwork="s1"),), allowed_networks=("v2",)
    )
    assert networks(request(with_settings)) == [{"network": "v1", "subnetwork": "s1"}]
    pod_options = {label_keys.ADDITIONAL_NETWORKS: "v2:s2, v1:s1"}
    assert networks(request(with_settings, annotations=pod_options)) == [
        {"network": "v2", "subnetwork": "s2"},
        {"network": "v1", "subnetwork": "s1"},
    ]


@pytest.mark.parametrize(
    ("annotation", "value", "setting"),
    [
        (label_keys.ADDITIONAL_NETWORKS, "secret:net", "ALLOWED_NODE_NETWORKS"),
        (label_keys.NODE_SERVICE_ACCOUNT, "admin@p", "ALLOWED_NODE_SERVICE_ACCOUNTS"),
    ],
)
def test_an_account_or_network_that_is_not_allowed_is_rejected(annotation, value, setting):
    with pytest.raises(BadInput, match=setting):
        pool_spec(settings(allowed_networks=("shared",)), annotations={annotation: value})


def test_annotated_networks_are_allowed_by_default_as_upstream():
    annotations = {label_keys.ADDITIONAL_NETWORKS: "v2:s2"}
    with_settings = settings(additional_networks=(NodeNetwork(network="v1", subnetwork="s1"),))
    assert networks(request(with_settings, annotations=annotations)) == [
        {"network": "v2", "subnetwork": "s2"}
    ]


def test_an_allowed_service_account_overrides_the_setting():
    with_settings = settings(service_account="nodes@p", allowed_service_accounts=("mine@p",))
    config = request(with_settings, annotations={label_keys.NODE_SERVICE_ACCOUNT: "mine@p"})[
        "config"
    ]
    assert config["serviceAccount"] == "mine@p"


NAMES = [
    pytest.param("train", "0123456789", "train-01234", id="short"),
    pytest.param("a" * 50, "0123456789", "a" * 34 + "-01234", id="cut at 34"),
    pytest.param("a" * 33 + "-b", "0123456789", "a" * 33 + "-01234", id="no double dash"),
    pytest.param("7b-run", "0123456789", "p7b-run-01234", id="starts with a digit"),
    pytest.param("run.v2", "0123456789", "run-v2-01234", id="a dot"),
]


@pytest.mark.parametrize(("jobset", "key", "name"), NAMES)
def test_a_pool_is_named_after_its_jobset_and_job_key(jobset, key, name):
    spec = pool_specs.pool_name(jobset, key, pool_specs.PREFIX_LENGTH, pool_specs.KEY_LENGTH)
    assert spec == name
    assert len(spec) <= 40 and re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", spec)


def test_a_job_key_that_is_too_short_is_rejected():
    with pytest.raises(BadInput, match="too short"):
        pool_specs.pool_name("train", "abc", pool_specs.PREFIX_LENGTH, pool_specs.KEY_LENGTH)


HASHED = [
    pytest.param({"node_selector": SPOT, "tolerations": TOLERATES_SPOT}, True, id="spot"),
    pytest.param(
        {"node_selector": {label_keys.TOPOLOGY: "4x8"}}, True, id="topology with the same machine"
    ),
    pytest.param({"node_selector": {"abc": "xyz"}}, True, id="label"),
    pytest.param({"node_selector": RESERVED}, True, id="reservation"),
    pytest.param({"since": builders.NOW.replace(year=2027)}, False, id="a restarted pod"),
]


@pytest.mark.parametrize(("change", "differs"), HASHED)
def test_the_hash_changes_only_with_the_requirements(change, differs):
    assert (pool_spec().hash != pool_spec(**change).hash) is differs


@pytest.mark.parametrize(
    "change",
    [
        {"zones": ("us-central1-b",)},
        {"service_account": "a"},
        {"max_pods_per_node": 30},
        {"additional_networks": (NodeNetwork(network="v", subnetwork="s"),)},
    ],
    ids=["zone", "account", "pods per node", "network"],
)
def test_the_hash_covers_the_settings(change):
    assert pool_spec(settings(**change)).hash != pool_spec().hash


def test_the_hash_is_the_same_in_every_location():
    spec = pool_spec(settings(zones=("us-central1-a", "us-central1-b")))
    result = {
        spec.create_request(location)["config"]["labels"][label_keys.HASH]
        for location in spec.locations
    }
    assert result == {spec.hash}


def test_a_flex_start_pool_starts_empty_and_scales_to_the_whole_slice():
    result = request(settings(), node_selector=FLEX)
    assert result["config"]["flexStart"] is True and "spot" not in result["config"]
    assert result["initialNodeCount"] == 0
    assert result["autoscaling"]["maxNodeCount"] == pool_spec(settings()).shape.nodes
    assert result["management"] == {"autoRepair": False, "autoUpgrade": False}
    ordinary = request(settings())
    assert "autoscaling" not in ordinary and ordinary["management"]["autoRepair"] is True


UNFIT = [
    pytest.param(
        {"node_selector": {label_keys.FLEX_START: "true"}},
        {"force_on_demand": True},
        "install the admission webhook",
        id="flex-start",
    ),
    pytest.param(
        {"node_selector": {label_keys.FLEX_START: "true", label_keys.SPOT: "true"}},
        {},
        "select only one",
        id="two kinds of capacity",
    ),
    pytest.param(
        {"node_selector": SPOT},
        {"force_on_demand": True},
        "install the admission webhook",
        id="forced on-demand",
    ),
    pytest.param(
        {"node_selector": RESERVED},
        {"force_on_demand": True},
        "install the admission webhook",
        id="reserved",
    ),
    pytest.param(
        {"node_selector": {"kubernetes.io/hostname": "n"}},
        {},
        "kubernetes.io/hostname=n",
        id="hostname",
    ),
    pytest.param(
        {"node_selector": {label_keys.INSTANCE_TYPE: "n2"}}, {}, "n2", id="another machine"
    ),
    pytest.param(
        {"node_selector": {"kubernetes.io/arch": "arm64"}}, {}, "arm64", id="another processor"
    ),
]


@pytest.mark.parametrize(("pod_options", "overrides", "message"), UNFIT)
def test_a_pod_that_would_not_fit_its_pool_is_rejected(pod_options, overrides, message):
    pod = builders.pod(**pod_options)
    with pytest.raises(BadInput, match=message):
        pod_fit.check_pod_fits(pod, pool_spec(settings(**overrides), **pod_options))


@pytest.mark.parametrize(
    ("selector", "missing"),
    [
        pytest.param({label_keys.RESERVATION_BLOCK: "b"}, label_keys.RESERVATION, id="block"),
        pytest.param(
            {**RESERVED, label_keys.RESERVATION_SUB_BLOCK: "s"},
            label_keys.RESERVATION_BLOCK,
            id="sub-block",
        ),
    ],
)
def test_a_block_is_selected_with_its_reservation(selector, missing):
    with pytest.raises(BadInput, match=f"without {missing}; add that node selector"):
        pool_spec(node_selector=selector)


def test_a_required_zone_is_used_or_rejected():
    with_settings = settings(zones=("us-central1-a", "us-central1-b"))
    assert pool_spec(with_settings, node_selector={label_keys.ZONE: "us-central1-b"}).locations == (
        PoolLocation("us-central1-b", PoolCapacity.ON_DEMAND),
    )
    with pytest.raises(BadInput, match="us-east1-c"):
        pool_spec(with_settings, node_selector={label_keys.ZONE: "us-east1-c"})


def test_without_a_zone_the_error_names_the_setting():
    with pytest.raises(BadInput, match="set GCP_ZONE or GCP_ZONES"):
        pool_spec(settings(zones=()))


def test_spot_fallback_comes_last_for_pods_that_tolerate_spot():
    with_settings = settings(zones=("a-1", "b-1"), spot_fallback=True)
    spec = pool_spec(with_settings, tolerations=TOLERATES_SPOT)
    assert [str(location) for location in spec.locations] == [
        "a-1 (on-demand)",
        "b-1 (on-demand)",
        "a-1 (spot)",
        "b-1 (spot)",
    ]
