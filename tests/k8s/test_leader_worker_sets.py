"""The provisioner serving LeaderWorkerSets, whose own controller makes their pods."""

from __future__ import annotations

import pytest

from tests.k8s.rigs import V5E, eventually
from tpufleet.kubernetes.connections import EVENT, LEADER_WORKER_SET, NODE, POD
from tpufleet_gke.provisioner.model import label_keys
from tpufleet_testbed.kubernetes import leader_worker_sets

HOSTS = 4
TOLERATIONS = [{"key": label_keys.TPU, "operator": "Exists"}]


@pytest.fixture
def served(rig):
    leader_worker_sets.install(rig.plane)
    rig.provision_here(SERVE_KINDS="jobset,leaderworkerset")
    yield rig
    for one in rig.connection.list(LEADER_WORKER_SET, rig.namespace)[0]:
        rig.connection.delete(LEADER_WORKER_SET, one["metadata"]["name"], rig.namespace)


def template(chips: int) -> dict:
    limits = {"limits": {label_keys.TPU: chips}} if chips else {}
    return {"spec": {
        "terminationGracePeriodSeconds": 1,
        "nodeSelector": V5E if chips else {},
        "tolerations": TOLERATIONS if chips else [],
        "containers": [{"name": "main", "image": "busybox", "resources": limits}],
    }}  # fmt: skip


EXCLUSIVE = {"leaderworkerset.sigs.k8s.io/exclusive-topology": label_keys.NODE_POOL}


SUBGROUPS_EXCLUSIVE = {label_keys.LWS_SUBGROUP_EXCLUSIVE: label_keys.NODE_POOL}


def serve(
    rig, name: str, *, groups: int, size: int = HOSTS, placed: dict[str, str] = EXCLUSIVE,
    **more: dict,
) -> None:  # fmt: skip
    rig.connection.create(LEADER_WORKER_SET, {
        "metadata": {
            "name": name, "namespace": rig.namespace, "annotations": placed,
        },
        "spec": {
            "replicas": groups,
            "leaderWorkerTemplate": {"size": size, "workerTemplate": template(4), **more},
        },
    })  # fmt: skip


def running(rig, by: str = label_keys.LWS_GROUP) -> dict[str, set[str | None]]:
    """By group, or another label: the pools that its pods run on, where all of them do."""
    pool_of = {
        node["metadata"]["name"]: node["metadata"]["labels"].get(label_keys.NODE_POOL)
        for node in rig.connection.list(NODE)[0]
    }
    groups: dict[str, list[str | None]] = {}
    for pod in rig.connection.list(POD, rig.namespace)[0]:
        labels, phase = pod["metadata"]["labels"], pod["status"].get("phase")
        if phase == "Running" and not pod["metadata"].get("deletionTimestamp"):
            group = groups.setdefault(labels.get(by, ""), [])
            group.append(pool_of.get(pod["spec"]["nodeName"]))
    return {group: set(pools) for group, pools in groups.items() if len(pools) >= HOSTS}


def resize(rig, name: str, groups: int) -> None:
    rig.connection.patch(LEADER_WORKER_SET, name, {"spec": {"replicas": groups}}, rig.namespace)


@pytest.mark.slow
def test_each_group_has_a_pool_until_the_set_is_scaled_down_or_deleted(served):
    serve(served, "serve", groups=1)
    eventually(lambda: len(running(served)) == 1, 120, served.describe)
    resize(served, "serve", 2)
    eventually(lambda: len(running(served)) == 2, 120, served.describe)
    pools = running(served)
    assert all(len(those) == 1 for those in pools.values()) and pools["0"] != pools["1"]
    assert len(served.gke.created) == 2

    resize(served, "serve", 1)
    eventually(lambda: set(served.gke.pools) == pools["0"], 60, served.describe)
    assert running(served)["0"] == pools["0"]

    served.connection.delete(LEADER_WORKER_SET, "serve", served.namespace)
    eventually(lambda: not served.gke.pools, 60, served.describe)
    assert len(served.gke.created) == 2


@pytest.mark.slow
def test_a_group_whose_leader_needs_no_chips_gets_a_pool_for_its_workers(served):
    """The leader, a router say, runs on a node without chips."""
    served.add_plain_node(f"plain-{served.namespace}")
    serve(served, "router", groups=1, size=1 + HOSTS, placed={}, leaderTemplate=template(0))
    eventually(lambda: served.gke.pools, 120, served.describe)
    (pool,) = served.gke.pools
    eventually(lambda: running(served).get("0") == {pool, "plain"}, 120, served.describe)
    assert served.gke.created == [pool]


@pytest.mark.slow
def test_a_group_recreated_after_a_failure_keeps_its_pool(served):
    serve(served, "serve", groups=1)
    eventually(lambda: running(served), 120, served.describe)
    before = {pod["metadata"]["uid"] for pod in served.connection.list(POD, served.namespace)[0]}
    first = next(
        pod["metadata"]["name"] for pod in served.connection.list(POD, served.namespace)[0]
    )
    served.connection.delete(POD, first, served.namespace)

    def renewed() -> bool:
        found = served.connection.list(POD, served.namespace)[0]
        return bool(running(served)) and not before & {pod["metadata"]["uid"] for pod in found}

    eventually(renewed, 120, served.describe)
    assert len(served.gke.created) == 1


DIVIDED = {
    "all pods": {"size": 2 * HOSTS, "subGroupPolicy": {"subGroupSize": HOSTS}},
    "all but a leader without chips": {
        "size": 1 + 2 * HOSTS, "leaderTemplate": template(0),
        "subGroupPolicy": {"subGroupSize": HOSTS, "subGroupPolicyType": "LeaderExcluded"},
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("divided", DIVIDED.values(), ids=DIVIDED)
def test_each_subgroup_gets_a_pool_of_its_own(served, divided):
    if "leaderTemplate" in divided:
        served.add_plain_node(f"plain-{served.namespace}")
    serve(served, "split", groups=1, placed=SUBGROUPS_EXCLUSIVE, **divided)

    def both() -> bool:
        found = running(served, by=label_keys.LWS_SUBGROUP)
        return {"0", "1"} <= set(found)

    eventually(both, 180, served.describe)
    found = running(served, by=label_keys.LWS_SUBGROUP)
    assert len(found["0"]) == len(found["1"]) == 1 and found["0"] != found["1"]
    assert len(served.gke.created) == 2
    served.connection.delete(LEADER_WORKER_SET, "split", served.namespace)
    eventually(lambda: not served.gke.pools, 60, served.describe)


@pytest.mark.slow
def test_subgroups_without_the_annotation_get_a_hint(served):
    policy = {"subGroupSize": HOSTS}
    serve(served, "mixed", groups=1, size=2 * HOSTS, placed={}, subGroupPolicy=policy)
    eventually(
        lambda: any(
            label_keys.LWS_SUBGROUP_EXCLUSIVE in one["message"]
            for one in served.connection.list(EVENT, served.namespace)[0]
        ),
        120, served.describe,
    )  # fmt: skip
    assert served.gke.created == []
