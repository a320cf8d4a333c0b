"""The conditions under which a pod waits for a node pool, and what it requires of it."""

from __future__ import annotations

import copy

import pytest

from tests.provisioner import builders
from tpufleet.errors import BadInput
from tpufleet_gke.provisioner.model import label_keys, pod_owners, pods


def waits(pod, *resource):
    return pods.waits_for_pool(pod, pod_owners.owner_of_pod(pod), *resource)


def test_an_unschedulable_leader_of_a_jobset_waits_for_a_pool():
    assert waits(builders.pod())


def _without_jobset(pod):
    del pod["metadata"]["annotations"][label_keys.JOBSET_NAME]


def _follower(pod):
    pod["metadata"]["annotations"][label_keys.COMPLETION_INDEX] = "1"


def _running(pod):
    pod["status"]["phase"] = "Running"


def _not_yet_scheduled(pod):
    pod["status"]["conditions"] = []


def _gated(pod):
    pod["status"]["conditions"][0]["reason"] = "SchedulingGated"


def _without_chips(pod):
    pod["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "1"}}


def _without_topology(pod):
    del pod["spec"]["nodeSelector"][label_keys.TOPOLOGY]


def _disabled_by_label(pod):
    pod["metadata"]["labels"][label_keys.DISABLE] = "true"


def _disabled_by_annotation(pod):
    pod["metadata"]["annotations"][label_keys.DISABLE] = "true"


def _being_deleted(pod):
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"


BROKEN = [
    _without_jobset, _follower, _running, _not_yet_scheduled, _gated, _without_chips,
    _without_topology, _disabled_by_label, _disabled_by_annotation, _being_deleted,
]  # fmt: skip


@pytest.mark.parametrize("change", BROKEN, ids=lambda change: change.__name__[1:])
def test_each_condition_alone_excludes_a_pod(change):
    pod = copy.deepcopy(builders.pod())
    change(pod)
    assert not waits(pod)


def test_another_resource_can_be_configured():
    pod = builders.pod()
    pod["spec"]["containers"][0]["resources"]["requests"] = {"example.com/chip": "4"}
    assert waits(pod, "example.com/chip")
    assert pods.requested_chips(pod, "example.com/chip") == 4


def test_chips_of_all_containers_except_init_containers_are_added():
    pod = builders.pod()
    pod["spec"]["containers"] *= 2
    pod["spec"]["initContainers"] = [{"resources": {"requests": {label_keys.TPU: "8"}}}]
    assert pods.requested_chips(pod) == 8


def test_a_pod_of_a_jobset_without_a_controller_is_rejected():
    pod = builders.pod()
    pod["metadata"]["ownerReferences"] = []
    with pytest.raises(BadInput, match="controller"):
        pod_owners.parent_of_pod(pod, pod_owners.owner_of_pod(pod))
