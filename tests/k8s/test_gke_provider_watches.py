"""The provider's watches on a real API server: fewer lists, and recovery when they break."""

from __future__ import annotations

import threading

import pytest
from msgspec.structs import replace

from tests.contract.test_providers import ZONE, order
from tests.k8s.patient_connection import PatientConnection
from tests.k8s.rigs import eventually
from tests.k8s.test_gke_provider import GkeWorld
from tpufleet.errors import ProviderUnavailable
from tpufleet.kubernetes.connections import JOB, JOBSET, POD, SECRET, Connection
from tpufleet.model.fleet.cloud_slices import CloudState
from tpufleet.model.fleet.slices import SliceId
from tpufleet.providers.base import Fault
from tpufleet.providers.gke.provider import GkeProvider

COMING = (CloudState.PENDING, CloudState.CREATING, CloudState.UP)


class RecordingConnection:
    """Records what was listed; its watches can be broken."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._watchers: set[threading.Thread] = set()
        self._broken = False
        self.listed: list[str] = []

    def list(self, kind, *args, **more):
        self.listed.append(kind.plural)
        return self._connection.list(kind, *args, **more)

    def watch(self, kind, *args, **more):
        if self._broken:
            raise ProviderUnavailable(f"cannot watch {kind.plural}: broken by the test")
        self._watchers.add(threading.current_thread())
        yield from self._connection.watch(kind, *args, **more)

    def break_watches(self) -> None:
        self._broken = True
        for thread in self._watchers:
            self._connection.interrupt(thread)

    def repair(self) -> None:
        self._broken = False

    def __getattr__(self, name):
        return getattr(self._connection, name)


@pytest.fixture
def world(rig):
    world = GkeWorld(rig, watching=False)
    yield world
    world.close()


@pytest.fixture
def started(rig, world):
    """Creates watching servers, each with its own connection."""
    opened = []

    def server():
        connection = PatientConnection(rig.plane.kubeconfig, timeout=900)
        recording = RecordingConnection(connection)
        provider = GkeProvider(
            recording, world.settings, fleet="test", zones=(ZONE,), clock=world.clock
        )
        opened.append((provider, connection))
        provider.start()
        return provider, recording

    yield server
    for provider, connection in opened:
        provider.close()
        connection.close()


def observed(provider):
    return {found.id: (found.state.value, found.message) for found in provider.listing()}


def there(rig):
    """What the server has: the slots of JobSets, Jobs and pods."""
    jobsets = [
        one["metadata"]["annotations"] for one in rig.connection.list(JOBSET, rig.namespace)[0]
    ]
    jobs = [
        (job["metadata"]["name"], job["metadata"]["uid"], job.get("status"))
        for job in rig.connection.list(JOB, rig.namespace)[0]
    ]
    pods = [
        (
            pod["metadata"]["uid"],
            [owner["uid"] for owner in pod["metadata"].get("ownerReferences") or ()],
            pod["metadata"].get("deletionTimestamp"),
            pod["spec"].get("nodeName"),
            {name: pod["status"].get(name) for name in ("phase", "conditions")},
        )
        for pod in rig.connection.list(POD, rig.namespace)[0]
    ]
    return jobsets, jobs, pods


def up(provider, *names):
    def now():
        return {found.id for found in provider.listing() if found.state is CloudState.UP}

    eventually(lambda: now() == set(names), 120, lambda: observed(provider))


def settled(provider, recording):
    """Polling and listing no longer cause requests."""

    def quiet():
        recording.listed.clear()
        provider.advance()
        provider.listing()
        return not recording.listed

    eventually(quiet, 60, lambda: recording.listed)


@pytest.mark.slow
def test_pod_changes_arrive_without_lists(rig, started):
    provider, recording = started()
    pod_changed = threading.Event()
    provider.on_change(pod_changed.set)
    provider.request(order("a"))
    up(provider, "a")
    settled(provider, recording)
    pods = rig.connection.list(POD, rig.namespace)[0]
    assert len(pods) == 4
    for number in range(10):
        for pod in pods:
            pod_changed.clear()
            change = {"metadata": {"annotations": {"tests/number": str(number)}}}
            rig.connection.patch(POD, pod["metadata"]["name"], change, rig.namespace)
            assert pod_changed.wait(900)
        provider.listing()
    assert recording.listed == []
    rig.connection.delete(POD, pods[2]["metadata"]["name"], rig.namespace)
    eventually(
        lambda: [found.lost_hosts for found in provider.listing()] != [()], 60,
        lambda: observed(provider),
    )  # fmt: skip
    provider.release(SliceId("a"), ZONE)
    assert [found for found in provider.listing() if found.state is not CloudState.STOPPING] == []


@pytest.mark.slow
def test_a_server_lists_while_its_watches_are_down(rig, world, started):
    provider, recording = started()
    provider.request(order("a"))
    up(provider, "a")
    settled(provider, recording)
    recording.break_watches()
    world.provider.request(order("b"))
    eventually(lambda: "b" in observed(provider), 60, lambda: observed(provider))
    up(provider, "a", "b")
    assert recording.listed
    world.provider.release(SliceId("a"), ZONE)
    up(provider, "b")
    assert "b" in observed(provider)
    recording.repair()
    settled(provider, recording)


@pytest.mark.slow
def test_two_watching_servers_agree_on_lost_and_replaced_slices(rig, started):
    servers = [started()[0], started()[0]]
    servers[0].request(replace(order("a0", "b"), job_id="j1"))
    for number in range(4):
        acts, looks = servers[number % 2], servers[(number + 1) % 2]
        mine, next_one = f"a{number}", f"a{number + 1}"
        bad = []

        def both_up(mine=mine, acts=acts, looks=looks, bad=bad):
            found = [one for provider in (acts, looks) for one in provider.listing()]
            bad.extend(one for one in found if one.lost_hosts or one.state not in COMING)
            return [one.id for one in found if one.state is CloudState.UP] == [mine, "b"] * 2

        eventually(both_up, 120, lambda: ([observed(provider) for provider in servers], there(rig)))
        assert bad == []
        acts.inject(SliceId(mine), Fault.PREEMPT)
        assert observed(acts)[mine][0] == "preempted"
        acts.release(SliceId(mine), ZONE)
        looks.request(replace(order(next_one), job_id="j1"))
        assert set(observed(looks)) == {next_one, "b"}
        eventually(lambda acts=acts, now={next_one, "b"}: set(observed(acts)) == now, 60)
    assert len(rig.connection.list(JOBSET, rig.namespace)[0]) == 1
    for name in ("a4", "b"):
        servers[0].release(SliceId(name), ZONE)
    for kind in (JOBSET, POD, SECRET):
        eventually(lambda kind=kind: not rig.connection.list(kind, rig.namespace)[0], 60, kind)
