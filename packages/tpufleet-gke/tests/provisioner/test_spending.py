"""No pool is bought for a pod that would not run on it, and none is left behind."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.container_v1", reason="needs the extra `gke`")

from tests.provisioner.harness import ProvisionerHarness
from tpufleet.clocks import ManualClock
from tpufleet_gke.provisioner.model import label_keys

ZONE = "us-central1-a"
MINUTE, SECOND = timedelta(minutes=1), timedelta(seconds=1)
SPOT_TOLERATION = {"key": label_keys.SPOT, "operator": "Exists", "effect": "NoSchedule"}


@pytest.fixture
def harness():
    harness = ProvisionerHarness(simulate_nodes=True)
    yield harness
    harness.close()


def requests(**amounts):
    return {"containers": [{"resources": {"requests": {label_keys.TPU: "4", **amounts}}}]}


# Known before a pool exists: nothing is bought.
IMPOSSIBLE = {
    "spot without a toleration": ({"node_selector": {label_keys.SPOT: "true"}}, "toler"),
    "4 Ti of memory": (requests(memory="4Ti"), "memory"),
    "500 CPUs": (requests(cpu="500"), "cpu"),
    # GKE reserves some of each node.
    "all memory of the machine": (requests(memory="192Gi"), "memory; a node of ct5lp-hightpu-4t"),
    "a label of GKE's that no node has": (
        {"node_selector": {"cloud.google.com/gke-sandbox": "true"}}, "gke-sandbox=true",
    ),
    "all CPUs of the machine": (requests(cpu="112"), "cpu; a node of ct5lp-hightpu-4t has 111"),
}  # fmt: skip
LEFT_TO_GKE = {"node_selector": {label_keys.COMPUTE_CLASS: "tpus"}}
# Known only to the scheduler, once there are nodes.
MISFITS = {
    "another extended resource": (
        requests(**{"example.com/nic": "1"}),
        "Insufficient example.com/nic",
    ),
}


@pytest.mark.parametrize(("pod", "reason"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_nothing_is_bought_for_a_pod_that_fits_no_node_of_its_kind(harness, pod, reason):
    harness.submit(**pod)
    harness.reconcile(90, every=20 * SECOND)
    assert harness.gke.created == []
    (failed,) = harness.events.messages("NodePoolCreationFailed")
    assert reason in failed


@pytest.mark.parametrize(("pod", "reason"), MISFITS.values(), ids=MISFITS)
def test_a_pool_that_its_pod_does_not_fit_is_deleted_and_not_bought_again(harness, pod, reason):
    harness.submit(**pod)
    harness.advance(5 * MINUTE)
    assert len(harness.gke.created) == 1
    assert reason in harness.events.messages("NodePoolCreationFailed")[0]
    harness.reconcile(135, every=20 * SECOND)
    assert len(harness.gke.created) == 1 and harness.states() == {}
    assert reason in harness.events.messages("NodePoolCreationFailed")[-1]
    harness.reconcile(24 * 12, every=5 * MINUTE)
    assert len(harness.gke.created) <= 6


def test_the_bill_of_a_jobset_says_what_was_used(harness):
    harness.submit(**{"node_selector": {label_keys.TOPOLOGY: "2x2"}})
    harness.reconcile(30, every=10 * SECOND)
    assert harness.pod_list[0]["status"]["phase"] == "Running"
    start = {"namespace": "default", "owner": "train"}
    metrics = harness.provisioner.metrics

    def bill():
        seconds = [
            metrics.value("tpu_provisioner_chip_seconds_total", {**start, "used": used})
            for used in ("true", "false")
        ]
        return *seconds, metrics.value("tpu_provisioner_dollars_total", start)

    used, unused, dollars = bill()
    harness.reconcile(60, every=10 * SECOND)
    harness.end("train")
    harness.reconcile(6, every=10 * SECOND)
    assert harness.states() == {}
    more_used, more_unused, more_dollars = (
        after - before for after, before in zip(bill(), (used, unused, dollars), strict=True)
    )
    assert 4 * 590 <= more_used <= 4 * 610 and 0 < more_unused <= 4 * 40
    assert more_dollars == pytest.approx(1.2 * (more_used + more_unused) / 3600)
    (message,) = harness.events.messages("NodePoolDeletionSucceeded")
    assert "chip-hours, $" in message and "unused for" in message
    harness.reconcile(70, every=MINUTE)
    assert bill() == (0, 0, 0)  # long enough to be scraped, and not for ever


def test_the_oldest_wait_is_a_metric(harness):
    harness.gke.stock = {(ZONE, "ct5lp-hightpu-4t"): 0}
    harness.submit()
    harness.advance(10 * MINUTE)
    harness.submit("later", since=harness.clock.now())
    harness.reconcile()
    oldest = harness.provisioner.metrics.value("tpu_provisioner_oldest_wait_seconds")
    assert 600 <= oldest < 620


def test_one_cause_is_logged_once_for_all_pods(harness, caplog):
    harness.gke.fail_next_call("create", "PERMISSION_DENIED", "no", times=20)
    harness.submit(slices=20)
    harness.advance(MINUTE)
    assert len(harness.events.messages("NodePoolCreationFailed")) >= 20
    warnings = [one for one in caplog.records if "CreationFailed on Pod" in one.getMessage()]
    assert len(warnings) == 1


@pytest.mark.parametrize("failing", [0, 3], ids=["saved at once", "saved again"])
def test_a_restart_does_not_forget_that_a_pod_fits_no_pool(harness, failing):
    harness.failing_saves = failing
    harness.submit(**MISFITS["another extended resource"][0])
    harness.advance(15 * MINUTE)
    assert len(harness.gke.created) == 1 and harness.states() == {}
    for _ in range(4):
        harness.restart()
        harness.advance(5 * MINUTE)
    assert len(harness.gke.created) == 1


@pytest.mark.parametrize("step", [20 * MINUTE, -20 * MINUTE], ids=["forwards", "backwards"])
def test_a_step_of_the_clock_ends_no_timer(harness, step):
    """A pool whose chips come late is healthy for ten minutes."""
    harness.gke.device_plugin_delay = 3 * MINUTE
    harness.submit()
    harness.advance(MINUTE)
    harness.simulated.clock = harness.gke.clock = steady = ManualClock(harness.clock.now())
    harness.clock.step(step)
    for _ in range(20):
        steady.advance(10 * SECOND)
        harness.reconcile(every=10 * SECOND)
    assert "NodePoolDeletionStarted" not in harness.events.reasons()
    assert len(harness.gke.created) == 1


def test_a_late_device_plugin_is_awaited(harness):
    harness.gke.device_plugin_delay = 5 * MINUTE
    harness.submit()
    harness.advance(8 * MINUTE)
    assert len(harness.gke.created) == 1
    assert harness.pod_list[0]["status"]["phase"] == "Running"
    assert "NodePoolDeletionStarted" not in harness.events.reasons()


@pytest.mark.slow
def test_a_pool_that_another_job_used_for_long_is_not_a_misfit(harness):
    """The scheduler takes up to ten seconds to see that it is free: it backs off."""
    single = {"node_selector": {label_keys.TOPOLOGY: "2x2"}}
    harness.gke.stock = {(ZONE, "ct5lp-hightpu-4t"): 1}
    harness.submit("first", **single)
    harness.reconcile(5)
    harness.submit("other", **single)
    harness.pod_list.reverse()  # the scheduler places it first
    harness.advance(20 * MINUTE)
    assert [pod["status"]["phase"] for pod in harness.pod_list] == ["Running", "Pending"]
    harness.end("other")
    for _ in range(5):  # before the scheduler looks again
        harness.clock.advance(2 * SECOND)
        harness.provisioner.reconcile()
        harness.provisioner.collect_results(timeout=900)
    harness.advance(MINUTE)
    assert [pod["status"]["phase"] for pod in harness.pod_list] == ["Running"]
    assert not any("does not fit" in text for _, _, text in harness.events.recorded)


def test_a_spare_pool_whose_chips_come_late_is_not_a_misfit(harness):
    """Its own Job runs on another pool, whose Job waits for it."""
    single = {"node_selector": {label_keys.TOPOLOGY: "2x2"}}
    harness.gke.device_plugin_delay = 4 * MINUTE
    harness.submit("first", **single)
    harness.reconcile(5)
    harness.submit("other", **single)
    harness.pod_list.reverse()
    for _ in range(300):  # the scheduler looks every ten seconds
        harness.clock.advance(2 * SECOND)
        harness.gke.advance()
        if _ % 5 == 0:
            harness.simulated.schedule(harness.pod_list)
        harness.provisioner.reconcile()
        harness.provisioner.collect_results(timeout=900)
    assert [pod["status"]["phase"] for pod in harness.pod_list] == ["Running"] * 2
    assert len(harness.gke.created) == 2
    assert not any("does not fit" in text for _, _, text in harness.events.recorded)


def test_a_recreated_jobset_that_fits_gets_a_pool_at_once(harness):
    harness.submit(**MISFITS["another extended resource"][0])
    harness.reconcile(60, every=20 * SECOND)
    assert harness.states() == {}
    harness.jobsets, harness.pod_list = [], []
    harness.advance(MINUTE)
    harness.submit()
    harness.jobsets[0]["metadata"]["uid"] = "another"
    harness.advance(MINUTE)
    assert harness.pod_list[0]["status"]["phase"] == "Running"


def test_a_pool_with_running_pods_is_never_deleted_as_unused(harness):
    """Pods of Jobs that are not watched, such as workers, run on it."""
    harness.submit(**MISFITS["another extended resource"][0])
    harness.advance(MINUTE)
    (pool,) = harness.gke.pools
    worker = {
        "metadata": {"name": "worker", "namespace": "other", "uid": "w", "labels": {}},
        "spec": {"nodeName": f"gke-{pool}-2", **requests()},
        "status": {"phase": "Running"},
    }
    seen = harness.pods_on
    harness.pods_on = lambda node: [*seen(node), *([worker] if node.endswith("-2") else [])]
    harness.reconcile(90, every=20 * SECOND)
    assert harness.states() == {pool: "RUNNING"}


@pytest.mark.parametrize("batches", [8, pytest.param(25, marks=pytest.mark.slow)])
def test_over_many_jobsets_no_more_pools_are_bought_than_needed(harness, batches):
    """Spend ledger: pools created ≤ needed + retries after failures; none left at the end."""
    chosen = random.Random(7)
    kinds = [
        {}, {}, {}, {"node_selector": {label_keys.TOPOLOGY: "2x4"}},
        {"node_selector": {label_keys.SPOT: "true"}, "tolerations": [SPOT_TOLERATION]},
        LEFT_TO_GKE,
        *(pod for pod, _ in (*IMPOSSIBLE.values(), *MISFITS.values())),
    ]  # fmt: skip
    needed = misfits = 0
    for batch in range(batches):
        harness.gke.device_plugin_delay = chosen.choice([0, 20, 90]) * timedelta(seconds=1)
        names = [f"job-{batch}-{number}" for number in range(20)]
        for name in names:
            kind = chosen.choice(kinds)
            harness.submit(name, **kind)
            needed += kind in kinds[:5]
            misfits += kind in kinds[-2:]
        harness.reconcile(20, every=timedelta(seconds=10))
        for name in names:
            harness.end(name)
        harness.reconcile(4, every=timedelta(seconds=10))
        harness.jobsets = []
    assert harness.states() == {}
    assert len(harness.gke.created) <= needed + misfits


def spend(harness, seed, batches):
    """JobSets of every kind on a GKE that runs out of stock, loses nodes, and fails deletions.
    Returns pools bought, pools needed (or tried once for a pod that fits none), and failures."""
    chosen = random.Random(seed)
    fitting = [{}, {}, {"node_selector": {label_keys.TOPOLOGY: "2x4"}}]
    impossible = [LEFT_TO_GKE, *(pod for pod, _ in IMPOSSIBLE.values())]
    misfits = [pod for pod, _ in MISFITS.values()]
    needed = failures = 0
    for batch in range(batches):
        harness.gke.device_plugin_delay = chosen.choice([0, 20, 90]) * SECOND
        sold_out = chosen.random() < 0.3
        harness.gke.stock = {(ZONE, "ct5lp-hightpu-4t"): 8} if sold_out else {}
        for _ in range(chosen.choice([0, 0, 1, 2])):
            harness.gke.lose_nodes_of_next_creation(1)
            failures += 1
        if chosen.random() < 0.3:
            harness.gke.fail_next_deletion(13, "internal error")
        names = [f"job-{batch}-{number}" for number in range(20)]
        for name in names:
            pod = chosen.choice(fitting * 3 + impossible + misfits)
            harness.submit(name, **pod)
            needed += pod not in impossible
        harness.reconcile(20, every=10 * SECOND)
        harness.gke.stock = {}
        for name in names:
            harness.end(name)
        harness.reconcile(12, every=10 * SECOND)
        harness.jobsets = []
    harness.reconcile(30, every=20 * SECOND)
    failures += sum(
        one.operation_type.name == "CREATE_NODE_POOL" and bool(one.error.code)
        for one in harness.gke.operations.values()
    )
    return len(harness.gke.created), needed, failures


def test_on_a_failing_gke_no_more_pools_are_bought_than_needed_and_retried(harness):
    bought, needed, failures = spend(harness, seed=3, batches=4)
    assert harness.states() == {} and bought <= needed + failures


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(3))
def test_over_500_jobsets_on_a_failing_gke_spending_stays_bounded(harness, seed):
    bought, needed, failures = spend(harness, seed=seed, batches=25)
    assert harness.states() == {} and bought <= needed + failures
