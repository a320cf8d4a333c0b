"""A provisioner with Google's client, an emulated GKE and a manual clock."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from math import ceil
from typing import Any

from tests.provisioner import builders
from tests.provisioner.emulated_slices import EmulatedSlices
from tests.provisioner.simulated_nodes import SimulatedNodes
from tests.testbed.gke.faulty_gke import FaultyGke
from tpufleet.clocks import ManualClock
from tpufleet.errors import ProviderUnavailable
from tpufleet_gke.provisioner.gke.node_pools import GkeNodePools, NodePools
from tpufleet_gke.provisioner.kube.pool_events import EventReporter
from tpufleet_gke.provisioner.loop import Provisioner
from tpufleet_gke.provisioner.model import label_keys, pod_owners
from tpufleet_testbed.gke.grpc_server import GkeServer, client
from tpufleet_testbed.gke.node_pools import NodeBackend

ROUND = timedelta(seconds=2)  # of a provisioner at its defaults


class RecordedEvents:
    """An event sink that keeps what it is sent."""

    def __init__(self) -> None:
        self.recorded: list[tuple[str, str, str]] = []  # kind, reason, message
        self.details: dict[str, list[str]] = {}  # whole messages of GKE, by reason

    def record(
        self,
        involved_object: Any,
        reason: str,
        message: str,
        *,
        warning: bool = False,
        annotations: Any = None,
    ) -> None:
        self.recorded.append((involved_object["kind"], reason, message))
        detail = (annotations or {}).get(label_keys.GKE_MESSAGE)
        if detail:
            self.details.setdefault(reason, []).append(detail)

    def reasons(self) -> list[str]:
        return [reason for _, reason, _ in self._once()]

    def messages(self, reason: str) -> list[str]:
        return [message for _, other, message in self._once() if other == reason]

    def _once(self) -> list[tuple[str, str, str]]:
        """Without the copies on the JobSet of what was just reported on its pod or node."""
        before = [("", "", ""), *self.recorded]
        return [
            event
            for event, last in zip(self.recorded, before, strict=False)
            if event[0] == last[0] or event[1] != last[1] or not event[2].endswith(last[2])
        ]


class ProvisionerHarness:
    """Kubernetes is plain lists; GKE is the emulator over gRPC."""

    def __init__(
        self,
        *,
        simulate_nodes: bool = False,
        clock: ManualClock | None = None,
        events: Any = None,
        list_timeout: timedelta = timedelta(minutes=15),
        dry_run: bool = False,
        **settings: Any,
    ) -> None:
        """Without simulated nodes, pools stay empty and pods stay as tests wrote them."""
        self.clock = clock or ManualClock()
        self.simulated = SimulatedNodes(self.clock) if simulate_nodes else None
        self.gke = FaultyGke(clock=self.clock, nodes=self.simulated or NodeBackend())
        self.server = GkeServer(self.gke).start()
        self.slices = EmulatedSlices(self.clock)
        self.list_timeout, self.dry_run = list_timeout, dry_run
        self.settings = builders.settings(**settings)
        self.events = events or RecordedEvents()
        self.jobsets: list[Any] = []
        self.pod_list: list[Any] = []
        self.stale_reason: str | None = None
        self.jobs: list[Any] = []  # of JobSets
        self.misfits: dict[str, Any] = {}
        self.failing_saves = 0  # how many of the next ones
        self.other_owners: dict[str, list[Any]] = {}  # of kinds other than JobSet, by kind
        self.create_executor = ThreadPoolExecutor(self.settings.concurrency)
        self.delete_executor = ThreadPoolExecutor(self.settings.concurrency)
        self.restart()

    def restart(
        self, pools: NodePools | None = None, is_leader: Callable[[], bool] = lambda: True
    ) -> None:
        """As after a crash: a new provisioner without the memory of the old one."""
        pools = pools or GkeNodePools(
            client(self.server.address), self.settings.parent, call_timeout=900
        )
        self.provisioner = Provisioner(
            self,
            pools,
            self.settings,
            clock=self.clock,
            reporter=EventReporter(self.events),
            create_executor=self.create_executor,
            delete_executor=self.delete_executor,
            is_leader=is_leader,
            list_timeout=self.list_timeout,
            dry_run=self.dry_run,
        )

    def close(self) -> None:
        self.server.close()
        self.create_executor.shutdown()
        self.delete_executor.shutdown()

    # In the place of WatchedCluster

    def stale(self) -> str | None:
        return self.stale_reason

    def pods(self) -> list[Any]:
        return self.pod_list

    def owners(self) -> dict[tuple[str, str], pod_owners.OwnerStatus]:
        statuses = pod_owners.owner_statuses(pod_owners.JOBSET, self.jobsets)
        for kind, resources in self.other_owners.items():
            statuses |= pod_owners.owner_statuses(kind, resources)
        return statuses

    def completed_jobs(self) -> Any:
        return pod_owners.completed_jobs(self.jobs)

    def nodes(self) -> list[Any]:
        return self.simulated.all() if self.simulated else []

    def tpu_slices(self) -> list[Any]:
        self.slices.advance()
        return copy.deepcopy(list(self.slices.slices.values()))

    def partition_nodes(self) -> list[Any]:
        return self.slices.nodes()

    def create_slice(self, manifest: Any) -> None:
        self.slices.create(manifest)

    def delete_slice(self, name: str) -> None:
        self.slices.delete(name)

    def pods_on(self, node: str) -> list[Any]:
        return [pod for pod in self.pod_list if pod["spec"].get("nodeName") == node]

    def set_cordon(self, node: str, at: datetime | None) -> None:
        assert self.simulated is not None
        if at is None:
            self.simulated.cordoned.pop(node, None)
        else:
            self.simulated.cordoned[node] = at.isoformat()

    def load_misfits(self) -> dict[str, Any]:
        return self.misfits

    def save_misfits(self, misfits: Any) -> None:
        if self.failing_saves:
            self.failing_saves -= 1
            raise ProviderUnavailable("etcdserver: request timed out")
        self.misfits = dict(misfits)

    def fetch_owner(self, namespace: str, name: str) -> pod_owners.OwnerStatus | None:
        return self.owners().get((namespace, name))

    # Driven by tests

    def submit(self, name: str = "train", slices: int = 1, **pod_options: Any) -> None:
        self.jobsets.append(builders.jobset(name))
        self.pod_list += [builders.pod(name, job=number, **pod_options) for number in range(slices)]

    def end(self, name: str) -> None:
        """This JobSet completes; its pods are gone."""
        self.pod_list = [
            pod for pod in self.pod_list
            if pod["metadata"]["labels"][label_keys.JOBSET_NAME] != name
        ]  # fmt: skip
        self.jobsets = [
            builders.jobset(name, Completed=self.clock.now())
            if one["metadata"]["name"] == name else one
            for one in self.jobsets
        ]  # fmt: skip

    def complete(self, name: str = "train") -> None:
        self.pod_list = []
        self.jobsets = [builders.jobset(name, Completed=self.clock.now())]

    def reconcile(self, count: int = 1, every: timedelta = ROUND) -> None:
        for _ in itertools.repeat(None, count):
            if self.simulated:
                self.gke.advance()
                self.simulated.schedule(self.pod_list)
            self.provisioner.reconcile()
            self.provisioner.collect_results(timeout=900)
            self.clock.advance(every)

    def advance(self, by: timedelta) -> None:
        """With fewer rounds than in reality once a minute has begun: nothing is that quick."""
        end = self.clock.now() + by
        self.reconcile(min(5, ceil(by / ROUND)))
        while self.clock.now() < end:
            self.reconcile(every=5 * ROUND)

    def states(self) -> dict[str, str]:
        self.gke.advance()
        return {name: pool.status.name for name, pool in self.gke.pools.items()}
