"""The provider with its watches: what they spare the server, and what they are not believed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest

pytest.importorskip("lightkube", reason="needs the extra `k8s`: pip install 'tpufleet[k8s]'")

from tests.kubernetes.fake_api_server import FakeApiServer, FakeConnection
from tests.providers.gke.test_manifests import SETTINGS, order
from tests.server_process import wait_until
from tpufleet.clocks import ManualClock
from tpufleet.kubernetes.connections import JOBSET, POD, WORKLOAD
from tpufleet.model.cloud_slices import CloudState
from tpufleet.model.slices import SliceId
from tpufleet.providers.base import Fault
from tpufleet.providers.gke import keys
from tpufleet.providers.gke.provider import GkeProvider

WITHIN = 60.0  # seconds; the machine may be busy
NAMESPACE, HOSTS = SETTINGS.namespace, 4


class World:
    """Servers of ours, each with a line of its own to the same API server, where we play JobSet's
    controller and the kubelets."""

    def __init__(self) -> None:
        self.clock, self.cluster = ManualClock(), FakeApiServer()
        self.lines: list[FakeConnection] = []
        self._providers: list[GkeProvider] = []

    def server(self, *, start: bool = True, **settings: str) -> tuple[GkeProvider, FakeConnection]:
        line = FakeConnection(self.cluster)
        provider = GkeProvider(
            line, replace(SETTINGS, **settings), fleet="f1", zones=("us-central1-a",),  # type: ignore[arg-type]
            clock=self.clock,
        )  # fmt: skip
        self.lines.append(line)
        self._providers.append(provider)
        if start:
            provider.start()
            watched = {JOBSET, POD, *([WORKLOAD] if settings.get("queue") else ())}
            wait_until(lambda: line.watching >= watched, WITHIN, lambda: f"{line.watching}")
        return provider, line

    def close(self) -> None:
        for provider in self._providers:
            provider.close()

    def make_pods(self, seat: int = 0, phase: str = "Running", mark: str = "") -> None:
        (jobset,) = self.cluster.items[JOBSET].values()
        for host in range(HOSTS):
            name = f"{jobset['metadata']['name']}-{seat}-{host}{mark}"
            self.cluster.put(POD, {
                "metadata": {
                    "name": name, "namespace": NAMESPACE, "uid": f"uid-of-{name}",
                    "creationTimestamp": f"2026-01-01T00:00:{len(mark):02}Z",
                    "labels": {
                        keys.FLEET: "f1", keys.JOB_INDEX: str(seat),
                        keys.JOBSET_NAME: jobset["metadata"]["name"],
                    },
                    "annotations": {keys.COMPLETION_INDEX: str(host)},
                },
                "status": {"phase": phase},
            })  # fmt: skip

    def end_pods(self, seat: int = 0) -> None:
        for key, pod in list(self.cluster.items[POD].items()):
            if pod["metadata"]["labels"][keys.JOB_INDEX] == str(seat):
                self.cluster.drop(POD, key)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()
    assert [line.modified() for line in world.lines if line.modified()] == []


def listed(provider: GkeProvider) -> dict[str, CloudState]:
    return {found.id: found.state for found in provider.listing()}


def becomes(provider: GkeProvider, **states: str) -> None:
    def told():
        return {name: state.value for name, state in listed(provider).items()}

    wait_until(lambda: told() == states, WITHIN, lambda: f"{told()}")


def settled(provider: GkeProvider, line: FakeConnection) -> None:
    """Nothing is left to be written, and so nothing to be asked."""

    def quiet():
        line.listed.clear()
        provider.advance()
        provider.listing()
        return not line.listed

    wait_until(quiet, WITHIN, lambda: f"it asked for {line.listed}")


def words(provider: GkeProvider) -> str:
    (found,) = provider.listing()
    return found.message


def test_while_the_watches_work_pods_change_and_nothing_is_asked(world):
    provider, line = world.server()
    provider.request(order("a"))
    becomes(provider, a="creating")
    settled(provider, line)
    waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    world.make_pods(phase="Pending")
    (name, pod), *_ = world.cluster.items[POD].items()
    for left in range(20):
        change = {"conditions": [{**waits, "message": f"{left} nodes are too small"}]}
        world.cluster.put(POD, {**pod, "status": {"phase": "Pending", **change}})
        wait_until(lambda left=left: f" {left} nodes" in words(provider), WITHIN, lambda: f"{name}")
        provider.advance()
    assert line.asked == []


def test_a_slice_that_came_up_is_written_down_and_then_nothing_is_asked(world):
    provider, line = world.server()
    told = threading.Event()
    provider.on_change(told.set)
    provider.request(order("a"))
    world.make_pods()
    becomes(provider, a="up")
    assert told.wait(WITHIN)
    settled(provider, line)
    world.end_pods()
    becomes(provider, a="preempted")
    settled(provider, line)


def test_what_was_requested_and_released_is_listed_so_though_no_watch_has_brought_it(world):
    provider, line = world.server()
    provider.listing()
    line.hold(JOBSET, POD)
    provider.request(order("a"))
    assert set(listed(provider)) == {"a"}
    provider.request(replace(order("b"), id="order-b"))
    provider.release(SliceId("a"), "us-central1-a")
    assert set(listed(provider)) == {"b"}
    line.hold()  # and all of it comes late
    settled(provider, line)
    assert set(listed(provider)) == {"b"}


def test_a_slice_that_took_a_seat_is_listed_though_no_watch_has_brought_it(world):
    provider, line = world.server()
    provider.request(replace(order("a", "b"), job_id="j1"))
    world.make_pods(0)
    world.make_pods(1)
    becomes(provider, a="up", b="up")
    settled(provider, line)
    line.hold(JOBSET, POD)
    provider.inject(SliceId("a"), Fault.PREEMPT)
    assert listed(provider)["a"] is CloudState.PREEMPTED
    provider.release(SliceId("a"), "us-central1-a")
    provider.request(replace(order("c"), id="order-c", job_id="j1"))
    assert {name: state.value for name, state in listed(provider).items()} == {
        "b": "up", "c": "creating",
    }  # fmt: skip


@pytest.mark.parametrize("first", ["looks", "lists"])
def test_a_server_whose_pods_come_late_does_not_take_a_slice_for_lost(world, first):
    """Another has seen all pods run and wrote down which, and its word comes before the pods."""
    behind, line = world.server()
    other, _ = world.server(start=False)
    assert listed(behind) == {}
    line.hold(POD)
    other.request(order("a"))
    world.make_pods()
    other.advance()
    (jobset,) = world.cluster.items[JOBSET].values()
    written = int(jobset["metadata"]["resourceVersion"])
    wait_until(lambda: line.took.get(JOBSET) == written, WITHIN, lambda: f"{line.took}")
    if first == "looks":
        behind.advance()
    assert listed(behind) == {"a": CloudState.UP}
    assert listed(other) == {"a": CloudState.UP}


def test_a_server_that_takes_over_lists_what_the_one_before_it_asked_for(world):
    behind, line = world.server()
    assert listed(behind) == {}
    line.hold(JOBSET, POD)
    other, _ = world.server()
    other.request(order("a"))
    world.clock.advance(timedelta(seconds=15))  # the lease of the other runs out
    assert set(listed(behind)) == {"a"}
    line.asked.clear()
    assert set(listed(behind)) == {"a"} and line.asked == []


def test_a_broken_watch_hides_nothing(world):
    provider, line = world.server()
    line.break_watches(JOBSET, POD)
    wait_until(lambda: not line.watching, WITHIN, lambda: f"{line.watching}")
    other, _ = world.server(start=False)
    other.request(order("a"))
    world.make_pods()
    becomes(provider, a="up")
    other.release(SliceId("a"), "us-central1-a")
    becomes(provider)
    line.break_watches()
    wait_until(lambda: line.watching == {JOBSET, POD}, WITHIN, lambda: f"{line.watching}")
    settled(provider, line)


def test_what_kueue_says_is_news_and_costs_nothing(world):
    provider, line = world.server(queue="q")
    told = threading.Event()
    provider.on_change(told.set)
    provider.request(order("a"))
    (jobset,) = world.cluster.items[JOBSET].values()
    world.cluster.put(JOBSET, {**jobset, "spec": {**jobset["spec"], "suspend": True}})
    becomes(provider, a="pending")
    settled(provider, line)
    told.clear()
    full = {"type": "QuotaReserved", "status": "False", "message": "the quota is used up"}
    owner = {"uid": jobset["metadata"]["uid"]}
    world.cluster.put(WORKLOAD, {
        "metadata": {"name": "w", "namespace": NAMESPACE, "ownerReferences": [owner]},
        "status": {"conditions": [full]},
    })  # fmt: skip
    assert told.wait(WITHIN)
    wait_until(lambda: "the quota is used up" in words(provider), WITHIN, lambda: words(provider))
    assert line.asked == []


def test_a_provider_that_was_not_started_asks_each_time(world):
    provider, line = world.server(start=False)
    provider.request(order("a"))
    world.make_pods()
    provider.advance()
    line.asked.clear()
    assert listed(provider) == {"a": CloudState.UP}
    assert line.asked == [JOBSET, POD]
