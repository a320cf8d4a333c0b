"""The Kubernetes client on a real API server: errors, watch caches, leader election, events."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from tests.k8s.rigs import eventually
from tpufleet.clocks import ManualClock
from tpufleet.errors import BadRequest, Conflict, NotFound
from tpufleet.kubernetes.connections import EVENT, LEASE, NODE, SECRET
from tpufleet.kubernetes.watch_cache import WatchCache
from tpufleet_gke.provisioner.kube import event_recorder
from tpufleet_gke.provisioner.kube.event_recorder import KubernetesEventRecorder
from tpufleet_gke.provisioner.kube.leader_election import LEASE_DURATION, LeaderElector
from tpufleet_gke.provisioner.kube.watched_cluster import WatchedCluster
from tpufleet_gke.provisioner.model import label_keys


def secret(rig, name, **text):
    return {"metadata": {"name": name, "namespace": rig.namespace}, "stringData": text}


def test_server_errors_are_translated(rig):
    with pytest.raises(NotFound, match="missing"):
        rig.connection.get(SECRET, "missing", rig.namespace)
    assert rig.connection.find(SECRET, "missing", rig.namespace) is None
    rig.connection.create(SECRET, secret(rig, "one"))
    with pytest.raises(Conflict):
        rig.connection.create(SECRET, secret(rig, "one"))
    with pytest.raises(BadRequest):
        rig.connection.create(SECRET, secret(rig, "Not A Name"))
    rig.connection.delete(SECRET, "one", rig.namespace)
    rig.connection.delete(SECRET, "one", rig.namespace)


def test_a_watch_cache_follows_creations_changes_and_deletions(rig):
    rig.connection.create(SECRET, secret(rig, "before"))
    cache = WatchCache(rig.connection, SECRET, lambda: None, namespace=rig.namespace).start()
    try:
        eventually(lambda: cache.get("before", rig.namespace))
        rig.connection.create(SECRET, secret(rig, "later"))
        eventually(lambda: cache.get("later", rig.namespace))
        change = {"metadata": {"labels": {"a": "b"}}}
        rig.connection.patch(SECRET, "later", change, rig.namespace)
        eventually(lambda: cache.get("later", rig.namespace)["metadata"].get("labels"))
        rig.connection.delete(SECRET, "before", rig.namespace)
        eventually(lambda: cache.get("before", rig.namespace) is None)
    finally:
        cache.close()


def test_closing_a_watch_cache_ends_its_thread_at_once(rig):
    cache = WatchCache(rig.connection, SECRET, lambda: None, namespace=rig.namespace).start()
    assert cache.synced.wait(900)
    cache.close()  # long before the server would end the watch
    assert not [one for one in threading.enumerate() if one.name == "watch-secrets"]


def leader(rig, clock, name):
    return LeaderElector(
        rig.connection, clock, name="the-lease", namespace=rig.namespace, identity=name
    )


def test_another_replica_leads_after_the_leader_stops_renewing(rig):
    clock = ManualClock()
    one, two = leader(rig, clock, "one"), leader(rig, clock, "two")
    one.acquire_or_renew()
    two.acquire_or_renew()
    assert (one.leading, two.leading) == (True, False)
    clock.advance(one.renew_deadline)
    assert not one.leading  # it stops before another can start
    two.acquire_or_renew()
    assert not two.leading
    clock.advance(LEASE_DURATION)
    two.acquire_or_renew()
    assert two.leading
    one.acquire_or_renew()
    assert not one.leading
    lease = rig.connection.get(LEASE, "the-lease", rig.namespace)["spec"]
    assert (lease["holderIdentity"], lease["leaseTransitions"]) == ("two", 1)


def test_a_released_lease_is_free_at_once(rig):
    clock = ManualClock()
    one, two = leader(rig, clock, "one"), leader(rig, clock, "two")
    one.acquire_or_renew()
    one.close()
    clock.advance(timedelta(seconds=1))
    two.acquire_or_renew()
    assert two.leading


def test_a_repeated_event_is_counted(rig):
    recorder = KubernetesEventRecorder(rig.connection, ManualClock(), source="tests")
    about = event_recorder.object_reference("Pod", "p", rig.namespace, "uid")
    for _ in range(3):
        recorder.record(about, "Reason", "the same message", warning=True)
    recorder.record(about, "Reason", "another message")
    found = rig.connection.list(EVENT, rig.namespace)[0]
    assert sorted((one["message"], one["count"]) for one in found) == [
        ("another message", 1), ("the same message", 3),
    ]  # fmt: skip


def test_a_cordon_that_was_not_seen_yet_stays(rig):
    """An administrator cordons a node after it was last seen, and before we do."""
    name = f"{rig.namespace}-node"
    labels = {label_keys.MANAGER: label_keys.MANAGER_NAME}
    rig.connection.create(NODE, {"metadata": {"name": name, "labels": labels}})
    cluster = WatchedCluster(rig.connection, lambda: None)
    cluster.start()
    try:
        eventually(lambda: name in {node["metadata"]["name"] for node in cluster.nodes()})
    finally:
        cluster.close()
    try:
        rig.connection.patch(NODE, name, {"spec": {"unschedulable": True}})
        cluster.set_cordon(name, datetime.now(UTC))
        marks = rig.connection.get(NODE, name)["metadata"]["annotations"]
        assert marks[label_keys.CORDONED_BEFORE] == "true" and label_keys.CORDONED_AT in marks
        cluster.set_cordon(name, None)
        assert rig.connection.get(NODE, name)["spec"]["unschedulable"]
    finally:
        rig.connection.delete(NODE, name)
    cluster.set_cordon(name, datetime.now(UTC))  # of a node that is gone: nothing happens


def test_a_cordon_is_tried_again_while_others_change_the_node():
    class Busy:
        """A node that changes between each of the first reads and what follows."""

        def __init__(self, changes: int) -> None:
            self.changes, self.patches = changes, 0

        def get(self, kind, name):
            return {"metadata": {"name": name, "resourceVersion": "7"}}

        def patch(self, kind, name, change):
            self.patches += 1
            if self.patches <= self.changes:
                raise Conflict("the object has been modified")

    for changes in (0, 3):
        busy = Busy(changes)
        WatchedCluster(cast(Any, busy), lambda: None).set_cordon("node", datetime.now(UTC))
        assert busy.patches == changes + 1
    with pytest.raises(Conflict):
        WatchedCluster(cast(Any, Busy(99)), lambda: None).set_cordon("node", datetime.now(UTC))


def test_kwok_nodes_become_ready_with_chips(rig):
    rig.add_pool("kwok-nodes", count=2)

    def ready():
        found = rig.connection.list(NODE, labels={"cloud.google.com/gke-nodepool": "kwok-nodes"})
        return [
            node for node in found[0]
            for one in node["status"].get("conditions") or ()
            if one["type"] == "Ready" and one["status"] == "True"
        ]  # fmt: skip

    eventually(lambda: len(ready()) == 2)
    assert {node["status"]["allocatable"]["google.com/tpu"] for node in ready()} == {"4"}
