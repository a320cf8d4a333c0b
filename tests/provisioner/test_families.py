"""What is served besides JobSets, where it is allowed: Jobs, LeaderWorkerSets and single pods."""

from __future__ import annotations

from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.container_v1", reason="needs the extra `gke`")

from tests.provisioner import making
from tests.provisioner.worlds import World
from tpufleet.errors import BadInput
from tpufleet.provisioner import families, keys, pods
from tpufleet.provisioner import settings as provisioner_settings
from tpufleet.provisioner.families import JOB, JOBSET, LEADER_WORKER_SET, POD

MINUTE = timedelta(minutes=1)
ALL = tuple(families.KINDS)


def waiting(name, *, owner=None, labels=None, annotations=None):
    """A pod that waits for a slice of four hosts, and is not part of a JobSet."""
    pod = making.pod()
    controller = [{"kind": owner[0], "name": owner[1], "controller": True}] if owner else []
    pod["metadata"] |= {
        "name": name, "uid": f"uid-{name}", "labels": labels or {},
        "annotations": annotations or {}, "ownerReferences": controller,
    }  # fmt: skip
    return pod


def group(name, number, worker="0", leader_has_chips=True):
    labels = {keys.LWS_NAME: name, keys.LWS_GROUP: str(number), keys.LWS_WORKER: worker}
    told = {keys.LWS_LEADER_HAS_CHIPS: "true"} if leader_has_chips and worker != "0" else {}
    owner = ("StatefulSet", name)
    return waiting(f"{name}-{number}", owner=owner, labels=labels, annotations=told)


INDEX = {keys.COMPLETION_INDEX: "0"}
PODS = {
    "of a JobSet": (making.pod(), JOBSET, "train"),
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
    assert families.of(pod, ALL).owner == owner
    assert pods.refusal(pod, served=ALL) is None
    others = tuple(other for other in ALL if other != kind)
    assert "not part of" in pods.refusal(pod, served=others)


IDLE = {
    "of a Deployment": waiting("web", owner=("ReplicaSet", "web")),
    "the second of a Job": waiting(
        "a-1", owner=("Job", "a"), annotations={keys.COMPLETION_INDEX: "1"}
    ),
    "the first worker of a group": group("serve", 0, worker="1"),
    "a worker of a group": group("serve", 0, worker="3"),
    "the second where the leader needs no chips": group(
        "serve", 0, worker="2", leader_has_chips=False
    ),
    "one that asks not to be": waiting("alone", annotations={keys.DISABLE: "true"}),
}


@pytest.mark.parametrize("pod", IDLE.values(), ids=IDLE)
def test_others_get_no_pool_of_their_own(pod):
    assert pods.refusal(pod, served=ALL) is not None


def test_what_is_served_is_a_setting_and_jobsets_alone_are_unless_it_is_set():
    assert provisioner_settings.from_environ({}).served == (JOBSET,)
    given = provisioner_settings.from_environ({"SERVE_KINDS": "JobSet, Pod"})
    assert given.served == (JOBSET, POD)
    with pytest.raises(BadInput, match="raycluster"):
        provisioner_settings.from_environ({"SERVE_KINDS": "raycluster"})


@pytest.fixture
def world():
    made = World(served=ALL)
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
    kinds = {pool.config.labels[keys.PARENT_KIND] for pool in world.gke.pools.values()}
    assert kinds == {"job", "pod"}
    assert not any(keys.OWNER_NAME in pool.config.labels for pool in world.gke.pools.values())

    world.pod_list = []
    done = {"type": "Complete", "status": "True",
            "lastTransitionTime": world.clock.now().isoformat()}  # fmt: skip
    world.others[JOB][0]["status"] = {"conditions": [done]}
    world.pass_time(MINUTE)
    (left,) = world.gke.pools.values()
    assert left.config.labels[keys.PARENT_NAME] == "probe"
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
    assert left.config.labels[keys.PARENT_NAME] == "serve-0"


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
