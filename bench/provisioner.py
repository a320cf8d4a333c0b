"""The provisioner with many JobSets on a real control plane, whose nodes KWOK simulates: time from
a pod that fits no node to the create call, from the end of a JobSet to the delete call, and what
the process needs. GKE is emulated, and answers at once; its operations take `--operation` seconds.

The pods of a JobSet end together, `--run-for` seconds after the last of them runs, as those of a
training job do. JobSets may run on pools that were created for others; a pool counts as unused from
the end of its JobSet, of the last pod on it, which is seen up to 0.2 s late, and of the shortest
life of its nodes (NODE_MIN_LIFESPAN, by default 10 s), which begins when its creation ends.

Beside it, worked out from the same arrivals and operation times: the provisioner that this one
replaces, whose workers (3 for pods, 3 for nodes) each wait for an operation, polling every 5 s.

Requires a built control plane: `tpu cluster local build`.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil

from reporting import Measure, report, run_benchmark
from tpufleet.clocks import SystemClock
from tpufleet.kubernetes.connections import JOBSET, NAMESPACE, NODE, POD, Connection
from tpufleet.kubernetes.watch_cache import WatchCache
from tpufleet_gke.provisioner.settings import ProvisionerSettings
from tpufleet_testbed.gke.grpc_server import GkeServer
from tpufleet_testbed.gke.kwok_backend import KwokNodes
from tpufleet_testbed.gke.node_pools import GkeEmulator
from tpufleet_testbed.kubernetes import cluster

ZONE = "us-central1-a"
SHAPES = {1: "2x2", 2: "2x4", 4: "4x4", 8: "4x8", 16: "8x8"}  # topology by nodes of 4 chips
FORMER_WORKERS, FORMER_POLL = 3, 5.0
LEADER = {"jobset.sigs.k8s.io/jobset-name": None, "batch.kubernetes.io/job-completion-index": "0"}


class QueuedNodes:
    """Changes nodes outside the emulator's lock, which calls of the API need too. What concerns one
    pool stays in order."""

    def __init__(self, nodes: KwokNodes) -> None:
        self._nodes = nodes
        self._executors = [ThreadPoolExecutor(1) for _ in range(2)]

    def create_nodes(self, pool: Any, *, chips: bool = True) -> None:
        self._line(pool.name).submit(self._nodes.create_nodes, pool, chips=chips)

    def register_chips(self, pool: Any) -> None:
        self._line(pool.name).submit(self._nodes.register_chips, pool)

    def delete_nodes(self, pool: str) -> None:
        self._line(pool).submit(self._nodes.delete_nodes, pool)

    def drain_nodes(self, pool: str) -> None:
        self._line(pool).submit(self._nodes.drain_nodes, pool)

    def relabel_nodes(self, pool: Any) -> None:
        self._line(pool.name).submit(self._nodes.relabel_nodes, pool)

    def _line(self, pool: str) -> ThreadPoolExecutor:
        return self._executors[hash(pool) % len(self._executors)]


class Moments:
    """When a condition was first seen, by JobSet: at most 50 ms late."""

    def __init__(
        self, connection: Connection, kind: Any, reached: Callable[[Any], str | None], **scope: Any
    ) -> None:
        self.at: dict[str, datetime] = {}
        self._reached = reached
        self._changed, self._closing = threading.Event(), threading.Event()
        self._cache = WatchCache(connection, kind, self._changed.set, **scope)
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def start(self) -> Moments:
        self._cache.start()
        self._thread.start()
        return self

    def close(self) -> None:
        self._closing.set()
        self._changed.set()
        self._thread.join()
        self._cache.close()

    def _follow(self) -> None:
        while not self._closing.wait(0.05):
            self._changed.wait()
            self._changed.clear()
            now = datetime.now(UTC)
            for item in self._cache.all():
                name = self._reached(item)
                if name is not None:
                    self.at.setdefault(name, now)


def unschedulable(pod: Any) -> str | None:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    waits = any(
        one["type"] == "PodScheduled" and one.get("reason") == "Unschedulable" for one in conditions
    )
    return pod["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-name"] if waits else None


class TrainingRuns:
    """Ends the pods of each Job together, once all of them have run for some time, and notes when
    pools were last used."""

    def __init__(self, connection: Connection, namespace: str, nodes: int, run_for: float) -> None:
        self.used_until: dict[str, datetime] = {}  # by pool
        self._connection, self._nodes, self._run_for = connection, nodes, run_for
        self._cache = WatchCache(connection, POD, lambda: None, namespace=namespace)
        self._executor = ThreadPoolExecutor(2)
        self._complete_since: dict[str, float] = {}
        self._ending: set[str] = set()
        self._in_use: dict[str, set[str]] = {}  # pods by pool
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def start(self) -> TrainingRuns:
        self._cache.start()
        self._thread.start()
        return self

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._executor.shutdown(cancel_futures=True)
        self._cache.close()

    def _follow(self) -> None:
        while not self._closing.wait(0.2):
            running: dict[str, list[Any]] = {}
            in_use: dict[str, set[str]] = {}
            for pod in self._cache.all():
                phase, node = pod["status"].get("phase"), pod["spec"].get("nodeName")
                if node and phase not in ("Succeeded", "Failed"):
                    pool = node.removeprefix("gke-").rpartition("-")[0]
                    in_use.setdefault(pool, set()).add(pod["metadata"]["uid"])
                if phase == "Running":
                    name = pod["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-name"]
                    running.setdefault(name, []).append(pod)
            for pool in self._in_use:
                if self._in_use[pool] - in_use.get(pool, set()):
                    self.used_until[pool] = datetime.now(UTC)
            self._in_use = in_use
            self._end_complete(running)

    def _end_complete(self, running: dict[str, list[Any]]) -> None:
        now = time.monotonic()
        for name, pods in running.items():
            if len(pods) < self._nodes or name in self._ending:
                continue
            if now - self._complete_since.setdefault(name, now) >= self._run_for:
                self._ending.add(name)
                for pod in pods:
                    self._executor.submit(self._end, pod["metadata"])

    def _end(self, metadata: Any) -> None:
        ends = {"metadata": {"annotations": {"local.tpufleet.dev/exit-code": "0"}}}
        self._connection.patch(POD, metadata["name"], ends, metadata["namespace"])


def ended(jobset: Any, *kinds: str) -> str | None:
    """The name of a JobSet that has one of these conditions; of one that ended, without any."""
    conditions = (jobset.get("status") or {}).get("conditions") or ()
    kinds = kinds or ("Completed", "Failed")
    done = any(one["type"] in kinds and one["status"] == "True" for one in conditions)
    return jobset["metadata"]["name"] if done else None


def jobset(name: str, namespace: str, nodes: int) -> dict[str, Any]:
    pod = {
        "restartPolicy": "Never",
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
            "cloud.google.com/gke-tpu-topology": SHAPES[nodes],
        },
        "containers": [
            {"name": "main", "image": "none", "resources": {"limits": {"google.com/tpu": 4}}}
        ],
    }
    job = {
        "parallelism": nodes,
        "completions": nodes,
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    return {
        "metadata": {"name": name, "namespace": namespace, "annotations": exclusive},
        "spec": {"replicatedJobs": [{"name": "slice", "template": {"spec": job}}]},
    }


def former_waits(arrivals: Sequence[float], operation: float) -> list[float]:
    """How long each request waits for one of the former tool's blocking workers, in seconds."""
    blocked = math.ceil(operation / FORMER_POLL) * FORMER_POLL
    free_at = [0.0] * FORMER_WORKERS
    waits = []
    for arrival in sorted(arrivals):
        start = max(arrival, heapq.heappop(free_at))
        heapq.heappush(free_at, start + blocked)
        waits.append(start - arrival)
    return waits


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


@contextlib.contextmanager
def control_plane(folder: Path | None) -> Iterator[Path]:
    """The kubeconfig of a running cluster, or of one for this run."""
    if folder is not None:
        yield cluster.find(folder).kubeconfig
        return
    with tempfile.TemporaryDirectory(prefix="tpufleet-bench-") as own:
        place = Path(own) / "cluster"
        try:
            yield cluster.up(place).kubeconfig
        finally:
            cluster.down(place)


@contextlib.contextmanager
def provisioner(kubeconfig: Path, endpoint: str, namespace: str) -> Iterator[psutil.Process]:
    """`tpu provisioner` at its default settings."""
    environment = {
        "GCP_PROJECT_ID": "p",
        "GCP_CLUSTER_LOCATION": "us-central1",
        "GCP_CLUSTER": "c",
        "GCP_ZONE": ZONE,
    }
    addresses = ("--metrics-bind-address", "--health-probe-bind-address")
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "tpufleet", "provisioner", "--kubeconfig", str(kubeconfig),
             "--gke-endpoint", endpoint, "--namespace", namespace,
             *(part for name in addresses for part in (name, "127.0.0.1:0"))],
            env={**os.environ, **environment}, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            yield psutil.Process(child.pid)
            if child.poll() is not None:
                log.seek(0)
                raise SystemExit(f"the provisioner ended: {log.read().decode()[-2000:]}")
        finally:
            child.terminate()
            child.wait(30)


def run(options: argparse.Namespace, kubeconfig: Path) -> list[Measure]:
    connection = Connection(kubeconfig, manager="bench")
    namespace = f"bench-{os.getpid()}"
    connection.apply(NAMESPACE, {"metadata": {"name": namespace}})
    operation = timedelta(seconds=options.operation)
    gke = GkeEmulator(
        clock=SystemClock(),
        nodes=QueuedNodes(KwokNodes(connection)),
        creation_time=operation,
        deletion_time=operation,
    )
    server = GkeServer(gke).start()
    from lightkube import operators

    labels = {key: value or operators.exists() for key, value in LEADER.items()}
    waiting = Moments(connection, POD, unschedulable, namespace=namespace, labels=labels).start()
    over = Moments(connection, JOBSET, ended, namespace=namespace).start()
    runs = TrainingRuns(connection, namespace, options.nodes, options.run_for).start()
    peak = threading.Event()
    memory = [0.0]
    try:
        with provisioner(kubeconfig, server.address, namespace) as process:

            def sample() -> None:
                while not peak.wait(0.5):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        memory[0] = max(memory[0], process.memory_info().rss / 1e6)

            threading.Thread(target=sample, daemon=True).start()
            time.sleep(2.0)
            began = time.monotonic()
            submit(connection, namespace, options, began)
            names = {f"job-{number:03}" for number in range(options.jobsets)}
            wait_for(
                lambda: len(over.at) >= options.jobsets,
                options.within,
                lambda: f"JobSets that have not ended: {sorted(names - set(over.at))}",
            )
            wait_for(
                lambda: set(gke.created) == set(gke.deleted_at),
                options.within,
                lambda: f"pools that are left: {sorted(gke.pools)}",
            )
            wall = time.monotonic() - began
            used = process.cpu_times()
            wait_for(lambda: not gke.pools, options.within, lambda: f"left: {sorted(gke.pools)}")
            jobsets, _ = connection.list(JOBSET, namespace)
            failed = sum(ended(one, "Failed") is not None for one in jobsets)
    finally:
        peak.set()
        for one in (waiting, over, runs):
            one.close()
        server.close()
        if options.cluster is not None:  # else it is deleted
            clean_up(connection, namespace, set(gke.created))
        connection.close()
    unused = {
        pool: max(
            over.at[jobset_of(pool)],
            runs.used_until.get(pool, over.at[jobset_of(pool)]),
            gke.created_at[pool] + operation + ProvisionerSettings().node_min_lifespan,
        )
        for pool in gke.created
    }
    cost = [
        Measure(name="JobSets that failed", ours=failed, unit="", goal=0),
        Measure(name="CPU of the provisioner", ours=used.user + used.system, unit="s"),
        Measure(
            name="CPU of the provisioner, share of a core",
            ours=(used.user + used.system) / wall,
            unit="cores",
        ),
        Measure(name="memory of the provisioner, peak", ours=memory[0], unit="MB"),
    ]
    return [*measures(gke, waiting.at, over.at, unused, options), *cost]


def jobset_of(pool: str) -> str:
    return pool.rpartition("-")[0]


def submit(
    connection: Connection, namespace: str, options: argparse.Namespace, began: float
) -> None:
    for number in range(options.jobsets):
        time.sleep(max(0.0, began + number / options.rate - time.monotonic()))
        connection.create(JOBSET, jobset(f"job-{number:03}", namespace, options.nodes))


def wait_for(condition: Callable[[], bool], within: float, describe: Callable[[], str]) -> None:
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"not done within {within:g} s (--within): {describe()}")
        time.sleep(0.2)


def clean_up(connection: Connection, namespace: str, pools: set[str]) -> None:
    for one in connection.list(JOBSET, namespace)[0]:
        connection.delete(JOBSET, one["metadata"]["name"], namespace)
    connection.delete(NAMESPACE, namespace)
    for node in connection.list(NODE)[0]:
        if node["metadata"]["labels"].get("cloud.google.com/gke-nodepool") in pools:
            connection.delete(NODE, node["metadata"]["name"])


def measures(
    gke: GkeEmulator,
    waiting: dict[str, datetime],
    over: dict[str, datetime],
    unused: dict[str, datetime],
    options: argparse.Namespace,
) -> list[Measure]:
    to_create = [
        (gke.created_at[pool] - waiting[jobset_of(pool)]).total_seconds()
        for pool in gke.created
        if jobset_of(pool) in waiting
    ]
    to_delete = [(at - unused[pool]).total_seconds() for pool, at in gke.deleted_at.items()]
    first = min(waiting.values())
    creations = former_waits(
        [(at - first).total_seconds() for at in waiting.values()], options.operation
    )
    deletions = former_waits(
        [(at - first).total_seconds() for at in over.values()], options.operation
    )
    peer = f"former tool, {FORMER_WORKERS} blocking workers, simulated"
    sizes = f"{options.jobsets} JobSets of {options.nodes} nodes"
    return [
        Measure(
            name=f"pod to create call, p99, {sizes}", ours=max(percentile(to_create, 0.99), 0.0),
            unit="s", goal=1.0, anchor=round(percentile(creations, 0.99), 1), peer=peer,
        ),
        Measure(
            name="pod to create call, median", ours=max(percentile(to_create, 0.5), 0.0), unit="s",
            anchor=round(percentile(creations, 0.5), 1), peer=peer,
        ),
        Measure(
            name="unused pool to delete call, maximum", ours=max(to_delete), unit="s", goal=5.0,
            anchor=round(max(deletions), 1), peer=peer,
        ),
        Measure(
            name="pools created per JobSet", ours=len(gke.created) / options.jobsets, unit="",
            goal=1.0,
        ),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobsets", type=int, default=200)
    parser.add_argument("--nodes", type=int, default=8, choices=SHAPES, help="of each JobSet")
    parser.add_argument("--rate", type=float, default=0.5, help="JobSets submitted per second")
    parser.add_argument("--operation", type=float, default=30.0, help="seconds of an operation")
    parser.add_argument("--run-for", type=float, default=10.0, help="seconds that pods run")
    parser.add_argument("--within", type=float, default=600.0, help="give up after these seconds")
    parser.add_argument("--cluster", type=Path, help="folder of a running local cluster")
    options = parser.parse_args()
    with control_plane(options.cluster) as kubeconfig:
        report("provisioner", run(options, kubeconfig))


if __name__ == "__main__":
    run_benchmark(main)
