"""A pool is not deleted under a pod that was scheduled to it at that moment."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

import pytest

pytest.importorskip("google.cloud.container_v1", reason="needs the extra `gke`")

from tests.provisioner import builders
from tests.provisioner.harness import ProvisionerHarness
from tpufleet.errors import PermissionMissing
from tpufleet_gke.provisioner.kube.watched_cluster import cordon_change
from tpufleet_gke.provisioner.model import label_keys, pod_owners

MINUTE, SECOND = timedelta(minutes=1), timedelta(seconds=1)


@pytest.fixture
def harness():
    harness = ProvisionerHarness(simulate_nodes=True)
    yield harness
    harness.close()


def running(harness, name="first"):
    harness.submit(name)
    harness.advance(MINUTE)
    (pool,) = harness.gke.pools
    return pool


def late_pod(harness, name="second"):
    """Bound to a node of the only pool; the watch has not shown it yet."""
    node = harness.simulated.all()[0]["metadata"]["name"]
    pod = builders.pod(name)
    pod["spec"]["nodeName"], pod["status"] = node, {"phase": "Running"}
    harness.jobsets.append(builders.jobset(name))
    seen = harness.pods_on
    harness.pods_on = lambda node: [
        *seen(node),
        *([pod] if pod["spec"]["nodeName"] == node else []),
    ]
    return pod


def test_a_pool_is_kept_for_a_pod_that_was_bound_while_its_jobset_ended(harness):
    pool = running(harness)
    harness.end("first")
    pod = late_pod(harness)
    harness.advance(20 * SECOND)
    assert "delete" not in harness.gke.calls
    harness.pod_list.append(pod)  # the watch shows it
    harness.advance(MINUTE)
    assert list(harness.gke.pools) == [pool]
    assert not harness.simulated.cordoned  # the rest of its pods can come
    harness.end("second")
    del harness.pods_on
    harness.advance(10 * SECOND)
    assert harness.states() in ({}, {pool: "STOPPING"})


def test_nodes_are_cordoned_for_a_moment_before_their_pool_is_deleted(harness):
    running(harness)
    harness.end("first")
    harness.reconcile()
    assert len(harness.simulated.cordoned) == len(harness.simulated.all())
    assert "delete" not in harness.gke.calls
    harness.reconcile(2)
    assert harness.gke.calls.count("delete") == 1


def test_the_scheduler_gets_its_moment_after_the_last_node_is_cordoned(harness):
    """Of a large pool this takes seconds; a pod may be bound to a node before its turn."""
    running(harness)
    harness.end("first")
    cordon = harness.set_cordon

    def slowly(node, at):
        cordon(node, at)
        if len(harness.simulated.cordoned) < len(harness.simulated.all()):
            harness.clock.advance(5 * SECOND)

    harness.set_cordon = slowly
    harness.reconcile(every=SECOND / 2)
    assert len(harness.simulated.cordoned) == len(harness.simulated.all()) > 1
    harness.reconcile(every=SECOND / 10)
    assert "delete" not in harness.gke.calls
    harness.clock.advance(harness.settings.cordon_grace)
    harness.reconcile()
    assert harness.gke.calls.count("delete") == 1


def test_nodes_of_a_large_slice_are_cordoned_and_checked_in_parallel(harness):
    """One after the other would take longer than a deletion may."""
    harness.submit("first", node_selector={label_keys.TOPOLOGY: "16x16"})
    harness.advance(MINUTE)
    assert len(harness.simulated.all()) == 64
    harness.end("first")
    cordon, list_pods = harness.set_cordon, harness.pods_on
    cordons, lists = threading.Barrier(8), threading.Barrier(8)

    def cordon_together(node, at):
        cordons.wait(900)
        cordon(node, at)

    def list_together(node):
        lists.wait(900)
        return list_pods(node)

    harness.set_cordon, harness.pods_on = cordon_together, list_together
    harness.reconcile(4)
    assert len(harness.simulated.cordoned) == 64
    assert harness.gke.calls.count("delete") == 1


def test_a_pool_whose_pod_does_not_fit_is_cordoned_too_and_the_reason_stays(harness):
    requests = {label_keys.TPU: "4", "example.com/nic": "1"}
    harness.submit("first", containers=[{"resources": {"requests": requests}}])
    harness.advance(9 * MINUTE)
    (reported,) = harness.events.messages("NodePoolCreationFailed")
    assert "Insufficient example.com/nic" in reported
    while not harness.simulated.cordoned and "delete" not in harness.gke.calls:
        harness.reconcile()
    assert "delete" not in harness.gke.calls
    harness.reconcile(3)
    assert harness.gke.calls.count("delete") == 1
    (started,) = harness.events.messages("NodePoolDeletionStarted")
    assert "Insufficient example.com/nic" in started and "unschedulable" not in started


def test_the_next_provisioner_goes_on_where_the_last_one_was_killed(harness):
    running(harness)
    harness.end("first")
    harness.reconcile()
    harness.restart()
    harness.reconcile(3)
    assert harness.gke.calls.count("delete") == 1


def test_the_next_provisioner_lifts_a_cordon_that_is_not_needed_any_more(harness):
    pool = running(harness)
    harness.end("first")
    harness.reconcile()
    assert harness.simulated.cordoned
    harness.restart()
    harness.pod_list.append(late_pod(harness))
    harness.advance(10 * SECOND)
    assert not harness.simulated.cordoned
    assert harness.states() == {pool: "RUNNING"}


def test_pods_of_the_ended_jobset_do_not_keep_its_pool(harness):
    """A failed JobSet whose pods are still there for a moment."""
    running(harness)
    (pod,) = harness.pod_list
    harness.end("first")
    harness.pod_list = [pod]
    harness.advance(10 * SECOND)
    assert harness.gke.calls.count("delete") == 1


def test_a_jobset_that_was_created_again_keeps_the_pool_before_the_watch_shows_it(harness):
    """Under the same name; the watch still shows its predecessor, which has ended."""
    pool = running(harness)
    harness.end("first")
    late_pod(harness, "first")
    harness.jobsets.pop()
    again = pod_owners.owner_statuses(pod_owners.JOBSET, [builders.jobset("first", uid="new")])
    harness.fetch_owner = lambda namespace, name: again.get((namespace, name))
    harness.reconcile(3)
    assert "delete" not in harness.gke.calls and list(harness.gke.pools) == [pool]


def refuse_cordon(node, at):
    raise PermissionMissing("nodes is forbidden: cannot patch resource nodes")


def test_without_the_permission_to_cordon_pools_are_deleted_and_the_log_says_so(harness, caplog):
    running(harness)
    harness.set_cordon = refuse_cordon
    harness.end("first")
    harness.advance(10 * SECOND)
    assert harness.gke.calls.count("delete") == 1
    assert "the verb patch on nodes" in caplog.text


def test_a_permission_that_was_granted_since_is_used_within_an_hour(harness):
    running(harness)
    harness.set_cordon = refuse_cordon
    harness.end("first")
    harness.advance(2 * MINUTE)
    del harness.set_cordon
    harness.clock.advance(60 * MINUTE)
    running(harness, "second")
    harness.end("second")
    harness.reconcile()
    assert harness.simulated.cordoned


AT = datetime(2026, 1, 1, tzinfo=UTC)
OURS = {label_keys.CORDONED_AT: AT.isoformat()}
BEFORE = {**OURS, label_keys.CORDONED_BEFORE: "true"}
CHANGES = [
    pytest.param(False, {}, AT, True, {**OURS, label_keys.CORDONED_BEFORE: None}, id="cordon"),
    pytest.param(True, OURS, None, None, dict.fromkeys(BEFORE), id="lift"),
    pytest.param(True, {}, AT, True, BEFORE, id="cordoned by an administrator"),
    pytest.param(True, BEFORE, AT, True, BEFORE, id="the same again"),
    pytest.param(True, BEFORE, None, True, dict.fromkeys(BEFORE), id="the other's stays"),
]


@pytest.mark.parametrize(("closed", "marks", "at", "after", "annotations"), CHANGES)
def test_a_cordon_of_someone_else_stays(closed, marks, at, after, annotations):
    node = {"metadata": {"annotations": marks}, "spec": {"unschedulable": closed}}
    change = cordon_change(node, at)
    assert change["spec"] == {"unschedulable": after}
    assert change["metadata"]["annotations"] == annotations
