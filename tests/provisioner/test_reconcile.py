"""The provisioner at work on GKE's API: pools come, fail, heal and go."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.container_v1", reason="needs the extra `gke`")

from tests.provisioner import builders
from tests.provisioner.harness import ProvisionerHarness
from tpufleet.provisioner.gke_api.node_pools import MockNodePools
from tpufleet.provisioner.kube import label_keys

MINUTE = timedelta(minutes=1)
SECONDS = timedelta(seconds=1)


@pytest.fixture
def make():
    worlds = []

    def one(**given):
        worlds.append(ProvisionerHarness(**given))
        return worlds[-1]

    yield one
    for world in worlds:
        world.close()


def test_a_pool_is_made_used_and_deleted_within_five_seconds_of_the_end(make):
    world = make()
    world.submit(slices=2)
    world.pass_time(MINUTE)
    assert list(world.states().values()) == ["RUNNING", "RUNNING"]
    world.pod_list = []  # they run now
    world.end()
    world.pass_time(4 * SECONDS)
    assert list(world.states().values()) == ["STOPPING", "STOPPING"]
    world.pass_time(MINUTE)
    assert world.states() == {}
    assert world.records.reasons() == [
        "NodePoolCreationStarted", "NodePoolCreationStarted",
        "NodePoolCreationSucceeded", "NodePoolCreationSucceeded",
        "NodePoolDeletionStarted", "NodePoolDeletionStarted",
        "NodePoolDeletionSucceeded", "NodePoolDeletionSucceeded",
    ]  # fmt: skip


def test_rounds_never_wait_so_fifty_pools_come_at_once_with_three_workers(make):
    world = make()
    world.submit(slices=50)
    world.rounds()
    assert list(world.states().values()) == ["PROVISIONING"] * 50
    world.pass_time(MINUTE)
    assert list(world.states().values()) == ["RUNNING"] * 50


@pytest.mark.parametrize("rounds", range(1, 25, 3))
def test_a_provisioner_killed_after_any_number_of_rounds_makes_no_pool_twice(make, rounds):
    world = make()
    world.submit(slices=3)
    world.rounds(rounds)
    world.restart()
    world.pass_time(MINUTE)
    assert sorted(world.states().values()) == ["RUNNING"] * 3
    assert len(world.gke.created) == 3
    world.end()
    world.rounds()
    world.restart()
    world.pass_time(MINUTE)
    assert world.states() == {}


def test_a_stock_out_is_deleted_and_the_next_zone_is_asked(make):
    world = make(zones=("us-central1-a", "us-central1-b"))
    world.gke.stock[("us-central1-a", "ct5lp-hightpu-4t")] = 3
    world.submit()
    world.pass_time(3 * MINUTE)
    (pool,) = world.gke.pools.values()
    assert (list(pool.locations), pool.status.name) == (["us-central1-b"], "RUNNING")
    failed = [words for _, reason, words in world.records.all if reason == "NodePoolCreationFailed"]
    assert "does not have enough resources" in failed[0]
    assert (
        world.provisioner.metrics.value("tpu_provisioner_pool_failures_total", trouble="stock") == 1
    )


def test_with_one_zone_a_stock_out_is_tried_again_and_heals(make):
    world = make()
    key = ("us-central1-a", "ct5lp-hightpu-4t")
    world.gke.stock[key] = 0
    world.submit()
    world.pass_time(5 * MINUTE)
    tries = len(world.gke.created)
    assert 2 <= tries <= 5  # each wait is longer than the last
    del world.gke.stock[key]
    world.pass_time(10 * MINUTE)
    assert list(world.states().values()) == ["RUNNING"]


REFUSALS = [
    pytest.param("RESOURCE_EXHAUSTED", "Quota exceeded for requests per minute", True, id="429"),
    pytest.param("UNAVAILABLE", "try again", True, id="503"),
    pytest.param("INTERNAL", "oops", True, id="500"),
    pytest.param("DEADLINE_EXCEEDED", "late", True, id="timeout"),
    pytest.param("FAILED_PRECONDITION", "running incompatible operation", True, id="busy"),
    pytest.param("PERMISSION_DENIED", "container.clusters.update", False, id="403"),
    pytest.param("INVALID_ARGUMENT", "no such network", False, id="400"),
]


@pytest.mark.parametrize(("code", "words", "heals"), REFUSALS)
def test_an_error_of_the_api_is_told_and_tried_again_where_that_helps(make, code, words, heals):
    world = make()
    world.gke.fail_next_call("create", code, words)
    world.submit()
    world.pass_time(2 * MINUTE)
    assert list(world.states().values()) == (["RUNNING"] if heals else [])
    failed = [told for _, reason, told in world.records.all if reason == "NodePoolCreationFailed"]
    assert words in failed[0]


@pytest.mark.parametrize("code", ["PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "INTERNAL"])
def test_a_listing_that_fails_ends_the_round_and_nothing_else(make, code):
    world = make()
    world.submit()
    world.gke.fail_next_call("list", code, "no")
    with pytest.raises(Exception, match="no"):
        world.rounds()
    world.pass_time(MINUTE)
    assert list(world.states().values()) == ["RUNNING"]


def test_a_deletion_that_is_refused_is_told_and_tried_again(make):
    world = make()
    world.submit()
    world.pass_time(MINUTE)
    world.end()
    world.gke.fail_next_call("delete", "UNAVAILABLE", "later", times=2)
    world.pass_time(MINUTE)
    assert world.states() == {}
    assert world.records.reasons().count("NodePoolDeletionFailed") == 2


def test_a_creation_that_fails_on_its_way_is_never_called_a_success(make):
    world = make()
    world.gke.fail_next_creation(13, "the network is gone")
    world.submit()
    world.pass_time(40 * SECONDS)
    assert "NodePoolCreationSucceeded" not in world.records.reasons()
    assert any("the network is gone" in words for _, _, words in world.records.all)
    world.pass_time(3 * MINUTE)
    assert list(world.states().values()) == ["RUNNING"]


def test_a_pool_that_is_stopping_is_waited_for_and_made_anew(make):
    world = make()
    world.submit()
    world.pass_time(MINUTE)
    (name,) = world.gke.pools
    world.gke.delete(world.settings.parent, name)
    world.rounds()
    assert world.states() == {name: "STOPPING"}
    world.pass_time(MINUTE)
    assert world.states() == {name: "RUNNING"}
    assert world.gke.created == [name, name]


def test_a_running_pool_with_an_error_of_stock_is_replaced(make):
    world = make()
    world.submit()
    world.pass_time(MINUTE)
    (name,) = world.gke.pools
    world.gke.set_status(name, "RUNNING_WITH_ERROR", "2 of 4 nodes", "GCE_STOCKOUT")
    world.pass_time(2 * MINUTE)
    assert world.states() == {name: "RUNNING"}
    assert len(world.gke.created) == 2


def test_an_orphan_is_deleted_whatever_its_state_and_a_live_owner_is_asked_for_first(make):
    world = make()
    world.submit("one")
    world.submit("two")
    world.pass_time(MINUTE)
    hidden = world.owners()
    world.pod_list = []
    # The watch shows nothing, but the server still has both: nothing is deleted.
    world.owner_now = lambda namespace, name: hidden[namespace, name]
    world.jobset_list = []
    world.pass_time(20 * SECONDS)
    assert list(world.states().values()) == ["RUNNING"] * 2
    world.owner_now = lambda namespace, name: None
    for name in world.gke.pools:
        world.gke.set_status(name, "ERROR")
    world.pass_time(MINUTE)
    assert world.states() == {}


def test_a_dry_run_says_each_thing_once(make, caplog):
    caplog.set_level("INFO")
    world = make(dry_run=True)
    world.submit()
    world.submit("odd", select={label_keys.TOPOLOGY: "3x3"})
    world.rounds(3)
    said = [record.getMessage() for record in caplog.records]
    (created,) = [words for words in said if "would create" in words]
    assert "4 × ct5lp-hightpu-4t in us-central1-a (on-demand), for pod default/train" in created
    (waits,) = [words for words in said if "waits" in words]
    assert "no topology 3x3" in waits


def test_a_dry_run_changes_nothing(make):
    world = make(dry_run=True)
    world.submit(slices=2)
    world.pass_time(MINUTE)
    assert world.gke.created == []


def test_what_no_pool_can_serve_is_told_once_and_stops_nobody_else(make):
    world = make()
    world.submit("bad", chips=16)
    world.submit("good")
    world.pass_time(MINUTE)
    assert list(world.states().values()) == ["RUNNING"]
    told = [words for _, reason, words in world.records.all if reason == "NodePoolCreationFailed"]
    assert len(told) == 1 and "16 chips" in told[0]


def test_a_changed_spec_deletes_the_pool_and_makes_another(make):
    world = make()
    world.submit()
    world.pass_time(MINUTE)
    world.pod_list = [builders.pod(node_selector={"cloud.google.com/gke-spot": "true"})]
    world.pass_time(2 * MINUTE)
    (pool,) = world.gke.pools.values()
    assert pool.config.spot and pool.status.name == "RUNNING"
    assert [taint.key for taint in pool.config.taints] == ["cloud.google.com/gke-spot"]


def test_a_restarted_jobset_keeps_its_pool(make):
    world = make()
    world.submit()
    world.pass_time(MINUTE)
    pod = builders.pod()
    pod["metadata"]["uid"] = "another"
    world.pod_list = [pod]
    world.pass_time(MINUTE)
    assert len(world.gke.created) == 1


def test_what_is_measured_can_be_read_by_prometheus(make):
    world = make()
    world.submit(slices=2)
    world.pass_time(MINUTE)
    text = world.provisioner.metrics.text()
    assert 'tpu_provisioner_pools{state="running"} 2' in text
    assert "tpu_provisioner_chips 32" in text
    assert 'tpu_provisioner_provisioning_seconds_bucket{le="60"} 2' in text


def test_a_provider_that_does_nothing_is_a_success_without_complaint_or_end(make):
    world = make(provider="mock")
    world.restart(MockNodePools())
    world.submit(slices=2)
    world.pass_time(20 * MINUTE)
    assert set(world.records.reasons()) == {"NodePoolCreationStarted", "NodePoolCreationSucceeded"}
    assert len(world.records.all) == 4
    world.end()
    world.pass_time(MINUTE)
    assert world.records.reasons()[4:] == [
        "NodePoolDeletionStarted", "NodePoolDeletionStarted",
        "NodePoolDeletionSucceeded", "NodePoolDeletionSucceeded",
    ]  # fmt: skip


def test_only_the_leader_collects_orphans(make):
    world, leads = make(), []
    world.submit()
    world.pass_time(MINUTE)
    world.pod_list, world.jobset_list = [], []  # its JobSet is gone
    world.restart(leading=lambda: bool(leads))
    thread = threading.Thread(target=world.provisioner.run)
    thread.start()
    try:
        for _ in range(20):
            world.clock.advance(MINUTE)
            world.provisioner.wake()
            time.sleep(0.02)
        assert list(world.states().values()) == ["RUNNING"]
        leads.append("now it does")
        deadline = time.monotonic() + 30
        while "RUNNING" in world.states().values():
            assert time.monotonic() < deadline
            world.clock.advance(SECONDS)
            world.provisioner.wake()
            time.sleep(0.02)
    finally:
        world.provisioner.close()
        thread.join()


def test_a_flexible_pool_is_waited_for_as_long_as_gke_takes(make):
    world = make()
    world.submit(select={label_keys.FLEX_START: "true"})
    world.pass_time(60 * MINUTE)
    assert list(world.states().values()) == ["RUNNING"]
    assert len(world.gke.created) == 1
    world.end()
    world.pass_time(MINUTE)
    assert world.states() == {}
