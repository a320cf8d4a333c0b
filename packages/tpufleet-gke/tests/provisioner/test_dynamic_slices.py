"""Slices formed of sub-blocks of an all-capacity reservation: of which, and what follows when one
fails."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.container_v1", reason="needs the extra `gke`")

from tests.kubernetes.fake_api_server import FakeApiServer, FakeConnection
from tests.provisioner import builders
from tests.server_process import wait_until
from tpufleet_gke.provisioner.kube import admission
from tpufleet_gke.provisioner.kube.admission import AdmissionSettings
from tpufleet_gke.provisioner.kube.pool_events import SLICE_FAILED
from tpufleet_gke.provisioner.kube.watched_cluster import WatchedCluster
from tpufleet_gke.provisioner.model import label_keys

SECOND = timedelta(seconds=1)


@pytest.fixture
def cluster(make):
    harness = make(dynamic_slices=True)
    harness.slices.add("a", "b", "c")
    return harness


def name_of(jobset, number=0, namespace="default"):
    """What the admission webhook makes pods select."""
    job = f"{jobset}-slice-{number}"
    return admission.mutate_selectors({}, namespace, job, AdmissionSettings(), True)[
        label_keys.TPU_SLICE
    ]


def submit(harness, jobset="train", topology="4x4x8", slices=1, **pod):
    harness.jobsets.append(builders.jobset(jobset))
    for number in range(slices):
        one = builders.pod(
            jobset, job=number, annotations={label_keys.SLICE_TOPOLOGY: topology}, **pod
        )
        one["spec"]["nodeSelector"] = {
            label_keys.ACCELERATOR: "tpu7x", label_keys.TPU_SLICE: name_of(jobset, number)
        }  # fmt: skip
        harness.pod_list.append(one)


def rounds(harness, count=3):
    """In each, what was sent arrives."""
    workers = harness.settings.concurrency
    for _ in range(count):
        harness.reconcile(every=SECOND)
        idle = threading.Barrier(workers)
        list(harness.delete_executor.map(lambda _, idle=idle: idle.wait(), range(workers)))


def state(harness, name):
    (condition,) = harness.slices.slices[name]["status"]["conditions"]
    return condition["status"], condition["reason"]


def test_a_slice_is_formed_of_free_sub_blocks_and_no_node_pool_is_bought(cluster):
    submit(cluster)
    rounds(cluster)
    assert cluster.slices.created == [(name_of("train"), ("a", "b"))]
    assert state(cluster, name_of("train")) == ("True", "ACTIVE")
    labels = [
        node["metadata"]["labels"].get(label_keys.TPU_SLICE) for node in cluster.slices.nodes()
    ]
    assert labels == 32 * [name_of("train")] + 16 * [None]
    assert cluster.gke.created == []


def test_a_slice_that_fails_is_formed_of_a_spare_sub_block_within_five_seconds(cluster):
    submit(cluster)
    rounds(cluster)
    failed_at = cluster.clock.now()
    cluster.slices.set_state("b", "UNHEALTHY")
    assert state(cluster, name_of("train")) == ("False", "FAILED")
    rounds(cluster, 5)
    assert cluster.clock.now() - failed_at == 5 * SECOND
    assert state(cluster, name_of("train")) == ("True", "ACTIVE")
    ((name, taken),) = cluster.slices.created[1:]
    assert (name, sorted(taken)) == (name_of("train"), ["a", "c"])
    [message] = [each for each in cluster.events.messages(SLICE_FAILED) if "FAILED" in each][:1]
    assert "a partition is unhealthy" in message


def test_a_sub_block_that_only_looks_healthy_is_chosen_last(cluster):
    submit(cluster, topology="4x4x4")
    nodes = cluster.slices.nodes()
    cluster.partition_nodes = lambda: nodes  # a watch that lags
    cluster.slices.sub_blocks["a"].nodes = 15
    rounds(cluster, 8)
    assert [taken for _, taken in cluster.slices.created] == [("a",), ("b",)]


def test_without_a_spare_sub_block_the_event_says_what_there_is(cluster):
    submit(cluster, topology="4x8x8")
    rounds(cluster)
    (message,) = cluster.events.messages(SLICE_FAILED)
    assert "of 3 in the cluster, 3 are healthy and free" in message
    cluster.slices.add("d", block="block-2")
    rounds(cluster)
    assert cluster.slices.created == []
    cluster.slices.add("e")
    rounds(cluster)
    assert cluster.slices.created == [(name_of("train"), ("a", "b", "c", "e"))]


def test_all_slices_of_a_jobset_are_formed_or_none(cluster):
    submit(cluster, slices=2)
    rounds(cluster)
    assert cluster.slices.created == []
    assert "(4 for all slices of its owner)" in cluster.events.messages(SLICE_FAILED)[0]
    submit(cluster, "small", topology="4x4x4")
    rounds(cluster)
    assert [name for name, _ in cluster.slices.created] == [name_of("small")]


def test_a_failed_slice_is_kept_while_there_is_nothing_to_form_it_of(cluster):
    submit(cluster, topology="4x4x12")
    rounds(cluster)
    cluster.slices.set_state("c", "UNHEALTHY")
    rounds(cluster, 10)
    assert len(cluster.slices.created) == 1
    assert "there are no spare sub-blocks" in cluster.events.messages(SLICE_FAILED)[-1]
    assert "1 UNHEALTHY" in cluster.events.messages(SLICE_FAILED)[-1]


@pytest.mark.parametrize("how", ["completes", "is deleted", "is suspended"])
def test_a_slice_is_deleted_with_its_jobset_and_no_other_is(cluster, how):
    cluster.slices.create(
        {"metadata": {"name": "foreign"},
         "spec": {"type": "tpu7x", "topology": "4x4x4", "partitionIds": ["c"]}}
    )  # fmt: skip
    submit(cluster)
    rounds(cluster)
    cluster.pod_list = []
    match how:
        case "completes":
            cluster.jobsets = [builders.jobset("train", Completed=cluster.clock.now())]
        case "is suspended":
            cluster.jobsets = [builders.jobset("train", Suspended=cluster.clock.now())]
        case _:
            cluster.jobsets = []
    rounds(cluster, 5)
    assert list(cluster.slices.slices) == ["foreign"]


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("2x2x2", "4x4x4 or larger"),
        ("8x4x4", "write 4x4x8"),
        ("64x64x64", "9216 chips"),
        ("big", "no topology 'big'"),
    ],
)
def test_a_topology_that_no_slice_has_is_refused_in_an_event(cluster, topology, message):
    submit(cluster, topology=topology)
    rounds(cluster)
    assert cluster.slices.created == []
    assert message in cluster.events.messages(SLICE_FAILED)[0]


def test_a_pod_without_the_selector_is_told_of_the_webhook(cluster):
    submit(cluster)
    del cluster.pod_list[0]["spec"]["nodeSelector"][label_keys.TPU_SLICE]
    rounds(cluster)
    assert "install the admission webhook" in cluster.events.messages(SLICE_FAILED)[0]


def test_the_webhook_selects_a_slice_instead_of_a_node_pool():
    selectors = admission.mutate_selectors(
        {"a": "b"}, "n", "train-slice-0", AdmissionSettings(), True
    )
    assert set(selectors) == {"a", label_keys.TPU_SLICE}
    assert len(selectors[label_keys.TPU_SLICE]) <= 49
    other = admission.mutate_selectors({}, "other", "train-slice-0", AdmissionSettings(), True)
    assert other[label_keys.TPU_SLICE] != selectors[label_keys.TPU_SLICE]


def test_a_pod_cannot_take_or_replace_the_slice_of_another_tenant(cluster):
    submit(cluster)
    rounds(cluster)
    cluster.slices.set_state("b", "UNHEALTHY")
    cluster.pod_list = []  # its own pods have not ended yet
    submit(cluster, "thief")
    cluster.pod_list[0]["spec"]["nodeSelector"][label_keys.TPU_SLICE] = name_of("train")
    rounds(cluster, 5)
    assert len(cluster.slices.created) == 1 and name_of("train") in cluster.slices.slices
    assert "belongs to another" in cluster.events.messages(SLICE_FAILED)[0]


def test_a_watch_of_jobsets_that_lags_costs_no_slice(cluster):
    submit(cluster)
    known, cluster.jobsets = cluster.jobsets, []
    rounds(cluster)
    assert cluster.slices.created == [], "its owner is not known yet"
    cluster.jobsets = known
    rounds(cluster)
    of_watch = cluster.owners
    cluster.fetch_owner = lambda namespace, name: of_watch().get((namespace, name))
    cluster.owners = dict
    rounds(cluster, 5)
    assert len(cluster.slices.created) == 1 and list(cluster.slices.slices) == [name_of("train")]


def test_a_watch_of_slices_that_lags_costs_no_sub_block(cluster):
    lag = cluster.tpu_slices()
    cluster.tpu_slices = lambda: lag
    submit(cluster, topology="4x4x4")
    rounds(cluster, 1)
    submit(cluster, "other", topology="4x4x4")
    rounds(cluster, 3)
    assert [taken for _, taken in cluster.slices.created] == [("a",), ("b",)]


def test_a_refusal_is_one_event(cluster):
    submit(cluster, topology="2x2x2")
    rounds(cluster, 5)
    assert len([1 for kind, *_ in cluster.events.recorded if kind == "Pod"]) == 1


def test_nothing_is_formed_without_the_setting(make):
    harness = make()
    harness.slices.add("a", "b")
    submit(harness)
    rounds(harness)
    assert harness.slices.created == []


def test_slices_are_created_watched_and_deleted():
    pytest.importorskip("lightkube", reason="needs the extra `k8s`")
    connection = FakeConnection(FakeApiServer())
    changes = threading.Semaphore(0)
    cluster = WatchedCluster(connection, changes.release, dynamic_slices=True)  # type: ignore[arg-type]
    cluster.start()
    try:
        assert cluster.wait_synced(60)
        spec = {"type": "tpu7x", "topology": "4x4x4", "partitionIds": ["a"]}
        for _ in range(2):  # the second time, it is there
            cluster.create_slice({"metadata": {"name": "train-1"}, "spec": spec})
        wait_until(lambda: len(cluster.tpu_slices()) == 1, 60, cluster.tpu_slices)
        cluster.delete_slice("train-1")
        wait_until(lambda: not cluster.tpu_slices(), 60, cluster.tpu_slices)
        cluster.delete_slice("train-1")
    finally:
        cluster.close()
