"""Many JobSets of one shape, whose pods go to any pool that is free: also one that is about to be
deleted. The scheduler acts on what it saw a moment ago, as a real one does."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("google.cloud.container_v1", reason="needs the extra `gke`")

from tests.provisioner.harness import ProvisionerHarness
from tests.provisioner.simulated_nodes import misfit, unschedulable
from tpufleet_gke.provisioner.model import label_keys

TICK = timedelta(milliseconds=500)
OPERATION = timedelta(seconds=30)  # to create or delete a pool
RUN = timedelta(seconds=10)
ARRIVALS = timedelta(minutes=2)  # of all JobSets
EIGHT_NODES = {label_keys.TOPOLOGY: "4x8"}


class LaggingScheduler:
    """Binds one leader to each free pool (exclusive placement), on nodes as they were `lag` ago."""

    def __init__(self, harness: ProvisionerHarness, lag: timedelta, seed: int) -> None:
        self._harness, self._lag = harness, lag
        self._random = random.Random(seed)
        self._views: list[tuple[Any, list[Any]]] = []  # time, nodes
        self.lost: list[str] = []  # JobSets whose pool went away under them

    def step(self) -> None:
        now = self._harness.clock.now()
        assert self._harness.simulated is not None
        nodes = self._harness.simulated.all()
        self._views = [*self._views, (now, nodes)][-20:]
        seen = next(
            (view for at, view in reversed(self._views) if at <= now - self._lag), self._views[0][1]
        )
        names = {node["metadata"]["name"] for node in nodes}
        self._note_losses(names)
        waiting = [pod for pod in self._harness.pod_list if not pod["spec"].get("nodeName")]
        self._random.shuffle(waiting)
        taken = {
            self._pool(pod["spec"]["nodeName"])
            for pod in self._harness.pod_list
            if pod["spec"].get("nodeName")
        }
        for pod in waiting:
            free = [
                node["metadata"]["name"]
                for node in seen
                if node["metadata"]["name"] in names
                and self._pool(node["metadata"]["name"]) not in taken
                and not misfit(pod, node)
            ]
            if not free:
                pod["status"] = unschedulable(f"0/{len(nodes)} nodes are available")
                continue
            chosen = self._random.choice(free)
            pod["spec"]["nodeName"], pod["status"] = chosen, {"phase": "Running"}
            pod["bound_at"] = now
            taken.add(self._pool(chosen))

    def _note_losses(self, names: set[str]) -> None:
        drained = self._harness.simulated.drained if self._harness.simulated else set()
        for pod in self._harness.pod_list:
            node = pod["spec"].get("nodeName")
            if node and (node not in names or self._pool(node) in drained):
                self.lost.append(pod["metadata"]["labels"][label_keys.JOBSET_NAME])
                del pod["spec"]["nodeName"]

    @staticmethod
    def _pool(node: str) -> str:
        return node.removeprefix("gke-").rpartition("-")[0]


def end_finished(harness: ProvisionerHarness) -> None:
    now = harness.clock.now()
    for pod in list(harness.pod_list):
        if pod["spec"].get("nodeName") and now - pod["bound_at"] >= RUN:
            harness.end(pod["metadata"]["labels"][label_keys.JOBSET_NAME])


def run_many(harness: ProvisionerHarness, jobsets: int, lag: timedelta, seed: int) -> list[str]:
    """Until all have ended and no pool is left. Returns the lost ones. JobSets are submitted for so
    long that the first ones end meanwhile, and leave pools that others are bound to."""
    scheduler = LaggingScheduler(harness, lag, seed)
    harness.gke.creation_time = harness.gke.deletion_time = OPERATION
    start, submitted = harness.clock.now(), 0
    for _ in range(2000):
        due = jobsets * ((harness.clock.now() - start) / ARRIVALS)
        while submitted < min(due, jobsets):
            harness.submit(f"job-{submitted:03}", node_selector=EIGHT_NODES)
            submitted += 1
        harness.gke.advance()
        scheduler.step()
        end_finished(harness)
        harness.provisioner.reconcile()
        harness.provisioner.collect_results(timeout=900)
        harness.clock.advance(TICK)
        if submitted == jobsets and not harness.pod_list and not harness.gke.pools:
            return scheduler.lost
    waiting = [pod["metadata"]["name"] for pod in harness.pod_list]
    raise AssertionError(f"stuck: {waiting}, pools {sorted(harness.gke.pools)}")


SIZES = [
    pytest.param(12, id="12"),
    pytest.param(200, id="200", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("jobsets", SIZES)
@pytest.mark.parametrize(
    ("lag", "nodes_late"),
    [
        pytest.param(0.0, 0.0, id="at once"),
        pytest.param(1.5, 0.0, id="late"),
        pytest.param(0.0, 2.0, id="late nodes"),
    ],
)
def test_no_jobset_loses_its_pool_and_no_pool_is_left(jobsets, lag, nodes_late):
    """JobSets also end on the pools of others while their own are being created."""
    harness = ProvisionerHarness(simulate_nodes=True, concurrency=8)
    assert harness.simulated is not None
    harness.simulated.late = timedelta(seconds=nodes_late)
    try:
        assert run_many(harness, jobsets, timedelta(seconds=lag), seed=jobsets) == []
        assert len(harness.gke.created) <= jobsets
    finally:
        harness.close()
