"""Pods whose nodes GKE creates itself get no pool from the provisioner, and an event says so."""

from __future__ import annotations

from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.container_v1", reason="needs the extra `gke`")

from tpufleet_gke.provisioner.kube.pool_events import LEFT_TO_GKE
from tpufleet_gke.provisioner.model import label_keys

MINUTE = timedelta(minutes=1)
COVERED = {"tpu-v5-lite-podslice": 64}


def test_a_pod_that_selects_a_compute_class_is_left_to_gke(make):
    harness = make()
    harness.submit(node_selector={label_keys.COMPUTE_CLASS: "tpus"})
    harness.advance(MINUTE)
    assert harness.gke.created == []
    [message] = harness.events.messages(LEFT_TO_GKE)
    assert "compute class tpus" in message
    assert "NodePoolCreationFailed" not in harness.events.reasons()
    assert {kind for kind, reason, _ in harness.events.recorded if reason == LEFT_TO_GKE} == {
        "Pod",
        "JobSet",
    }


COVERS = {
    "its accelerator": (COVERED, {}, True),
    "another accelerator": ({"tpu-v6e-slice": 64}, {}, False),
    "none of it": ({"tpu-v5-lite-podslice": 0}, {}, False),
    "not reservations": (COVERED, {"node_selector": {label_keys.RESERVATION: "mine"}}, False),
    "not labels without a taint": (COVERED, {"node_selector": {"team": "blue"}}, False),
    "labels with a taint": (
        COVERED,
        {"node_selector": {"team": "blue"}, "tolerations": [{"key": "team", "value": "blue"}]},
        True,
    ),
}


@pytest.mark.parametrize(("limits", "pod", "left"), COVERS.values(), ids=COVERS)
def test_node_auto_provisioning_covers(make, limits, pod, left):
    harness = make()
    harness.gke.auto_provisioning = limits
    harness.submit(**pod)
    harness.advance(MINUTE)
    assert (harness.gke.created == []) is left
    assert len(harness.events.messages(LEFT_TO_GKE)) == left


def test_limits_that_are_set_later_apply_within_five_minutes(make):
    harness = make()
    harness.advance(MINUTE)
    harness.gke.auto_provisioning = COVERED
    harness.advance(5 * MINUTE)
    harness.submit()
    harness.advance(MINUTE)
    assert harness.gke.created == []


def test_auto_provisioning_can_be_ignored(make):
    harness = make(respect_auto_provisioning=False)
    harness.gke.auto_provisioning = COVERED
    harness.submit()
    harness.advance(MINUTE)
    assert len(harness.gke.created) == 1
    assert "cluster" not in harness.gke.calls


def test_without_permission_to_read_the_cluster_pools_are_created_with_one_warning(make, caplog):
    harness = make(simulate_nodes=True)
    harness.gke.fail_next_call("cluster", "PERMISSION_DENIED", "no", times=9)
    harness.submit()
    harness.advance(12 * MINUTE)
    assert len(harness.gke.created) == 1
    assert caplog.text.count("container.clusters.get") == 1


def test_nothing_is_bought_while_the_limits_are_unknown(make):
    harness = make()
    harness.gke.auto_provisioning = COVERED
    harness.gke.fail_next_call("cluster", "UNAVAILABLE", "later", times=2)
    harness.submit()
    harness.advance(MINUTE)
    assert harness.gke.created == []
    assert len(harness.events.messages(LEFT_TO_GKE)) == 1
