"""Pools that are kept after their JobSet has ended: reused, within the budget, deleted after."""

from __future__ import annotations

from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.container_v1", reason="needs the extra `gke`")

from tpufleet_gke.provisioner.kube import pool_events
from tpufleet_gke.provisioner.model import label_keys
from tpufleet_gke.provisioner.settings import Limit

MINUTE, SECOND = timedelta(minutes=1), timedelta(seconds=1)
TTL = 10 * MINUTE


@pytest.fixture
def make(make):
    """With warm pools, and nodes that appear."""
    return lambda **settings: make(simulate_nodes=True, **{"warm_pool_ttl": TTL, **settings})


def tied(name):
    """What the admission webhook adds: each Job runs only on a pool with its own label."""
    return {"labels": {"job-key": name}, "node_selector": {"job-key": name}}


def run(harness, name, **pod):
    harness.submit(name, **pod)
    harness.advance(MINUTE)
    assert [one["status"]["phase"] for one in harness.pod_list] == ["Running"]


def finish(harness, name):
    harness.end(name)
    harness.jobsets = [one for one in harness.jobsets if one["metadata"]["name"] != name]


@pytest.mark.parametrize("tie", [lambda _: {}, tied], ids=["any pool", "tied to its own pool"])
def test_the_next_jobset_of_the_same_kind_gets_the_pool_without_a_create_call(make, tie):
    harness = make()
    for name in ("one", "two", "three"):
        run(harness, name, **tie(name))
        finish(harness, name)
        harness.advance(MINUTE)
    assert len(harness.gke.created) == 1
    harness.advance(TTL)
    harness.advance(MINUTE)
    assert harness.states() == {}


def test_a_pool_that_changes_hands_is_reported_and_belongs_to_its_new_jobset(make):
    harness = make()
    run(harness, "one", **tied("one"))
    finish(harness, "one")
    harness.advance(MINUTE)
    run(harness, "two", **tied("two"))
    [message] = harness.events.messages(pool_events.POOL_REUSED)
    assert "served JobSet default/one" in message
    [pool] = harness.gke.pools.values()
    assert pool.config.labels[label_keys.OWNER_NAME] == "two"
    assert pool.config.labels["job-key"] == "two"


def test_by_default_no_pool_is_kept(make):
    harness = make(warm_pool_ttl=timedelta(0))
    run(harness, "one")
    finish(harness, "one")
    harness.advance(30 * SECOND)
    assert harness.states() == {}


OTHER_KINDS = {
    "topology": {"node_selector": {label_keys.TOPOLOGY: "2x4"}},
    "spot": {
        "node_selector": {label_keys.SPOT: "true"},
        "tolerations": [{"key": label_keys.SPOT, "operator": "Exists"}],
    },
    "reservation": {"node_selector": {label_keys.RESERVATION: "mine"}},
    "service account": {"annotations": {label_keys.NODE_SERVICE_ACCOUNT: "m@p.iam"}, **tied("x")},
    "networks": {"annotations": {label_keys.ADDITIONAL_NETWORKS: "vpc:subnet"}, **tied("x")},
    "resiliency": {"node_selector": {label_keys.ICI_RESILIENCY: "false"}},
}  # fmt: skip


@pytest.mark.parametrize("pod", OTHER_KINDS.values(), ids=OTHER_KINDS)
def test_a_pod_that_needs_another_kind_of_pool_gets_its_own(make, pod):
    harness = make(allowed_service_accounts=("*",))
    run(harness, "one")
    finish(harness, "one")
    harness.advance(MINUTE)
    run(harness, "two", **pod)
    assert len(harness.gke.created) == 2


def test_a_pool_with_a_granted_service_account_is_not_given_to_a_pod_without_it(make):
    harness = make(allowed_service_accounts=("*",))
    annotations = {label_keys.NODE_SERVICE_ACCOUNT: "mine@p.iam"}
    run(harness, "one", annotations=annotations, **tied("one"))
    finish(harness, "one")
    harness.advance(MINUTE)
    run(harness, "two", **tied("two"))
    assert len(harness.gke.created) == 2


def test_a_kept_pool_counts_towards_the_budget_and_makes_room_for_another_kind(make):
    harness = make(budget_pools=Limit(1))
    run(harness, "one")
    finish(harness, "one")
    harness.advance(MINUTE)
    assert len(harness.states()) == 1
    harness.submit("two", node_selector={label_keys.TOPOLOGY: "2x4"})
    for _ in range(60):
        harness.reconcile()
        assert len(harness.gke.pools) <= 1
    assert [one["status"]["phase"] for one in harness.pod_list] == ["Running"]
    assert "NodePoolCreationFailed" not in harness.events.reasons()


def test_without_room_in_the_budget_no_pool_is_evicted_in_vain(make):
    harness = make(budget_chips=Limit(16))
    run(harness, "one")
    finish(harness, "one")
    harness.advance(MINUTE)
    harness.submit("two", node_selector={label_keys.TOPOLOGY: "4x8"})
    harness.advance(MINUTE)
    assert len(harness.states()) == 1
    assert any("over budget" in one for one in harness.events.messages("NodePoolCreationFailed"))


def test_when_gke_refuses_new_labels_the_pod_gets_a_pool_of_its_own(make):
    harness = make()
    run(harness, "one", **tied("one"))
    finish(harness, "one")
    harness.advance(MINUTE)
    harness.gke.fail_next_call("update", "PERMISSION_DENIED", "no")
    run(harness, "two", **tied("two"))
    assert len(harness.gke.created) == 2


def test_a_restart_between_the_call_and_its_effect_gives_the_pool_away_once(make):
    harness = make()
    harness.gke.relabel_time = 20 * SECOND
    run(harness, "one", **tied("one"))
    finish(harness, "one")
    harness.advance(MINUTE)
    harness.submit("two", **tied("two"))
    harness.reconcile()
    assert "update" in harness.gke.calls
    harness.restart()
    harness.advance(2 * MINUTE)
    assert [one["status"]["phase"] for one in harness.pod_list] == ["Running"]
    assert len(harness.gke.created) == 1


def test_a_kept_pool_that_a_pod_was_just_scheduled_to_is_not_deleted(make):
    """The watch has not shown the pod yet; the API server is asked before the deletion."""
    harness = make()
    run(harness, "one")
    finish(harness, "one")
    harness.advance(MINUTE)
    [pool] = harness.gke.pools
    worker = {
        "metadata": {"name": "worker", "namespace": "other", "uid": "w", "labels": {}},
        "spec": {
            "nodeName": f"gke-{pool}-2",
            "containers": [{"resources": {"requests": {label_keys.TPU: "4"}}}],
        },
        "status": {"phase": "Running"},
    }
    harness.pods_on = lambda node: [worker] if node.endswith("-2") else []
    harness.advance(2 * TTL)
    assert harness.states() == {pool: "RUNNING"}
