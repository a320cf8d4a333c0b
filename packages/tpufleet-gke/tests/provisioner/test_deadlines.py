"""An unneeded pool is deleted within five seconds, whatever else is in progress.

Reconciliations are spaced as the loop would space them.
"""

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
from tpufleet.errors import ProviderUnavailable
from tpufleet_gke.provisioner.gke.node_pools import GkeNodePools
from tpufleet_gke.provisioner.kube.pool_events import BackgroundRecorder
from tpufleet_gke.provisioner.loop import MIN_INTERVAL
from tpufleet_gke.provisioner.planning.cordons import NODES_LATE
from tpufleet_testbed.gke.grpc_server import client

MINUTE = timedelta(minutes=1)
SOON = timedelta(seconds=5)


@pytest.fixture
def harness() -> Iterator[ProvisionerHarness]:
    harness = ProvisionerHarness()
    yield harness
    harness.close()


def complete(harness: ProvisionerHarness) -> None:
    harness.jobsets = [builders.jobset("train", Completed=harness.clock.now())]


def fail(harness: ProvisionerHarness) -> None:
    harness.jobsets = [builders.jobset("train", Failed=harness.clock.now())]


def delete(harness: ProvisionerHarness) -> None:
    harness.jobsets = []


def recreate(harness: ProvisionerHarness) -> None:
    harness.jobsets = [builders.jobset("train", uid="another")]


ENDS = {"completes": complete, "fails": fail, "is deleted": delete, "is recreated": recreate}


def run_for(harness: ProvisionerHarness, duration: timedelta) -> None:
    """The first reconciliation comes at once, because the end of a JobSet wakes the loop."""
    end = harness.clock.now() + duration
    while harness.clock.now() < end:
        wait = harness.provisioner.reconcile()
        harness.provisioner.collect_results(timeout=900)
        harness.clock.advance(max(wait, MIN_INTERVAL))


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_pools_are_deleted_within_five_seconds_after_a_jobset(harness, end: Callable[..., None]):
    harness.submit("train", slices=2)
    harness.advance(MINUTE)
    harness.pod_list = []  # they run
    run_for(harness, timedelta(minutes=5))  # nothing changes, so the loop waits long
    assert list(harness.states().values()) == ["RUNNING", "RUNNING"]
    ended_at = harness.clock.now()
    end(harness)
    run_for(harness, MINUTE)
    late = [at - ended_at for at in harness.gke.deleted_at.values()]
    assert len(late) == 2 and max(late) <= SOON


class HangingNodePools(GkeNodePools):
    """Create calls do not return until `release` is set."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.release = threading.Event()
        self.create_calls = 0

    def create(self, request: Any) -> None:
        self.create_calls += 1
        self.release.wait(900)
        super().create(request)


def test_hanging_creates_delay_no_deletion(harness):
    harness.submit("train")
    harness.advance(MINUTE)
    pools = HangingNodePools(client(harness.server.address), harness.settings.parent)
    harness.restart(pools)
    harness.provisioner.reconcile()
    harness.clock.advance(NODES_LATE)
    ended_at = harness.clock.now()
    harness.complete("train")
    harness.jobsets.append(builders.jobset("next"))
    slices = 2 * harness.settings.concurrency  # more than there are threads
    harness.pod_list = [builders.pod("next", job=number) for number in range(slices)]
    harness.provisioner.reconcile()
    try:
        wait_until(
            lambda: pools.create_calls == harness.settings.concurrency,
            60,
            lambda: f"{pools.create_calls}",
        )
        wait_until(lambda: harness.gke.deleted_at, 60, lambda: f"{harness.states()}")
        for _ in range(3):  # reconciling continues, and requests nothing twice
            harness.clock.advance(timedelta(seconds=1))
            harness.provisioner.reconcile()
        assert max(harness.gke.deleted_at.values()) - ended_at <= SOON
    finally:
        pools.release.set()
    harness.provisioner.collect_results(timeout=900)
    harness.advance(MINUTE)
    assert sorted(harness.states().values()) == ["RUNNING"] * slices
    assert pools.create_calls == slices


class HangingListings(GkeNodePools):
    """The next `hanging` listings do not return until `release` is set."""

    def __init__(self, *args: Any, hanging: int) -> None:
        super().__init__(*args)
        self.hanging = hanging
        self.release = threading.Event()

    def list_pools(self) -> Any:
        if self.hanging > 0:
            self.hanging -= 1
            self.release.wait(900)
        return super().list_pools()


def test_a_listing_that_hangs_is_given_up_and_another_one_started():
    harness = ProvisionerHarness(list_timeout=timedelta(seconds=2))
    pools = HangingListings(client(harness.server.address), harness.settings.parent, hanging=2)
    harness.restart(pools)
    harness.submit()
    try:
        for _ in range(2):
            with pytest.raises(ProviderUnavailable, match="has not listed its node pools"):
                harness.provisioner.reconcile()
        harness.advance(MINUTE)
        assert list(harness.states().values()) == ["RUNNING"]
    finally:
        pools.release.set()
        harness.close()


def test_a_listing_that_is_always_slow_is_used_by_the_next_round():
    harness = ProvisionerHarness(list_timeout=timedelta(milliseconds=100))
    pools = HangingListings(client(harness.server.address), harness.settings.parent, hanging=99)
    harness.restart(pools)
    harness.submit()
    try:
        with pytest.raises(ProviderUnavailable):
            harness.provisioner.reconcile()
        pools.release.set()
        wait_until(lambda: harness.gke.calls.count("list") == 1, 60, lambda: "not listed")
        pools.release.clear()
        # The slow one is done by now; the next one hangs.
        wait_until(lambda: _reconciles(harness), 60, lambda: f"{harness.gke.calls}")
        harness.provisioner.collect_results(timeout=900)
        assert len(harness.gke.created) == 1
    finally:
        pools.release.set()
        harness.close()


def _reconciles(harness: ProvisionerHarness) -> bool:
    try:
        harness.provisioner.reconcile()
    except ProviderUnavailable:
        return False
    return True


READS = {"operations": "failed_creates", "the cluster": "auto_provisioned"}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("hangs", [True, False], ids=["hangs", "fails"])
def test_no_other_read_delays_a_deletion(read, hangs):
    harness = ProvisionerHarness(list_timeout=timedelta(seconds=1))
    harness.submit("old")
    harness.advance(MINUTE)
    harness.gke.fail_next_creation(8, "GCE_STOCKOUT")
    harness.submit("new")  # GKE says in its operations why it fails
    release = threading.Event()

    def broken() -> Any:
        if hangs:
            release.wait(900)
        raise ProviderUnavailable("GKE: 429")

    pools = GkeNodePools(client(harness.server.address), harness.settings.parent)
    setattr(pools, read, broken)
    harness.restart(pools)

    def is_deleted() -> bool:
        _reconciles(harness)
        harness.provisioner.collect_results(timeout=900)
        harness.clock.advance(timedelta(seconds=5))
        return any(name.startswith("old-") for name in harness.gke.deleted_at)

    try:
        harness.end("old")
        wait_until(is_deleted, 60, lambda: f"{harness.states()}")
    finally:
        release.set()
        harness.close()


class SlowSink:
    """Accepts events only once `accept` is set."""

    def __init__(self) -> None:
        self.accept = threading.Event()
        self.recorded: list[str] = []

    def record(
        self,
        involved_object: Any,
        reason: str,
        message: str,
        *,
        warning: bool = False,
        annotations: Any = None,
    ) -> None:
        self.accept.wait(900)
        if reason == "Broken":
            raise RuntimeError("unexpected")
        self.recorded.append(reason)


def test_events_are_written_in_the_background(caplog):
    slow = SlowSink()
    recorder = BackgroundRecorder(slow)
    for reason in ("One", "Broken", "Two"):
        recorder.record({"kind": "Pod", "name": "p"}, reason, "message")
    assert slow.recorded == []
    slow.accept.set()
    recorder.close(timeout=900)
    assert slow.recorded == ["One", "Two"]
    assert any("writing an event" in record.getMessage() for record in caplog.records)
