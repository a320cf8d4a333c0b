"""Owners other than JobSets, where SERVE_KINDS allows them: Jobs, LeaderWorkerSets, single pods."""

from __future__ import annotations

from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.container_v1", reason="needs the extra `gke`")

from tests.provisioner import builders
from tests.provisioner.harness import ProvisionerHarness
from tpufleet.errors import BadInput
from tpufleet_gke.provisioner import settings as provisioner_settings
from tpufleet_gke.provisioner.kube.pool_events import CREATE_FAILED
from tpufleet_gke.provisioner.model import label_keys, pod_owners, pods
from tpufleet_gke.provisioner.model.pod_owners import JOB, JOBSET, LEADER_WORKER_SET, POD

MINUTE = timedelta(minutes=1)
ALL = tuple(pod_owners.KINDS)


def waiting(name, *, owner=None, labels=None, annotations=None):
    """A pod that waits for a slice of four hosts and is not part of a JobSet."""
    pod = builders.pod()
    controller = [{"kind": owner[0], "name": owner[1], "controller": True}] if owner else []
    pod["metadata"] |= {
        "name": name,
        "uid": f"uid-{name}",
        "labels": labels or {},
        "annotations": annotations or {},
        "ownerReferences": controller,
    }
    return pod


def group(name, number, worker="0", leader_has_chips=True):
    labels = {
        label_keys.LWS_NAME: name,
        label_keys.LWS_GROUP: str(number),
        label_keys.LWS_WORKER: worker,
    }
    extra = (
        {label_keys.LWS_LEADER_REQUESTS_TPUS: "true"} if leader_has_chips and worker != "0" else {}
    )
    owner = ("StatefulSet", name)
    return waiting(f"{name}-{number}", owner=owner, labels=labels, annotations=extra)


INDEX = {label_keys.COMPLETION_INDEX: "0"}
PODS = {
    "of a JobSet": (builders.pod(), JOBSET, "train"),
    "of a Job": (waiting("a-0", owner=("Job", "a"), annotations=INDEX), JOB, "job/a"),
    "of a Job without indexes": (waiting("a-x", owner=("Job", "a")), JOB, "job/a"),
    "of a group": (group("serve", 1), LEADER_WORKER_SET, "leaderworkerset/serve-1"),
    "of a group whose leader needs no chips": (
        group("serve", 1, worker="1", leader_has_chips=False),
        LEADER_WORKER_SET,
        "leaderworkerset/serve-1",
    ),
    "alone": (waiting("probe"), POD, "pod/probe"),
}


@pytest.mark.parametrize(("pod", "kind", "owner"), PODS.values(), ids=PODS)
def test_a_pod_is_served_if_its_kind_is(pod, kind, owner):
    assert pod_owners.owner_of_pod(pod, ALL).name == owner
    assert pods.waits_for_pool(pod, pod_owners.owner_of_pod(pod, ALL))
    others = tuple(other for other in ALL if other != kind)
    assert pod_owners.owner_of_pod(pod, others) is None


SKIPPED = {
    "of a Deployment": waiting("web", owner=("ReplicaSet", "web")),
    "the second of a Job": waiting(
        "a-1", owner=("Job", "a"), annotations={label_keys.COMPLETION_INDEX: "1"}
    ),
    "the first worker of a group": group("serve", 0, worker="1"),
    "a worker of a group": group("serve", 0, worker="3"),
    "the second where the leader needs no chips": group(
        "serve", 0, worker="2", leader_has_chips=False
    ),
    "one that asks not to be": waiting("alone", annotations={label_keys.DISABLE: "true"}),
}


@pytest.mark.parametrize("pod", SKIPPED.values(), ids=SKIPPED)
def test_other_pods_get_no_pool(pod):
    assert not pods.waits_for_pool(pod, pod_owners.owner_of_pod(pod, ALL))


def test_by_default_only_jobsets_are_served():
    assert provisioner_settings.from_environ({}).served_kinds == (JOBSET,)
    parsed = provisioner_settings.from_environ({"SERVE_KINDS": "JobSet, Pod"})
    assert parsed.served_kinds == (JOBSET, POD)
    with pytest.raises(BadInput, match="raycluster"):
        provisioner_settings.from_environ({"SERVE_KINDS": "raycluster"})


@pytest.fixture
def harness():
    harness = ProvisionerHarness(served_kinds=ALL)
    yield harness
    harness.close()


def resource(name, **spec):
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-of-{name}",
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": spec,
        "status": {},
    }


def test_each_owner_gets_a_pool_that_is_deleted_with_it(harness):
    alone = waiting("probe")
    harness.other_owners = {JOB: [resource("a")], POD: [alone]}
    harness.pod_list = [waiting("a-0", owner=("Job", "a"), annotations=INDEX), alone]
    harness.advance(MINUTE)
    assert sorted(harness.states().values()) == ["RUNNING", "RUNNING"]
    kinds = {pool.config.labels[label_keys.PARENT_KIND] for pool in harness.gke.pools.values()}
    assert kinds == {"job", "pod"}
    assert not any(
        label_keys.OWNER_NAME in pool.config.labels for pool in harness.gke.pools.values()
    )

    harness.pod_list = []
    done = {
        "type": "Complete",
        "status": "True",
        "lastTransitionTime": harness.clock.now().isoformat(),
    }
    harness.other_owners[JOB][0]["status"] = {"conditions": [done]}
    harness.advance(MINUTE)
    (left,) = harness.gke.pools.values()
    assert left.config.labels[label_keys.PARENT_NAME] == "probe"
    harness.other_owners = {}
    harness.advance(MINUTE)
    assert harness.states() == {}


CLAIMS = {
    "by a label": (label_keys.OWNER_NAME, {}),
    "by a label of old versions": (label_keys.LEGACY_OWNER, {}),
    "by a selector": (label_keys.LEGACY_OWNER, {label_keys.LEGACY_OWNER: "victim"}),
}


@pytest.mark.parametrize(("key", "selector"), CLAIMS.values(), ids=CLAIMS)
def test_a_job_cannot_have_its_pool_owned_by_another(harness, key, selector):
    harness.jobsets = [builders.jobset("victim")]
    harness.other_owners = {JOB: [resource("a")]}
    pod = waiting(
        "a-0", owner=("Job", "a"), labels={key: "victim"},
        annotations={**INDEX, label_keys.COPY_LABELS: key},
    )  # fmt: skip
    pod["spec"]["nodeSelector"] |= selector
    harness.pod_list = [pod]
    harness.reconcile()
    (pool,) = harness.gke.pools.values()
    assert pod_owners.owner_from_labels(pool.config.labels) == ("default", "job/a")


def test_each_group_has_a_pool_until_the_set_is_scaled_down(harness):
    harness.other_owners = {LEADER_WORKER_SET: [resource("serve", replicas=2)]}
    harness.pod_list = [group("serve", 0), group("serve", 1)]
    harness.advance(MINUTE)
    assert len(harness.gke.pools) == 2
    harness.pod_list = []
    harness.other_owners[LEADER_WORKER_SET][0]["spec"]["replicas"] = 1
    harness.advance(MINUTE)
    (left,) = harness.gke.pools.values()
    assert left.config.labels[label_keys.PARENT_NAME] == "serve-0"


def subgroup(
    group_number,
    worker,
    *,
    size=8,
    subgroups_of=4,
    placed=label_keys.NODE_POOL,
    excluded=False,
    chips=True,
):
    """A pod of a group with subgroups, labelled as LeaderWorkerSet's webhook does."""
    pod = group("serve", group_number, worker=str(worker), leader_has_chips=chips)
    extra = (size - 1) % subgroups_of == 0
    number = 0 if worker == 0 else (worker - extra) // subgroups_of
    if worker or not excluded:
        pod["metadata"]["labels"][label_keys.LWS_SUBGROUP] = str(number)
    pod["metadata"] |= {"name": f"serve-{group_number}-{worker}", "uid": f"{group_number}-{worker}"}
    pod["metadata"]["annotations"] |= {
        label_keys.LWS_SIZE: str(size),
        label_keys.LWS_SUBGROUP_SIZE: str(subgroups_of),
        **({label_keys.LWS_SUBGROUP_EXCLUSIVE: placed} if placed else {}),
    }
    return pod


DIVIDED = {
    "all pods": (dict(size=8), {0: "0.0", 1: "0.0", 4: "0.1"}),
    "an extra leader": (dict(size=9, chips=False), {0: "0.0", 1: "0.0", 5: "0.1"}),
    "a leader outside the subgroups": (dict(size=9, excluded=True), {0: "0", 1: "0.0", 5: "0.1"}),
    "one each": (dict(size=3, subgroups_of=1, excluded=True), {0: "0", 1: "0.0", 2: "0.1"}),
}


@pytest.mark.parametrize(("divided", "leaders"), DIVIDED.values(), ids=DIVIDED)
def test_the_first_pod_of_a_subgroup_with_its_own_slice_leads_it(divided, leaders):
    owners = {
        worker: pod_owners.owner_of_pod(subgroup(0, worker, **divided), ALL)
        for worker in range(divided["size"])
    }
    assert {
        worker: owner.name.removeprefix("leaderworkerset/serve-")
        for worker, owner in owners.items()
        if owner.is_leader
    } == leaders


def test_each_subgroup_has_a_pool_until_its_group_is_removed(harness):
    divided = {"size": 8, "subGroupPolicy": {"subGroupSize": 4}}
    harness.other_owners = {
        LEADER_WORKER_SET: [resource("serve", replicas=2, leaderWorkerTemplate=divided)]
    }
    harness.pod_list = [subgroup(number, worker) for number in range(2) for worker in range(8)]
    harness.advance(MINUTE)
    names = {pool.config.labels[label_keys.PARENT_NAME] for pool in harness.gke.pools.values()}
    assert names == {"serve-0.0", "serve-0.1", "serve-1.0", "serve-1.1"}
    assert len(harness.gke.created) == 4
    harness.pod_list = []
    harness.other_owners[LEADER_WORKER_SET][0]["spec"]["replicas"] = 1
    harness.advance(MINUTE)
    names = {pool.config.labels[label_keys.PARENT_NAME] for pool in harness.gke.pools.values()}
    assert names == {"serve-0.0", "serve-0.1"}
    harness.other_owners = {}
    harness.advance(MINUTE)
    assert harness.states() == {}


@pytest.mark.parametrize("placed", ["", "topology.kubernetes.io/zone"])
def test_subgroups_that_need_slices_without_the_annotation_get_a_hint(harness, placed):
    harness.other_owners = {LEADER_WORKER_SET: [resource("serve", replicas=1)]}
    harness.pod_list = [subgroup(0, worker, placed=placed) for worker in range(8)]
    harness.advance(MINUTE)
    assert harness.gke.created == []
    (message,) = harness.events.messages(CREATE_FAILED)
    assert label_keys.LWS_SUBGROUP_EXCLUSIVE in message


SHARED = {"a slice that is larger": (4, 2), "one subgroup and an extra leader": (5, 4)}


@pytest.mark.parametrize(("size", "each"), SHARED.values(), ids=SHARED)
def test_subgroups_can_share_one_slice(harness, size, each):
    harness.other_owners = {LEADER_WORKER_SET: [resource("serve", replicas=1)]}
    harness.pod_list = [
        subgroup(0, worker, size=size, subgroups_of=each, placed="") for worker in range(size)
    ]
    harness.advance(MINUTE)
    assert list(harness.states().values()) == ["RUNNING"]


def test_a_pod_with_invalid_labels_blocks_no_other(harness):
    odd = subgroup(0, 0)
    odd["metadata"]["labels"][label_keys.LWS_SUBGROUP] = "first"
    odd["metadata"]["annotations"][label_keys.LWS_SUBGROUP_SIZE] = "0"
    odd["metadata"]["labels"][label_keys.LWS_WORKER] = "none"
    harness.other_owners = {LEADER_WORKER_SET: [resource("serve", replicas=1)]}
    harness.pod_list = [odd, waiting("probe")]
    harness.other_owners[POD] = [waiting("probe")]
    harness.advance(MINUTE)
    (pool,) = harness.gke.pools.values()
    assert pool.config.labels[label_keys.PARENT_NAME] == "probe"


def test_a_surge_group_of_a_rollout_has_a_pool_until_it_is_removed(harness):
    serve = resource("serve", replicas=1)
    harness.other_owners = {LEADER_WORKER_SET: [serve | {"status": {"replicas": 2}}]}
    harness.pod_list = [group("serve", 1)]
    harness.advance(MINUTE)
    assert len(harness.gke.pools) == 1
    harness.pod_list, harness.other_owners = (
        [],
        {LEADER_WORKER_SET: [serve | {"status": {"replicas": 1}}]},
    )
    harness.advance(MINUTE)
    assert harness.gke.pools == {}


def test_a_pool_of_a_kind_no_longer_served_lives_as_long_as_its_owner(harness):
    harness.other_owners = {JOB: [resource("a")]}
    harness.pod_list = [waiting("a-0", owner=("Job", "a"), annotations=INDEX)]
    harness.advance(MINUTE)
    hidden = harness.owners()
    harness.pod_list, harness.other_owners = [], {}
    harness.fetch_owner = lambda namespace, name: hidden.get((namespace, name))
    harness.advance(MINUTE)
    assert list(harness.states().values()) == ["RUNNING"]
