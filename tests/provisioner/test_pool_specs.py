"""The pool that a pod gets: whole requests, case by case."""

from __future__ import annotations

import re

import pytest

from tests.provisioner import builders
from tests.provisioner.builders import pool_spec, settings
from tpufleet.errors import BadInput
from tpufleet.provisioner.gke_api import pool_hashes, pool_specs
from tpufleet.provisioner.gke_api.pool_specs import PoolCapacity, PoolLocation
from tpufleet.provisioner.kube import label_keys
from tpufleet.provisioner.planning import pod_fit
from tpufleet.provisioner.settings import NodeNetwork

V5P = {label_keys.ACCELERATOR: "tpu-v5p-slice"}
V6E = {label_keys.ACCELERATOR: "tpu-v6e-slice"}


def request(given=None, **asked):
    found = pool_spec(given, **asked)
    return found.create_request(found.locations[0])


def labels(found):
    return {
        key: value
        for key, value in found["config"]["labels"].items()
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


def test_a_whole_request_is_as_of_old():
    found = request(select={**V5P, label_keys.TOPOLOGY: "8x16x16"})
    assert re.fullmatch(r"v2-[0-9a-f]{16}", found["config"]["labels"].pop(label_keys.HASH))
    assert found == {
        "name": f"train-{builders.job_key('default', 'train-slice-0')[:5]}",
        "initialNodeCount": 512,
        "locations": ["us-central1-a"],
        "config": {
            "machineType": "ct5p-hightpu-4t",
            "labels": {
                **OWN_LABELS, "google.com/tpu-provisioner-jobset-uid": "uid-default-train",
            },
            "shieldedInstanceConfig": {"enableIntegrityMonitoring": True, "enableSecureBoot": True},
        },
        "placementPolicy": {"type": "COMPACT", "tpuTopology": "8x16x16"},
        "management": {"autoRepair": True, "autoUpgrade": False},
        "upgradeSettings": {"maxSurge": 1},
        "maxPodsConstraint": {"maxPodsPerNode": 15},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("select", "chips", "nodes", "machine"),
    [
        pytest.param({label_keys.TOPOLOGY: "1x1"}, 1, 1, "ct5lp-hightpu-1t", id="1x1"),
        pytest.param({**V6E, label_keys.TOPOLOGY: "2x2"}, 4, 1, "ct6e-standard-4t", id="v6e 2x2"),
        pytest.param(
            {**V6E, label_keys.TOPOLOGY: "2x4"}, 8, 1, "ct6e-standard-8t", id="v6e 2x4 8t"
        ),
    ],
)
def test_single_hosts_get_no_placement_policy(select, chips, nodes, machine):
    found = request(select=select, chips=chips)
    assert (found["initialNodeCount"], found["config"]["machineType"]) == (nodes, machine)
    assert "placementPolicy" not in found


def test_v6e_4x4_is_four_machines_of_four_chips_and_never_one_of_sixteen():
    found = request(select={**V6E, label_keys.TOPOLOGY: "4x4"})
    assert (found["initialNodeCount"], found["config"]["machineType"]) == (4, "ct6e-standard-4t")
    with pytest.raises(BadInput, match="16 chips"):
        pool_spec(select={**V6E, label_keys.TOPOLOGY: "4x4"}, chips=16)


SPOT = {label_keys.SPOT: "true"}
RESERVED = {label_keys.RESERVATION: "mine"}
TAINT = {"key": "cloud.google.com/gke-spot", "value": "true", "effect": "NO_SCHEDULE"}


def affinity(value):
    return {
        "consumeReservationType": "SPECIFIC_RESERVATION",
        "key": "compute.googleapis.com/reservation-name",
        "values": [value],
    }


FLEX = {label_keys.FLEX_START: "true"}
CAPACITY = [
    pytest.param(SPOT, False, {"spot": True, "taints": [TAINT]}, id="spot"),
    pytest.param(SPOT, True, {}, id="spot, on-demand forced"),
    pytest.param(RESERVED, False, {"reservationAffinity": affinity("mine")}, id="reservation"),
    pytest.param(
        {**RESERVED, label_keys.RESERVATION_PROJECT: "other"}, False,
        {"reservationAffinity": affinity("projects/other/reservations/mine")},
        id="reservation of another project",
    ),
    pytest.param(RESERVED, True, {}, id="reservation, on-demand forced"),
]  # fmt: skip


@pytest.mark.parametrize(("select", "forced", "capacity"), CAPACITY)
def test_the_kind_of_capacity_follows_the_selectors(select, forced, capacity):
    config = request(settings(force_on_demand=forced), select=select)["config"]
    found = {key: config[key] for key in ("spot", "taints", "reservationAffinity") if key in config}
    assert found == capacity


NODE_LABELS = [
    pytest.param(
        {label_keys.ICI_RESILIENCY: "false"}, {label_keys.ICI_RESILIENCY: "false"}, id="ICI"
    ),
    pytest.param(
        {label_keys.LOCATION_HINT: "cell-1"}, {label_keys.LOCATION_HINT: "cell-1"}, id="hint"
    ),
    pytest.param({"abc": "xyz", "job-key": "k"}, {"abc": "xyz", "job-key": "k"}, id="own"),
    pytest.param({"cloud.google.com/machine-family": "ct5lp"}, {}, id="GKE's are not copied"),
    pytest.param({"kubernetes.io/os": "linux"}, {}, id="Kubernetes' are not copied"),
    pytest.param({"iam.gke.io/gke-metadata-server-enabled": "true"}, {}, id="metadata server"),
    pytest.param({label_keys.ZONE: "us-central1-a"}, {}, id="the zone is a place, not a label"),
]


@pytest.mark.parametrize(("select", "extra"), NODE_LABELS)
def test_selectors_become_node_labels_where_gke_allows_it(select, extra):
    assert labels(request(select=select)) == OWN_LABELS | extra


def test_labels_of_the_pod_are_copied_by_setting_and_by_annotation():
    by_setting = request(settings(pod_to_node_labels=("team", "absent")), labels={"team": "a"})
    by_annotation = request(
        labels={"team": "a", "cost": "b"}, annotations={label_keys.COPY_LABELS: "team, cost"}
    )
    assert labels(by_setting) == OWN_LABELS | {"team": "a"}
    assert labels(by_annotation) == OWN_LABELS | {"team": "a", "cost": "b"}


def test_disks_tags_and_accounts_come_from_the_settings():
    given = settings(
        secondary_disk="projects/p/global/images/img", disk_type="hyperdisk-balanced",
        confidential_storage=True, boot_disk_kms_key="key", tags=("a", "b"),
        service_account="nodes@p", secure_boot=False,
    )  # fmt: skip
    config = request(given)["config"]
    assert config["secondaryBootDisks"] == [
        {"diskImage": "projects/p/global/images/img", "mode": "CONTAINER_IMAGE_CACHE"}
    ]
    assert config["diskType"] == "hyperdisk-balanced"
    assert config["enableConfidentialStorage"] is True
    assert config["bootDiskKmsKey"] == "key"
    assert config["tags"] == ["a", "b"]
    assert config["serviceAccount"] == "nodes@p"
    assert config["shieldedInstanceConfig"]["enableSecureBoot"] is False


def networks(found):
    return found["networkConfig"]["additionalNodeNetworkConfigs"]


def test_extra_networks_come_from_the_settings_and_an_allowed_annotation_overrides_them():
    given = settings(
        networks=(NodeNetwork(network="v1", subnetwork="s1"),), allowed_networks=("v2",)
    )
    assert networks(request(given)) == [{"network": "v1", "subnetwork": "s1"}]
    asked = {label_keys.ADDITIONAL_NETWORKS: "v2:s2, v1:s1"}
    assert networks(request(given, annotations=asked)) == [
        {"network": "v2", "subnetwork": "s2"}, {"network": "v1", "subnetwork": "s1"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("annotation", "value", "setting"),
    [
        (label_keys.ADDITIONAL_NETWORKS, "secret:net", "ALLOWED_NODE_NETWORKS"),
        (label_keys.NODE_SERVICE_ACCOUNT, "admin@p", "ALLOWED_NODE_SERVICE_ACCOUNTS"),
    ],
)
def test_a_pod_may_not_choose_an_account_or_network_that_nobody_allowed(annotation, value, setting):
    with pytest.raises(BadInput, match=setting):
        pool_spec(annotations={annotation: value})


def test_an_allowed_service_account_overrides_the_setting():
    given = settings(service_account="nodes@p", allowed_service_accounts=("mine@p",))
    config = request(given, annotations={label_keys.NODE_SERVICE_ACCOUNT: "mine@p"})["config"]
    assert config["serviceAccount"] == "mine@p"


NAMES = [
    pytest.param("train", "0123456789", "train-01234", id="short"),
    pytest.param("a" * 50, "0123456789", "a" * 34 + "-01234", id="cut at 34"),
    pytest.param("a" * 33 + "-b", "0123456789", "a" * 33 + "-01234", id="no dash before the dash"),
    pytest.param("7b-run", "0123456789", "p7b-run-01234", id="begins with a digit"),
    pytest.param("run.v2", "0123456789", "run-v2-01234", id="a dot"),
]


@pytest.mark.parametrize(("jobset", "key", "name"), NAMES)
def test_a_pool_is_named_after_its_jobset_and_job_key(jobset, key, name):
    found = pool_specs.pool_name(jobset, key, pool_specs.PREFIX_LENGTH, pool_specs.KEY_LENGTH)
    assert found == name
    assert len(found) <= 40 and re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", found)


def test_a_key_that_is_too_short_is_refused():
    with pytest.raises(BadInput, match="too short"):
        pool_specs.pool_name("train", "abc", pool_specs.PREFIX_LENGTH, pool_specs.KEY_LENGTH)


HASHED = [
    pytest.param({"select": SPOT}, True, id="spot"),
    pytest.param(
        {"select": {label_keys.TOPOLOGY: "4x8"}}, True, id="topology with the same machine"
    ),
    pytest.param({"select": {"abc": "xyz"}}, True, id="label"),
    pytest.param({"select": RESERVED}, True, id="reservation"),
    pytest.param({"since": builders.NOW.replace(year=2027)}, False, id="a restarted pod"),
]


@pytest.mark.parametrize(("change", "differs"), HASHED)
def test_the_hash_changes_with_what_is_asked_for_and_with_nothing_else(change, differs):
    assert (pool_spec().hash != pool_spec(**change).hash) is differs


@pytest.mark.parametrize(
    "change",
    [{"zones": ("us-central1-b",)}, {"service_account": "a"}, {"max_pods_per_node": 30},
     {"networks": (NodeNetwork(network="v", subnetwork="s"),)}],
    ids=["zone", "account", "pods a node", "network"],
)  # fmt: skip
def test_the_hash_covers_the_settings_that_a_pool_is_made_with(change):
    assert pool_spec(settings(**change)).hash != pool_spec().hash


def test_a_pool_of_any_allowed_place_has_the_same_hash():
    found = pool_spec(settings(zones=("us-central1-a", "us-central1-b")))
    made = {
        found.create_request(place)["config"]["labels"][label_keys.HASH]
        for place in found.locations
    }
    assert made == {found.hash}


def test_pools_of_old_are_judged_by_the_hash_of_old_and_unmarked_ones_are_taken():
    found = pool_spec()
    old = found.legacy_hash(PoolCapacity.ON_DEMAND)
    assert re.fullmatch(r"[bcdfghjklmnpqrstvwxz2456789]{8,10}", old)
    assert pool_hashes.hash_matches(old, found.hash, old)
    assert not pool_hashes.hash_matches(
        pool_spec(select=SPOT).legacy_hash(PoolCapacity.SPOT), found.hash, old
    )
    assert pool_hashes.hash_matches(None, found.hash, old)
    assert not pool_hashes.hash_matches("v2-0000000000000000", found.hash, old)


def test_the_hash_of_old_is_fnv_32a_of_the_json_that_go_writes():

    config = {"labels": {"a": "b"}, "machineType": "ct5p-hightpu-4t", "spot": False}
    value = 0x811C9DC5
    for byte in b'{"config":{"labels":{"a":"b"},"machineType":"ct5p-hightpu-4t"}}':
        value = (value ^ byte) * 0x01000193 % 2**32
    safe = "bcdfghjklmnpqrstvwxz2456789"
    assert pool_hashes.legacy_hash({"config": config}) == "".join(
        safe[ord(digit) % 27] for digit in str(value)
    )


def test_flex_start_is_a_pool_that_begins_empty_and_grows_to_the_whole_slice():
    made = request(settings(), select=FLEX)
    assert made["config"]["flexStart"] is True and "spot" not in made["config"]
    assert made["initialNodeCount"] == 0
    assert made["autoscaling"]["totalMaxNodeCount"] == pool_spec(settings()).shape.nodes
    assert made["management"] == {"autoRepair": False, "autoUpgrade": False}
    ordinary = request(settings())
    assert "autoscaling" not in ordinary and ordinary["management"]["autoRepair"] is True


UNFIT = [
    pytest.param(
        {"select": {label_keys.FLEX_START: "true"}},
        {"force_on_demand": True},
        "install it",
        id="flex-start",
    ),
    pytest.param(
        {"select": {label_keys.FLEX_START: "true", label_keys.SPOT: "true"}},
        {},
        "it can have one",
        id="two kinds of capacity",
    ),
    pytest.param({"select": SPOT}, {"force_on_demand": True}, "install it", id="forced on-demand"),
    pytest.param({"select": RESERVED}, {"force_on_demand": True}, "install it", id="reserved"),
    pytest.param({"select": {"kubernetes.io/hostname": "n"}}, {}, "GKE sets", id="one host"),
    pytest.param({"select": {label_keys.INSTANCE_TYPE: "n2"}}, {}, "n2", id="another machine"),
    pytest.param({"select": {"kubernetes.io/arch": "arm64"}}, {}, "arm64", id="another processor"),
]


@pytest.mark.parametrize(("asked", "given", "words"), UNFIT)
def test_no_pool_is_made_whose_nodes_the_pod_does_not_select(asked, given, words):
    pod = builders.pod(**asked)
    with pytest.raises(BadInput, match=words):
        pod_fit.check_pod_fits(pod, pool_specs.pool_spec_for_pod(pod, "uid", settings(**given)))


def test_a_pod_that_insists_on_a_zone_gets_that_one_or_none():
    given = settings(zones=("us-central1-a", "us-central1-b"))
    assert pool_spec(given, select={label_keys.ZONE: "us-central1-b"}).locations == (
        PoolLocation("us-central1-b", PoolCapacity.ON_DEMAND),
    )
    with pytest.raises(BadInput, match="us-east1-c"):
        pool_spec(given, select={label_keys.ZONE: "us-east1-c"})


def test_without_any_zone_the_setting_that_is_missing_is_named():
    with pytest.raises(BadInput, match="set GCP_ZONE or GCP_ZONES"):
        pool_spec(settings(zones=()))


def test_where_it_is_allowed_a_pod_that_tolerates_spot_may_get_it_last():
    given = settings(zones=("a-1", "b-1"), spot_fallback=True)
    found = pool_spec(given, tolerations=[{"key": label_keys.SPOT, "operator": "Exists"}])
    assert [str(place) for place in found.locations] == [
        "a-1 (on-demand)", "b-1 (on-demand)", "a-1 (spot)", "b-1 (spot)",
    ]  # fmt: skip
