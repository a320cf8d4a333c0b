"""What is served besides JobSets, where it is allowed: Jobs, LeaderWorkerSets and single pods."""

from __future__ import annotations

from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.container_v1", reason="needs the extra `gke`")

from tests.provisioner import builders
from tests.provisioner.harness import ProvisionerHarness
from tpufleet.errors import BadInput
from tpufleet.provisioner import settings as provisioner_settings
from tpufleet.provisioner.kube import label_keys, pod_owners, pods
from tpufleet.provisioner.kube.pod_owners import JOB, JOBSET, LEADER_WORKER_SET, POD
from tpufleet.provisioner.kube.pool_events import CREATE_FAILED

MINUTE = timedelta(minutes=1)
ALL = tuple(pod_owners.KINDS)


def waiting(name, *, owner=None, labels=None, annotations=None):
    """A pod that waits for a slice of four hosts, and is not part of a JobSet."""
    pod = builders.pod()
    controller = [{"kind": owner[0], "name": owner[1], "controller": True}] if owner else []
    pod["metadata"] |= {
        "name": name, "uid": f"uid-{name}", "labels": labels or {},
        "annotations": annotations or {}, "ownerReferences": controller,
    }  # fmt: skip
    return pod


def group(name, number, worker="0", leader_has_chips=True):
    labels = {
        label_keys.LWS_NAME: name,
        label_keys.LWS_GROUP: str(number),
        label_keys.LWS_WORKER: worker,
    }
    told = (
        {label_keys.LWS_LEADER_REQUESTS_TPUS: "true"} if leader_has_chips and worker != "0" else {}
    )
    owner = ("StatefulSet", name)
    return waiting(f"{name}-{number}", owner=owner, labels=labels, annotations=told)


INDEX = {label_keys.COMPLETION_INDEX: "0"}
PODS = {
    "of a JobSet": (builders.pod(), JOBSET, "train"),
    "of a Job": (waiting("a-0", owner=("Job", "a"), annotations=INDEX), JOB, "job/a"),
    "of a Job without indexes": (waiting("a-x", owner=("Job", "a")), JOB, "job/a"),
    "of a group": (group("serve", 1), LEADER_WORKER_SET, "leaderworkerset/serve-1"),
    "of a group whose leader needs no chips": (
        group("serve", 1, worker="1", leader_has_chips=False),
        LEADER_WORKER_SET, "leaderworkerset/serve-1",
    ),
    "alone": (waiting("probe"), POD, "pod/probe"),
}  # fmt: skip


@pytest.mark.parametrize(("pod", "kind", "owner"), PODS.values(), ids=PODS)
def test_a_pod_is_served_where_its_kind_is(pod, kind, owner):
    assert pod_owners.owner_of_pod(pod, ALL).name == owner
    assert pods.skip_reason(pod, served_kinds=ALL) is None
    others = tuple(other for other in ALL if other != kind)
    assert "not part of" in pods.skip_reason(pod, served_kinds=others)


IDLE = {
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


@pytest.mark.parametrize("pod", IDLE.values(), ids=IDLE)
def test_others_get_no_pool_of_their_own(pod):
    assert pods.skip_reason(pod, served_kinds=ALL) is not None


def test_what_is_served_is_a_setting_and_jobsets_alone_are_unless_it_is_set():
    assert provisioner_settings.from_environ({}).served_kinds == (JOBSET,)
    given = provisioner_settings.from_environ({"SERVE_KINDS": "JobSet, Pod"})
    assert given.served_kinds == (JOBSET, POD)
    with pytest.raises(BadInput, match="raycluster"):
        provisioner_settings.from_environ({"SERVE_KINDS": "raycluster"})


@pytest.fixture
def world():
    made = ProvisionerHarness(served=ALL)
    yield made
    made.close()


def resource(name, **spec):
    return {
        "metadata": {
            "name": name, "namespace": "default", "uid": f"uid-of-{name}",
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": spec, "status": {},
    }  # fmt: skip


def test_each_gets_a_pool_that_goes_with_it(world):
    alone = waiting("probe")
    world.others = {JOB: [resource("a")], POD: [alone]}
    world.pod_list = [waiting("a-0", owner=("Job", "a"), annotations=INDEX), alone]
    world.pass_time(MINUTE)
    assert sorted(world.states().values()) == ["RUNNING", "RUNNING"]
    kinds = {pool.config.labels[label_keys.PARENT_KIND] for pool in world.gke.pools.values()}
    assert kinds == {"job", "pod"}
    assert not any(label_keys.OWNER_NAME in pool.config.labels for pool in world.gke.pools.values())

    world.pod_list = []
    done = {"type": "Complete", "status": "True",
            "lastTransitionTime": world.clock.now().isoformat()}  # fmt: skip
    world.others[JOB][0]["status"] = {"conditions": [done]}
    world.pass_time(MINUTE)
    (left,) = world.gke.pools.values()
    assert left.config.labels[label_keys.PARENT_NAME] == "probe"
    world.others = {}
    world.pass_time(MINUTE)
    assert world.states() == {}


def test_each_group_has_its_own_pool_and_loses_it_when_the_set_shrinks(world):
    world.others = {LEADER_WORKER_SET: [resource("serve", replicas=2)]}
    world.pod_list = [group("serve", 0), group("serve", 1)]
    world.pass_time(MINUTE)
    assert len(world.gke.pools) == 2
    world.pod_list = []
    world.others[LEADER_WORKER_SET][0]["spec"]["replicas"] = 1
    world.pass_time(MINUTE)
    (left,) = world.gke.pools.values()
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
    """Of one group in subgroups, labelled as LeaderWorkerSet's webhook does."""
    pod = group("serve", group_number, worker=str(worker), leader_has_chips=chips)
    extra = (size - 1) % subgroups_of == 0
    number = 0 if worker == 0 else (worker - extra) // subgroups_of
    if worker or not excluded:
        pod["metadata"]["labels"][label_keys.LWS_SUBGROUP] = str(number)
    pod["metadata"] |= {"name": f"serve-{group_number}-{worker}", "uid": f"{group_number}-{worker}"}
    pod["metadata"]["annotations"] |= {
        label_keys.LWS_SIZE: str(size), label_keys.LWS_SUBGROUP_SIZE: str(subgroups_of),
        **({label_keys.LWS_SUBGROUP_EXCLUSIVE: placed} if placed else {}),
    }  # fmt: skip
    return pod


DIVIDED = {
    "all pods": (dict(size=8), {0: "0.0", 1: "0.0", 4: "0.1"}),
    "a leader besides": (dict(size=9, chips=False), {0: "0.0", 1: "0.0", 5: "0.1"}),
    "a leader in none": (dict(size=9, excluded=True), {0: "0", 1: "0.0", 5: "0.1"}),
    "one each": (dict(size=3, subgroups_of=1, excluded=True), {0: "0", 1: "0.0", 2: "0.1"}),
}


@pytest.mark.parametrize(("divided", "standing"), DIVIDED.values(), ids=DIVIDED)
def test_of_each_subgroup_with_a_slice_of_its_own_the_first_stands_for_it(divided, standing):
    found = {
        worker: pod_owners.owner_of_pod(subgroup(0, worker, **divided), ALL)
        for worker in range(divided["size"])
    }
    assert {
        worker: family.name.removeprefix("leaderworkerset/serve-")
        for worker, family in found.items() if family.is_leader
    } == standing  # fmt: skip


def test_each_subgroup_has_its_own_pool_as_long_as_its_group_lives(world):
    divided = {"size": 8, "subGroupPolicy": {"subGroupSize": 4}}
    world.others = {
        LEADER_WORKER_SET: [resource("serve", replicas=2, leaderWorkerTemplate=divided)]
    }
    world.pod_list = [subgroup(number, worker) for number in range(2) for worker in range(8)]
    world.pass_time(MINUTE)
    names = {pool.config.labels[label_keys.PARENT_NAME] for pool in world.gke.pools.values()}
    assert names == {"serve-0.0", "serve-0.1", "serve-1.0", "serve-1.1"}
    assert len(world.gke.created) == 4
    world.pod_list = []
    world.others[LEADER_WORKER_SET][0]["spec"]["replicas"] = 1
    world.pass_time(MINUTE)
    names = {pool.config.labels[label_keys.PARENT_NAME] for pool in world.gke.pools.values()}
    assert names == {"serve-0.0", "serve-0.1"}
    world.others = {}
    world.pass_time(MINUTE)
    assert world.states() == {}


@pytest.mark.parametrize("placed", ["", "topology.kubernetes.io/zone"])
def test_subgroups_that_need_slices_and_do_not_say_so_are_told_how(world, placed):
    world.others = {LEADER_WORKER_SET: [resource("serve", replicas=1)]}
    world.pod_list = [subgroup(0, worker, placed=placed) for worker in range(8)]
    world.pass_time(MINUTE)
    assert world.gke.created == []
    (told,) = [words for _, reason, words in world.records.all if reason == CREATE_FAILED]
    assert label_keys.LWS_SUBGROUP_EXCLUSIVE in told


SHARED = {"a slice that is larger": (4, 2), "one subgroup and a leader besides": (5, 4)}


@pytest.mark.parametrize(("size", "each"), SHARED.values(), ids=SHARED)
def test_subgroups_of_one_slice_share_it(world, size, each):
    world.others = {LEADER_WORKER_SET: [resource("serve", replicas=1)]}
    world.pod_list = [
        subgroup(0, worker, size=size, subgroups_of=each, placed="") for worker in range(size)
    ]
    world.pass_time(MINUTE)
    assert list(world.states().values()) == ["RUNNING"]


def test_a_pod_with_labels_that_make_no_sense_stops_nobody(world):
    odd = subgroup(0, 0)
    odd["metadata"]["labels"][label_keys.LWS_SUBGROUP] = "first"
    odd["metadata"]["annotations"][label_keys.LWS_SUBGROUP_SIZE] = "0"
    odd["metadata"]["labels"][label_keys.LWS_WORKER] = "none"
    world.others = {LEADER_WORKER_SET: [resource("serve", replicas=1)]}
    world.pod_list = [odd, waiting("probe")]
    world.others[POD] = [waiting("probe")]
    world.pass_time(MINUTE)
    (pool,) = world.gke.pools.values()
    assert pool.config.labels[label_keys.PARENT_NAME] == "probe"


def test_a_group_that_a_rollout_made_besides_has_a_pool_until_it_is_gone(world):
    serve = resource("serve", replicas=1)
    world.others = {LEADER_WORKER_SET: [serve | {"status": {"replicas": 2}}]}
    world.pod_list = [group("serve", 1)]
    world.pass_time(MINUTE)
    assert len(world.gke.pools) == 1
    world.pod_list, world.others = [], {LEADER_WORKER_SET: [serve | {"status": {"replicas": 1}}]}
    world.pass_time(MINUTE)
    assert world.gke.pools == {}


def test_a_pool_made_for_a_kind_that_is_no_longer_served_lives_as_long_as_its_owner(world):
    world.others = {JOB: [resource("a")]}
    world.pod_list = [waiting("a-0", owner=("Job", "a"), annotations=INDEX)]
    world.pass_time(MINUTE)
    hidden = world.owners()
    world.pod_list, world.others = [], {}
    world.owner_now = lambda namespace, name: hidden.get((namespace, name))
    world.pass_time(MINUTE)
    assert list(world.states().values()) == ["RUNNING"]
