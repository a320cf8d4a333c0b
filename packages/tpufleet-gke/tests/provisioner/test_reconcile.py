"""The reconcile loop against the GKE emulator: pools are created, fail, recover and are deleted."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import msgspec
import pytest

from tests.polling import Patience

pytest.importorskip("google.cloud.container_v1", reason="needs the extra `gke`")

from tests.provisioner import builders
from tpufleet.errors import ProviderUnavailable
from tpufleet_gke.provisioner.gke.node_pools import MockNodePools
from tpufleet_gke.provisioner.model import label_keys
from tpufleet_gke.provisioner.settings import NodeNetwork

MINUTE = timedelta(minutes=1)
SECONDS = timedelta(seconds=1)


def test_a_pool_is_created_and_deleted_within_five_seconds_of_the_end(make):
    harness = make()
    harness.submit(slices=2)
    harness.advance(MINUTE)
    assert list(harness.states().values()) == ["RUNNING", "RUNNING"]
    harness.pod_list = []  # they run now
    harness.complete()
    harness.advance(4 * SECONDS)
    assert list(harness.states().values()) == ["STOPPING", "STOPPING"]
    harness.advance(MINUTE)
    assert harness.states() == {}
    assert harness.events.reasons() == [
        "NodePoolCreationStarted",
        "NodePoolCreationStarted",
        "NodePoolCreationSucceeded",
        "NodePoolCreationSucceeded",
        "NodePoolDeletionStarted",
        "NodePoolDeletionStarted",
        "NodePoolDeletionSucceeded",
        "NodePoolDeletionSucceeded",
    ]


def test_reconciling_never_waits_so_fifty_pools_start_at_once(make):
    harness = make()
    harness.submit(slices=50)
    harness.reconcile()
    assert list(harness.states().values()) == ["PROVISIONING"] * 50
    harness.advance(MINUTE)
    assert list(harness.states().values()) == ["RUNNING"] * 50


@pytest.mark.parametrize("rounds", range(1, 25, 3))
def test_a_provisioner_restarted_at_any_time_creates_no_pool_twice(make, rounds):
    harness = make()
    harness.submit(slices=3)
    harness.reconcile(rounds)
    harness.restart()
    harness.advance(MINUTE)
    assert sorted(harness.states().values()) == ["RUNNING"] * 3
    assert len(harness.gke.created) == 3
    harness.complete()
    harness.reconcile()
    harness.restart()
    harness.advance(MINUTE)
    assert harness.states() == {}


def test_after_a_stockout_the_pool_is_deleted_and_the_next_zone_tried(make):
    harness = make(zones=("us-central1-a", "us-central1-b"))
    harness.gke.stock[("us-central1-a", "ct5lp-hightpu-4t")] = 3
    harness.submit()
    harness.advance(3 * MINUTE)
    (pool,) = harness.gke.pools.values()
    assert (list(pool.locations), pool.status.name) == (["us-central1-b"], "RUNNING")
    failed = harness.events.messages("NodePoolCreationFailed")
    assert "no capacity in" in failed[0]
    assert (
        harness.provisioner.metrics.value(
            "tpu_provisioner_pool_failures_total", {"trouble": "stock"}
        )
        == 1
    )


def test_with_one_zone_a_stockout_is_retried_until_it_succeeds(make):
    harness = make()
    key = ("us-central1-a", "ct5lp-hightpu-4t")
    harness.gke.stock[key] = 0
    harness.submit()
    harness.advance(5 * MINUTE)
    tries = len(harness.gke.created)
    assert 2 <= tries <= 5  # each wait is longer than the last
    del harness.gke.stock[key]
    harness.advance(10 * MINUTE)
    assert list(harness.states().values()) == ["RUNNING"]


API_ERRORS = [
    pytest.param("RESOURCE_EXHAUSTED", "Quota exceeded for requests per minute", True, id="429"),
    pytest.param("UNAVAILABLE", "try again", True, id="503"),
    pytest.param("INTERNAL", "oops", True, id="500"),
    pytest.param("DEADLINE_EXCEEDED", "late", True, id="timeout"),
    pytest.param("FAILED_PRECONDITION", "running incompatible operation", True, id="busy"),
    pytest.param("PERMISSION_DENIED", "container.clusters.update", False, id="403"),
    pytest.param("INVALID_ARGUMENT", "no such network", False, id="400"),
]


@pytest.mark.parametrize(("code", "message", "retried"), API_ERRORS)
def test_an_api_error_is_reported_and_retried_where_that_helps(make, code, message, retried):
    harness = make()
    harness.gke.fail_next_call("create", code, message)
    harness.submit()
    harness.advance(2 * MINUTE)
    assert list(harness.states().values()) == (["RUNNING"] if retried else [])
    assert harness.events.messages("NodePoolCreationFailed")
    assert set(harness.events.details["NodePoolCreationFailed"]) == {message}


@pytest.mark.parametrize("code", ["PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "INTERNAL"])
def test_a_failed_listing_fails_only_that_reconciliation(make, code):
    harness = make()
    harness.submit()
    harness.gke.fail_next_call("list", code, "no")
    with pytest.raises(Exception, match="no"):
        harness.reconcile()
    harness.advance(MINUTE)
    assert list(harness.states().values()) == ["RUNNING"]


def test_nothing_is_created_or_deleted_from_a_stale_watch_cache(make):
    harness = make()
    harness.stale_reason = "stale watch caches: pods 150 s"
    harness.submit()
    with pytest.raises(ProviderUnavailable, match="pods 150 s"):
        harness.reconcile()
    assert harness.states() == {}
    harness.stale_reason = None
    harness.advance(MINUTE)
    assert list(harness.states().values()) == ["RUNNING"]
    harness.complete()
    harness.stale_reason = "stale watch caches: pods 150 s"
    with pytest.raises(ProviderUnavailable):
        harness.reconcile()
    assert list(harness.states().values()) == ["RUNNING"]
    harness.stale_reason = None
    harness.advance(MINUTE)
    assert harness.states() == {}


def test_a_failed_deletion_is_reported_and_retried(make):
    harness = make()
    harness.submit()
    harness.advance(MINUTE)
    harness.complete()
    harness.gke.fail_next_call("delete", "UNAVAILABLE", "later", times=2)
    harness.advance(MINUTE)
    assert harness.states() == {}
    assert harness.events.reasons().count("NodePoolDeletionFailed") == 2


REFUSED_DELETIONS = [
    pytest.param("FAILED_PRECONDITION", "running incompatible operation", id="busy"),
    pytest.param("UNAVAILABLE", "later", id="unavailable"),
    pytest.param("PERMISSION_DENIED", "container.clusters.update", id="permission"),
]


@pytest.mark.parametrize(("code", "message"), REFUSED_DELETIONS)
def test_a_refused_deletion_backs_off(make, code, message):
    harness = make()
    harness.submit()
    harness.advance(MINUTE)
    harness.complete()
    harness.gke.fail_next_call("delete", code, message, times=10_000)
    harness.reconcile(5 * 60, every=4 * SECONDS)
    assert 5 <= harness.gke.calls.count("delete") <= 12
    failed = harness.events.messages("NodePoolDeletionFailed")
    assert 1 <= len(failed) <= 12
    assert set(harness.events.details["NodePoolDeletionFailed"]) == {message}
    harness.gke.stop_failing()
    harness.reconcile(5, every=5 * MINUTE)
    assert harness.states() == {}


def test_a_failed_create_operation_is_never_reported_as_success(make):
    harness = make()
    harness.gke.fail_next_creation(13, "the network is gone")
    harness.submit()
    harness.advance(40 * SECONDS)
    assert "NodePoolCreationSucceeded" not in harness.events.reasons()
    assert any("the network is gone" in message for _, _, message in harness.events.recorded)
    harness.advance(3 * MINUTE)
    assert list(harness.states().values()) == ["RUNNING"]


def test_a_stopping_pool_is_awaited_and_recreated(make):
    harness = make()
    harness.submit()
    harness.advance(MINUTE)
    (name,) = harness.gke.pools
    harness.gke.delete(harness.settings.parent, name)
    harness.reconcile()
    assert harness.states() == {name: "STOPPING"}
    harness.advance(MINUTE)
    assert harness.states() == {name: "RUNNING"}
    assert harness.gke.created == [name, name]


def test_a_running_pool_with_a_stockout_is_replaced(make):
    harness = make()
    harness.submit()
    harness.advance(MINUTE)
    (name,) = harness.gke.pools
    harness.gke.set_status(name, "RUNNING_WITH_ERROR", "2 of 4 nodes", "GCE_STOCKOUT")
    harness.advance(2 * MINUTE)
    assert harness.states() == {name: "RUNNING"}
    assert len(harness.gke.created) == 2


def test_an_orphan_is_deleted_after_its_owner_was_looked_up(make):
    harness = make()
    harness.submit("one")
    harness.submit("two")
    harness.advance(MINUTE)
    hidden = harness.owners()
    harness.pod_list = []
    # The watch cache is empty, but the API server still has both: nothing is deleted.
    harness.fetch_owner = lambda namespace, name: hidden[namespace, name]
    harness.jobsets = []
    harness.advance(20 * SECONDS)
    assert list(harness.states().values()) == ["RUNNING"] * 2
    harness.fetch_owner = lambda namespace, name: None
    for name in harness.gke.pools:
        harness.gke.set_status(name, "ERROR")
    harness.advance(MINUTE)
    assert harness.states() == {}


def test_a_dry_run_logs_each_action_once(make, caplog):
    caplog.set_level("INFO")
    harness = make(dry_run=True)
    harness.submit()
    harness.submit("odd", node_selector={label_keys.TOPOLOGY: "3x3"})
    harness.reconcile(3)
    logged = [record.getMessage() for record in caplog.records]
    (created,) = [line for line in logged if "would create" in line]
    assert "4 × ct5lp-hightpu-4t in us-central1-a " in created
    (waits,) = [line for line in logged if "waits" in line]
    assert "no topology '3x3'" in waits


def test_a_dry_run_changes_nothing(make):
    harness = make(dry_run=True)
    harness.submit(slices=2)
    harness.advance(MINUTE)
    assert harness.gke.created == []


def test_an_impossible_pod_is_reported_once_and_blocks_no_other(make):
    harness = make()
    harness.submit("bad", chips=16)
    harness.submit("good")
    harness.advance(MINUTE)
    assert list(harness.states().values()) == ["RUNNING"]
    (failed,) = harness.events.messages("NodePoolCreationFailed")
    assert "16 chips" in failed


def test_a_changed_pod_spec_replaces_the_pool(make):
    harness = make()
    harness.submit()
    harness.advance(MINUTE)
    toleration = {"key": label_keys.SPOT, "operator": "Exists"}
    harness.pod_list = [
        builders.pod(node_selector={label_keys.SPOT: "true"}, tolerations=[toleration])
    ]
    harness.advance(2 * MINUTE)
    (pool,) = harness.gke.pools.values()
    assert pool.config.spot and pool.status.name == "RUNNING"
    assert [taint.key for taint in pool.config.taints] == ["cloud.google.com/gke-spot"]


CHANGED_SETTINGS = {
    "zones": {"zones": ("us-central1-b", "us-central1-a")},
    "other zones": {"zones": ("us-central1-b",)},
    "service account": {"service_account": "nodes@p.iam"},
    "tags": {"tags": ("tpu",)},
    "labels copied from pods": {"pod_to_node_labels": (label_keys.JOB_KEY,)},
    "disk": {"secondary_disk": "image", "disk_type": "pd-ssd", "boot_disk_kms_key": "key"},
    "secure boot": {"secure_boot": False},
    "networks": {"additional_networks": (NodeNetwork(network="vpc", subnetwork="subnet"),)},
    "spot fallback": {"spot_fallback": True},
    "pods per node": {"max_pods_per_node": 30},
    "forced on-demand": {"force_on_demand": True},
}


@pytest.mark.parametrize("changed", CHANGED_SETTINGS.values(), ids=CHANGED_SETTINGS)
def test_a_changed_setting_applies_to_new_pools_only(make, changed):
    harness = make()
    harness.submit()
    harness.advance(MINUTE)  # the pod still waits, as after a restart of the JobSet
    harness.settings = msgspec.structs.replace(harness.settings, **changed)
    harness.restart()
    harness.advance(MINUTE)
    assert list(harness.states().values()) == ["RUNNING"]
    assert "NodePoolDeletionStarted" not in harness.events.reasons()


@pytest.mark.parametrize("written", ["v2-0000000000000000", "bcdfgh2456", None])
def test_pools_of_other_versions_are_kept(make, written):
    """Their hashes are computed differently; what the pool is tells whether it serves the pod."""
    harness = make()
    harness.submit()
    harness.advance(MINUTE)
    (pool,) = harness.gke.pools.values()
    del pool.config.labels[label_keys.HASH]
    if written:
        pool.config.labels[label_keys.HASH] = written
    harness.restart()
    harness.advance(MINUTE)
    assert len(harness.gke.created) == 1 and list(harness.states().values()) == ["RUNNING"]


SPOT_POD = {
    "node_selector": {label_keys.SPOT: "true"},
    "tolerations": [{"key": label_keys.SPOT, "operator": "Exists"}],
}
CHANGED_PODS = {
    "topology": {"node_selector": {label_keys.TOPOLOGY: "2x4"}},
    "machine": {"node_selector": {label_keys.TOPOLOGY: "2x4"}, "chips": 8},
    "spot": SPOT_POD,
    "reservation": {"node_selector": {label_keys.RESERVATION: "mine"}},
    "block of a reservation": {
        "node_selector": {label_keys.RESERVATION: "mine", label_keys.RESERVATION_BLOCK: "b"}
    },
    "label": {"node_selector": {"team": "blue"}},
    "zone": {"node_selector": {label_keys.ZONE: "us-central1-b"}},
    "service account": {"annotations": {label_keys.NODE_SERVICE_ACCOUNT: "mine@p.iam"}},
    "networks": {"annotations": {label_keys.ADDITIONAL_NETWORKS: "vpc:subnet"}},
}


@pytest.mark.parametrize("changed", CHANGED_PODS.values(), ids=CHANGED_PODS)
def test_a_pool_that_its_pods_cannot_use_any_more_is_replaced(make, changed):
    harness = make(
        zones=("us-central1-a", "us-central1-b"),
        allowed_service_accounts=("*",),
        allowed_networks=("*",),
    )
    harness.submit()
    harness.advance(MINUTE)
    harness.pod_list = [builders.pod(**changed)]
    harness.advance(2 * MINUTE)
    assert len(harness.gke.created) == 2 and list(harness.states().values()) == ["RUNNING"]
    (reason,) = harness.events.messages("NodePoolDeletionStarted")
    assert "its pods now require" in reason


def test_a_restarted_jobset_keeps_its_pool(make):
    harness = make()
    harness.submit()
    harness.advance(MINUTE)
    pod = builders.pod()
    pod["metadata"]["uid"] = "another"
    harness.pod_list = [pod]
    harness.advance(MINUTE)
    assert len(harness.gke.created) == 1


def test_metrics_are_exposed_in_prometheus_format(make):
    harness = make()
    harness.submit(slices=2)
    harness.advance(MINUTE)
    text = harness.provisioner.metrics.text()
    assert 'tpu_provisioner_pools{state="running"} 2' in text
    assert "tpu_provisioner_chips 32" in text
    assert 'tpu_provisioner_provisioning_seconds_bucket{le="60.0"} 2' in text


def test_the_mock_provider_reports_success_and_never_times_out(make):
    harness = make(provider="mock")
    harness.restart(MockNodePools())
    harness.submit(slices=2)
    harness.advance(20 * MINUTE)
    assert set(harness.events.reasons()) == {"NodePoolCreationStarted", "NodePoolCreationSucceeded"}
    assert len(harness.events.reasons()) == 4
    harness.complete()
    harness.advance(MINUTE)
    assert harness.events.reasons()[4:] == [
        "NodePoolDeletionStarted",
        "NodePoolDeletionStarted",
        "NodePoolDeletionSucceeded",
        "NodePoolDeletionSucceeded",
    ]


def test_only_the_leader_deletes_orphans(make):
    harness, leads = make(), []
    harness.submit()
    harness.advance(MINUTE)
    harness.pod_list, harness.jobsets = [], []  # its JobSet is gone
    harness.restart(is_leader=lambda: bool(leads))
    thread = threading.Thread(target=harness.provisioner.run)
    thread.start()
    try:
        for _ in range(20):
            harness.clock.advance(MINUTE)
            harness.provisioner.wake()
            time.sleep(0.02)
        assert list(harness.states().values()) == ["RUNNING"]
        leads.append(True)
        patience = Patience(30)
        while "RUNNING" in harness.states().values():
            assert not patience.is_over
            harness.clock.advance(SECONDS)
            harness.provisioner.wake()
            time.sleep(0.02)
    finally:
        harness.provisioner.close()
        thread.join()


def test_a_flex_start_pool_is_awaited_without_a_timeout(make):
    harness = make()
    harness.submit(node_selector={label_keys.FLEX_START: "true"})
    harness.reconcile(6 * 60, every=10 * SECONDS)
    assert list(harness.states().values()) == ["RUNNING"]
    assert len(harness.gke.created) == 1
    harness.complete()
    harness.advance(MINUTE)
    assert harness.states() == {}


def test_a_worker_that_finds_no_node_has_an_event(make):
    harness = make(simulate_nodes=True)
    harness.submit(**{"node_selector": {label_keys.TOPOLOGY: "2x2"}})
    harness.pod_list.append(builders.pod(index="1", node_selector={label_keys.TOPOLOGY: "2x2"}))
    harness.advance(5 * MINUTE)
    assert len(harness.gke.created) == 1
    messages = harness.events.messages("NodePoolCreationFailed")
    assert len(messages) == 1 and "no room on node pool" in messages[0]
