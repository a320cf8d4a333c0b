"""The provisioner on a real control plane, with KWOK nodes as node pools."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from tests.k8s.rigs import V5E, eventually
from tpufleet.kubernetes.connections import EVENT, JOB, JOBSET, NODE, POD
from tpufleet_gke.provisioner.model import label_keys


def nodes(rig):
    return rig.connection.list(NODE, labels={label_keys.OWNER_NAMESPACE: rig.namespace})[0]


def ended_at(rig, jobset):
    status = rig.connection.get(JOBSET, jobset, rig.namespace)["status"]
    (at,) = [
        one["lastTransitionTime"] for one in status["conditions"]
        if one["type"] == "Completed" and one["status"] == "True"
    ]  # fmt: skip
    return datetime.fromisoformat(at)


def gone(rig):
    return not rig.gke.pools and not nodes(rig)


def test_two_slices_get_pools_run_to_completion_and_leave_nothing(rig):
    rig.provision()
    rig.submit("train", slices=2)
    eventually(lambda: rig.running("train", 8), 120, rig.describe)
    assert len(rig.gke.created) == 2
    assert {node["metadata"]["labels"][label_keys.OWNER_NAME] for node in nodes(rig)} == {"train"}
    for asked in ("healthz", "readyz"):
        eventually(lambda path=asked: rig.page(path) == "ok\n", 60, rig.describe)
    running = 'tpu_provisioner_pools{state="running"} 2'
    eventually(lambda: running in rig.page("metrics"), 60, rig.describe)
    rig.end_pods("train")
    eventually(lambda: rig.condition("train", "Completed"), 60, rig.describe)
    eventually(lambda: gone(rig), 60, rig.describe)
    # tests/provisioner/test_deadlines.py checks five seconds on a manual clock; this machine may be
    # busy. Without a watch event it would take up to a minute, the idle interval.
    late = [(at - ended_at(rig, "train")).total_seconds() for at in rig.gke.deleted_at.values()]
    assert len(late) == 2 and max(late) < 20
    deleted = "tpu_provisioner_deletion_seconds_count 2"
    eventually(lambda: deleted in rig.page("metrics"), 60, rig.describe)
    assert {"NodePoolCreationStarted", "NodePoolCreationSucceeded"} <= rig.events()


def test_a_pool_is_released_with_its_job_while_the_jobset_runs_on(rig):
    rig.provision_here()
    rig.submit("train", slices=2)
    eventually(lambda: rig.running("train", 8), 120, rig.describe)
    for pod in rig.pods("train"):
        if pod["metadata"]["labels"][label_keys.JOB_NAME] == "train-slice-0":
            rig.end_pod(pod)
    eventually(lambda: len(rig.gke.deleted_at) == 1, 60, rig.describe)
    assert rig.running("train", 4) and not rig.condition("train", "Completed")


def test_a_preempted_slice_gets_its_nodes_back_and_the_jobset_recovers(rig):
    rig.provision_here()
    rig.submit("spot", select={"cloud.google.com/gke-spot": "true"})
    eventually(lambda: rig.running("spot", 4), 120, rig.describe)
    before = {pod["metadata"]["uid"] for pod in rig.pods("spot")}
    (name,) = rig.gke.pools
    pool = rig.gke.pools[name]
    rig.gke.nodes.delete_nodes(name)  # the machines are taken, and GKE makes new ones
    rig.gke.nodes.create_nodes(pool)
    eventually(
        lambda: rig.running("spot", 4)
        and not before & {pod["metadata"]["uid"] for pod in rig.pods("spot")},
        180, rig.describe,
    )  # fmt: skip
    assert rig.gke.created == [name]


@pytest.mark.slow
def test_late_chips_and_a_repair_cost_nothing(rig):
    """On real nodes of the API server: chips registered after the node is ready, then a repair, in
    which GKE replaces all nodes of the slice."""
    rig.gke.device_plugin_delay = timedelta(seconds=2)
    rig.gke.upgrade_time = timedelta(seconds=1)
    rig.provision_here()
    rig.submit("late")
    eventually(lambda: rig.running("late", 4), 120, rig.describe)
    before = {pod["metadata"]["uid"] for pod in rig.pods("late")}
    (name,) = rig.gke.pools
    rig.gke.start_repair(name)
    eventually(
        lambda: rig.running("late", 4)
        and not before & {pod["metadata"]["uid"] for pod in rig.pods("late")},
        180, rig.describe,
    )  # fmt: skip
    assert rig.gke.created == [name] and rig.gke.deleted_at == {}
    assert "NodePoolCreationFailed" not in rig.events()


@pytest.mark.slow
def test_a_deleted_jobset_loses_its_pools(rig):
    rig.provision_here()
    rig.submit("short")
    eventually(lambda: rig.running("short", 4), 120, rig.describe)
    rig.connection.delete(JOBSET, "short", rig.namespace)
    eventually(lambda: gone(rig), 60, rig.describe)


KILLED_AT = {
    "pods are pending": lambda rig: rig.pods("train", "Pending"),
    "a pool was asked for": lambda rig: "create" in rig.gke.calls,
    "a pool runs": lambda rig: any(
        pool.status.name == "RUNNING" for pool in list(rig.gke.pools.values())
    ),
    "the job runs": lambda rig: rig.pods("train", "Running"),
    "the job has ended": lambda rig: rig.condition("train", "Completed"),
    "pools are being deleted": lambda rig: "delete" in rig.gke.calls,
}


@pytest.mark.slow
def test_a_provisioner_killed_at_every_step_of_a_job_loses_nothing(rig):
    """One after the other on the same job; the long version has a job for each."""
    process = rig.provision()
    rig.submit("train", slices=2)
    for step, reached in KILLED_AT.items():
        if step == "the job has ended":
            eventually(lambda: rig.running("train", 8), 120, rig.describe)
            rig.end_pods("train")
        eventually(
            lambda reached=reached: reached(rig), 120, lambda step=step: (step, rig.describe())
        )
        rig.kill(process)
        process = rig.provision()
    eventually(lambda: gone(rig), 60, rig.describe)
    assert len(rig.gke.created) == 2


@pytest.mark.chaos
@pytest.mark.parametrize("step", KILLED_AT)
def test_a_provisioner_killed_at_one_step_is_replaced_without_loss(rig, step):
    first = rig.provision()
    rig.submit("train", slices=2, run_for="2s")
    eventually(lambda: KILLED_AT[step](rig), 120, rig.describe)
    rig.kill(first)
    rig.provision()
    eventually(lambda: rig.condition("train", "Completed"), 180, rig.describe)
    eventually(lambda: gone(rig), 60, rig.describe)
    assert len(rig.gke.created) == 2


@pytest.mark.slow
def test_of_two_replicas_one_acts_and_the_other_takes_over_when_it_dies(rig):
    first = rig.provision("--leader-elect", LEASE_DURATION="3s")
    eventually(lambda: "acquired the lease" in rig.log(), 60, rig.log)
    rig.provision("--leader-elect", LEASE_DURATION="3s")
    rig.kill(first)
    rig.submit("train")
    eventually(lambda: rig.running("train", 4), 120, rig.describe)
    assert len(rig.gke.created) == 1


def test_a_jobset_that_disables_provisioning_gets_no_pool(rig):
    rig.provision_here()
    small = {"cloud.google.com/gke-tpu-topology": "2x2"}
    rig.submit("no", hosts=1, select=small, annotations={label_keys.DISABLE: "true"})
    rig.submit("yes")
    eventually(lambda: rig.running("yes", 4), 120, rig.describe)
    assert len(rig.gke.created) == 1


def test_a_stockout_moves_to_the_next_zone(rig):
    rig.gke.stock[("us-central1-a", "ct5lp-hightpu-4t")] = 0
    rig.provision_here(GCP_ZONES="us-central1-a,us-central1-b")
    rig.submit("moves")
    eventually(lambda: rig.running("moves", 4), 180, rig.describe)
    zones = {node["metadata"]["labels"]["topology.kubernetes.io/zone"] for node in nodes(rig)}
    assert zones == {"us-central1-b"}
    assert "NodePoolCreationFailed" in rig.events()


def test_over_budget_no_pool_is_created_and_an_event_is_written(rig):
    rig.provision_here(BUDGET_CHIPS="16")
    rig.submit("budget", slices=2)
    eventually(lambda: "NodePoolCreationFailed" in rig.events(), 120, rig.describe)
    # Of another kind: pods of the first would otherwise run on its node pool.
    rig.submit("small", hosts=1, select={"cloud.google.com/gke-tpu-topology": "2x2"})
    eventually(lambda: rig.running("small", 1), 120, rig.describe)
    assert len(rig.gke.created) == 1 and not rig.running("budget", 4)


@pytest.mark.slow
@pytest.mark.parametrize("count", [6, pytest.param(50, marks=pytest.mark.scale)])
def test_many_pools_are_created_and_deleted_at_once(rig, count):
    rig.provision_here()
    small = {"cloud.google.com/gke-tpu-topology": "2x2"}
    rig.submit("many", slices=count, hosts=1, select=small)
    eventually(lambda: rig.running("many", count), 240, rig.describe)
    rig.end_pods("many")
    eventually(lambda: gone(rig), 240, rig.describe)
    assert len(rig.gke.created) == count


@pytest.mark.slow
def test_a_job_and_a_single_pod_are_served_where_that_is_allowed(rig):
    rig.provision_here(SERVE_KINDS="jobset,job,pod")
    tpu = {"resources": {"limits": {label_keys.TPU: 4}}, "name": "main", "image": "busybox"}
    pod = {
        "restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [tpu],
        "nodeSelector": {**V5E, label_keys.TOPOLOGY: "2x2"},
        "tolerations": [{"key": label_keys.TPU, "operator": "Exists"}],
    }  # fmt: skip
    alone = {"metadata": {"name": "probe", "namespace": rig.namespace}, "spec": pod}
    job = {
        "metadata": {"name": "batch", "namespace": rig.namespace},
        "spec": {"completionMode": "Indexed", "completions": 1, "template": {"spec": pod}},
    }
    rig.connection.create(POD, alone)
    rig.connection.create(JOB, job)

    def running():
        found = rig.connection.list(POD, rig.namespace)[0]
        return [one for one in found if one["status"].get("phase") == "Running"]

    eventually(lambda: len(running()) == 2, 120, rig.describe)
    assert len(rig.gke.created) == 2
    rig.connection.delete(POD, "probe", rig.namespace)
    rig.connection.delete(JOB, "batch", rig.namespace)
    eventually(lambda: not rig.gke.pools, 60, rig.describe)


@pytest.mark.slow
def test_a_pool_used_by_another_jobset_outlives_its_own(rig):
    """Nothing ties either to its pool: the scheduler sends pods where there is room."""
    rig.provision_here()
    rig.submit("host", hosts=1, exclusive=False)
    eventually(lambda: rig.running("host", 1), 120, rig.describe)
    rig.submit("guest", hosts=1, exclusive=False, annotations={label_keys.DISABLE: "true"})
    eventually(lambda: rig.running("guest", 1), 120, rig.describe)
    rig.end_pods("host")
    eventually(lambda: rig.condition("host", "Completed"), 60, rig.describe)
    rig.submit("mark", hosts=1, select={label_keys.TOPOLOGY: "2x2"}, run_for="100ms")
    eventually(lambda: rig.condition("mark", "Completed"), 120, rig.describe)
    eventually(lambda: len(rig.gke.deleted_at) == 1, 60, rig.describe)  # that of `mark`
    assert rig.running("guest", 1) and len(rig.gke.pools) >= 1
    rig.end_pods("guest")
    eventually(lambda: gone(rig), 60, rig.describe)
    assert len(rig.gke.created) == 2


@pytest.mark.slow
def test_a_pool_with_flex_start_is_kept_empty_until_gke_has_its_nodes(rig):
    rig.gke.flex_start_delay = timedelta(hours=1)
    rig.provision_here()
    rig.submit("patient", select={label_keys.FLEX_START: "true"})
    eventually(
        lambda: [pool.status.name for pool in list(rig.gke.pools.values())] == ["RUNNING"],
        120, rig.describe,
    )  # fmt: skip
    assert nodes(rig) == []
    (pool,) = rig.gke.pools.values()
    assert (pool.initial_node_count, pool.autoscaling.max_node_count) == (0, 4)
    rig.gke.nodes.create_nodes(pool)
    eventually(lambda: rig.running("patient", 4), 120, rig.describe)
    rig.end_pods("patient")
    eventually(lambda: gone(rig), 60, rig.describe)
    assert len(rig.gke.created) == 1


TPU7X = {label_keys.ACCELERATOR: "tpu7x", label_keys.TOPOLOGY: "2x2x2"}


@pytest.mark.slow
def test_a_tpu7x_slice_uses_its_policy_and_a_missing_one_gives_a_hint(rig):
    rig.gke.policies = {"tpu-provisioner-2x2x2"}
    rig.provision_here()
    rig.submit("new", hosts=2, accelerator=TPU7X)
    rig.submit("large", hosts=4, accelerator=TPU7X, select={label_keys.TOPOLOGY: "2x2x4"})
    eventually(lambda: rig.running("new", 2), 120, rig.describe)
    (pool,) = rig.gke.pools.values()
    assert pool.placement_policy.policy_name == "tpu-provisioner-2x2x2"
    assert pool.config.machine_type == "tpu7x-standard-4t"
    eventually(
        lambda: any(
            "--make-policies" in one["message"]
            for one in rig.connection.list(EVENT, rig.namespace)[0]
        ),
        60, rig.describe,
    )  # fmt: skip
    rig.end_pods("new")
    eventually(lambda: gone(rig), 60, rig.describe)
