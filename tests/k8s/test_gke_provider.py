"""The provider contract for `gke` on a real control plane, and what is specific to GKE."""

from __future__ import annotations

import json
import time
from datetime import timedelta

import pytest

from tests.contract.test_providers import *  # noqa: F403  (the suite, for the world below)
from tests.contract.test_providers import SLICE, ZONE, becomes, come_up, listed, order
from tests.k8s.rigs import eventually
from tpufleet.clocks import ManualClock
from tpufleet.errors import BadRequest
from tpufleet.kubernetes.connections import (
    JOBSET,
    NODE,
    POD,
    SECRET,
    WORKLOAD,
    ResourceKind,
)
from tpufleet.model.fleet.cloud_slices import CloudState
from tpufleet.model.fleet.slices import SliceId
from tpufleet.providers.base import Fault
from tpufleet.providers.gke import jobset_client, keys, kueue, slice_slots, states
from tpufleet.providers.gke.manifests import GkeSettings
from tpufleet.providers.gke.provider import GkeProvider
from tpufleet.providers.gke.slice_slots import ANNOTATION

PRIORITY_CLASS = ResourceKind(
    "kueue.x-k8s.io", "v1beta2", "WorkloadPriorityClass", "workloadpriorityclasses",
    namespaced=False,
)  # fmt: skip
FLAVOR = ResourceKind(
    "kueue.x-k8s.io", "v1beta2", "ResourceFlavor", "resourceflavors", namespaced=False
)
CLUSTER_QUEUE = ResourceKind(
    "kueue.x-k8s.io", "v1beta2", "ClusterQueue", "clusterqueues", namespaced=False
)
LOCAL_QUEUE = ResourceKind("kueue.x-k8s.io", "v1beta2", "LocalQueue", "localqueues")


class ManualNow(ManualClock):
    """System time plus whatever the test adds."""

    def __init__(self) -> None:
        super().__init__()
        self._ahead = timedelta(0)

    def now(self):
        from tpufleet.clocks import SystemClock

        return SystemClock().now() + self._ahead

    def advance(self, by):
        self._ahead += by


V5P = ("tpu-v5p-slice", "ct5p-hightpu-4t")


class GkeWorld:
    """With spot node pools already created; the provisioner is tested elsewhere."""

    def __init__(self, rig, queue="", *, watching=True) -> None:
        self.rig, self.clock, self.most, self.watching = rig, ManualNow(), None, watching
        self.settings = GkeSettings(
            namespace=rig.namespace, image="registry/agent:1", queue=queue, cpu="1", memory="1Gi"
        )
        spot = {"cloud.google.com/gke-spot": "true"}
        for number in range(3):  # SLICE and SINGLE_HOST
            rig.add_pool(f"{rig.namespace}-big-{number}", 4, "2x2x4", *V5P, **spot)
            rig.add_pool(f"{rig.namespace}-small-{number}", 1, "2x2x1", *V5P, **spot)
        self.provider = self._open()

    def _open(self) -> GkeProvider:
        provider = GkeProvider(
            self.rig.connection, self.settings, fleet="test", zones=(ZONE,), clock=self.clock,
            most_slices=self.most, notice_period=timedelta(minutes=5),
        )  # fmt: skip
        if self.watching:
            provider.start()
        return provider

    def limit(self, slices: int, accelerator: str = SLICE) -> None:
        self.most = slices
        self.reopen()

    def reopen(self) -> None:
        self.provider.close()
        self.provider = self._open()

    def pass_time(self, by: timedelta) -> None:
        """Kubernetes' clock cannot be moved; one second here is a tenth of a second there."""
        if by > timedelta(seconds=1):
            self.clock.advance(by)
        time.sleep(0.1)
        self.provider.advance()

    def close(self) -> None:
        for found in self.provider.listing():
            self.provider.release(found.id, found.zone)
        self.provider.close()


# As when watches are broken; a real server always watches.
LISTING = pytest.param(False, id="listing", marks=pytest.mark.scale)


@pytest.fixture(params=[pytest.param(True, id="watching"), LISTING])
def world(rig, request):
    world = GkeWorld(rig, watching=request.param)
    yield world
    world.close()


def test_a_stalled_host_looks_alive_to_the_provider(world):
    """Not supported on Kubernetes; the error names the alternative."""
    world.provider.request(order("a"))
    with pytest.raises(BadRequest, match="kill-host"):
        world.provider.inject(SliceId("a"), Fault.STALL_HOST, 1)


def test_one_order_is_one_jobset_with_a_replica_for_each_slice(world, rig):
    world.provider.request(order("a", "b"))
    come_up(world, "a", "b")
    (jobset,) = rig.connection.list(JOBSET, rig.namespace)[0]
    assert jobset["spec"]["replicatedJobs"][0]["replicas"] == 2
    pods = rig.connection.list(POD, rig.namespace)[0]
    pools = {pod["spec"]["nodeName"].rpartition("-")[0] for pod in pods}
    assert len(pods) == 8 and len(pools) == 2


def test_a_released_slice_leaves_nothing_behind(world, rig):
    world.provider.request(order("a", "b"))
    come_up(world, "a", "b")
    for name in ("a", "b"):
        world.provider.release(SliceId(name), ZONE)
    becomes(world, lambda now: not now)
    for kind in (JOBSET, POD, SECRET):
        eventually(lambda kind=kind: not rig.connection.list(kind, rig.namespace)[0], 60, kind)


def slots(rig):
    (secret,) = rig.connection.list(SECRET, rig.namespace)[0]
    import base64

    return {
        index: json.loads(base64.b64decode(entry))["slice"]
        for index, entry in (secret.get("data") or {}).items()
    }


@pytest.mark.slow
def test_a_replacement_slice_reuses_the_slot_and_node_pool_of_a_lost_one(world, rig):
    from msgspec.structs import replace

    world.provider.request(replace(order("a", "b"), job_id="j1"))
    come_up(world, "a", "b")
    world.provider.inject(SliceId("a"), Fault.PREEMPT)
    world.provider.release(SliceId("a"), ZONE)
    assert slots(rig) == {"1": "b"}
    world.provider.request(replace(order("c"), job_id="j1"))
    assert slots(rig) == {"0": "c", "1": "b"}
    come_up(world, "b", "c")
    assert len(rig.connection.list(JOBSET, rig.namespace)[0]) == 1


class InterruptedList:
    """A connection that runs a callback before the first list of pods."""

    def __init__(self, connection, callback) -> None:
        self._connection, self._callback = connection, callback

    def list(self, kind, *args, **more):
        if kind is POD and self._callback is not None:
            callback, self._callback = self._callback, None
            callback()
        return self._connection.list(kind, *args, **more)

    def __getattr__(self, name):
        return getattr(self._connection, name)


@pytest.mark.slow
def test_a_server_with_an_outdated_snapshot_does_not_overwrite_newer_slots(world, rig):
    from msgspec.structs import replace

    world.provider.request(replace(order("a", "b"), job_id="j1"))
    come_up(world, "a", "b")

    def replace_slice():
        world.provider.inject(SliceId("a"), Fault.PREEMPT)
        world.provider.release(SliceId("a"), ZONE)
        world.provider.request(replace(order("c"), job_id="j1"))

    other = GkeProvider(
        InterruptedList(rig.connection, replace_slice), world.settings, fleet="test", zones=(ZONE,),
        clock=world.clock,
    )  # fmt: skip
    other.advance()  # it read `a` in the slot that `c` has taken since
    assert slots(rig) == {"0": "c", "1": "b"}
    assert set(listed(world)) == {"b", "c"}
    come_up(world, "b", "c")


def test_a_new_server_deletes_leftover_pods_of_a_lost_slice(world, rig):
    from msgspec.structs import replace

    world.provider.request(replace(order("a", "b"), job_id="j1"))
    come_up(world, "a", "b")
    (jobset,) = rig.connection.list(JOBSET, rig.namespace)[0]
    mine = [
        pod for pod in rig.connection.list(POD, rig.namespace)[0] if states.slot_index(pod) == 0
    ]
    table = slice_slots.slots_of(jobset)
    gone = table.slots[0].mark_lost(
        "preempted", preempted=True, leaving=jobset_client.pod_uids(mine)
    )
    change = {"metadata": {"annotations": {ANNOTATION: table.replace_slot(0, gone).to_json()}}}
    rig.connection.patch(JOBSET, jobset["metadata"]["name"], change, rig.namespace)
    world.reopen()  # the old server died before it deleted them
    before = set(jobset_client.pod_uids(mine))

    def ended():
        world.provider.advance()
        left = jobset_client.pod_uids(rig.connection.list(POD, rig.namespace)[0])
        return not before & set(left)

    eventually(ended, 60, rig.describe)
    assert listed(world)["a"].state is CloudState.PREEMPTED
    assert listed(world)["b"].state is CloudState.UP


def test_a_preempted_node_pool_is_a_preempted_slice(world, rig):
    world.provider.request(order("a"))
    come_up(world, "a")
    world.pass_time(timedelta(seconds=1))
    node = rig.connection.list(POD, rig.namespace)[0][0]["spec"]["nodeName"]
    pool = node.rpartition("-")[0].removeprefix("gke-")
    taint = [{"key": "cloud.google.com/impending", "effect": "NoExecute", "value": "true"}]
    for index in range(4):
        rig.connection.patch(NODE, f"gke-{pool}-{index}", {"spec": {"taints": taint}})
    becomes(world, lambda now: now["a"].state is CloudState.PREEMPTED)
    assert listed(world)["a"].message


def test_an_unschedulable_slice_reports_the_reason(world):
    world.provider.request(order("a", accelerator="v5litepod-64"))
    becomes(world, lambda now: "no node fits" in now["a"].message)
    assert listed(world)["a"].state is CloudState.CREATING


@pytest.fixture
def queued(rig):
    """With Kueue: a queue with quota for two slices."""
    queue = f"q-{rig.namespace}"
    for flavor in kueue.flavors():
        if flavor["metadata"]["name"] == SLICE:
            rig.connection.apply(FLAVOR, flavor)
    for one in kueue.priority_classes():
        rig.connection.apply(PRIORITY_CLASS, one)
    rig.connection.apply(CLUSTER_QUEUE, kueue.cluster_queue({SLICE: 2}, name=queue))
    local = kueue.local_queue(rig.namespace, name=queue, cluster_queue=queue)
    rig.connection.apply(LOCAL_QUEUE, local)
    world = GkeWorld(rig, queue)
    yield world
    world.close()
    rig.connection.delete(CLUSTER_QUEUE, queue)


def settles(world, condition, within=120):
    """Like `becomes`, with more time for Kueue on a busy machine."""

    def holds():
        world.pass_time(timedelta(seconds=1))
        return condition(listed(world))

    eventually(holds, within, lambda: listed(world))


def urgent(name, priority):
    from msgspec.structs import replace

    return replace(order(name), priority=priority)


@pytest.mark.slow
def test_kueue_admits_queues_and_preempts_by_priority(queued, rig):
    queued.provider.request(urgent("low-1", -1))
    queued.provider.request(urgent("low-2", -1))
    settles(queued, lambda now: now["low-1"].state is now["low-2"].state is CloudState.UP)
    queued.provider.request(urgent("low-3", -1))
    settles(queued, lambda now: "quota" in now["low-3"].message.lower())
    assert listed(queued)["low-3"].state is CloudState.PENDING
    queued.provider.request(urgent("first", 100))
    settles(
        queued,
        lambda now: (
            CloudState.PREEMPTED in (now["low-1"].state, now["low-2"].state)
            and now["first"].state is CloudState.UP
        ),
    )
    lost = [found for found in listed(queued).values() if found.state is CloudState.PREEMPTED]
    assert len(lost) == 1 and "Kueue" in lost[0].message
    workloads = rig.connection.list(WORKLOAD, rig.namespace)[0]
    names = {one["spec"].get("priorityClassRef", {}).get("name") for one in workloads}
    assert names == {"low", "veryhigh"}


def test_pods_pass_the_restricted_pod_security_level(rig):
    """Enforced by the API server."""
    from tpufleet.kubernetes.connections import NAMESPACE

    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    rig.connection.patch(NAMESPACE, rig.namespace, {"metadata": {"labels": labels}})
    world = GkeWorld(rig)
    world.provider.request(order("a"))
    come_up(world, "a")
    pod = rig.connection.list(POD, rig.namespace)[0][0]
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert keys.CONTAINER in [one["name"] for one in pod["spec"]["containers"]]
    world.close()
