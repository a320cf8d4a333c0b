"""How soon a pool goes when nobody needs it any more: within five seconds, whatever else is under
way. Rounds follow each other here as the loop itself would space them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("google.cloud.container_v1", reason="needs the extra `gke`")

from tests.provisioner import builders
from tests.provisioner.harness import ProvisionerHarness
from tests.server_process import wait_until
from tpufleet.provisioner.gke_api.node_pools import GkeNodePools
from tpufleet.provisioner.kube.pool_events import BackgroundRecorder
from tpufleet.provisioner.loop import MIN_INTERVAL
from tpufleet.testbed.gke.grpc_server import client

MINUTE = timedelta(minutes=1)
SOON = timedelta(seconds=5)


@pytest.fixture
def world() -> Iterator[ProvisionerHarness]:
    world = ProvisionerHarness()
    yield world
    world.close()


def complete(world: ProvisionerHarness) -> None:
    world.jobsets = [builders.jobset("train", Completed=world.clock.now())]


def fail(world: ProvisionerHarness) -> None:
    world.jobsets = [builders.jobset("train", Failed=world.clock.now())]


def vanish(world: ProvisionerHarness) -> None:
    world.jobsets = []


def make_anew(world: ProvisionerHarness) -> None:
    world.jobsets = [builders.jobset("train", uid="another")]


ENDS = {"completes": complete, "fails": fail, "vanishes": vanish, "is made anew": make_anew}


def run_for(world: ProvisionerHarness, span: timedelta) -> None:
    """The first round comes at once, for every end is news to the loop; then there is none."""
    end = world.clock.now() + span
    while world.clock.now() < end:
        wait = world.provisioner.reconcile()
        world.provisioner.collect_results(timeout=60)
        world.clock.advance(max(wait, MIN_INTERVAL))


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_its_pools_go_within_five_seconds_of_the_moment_a_jobset(world, end: Callable[..., None]):
    world.submit("train", slices=2)
    world.pass_time(MINUTE)
    world.pod_list = []  # they run
    run_for(world, timedelta(minutes=5))  # nothing moves, and the loop sleeps long
    assert list(world.states().values()) == ["RUNNING", "RUNNING"]
    ended_at = world.clock.now()
    end(world)
    run_for(world, MINUTE)
    late = [at - ended_at for at in world.gke.deleted_at.values()]
    assert len(late) == 2 and max(late) <= SOON


class Hanging(GkeNodePools):
    """GKE takes creations and does not answer."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.answers = threading.Event()
        self.asked = 0

    def create(self, request: Any) -> None:
        self.asked += 1
        self.answers.wait(60)
        super().create(request)


def test_creations_that_hang_hold_up_no_deletion(world):
    world.submit("train")
    world.pass_time(MINUTE)
    pools = Hanging(client(world.server.address), world.settings.parent)
    world.restart(pools)
    ended_at = world.clock.now()
    world.end("train")
    world.jobset_list.append(builders.jobset("next"))
    slices = 2 * world.settings.concurrency  # more than there are threads for
    world.pod_list = [builders.pod("next", job=number) for number in range(slices)]
    world.provisioner.round()
    try:
        wait_until(lambda: pools.asked == world.settings.concurrency, 60, lambda: f"{pools.asked}")
        wait_until(lambda: world.gke.deleted_at, 60, lambda: f"{world.states()}")
        for _ in range(3):  # and rounds go on, and ask for nothing twice
            world.clock.advance(timedelta(seconds=1))
            world.provisioner.round()
        assert max(world.gke.deleted_at.values()) - ended_at <= SOON
    finally:
        pools.answers.set()
    world.provisioner.settle(within=60)
    world.pass_time(MINUTE)
    assert sorted(world.states().values()) == ["RUNNING"] * slices
    assert pools.asked == slices


class Slow:
    """An API server that takes no events."""

    def __init__(self) -> None:
        self.takes = threading.Event()
        self.all: list[str] = []

    def record(self, about: Any, reason: str, message: str, *, warning: bool = False) -> None:
        self.takes.wait(60)
        if reason == "Broken":
            raise RuntimeError("nobody foresaw this")
        self.all.append(reason)


def test_events_wait_for_a_slow_server_and_nobody_waits_for_them(caplog):
    slow = Slow()
    later = BackgroundRecorder(slow)
    for reason in ("One", "Broken", "Two"):
        later.record({"kind": "Pod", "name": "p"}, reason, "words")
    assert slow.all == []
    slow.takes.set()
    later.close(within=60)
    assert slow.all == ["One", "Two"]
    assert any("Broken" in record.getMessage() for record in caplog.records)
