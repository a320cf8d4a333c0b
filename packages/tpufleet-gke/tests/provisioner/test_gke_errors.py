"""What the provisioner does when GKE refuses, is slow or fails in the middle."""

from __future__ import annotations

from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.container_v1", reason="needs the extra `gke`")

from tests.provisioner import builders
from tests.provisioner.harness import ProvisionerHarness
from tpufleet_gke.provisioner.gke import failures
from tpufleet_gke.provisioner.model import label_keys
from tpufleet_gke.provisioner.model.cluster_state import FailureCause
from tpufleet_testbed.gke import api_errors

MINUTE, SECOND = timedelta(minutes=1), timedelta(seconds=1)
LABEL = "tpu-v5-lite-podslice"


@pytest.fixture
def harness():
    harness = ProvisionerHarness(
        simulate_nodes=True, zones=("us-central1-a", "us-east5-b"), concurrency=8
    )
    yield harness
    harness.close()


def phases(harness):
    return [pod["status"]["phase"] for pod in harness.pod_list]


def test_a_region_without_quota_is_left_for_the_next(harness):
    """GKE answers PERMISSION_DENIED, which must not be read as a missing role."""
    harness.gke.quotas["us-central1", LABEL] = 8
    harness.submit()
    harness.advance(MINUTE)
    assert phases(harness) == ["Running"]
    assert [pool.locations[0] for pool in harness.gke.pools.values()] == ["us-east5-b"]
    assert "grant the provisioner" not in str(harness.events.recorded)


def test_a_quota_that_instances_exceed_later_is_left_for_the_next_region(harness):
    text = api_errors.text(
        "late-quota", cluster="c", pool="pool", metric="TPU_LITE_PODSLICE_V5", nodes=4, limit=8
    )
    harness.gke.fail_next_creation(8, text)
    harness.submit()
    harness.advance(2 * MINUTE)
    assert phases(harness) == ["Running"]
    assert [pool.locations[0] for pool in harness.gke.pools.values()] == ["us-east5-b"]


@pytest.mark.parametrize("channel", ["REGULAR", ""])
def test_pools_are_upgraded_by_gke_only_where_it_insists(harness, channel):
    harness.gke.release_channel = channel
    for name in ("first", "second"):
        harness.submit(name)
        harness.advance(MINUTE)
        assert phases(harness) == ["Running"]
        [pool] = harness.gke.pools.values()
        assert pool.management.auto_upgrade is bool(channel)
        harness.end(name)
        harness.advance(MINUTE)
    assert harness.gke.calls.count("create") == (3 if channel else 2)  # it learns once


QUOTA_TEXTS = {
    "of a call": api_errors.quota("p", "TPU_LITE_PODSLICE_V5", 16, 24, 8),
    "of a call, in a list": '(1) insufficient regional quota to satisfy request: resource "CPUS"',
    "of a call, before 2019": 'Insufficient regional quota to satisfy request for resource: "C"',
    "of the whole project": 'Insufficient project quota to satisfy request: resource "CPUS"',
    "of an operation": api_errors.text(
        "late-quota", cluster="c", pool="pool", metric="CPUS_ALL_REGIONS", nodes=4, limit=8
    ),
    "of an operation, cut short": "Insufficient quota to satisfy the request: Not all instances",
}


@pytest.mark.parametrize("text", QUOTA_TEXTS.values(), ids=QUOTA_TEXTS)
def test_a_quota_is_recognised_in_googles_wording(text):
    assert failures.classify_operation(8, text) is FailureCause.QUOTA


# Of https://cloud.google.com/kubernetes-engine/docs/troubleshooting/node-pools, and those that
# Google's cluster autoscaler looks for in answers of GKE and Compute Engine.
STOCK, QUOTA = FailureCause.OUT_OF_STOCK, FailureCause.QUOTA
GOOGLES_TEXTS = [
    ("resource pool exhausted", STOCK),
    ("The zone does not have enough resources available to fulfill the request. Try a different "
     "zone, or try again later.", STOCK),
    ("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", STOCK),
    ("Machine type with name 'ct6e-standard-4t' does not exist in zone 'us-west4-c'.", STOCK),
    ("Zone does not currently have sufficient capacity for the requested resources.", STOCK),
    ("Reservation r does not have sufficient capacity for the requested resources.", STOCK),
    ("Could not find the given reservation with the following name: r", STOCK),
    ("Reservation r is incorrect for the requested resources.", STOCK),
    ("Incompatible AggregateReservation VMFamily", STOCK),
    ("It requires reservation to be in READY state", STOCK),
    ('The network "default" does not have available private IP space in 10.0.0.0/14', QUOTA),
    ("Cannot find pod range with enough available IPs for nodepool", QUOTA),
    ("Cluster byte size limit reached", QUOTA),
    ("Service account a@p.iam.gserviceaccount.com does not exist.", FailureCause.PERMISSION),
    ("Google Compute Engine: Required 'compute.instances.create' permission for 'projects/p'",
     FailureCause.PERMISSION),
    ("The Kubernetes Engine service account is missing required permissions",
     FailureCause.PERMISSION),
    ('Invalid machine type "ct4p-hightpu-4t" in zone "us-central1-b": GCE_NOT_FOUND', STOCK),
    ("Constraint constraints/gcp.resourceLocations violated for projects/p", STOCK),
    ("Current errors: [CONDITION_NOT_MET]: Instance 'a' creation failed: Constraint "
     "constraints/compute.requireShieldedVm violated for project projects/p.",
     FailureCause.PERMISSION),
    ("Current errors: [PERMISSIONS_ERROR]: Instance 'a' creation failed",
     FailureCause.PERMISSION),
    ('The user does not have access to service account "a@p.iam.gserviceaccount.com".',
     FailureCause.PERMISSION),
]  # fmt: skip


@pytest.mark.parametrize(("text", "cause"), GOOGLES_TEXTS)
def test_a_failure_is_recognised_in_googles_wording(text, cause):
    assert failures.classify_operation(9, text) is cause


def test_a_zone_without_the_machine_type_is_left_for_the_next(harness):
    harness.gke.not_offered.add(("us-central1-a", "ct5lp-hightpu-4t"))
    harness.submit()
    harness.advance(MINUTE)
    assert phases(harness) == ["Running"]
    assert [pool.locations[0] for pool in harness.gke.pools.values()] == ["us-east5-b"]
    assert "us-central1-a has no ct5lp-hightpu-4t" in str(harness.events.recorded)


def test_people_read_a_summary_and_programs_the_whole_message(harness, caplog):
    harness.gke.quotas["us-central1", LABEL] = 8
    harness.gke.quotas["us-east5", LABEL] = 0
    harness.submit()
    harness.advance(MINUTE)
    first, *others = harness.events.messages("NodePoolCreationFailed")
    of_both = next(each for each in others if "us-central1-a" in each and "us-east5-b" in each)
    assert "TPU_LITE_PODSLICE_V5: 16 needed, 8 of 8 left" in first
    assert "Insufficient regional quota" not in first + of_both
    assert len(of_both) < 400
    whole = harness.events.details["NodePoolCreationFailed"]
    assert "Insufficient regional quota" in whole[0]
    assert max(each.count("Insufficient regional quota") for each in whole) == 2  # of both zones
    assert "whole message: Insufficient regional quota" in caplog.text


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("Google Compute Engine: GKE has a bad day.", True),
        ("pd-ssd disk type cannot be used by tpu7x-standard-4t machine type.", False),
        ("The resource 'regions/us-central1/resourcePolicies/other' was not found", False),
    ],
    ids=["unknown", "known", "no policy"],
)
@pytest.mark.parametrize("late", [False, True], ids=["call", "operation"])
def test_a_missing_policy_is_suspected_only_without_a_known_reason(harness, text, asked, late):
    if late:
        harness.gke.fail_next_creation(3, text)
    else:
        harness.gke.fail_next_call("create", "INVALID_ARGUMENT", text)
    harness.submit(node_selector={label_keys.ACCELERATOR: "tpu7x", label_keys.TOPOLOGY: "2x2x2"})
    harness.advance(MINUTE)
    failed, *_ = harness.events.messages("NodePoolCreationFailed")
    assert ("tpu-provisioner-2x2x2 missing?" in failed) is asked


def test_a_policy_of_the_organisation_is_not_taken_for_a_busy_cluster(harness):
    text = "Constraint constraints/gcp.restrictNonCmekServices violated for projects/p."
    harness.gke.fail_next_call("create", "FAILED_PRECONDITION", text, times=100)
    harness.submit()
    harness.advance(5 * MINUTE)
    assert harness.gke.calls.count("create") == 1
    (failed,) = {each.partition("GKE: ")[2] for each in
                 harness.events.messages("NodePoolCreationFailed")}  # fmt: skip
    assert failed.startswith("policy gcp.restrictNonCmekServices of the organisation forbids it")


def test_a_pool_of_a_deleted_jobset_is_deleted_soon_after_its_creation(harness):
    """GKE refuses to delete a pool that it is creating, for up to 35 minutes."""
    harness.gke.slow_next_creation(20 * MINUTE)
    harness.submit()
    harness.advance(10 * SECOND)
    assert len(harness.gke.pools) == 1
    harness.jobsets, harness.pod_list = [], []
    harness.advance(20 * MINUTE)
    harness.advance(MINUTE)
    assert harness.states() == {}
    assert harness.gke.calls.count("delete") < 20  # no hot loop meanwhile


@pytest.mark.slow
def test_the_limit_of_concurrent_operations_delays_pools_and_fails_none(harness):
    harness.gke.max_operations = 5
    harness.submit(slices=40)  # on at least 10 pools of 4 nodes
    harness.advance(5 * MINUTE)
    assert phases(harness) == ["Running"] * 40
    assert 10 <= len(harness.gke.created) <= 40


def test_a_pool_is_left_alone_while_it_is_upgraded(harness):
    harness.submit()
    harness.advance(MINUTE)
    (name,) = harness.gke.pools
    harness.gke.start_upgrade(name)
    harness.advance(harness.gke.upgrade_time + MINUTE)
    assert phases(harness) == ["Running"] and harness.gke.created == [name]
    assert harness.gke.deleted_at == {}


def test_a_failed_deletion_is_repeated(harness):
    harness.submit()
    harness.advance(MINUTE)
    harness.gke.fail_next_deletion(13, "internal error")
    harness.complete()
    harness.advance(3 * MINUTE)
    assert harness.states() == {}


def test_a_pool_that_lost_a_node_is_replaced_once(harness):
    harness.gke.lose_nodes_of_next_creation(1)
    harness.submit()
    harness.reconcile(60, every=20 * SECOND)
    assert phases(harness) == ["Running"]
    assert len(harness.gke.created) <= 2


def tenants(harness, *namespaces, **pod_options):
    """A JobSet of one slice in each namespace."""
    for namespace in namespaces:
        harness.jobsets.append(builders.jobset(f"{namespace}-job", namespace=namespace))
        harness.pod_list.append(
            builders.pod(f"{namespace}-job", namespace=namespace, **pod_options)
        )


def test_an_invalid_request_of_one_tenant_blocks_no_other(harness):
    harness.gke.fail_next_creation(3, "The resource 'subnetworks/typo' was not found")
    tenants(harness, "bad", "good")
    harness.advance(5 * MINUTE)
    assert phases(harness) == ["Running", "Running"]  # the bad one in its second zone


def test_a_mistyped_reservation_blocks_only_those_who_name_it(harness):
    harness.gke.reservations = {"right": 8}
    for namespace, name in (("bad", "wrong"), ("good", "right")):
        tenants(harness, namespace, node_selector={label_keys.RESERVATION: name})
        harness.advance(MINUTE)
    assert phases(harness) == ["Pending", "Running"]
