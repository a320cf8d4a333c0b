"""The provider with its watches: fewer lists, and no decision on lagging data."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

pytest.importorskip("lightkube", reason="needs the extra `k8s`: pip install 'tpufleet[k8s]'")

from msgspec import structs

from tests.kubernetes.fake_api_server import FakeApiServer, FakeConnection
from tests.providers.gke.test_manifests import SETTINGS, order
from tests.server_process import wait_until
from tpufleet.clocks import ManualClock
from tpufleet.kubernetes.connections import EVENT, JOBSET, POD, SECRET, WORKLOAD
from tpufleet.model.fleet.cloud_slices import CloudSlice, CloudState, ExpectedSlice
from tpufleet.model.fleet.slices import LossReason, SliceId
from tpufleet.model.job.pod_settings import PodSettings
from tpufleet.providers.base import Fault
from tpufleet.providers.gke import keys
from tpufleet.providers.gke.provider import GkeProvider
from tpufleet.providers.gke.settings import GkeTeam

TIMEOUT = 60.0  # seconds; the machine may be busy
NAMESPACE, HOSTS = SETTINGS.namespace, 4


class World:
    """Several servers on one fake API server. The test plays JobSet's controller and kubelets."""

    def __init__(self) -> None:
        self.clock, self.cluster = ManualClock(), FakeApiServer()
        self.connections: list[FakeConnection] = []
        self._providers: list[GkeProvider] = []

    def server(self, *, start: bool = True, **settings: Any) -> tuple[GkeProvider, FakeConnection]:
        connection = FakeConnection(self.cluster)
        provider = GkeProvider(
            connection, structs.replace(SETTINGS, **settings), fleet="f1", zones=("us-central1-a",),
            clock=self.clock,
        )  # fmt: skip
        self.connections.append(connection)
        self._providers.append(provider)
        if start:
            provider.start()
            watched = {JOBSET, POD, *([WORKLOAD] if settings.get("queue") else ())}
            wait_until(
                lambda: connection.watching >= watched, TIMEOUT, lambda: f"{connection.watching}"
            )
        return provider, connection

    def close(self) -> None:
        for provider in self._providers:
            provider.close()

    def make_pods(self, slot: int = 0, phase: str = "Running", mark: str = "") -> None:
        (jobset,) = self.cluster.items[JOBSET].values()
        for host in range(HOSTS):
            name = f"{jobset['metadata']['name']}-{slot}-{host}{mark}"
            self.cluster.put(POD, {
                "metadata": {
                    "name": name, "namespace": NAMESPACE, "uid": f"uid-of-{name}",
                    "creationTimestamp": f"2026-01-01T00:00:{len(mark):02}Z",
                    "labels": {
                        keys.FLEET: "f1", keys.JOB_INDEX: str(slot),
                        keys.JOBSET_NAME: jobset["metadata"]["name"],
                    },
                    "annotations": {keys.COMPLETION_INDEX: str(host)},
                },
                "status": {"phase": phase},
            })  # fmt: skip

    def end_pods(self, slot: int = 0) -> None:
        for key, pod in list(self.cluster.items[POD].items()):
            if pod["metadata"]["labels"][keys.JOB_INDEX] == str(slot):
                self.cluster.drop(POD, key)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()
    assert [
        connection.modified() for connection in world.connections if connection.modified()
    ] == []


def listed(provider: GkeProvider) -> dict[str, CloudState]:
    return {found.id: found.state for found in provider.listing()}


def becomes(provider: GkeProvider, **states: str) -> None:
    def changed():
        return {name: state.value for name, state in listed(provider).items()}

    wait_until(lambda: changed() == states, TIMEOUT, lambda: f"{changed()}")


def settled(provider: GkeProvider, connection: FakeConnection) -> None:
    """Nothing is left to record, and so nothing is listed."""

    def quiet():
        connection.listed.clear()
        provider.advance()
        provider.listing()
        return not connection.listed

    wait_until(quiet, TIMEOUT, lambda: f"it asked for {connection.listed}")


def message(provider: GkeProvider) -> str:
    (found,) = provider.listing()
    return found.message


def test_pod_changes_cause_no_lists_while_the_watches_work(world):
    provider, connection = world.server()
    provider.request(order("a"))
    becomes(provider, a="creating")
    settled(provider, connection)
    waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    world.make_pods(phase="Pending")
    (name, pod), *_ = world.cluster.items[POD].items()
    for left in range(20):
        change = {"conditions": [{**waits, "message": f"{left} nodes are too small"}]}
        world.cluster.put(POD, {**pod, "status": {"phase": "Pending", **change}})
        wait_until(
            lambda left=left: f" {left} nodes" in message(provider), TIMEOUT, lambda: f"{name}"
        )
        provider.advance()
    assert connection.listed == [EVENT]  # at most every five seconds, and only while pods wait


def test_a_slice_that_came_up_is_recorded_and_then_nothing_is_listed(world):
    provider, connection = world.server()
    changed = threading.Event()
    provider.on_change(changed.set)
    provider.request(order("a"))
    world.make_pods()
    becomes(provider, a="up")
    assert changed.wait(TIMEOUT)
    settled(provider, connection)
    world.end_pods()
    becomes(provider, a="preempted")
    settled(provider, connection)


def test_own_requests_and_releases_show_even_if_watches_lag(world):
    provider, connection = world.server()
    provider.listing()
    connection.pause(JOBSET, POD)
    provider.request(order("a"))
    assert set(listed(provider)) == {"a"}
    provider.request(replace(order("b"), id="order-b"))
    provider.release(SliceId("a"), "us-central1-a")
    assert set(listed(provider)) == {"b"}
    connection.pause()  # all events arrive late
    settled(provider, connection)
    assert set(listed(provider)) == {"b"}


def test_a_slice_in_a_reused_slot_shows_even_if_watches_lag(world):
    provider, connection = world.server()
    provider.request(replace(order("a", "b"), job_id="j1"))
    world.make_pods(0)
    world.make_pods(1)
    becomes(provider, a="up", b="up")
    settled(provider, connection)
    connection.pause(JOBSET, POD)
    provider.inject(SliceId("a"), Fault.PREEMPT)
    assert listed(provider)["a"] is CloudState.PREEMPTED
    provider.release(SliceId("a"), "us-central1-a")
    provider.request(replace(order("c"), id="order-c", job_id="j1"))
    assert {name: state.value for name, state in listed(provider).items()} == {
        "b": "up", "c": "creating",
    }  # fmt: skip


@pytest.mark.parametrize("first", ["polls", "lists"])
def test_a_lagging_pod_watch_does_not_make_a_slice_lost(world, first):
    """Another server saw all pods run and recorded them; the record arrives before the pods."""
    behind, connection = world.server()
    other, _ = world.server(start=False)
    assert listed(behind) == {}
    connection.pause(POD)
    other.request(order("a"))
    world.make_pods()
    other.advance()
    (jobset,) = world.cluster.items[JOBSET].values()
    written = int(jobset["metadata"]["resourceVersion"])
    wait_until(
        lambda: connection.delivered.get(JOBSET) == written,
        TIMEOUT,
        lambda: f"{connection.delivered}",
    )
    if first == "polls":
        behind.advance()
    assert listed(behind) == {"a": CloudState.UP}
    assert listed(other) == {"a": CloudState.UP}


def test_a_new_leader_lists_what_the_previous_leader_requested(world):
    behind, connection = world.server()
    assert listed(behind) == {}
    connection.pause(JOBSET, POD)
    other, _ = world.server()
    other.request(order("a"))
    world.clock.advance(timedelta(seconds=15))  # the lease of the other expires
    assert set(listed(behind)) == {"a"}
    connection.listed.clear()
    assert set(listed(behind)) == {"a"} and connection.listed == []


def test_a_broken_watch_hides_nothing(world):
    provider, connection = world.server()
    connection.break_watches(JOBSET, POD)
    wait_until(lambda: not connection.watching, TIMEOUT, lambda: f"{connection.watching}")
    other, _ = world.server(start=False)
    other.request(order("a"))
    world.make_pods()
    becomes(provider, a="up")
    other.release(SliceId("a"), "us-central1-a")
    becomes(provider)
    connection.break_watches()
    wait_until(
        lambda: connection.watching == {JOBSET, POD}, TIMEOUT, lambda: f"{connection.watching}"
    )
    settled(provider, connection)


def test_a_kueue_message_is_a_change_and_causes_no_list(world):
    provider, connection = world.server(queue="q")
    changed = threading.Event()
    provider.on_change(changed.set)
    provider.request(order("a"))
    (jobset,) = world.cluster.items[JOBSET].values()
    world.cluster.put(JOBSET, {**jobset, "spec": {**jobset["spec"], "suspend": True}})
    becomes(provider, a="pending")
    settled(provider, connection)
    changed.clear()
    full = {"type": "QuotaReserved", "status": "False", "message": "the quota is used up"}
    owner = {"uid": jobset["metadata"]["uid"]}
    world.cluster.put(WORKLOAD, {
        "metadata": {"name": "w", "namespace": NAMESPACE, "ownerReferences": [owner]},
        "status": {"conditions": [full]},
    })  # fmt: skip
    assert changed.wait(TIMEOUT)
    wait_until(
        lambda: "the quota is used up" in message(provider), TIMEOUT, lambda: message(provider)
    )
    assert connection.listed == []


def test_a_provider_that_was_not_started_lists_each_time(world):
    provider, connection = world.server(start=False)
    provider.request(order("a"))
    world.make_pods()
    provider.advance()
    connection.listed.clear()
    assert listed(provider) == {"a": CloudState.UP}
    assert connection.listed == [JOBSET, POD]


@pytest.mark.parametrize("watching", [True, False])
def test_slices_of_all_teams_are_found_and_released_in_their_namespaces(world, watching):
    teams = {"red": GkeTeam(), "blue": GkeTeam(namespace="lab")}
    provider, _ = world.server(start=watching, teams=teams)
    for name, team in (("a", "red"), ("b", "blue")):
        pod = PodSettings(team=team)
        provider.request(order(name, id=f"order-{name}", job_id=f"j-{name}", pod=pod))
    assert {namespace for namespace, _ in world.cluster.items[JOBSET]} == {"red", "lab"}
    assert {namespace for namespace, _ in world.cluster.items[SECRET]} == {"red", "lab"}
    becomes(provider, a="creating", b="creating")
    provider.release(SliceId("b"), "us-central1-a")
    becomes(provider, a="creating")
    assert {namespace for namespace, _ in world.cluster.items[JOBSET]} == {"red"}


@pytest.mark.parametrize("watching", [True, False])
def test_a_jobset_that_somebody_deleted_is_named_once(world, watching):
    """A spot slice does not count as preempted then."""
    provider, _ = world.server(start=watching)
    for name in ("a", "b"):
        provider.request(order(name, id=f"order-{name}", job_id=f"j-{name}"))
    becomes(provider, a="creating", b="creating")
    [(key, jobset)] = [
        (key, one) for key, one in world.cluster.items[JOBSET].items() if "order-a" in key[1]
    ]
    world.cluster.drop(JOBSET, key)
    provider.release(SliceId("b"), "us-central1-a")
    expected = [ExpectedSlice(id=SliceId(name), zone="us-central1-a") for name in ("a", "b")]
    found = []
    wait_until(lambda: found.extend(provider.listing(expected)) or "a" in map(gone, found), TIMEOUT)
    [told] = [one for one in found if gone(one) == "a"]
    assert jobset["metadata"]["name"] in told.message
    assert "b" not in map(gone, found)
    assert listed(provider) == {}


def gone(found: CloudSlice) -> str:
    return found.id if found.loss is LossReason.VANISHED else ""


# https://github.com/kubernetes-sigs/kueue: preemptionMessage
PREEMPTED = (
    "Preempted to accommodate a workload (UID: 1f2e, JobUID: {uid}) due to reclamation within the "
    "cohort; preemptor path: /red; preemptee path: /blue"
)


@pytest.mark.parametrize("watching", [True, False])
def test_an_evicted_slice_keeps_the_message_of_kueue_with_the_job_that_won(world, watching):
    """Also when a watch, and not a listing, notices the eviction."""
    provider, _ = world.server(start=watching, queue="q")
    provider.request(order("a", id="order-a", job_id="j-loses"))
    world.make_pods()
    becomes(provider, a="up")
    provider.advance()
    [jobset] = world.cluster.items[JOBSET].values()
    provider.request(order("b", id="order-b", job_id="j-wins"))
    [winner] = [one for one in world.cluster.items[JOBSET].values() if one is not jobset]
    message = PREEMPTED.format(uid=winner["metadata"]["uid"])
    world.cluster.put(WORKLOAD, {
        "metadata": {
            "name": "a", "namespace": NAMESPACE,
            "ownerReferences": [{"uid": jobset["metadata"]["uid"]}],
        },
        "status": {"conditions": [{"type": "Evicted", "status": "True", "message": message}]},
    })  # fmt: skip
    suspended = {**jobset, "spec": {**jobset["spec"], "suspend": True}}
    world.cluster.put(JOBSET, suspended)
    provider.advance()
    becomes(provider, a="preempted", b="creating")
    [found] = [one for one in provider.listing() if one.id == "a"]
    assert found.message == (
        "Kueue evicted its workload: Preempted to accommodate job j-wins due to reclamation within "
        "the cohort"
    )
