"""A provisioner around Google's client and an emulated GKE, on a clock that tests move."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from tests.provisioner import builders
from tpufleet.clocks import ManualClock
from tpufleet.provisioner.gke_api.node_pools import GkeNodePools, NodePools
from tpufleet.provisioner.kube import pod_owners
from tpufleet.provisioner.kube.pool_events import EventReporter
from tpufleet.provisioner.loop import Provisioner
from tpufleet.testbed.gke.grpc_server import GkeServer, client
from tpufleet.testbed.gke.node_pools import GkeEmulator


class RecordedEvents:
    """Events, as they would be written."""

    def __init__(self) -> None:
        self.recorded: list[tuple[str, str, str]] = []  # kind of object, reason, words

    def record(self, about: Any, reason: str, message: str, *, warning: bool = False) -> None:
        self.recorded.append((about["kind"], reason, message))

    def reasons(self) -> list[str]:
        return [reason for _, reason, _ in self.recorded]


class ProvisionerHarness:
    """The edge of Kubernetes is plain lists; GKE is spoken to over gRPC."""

    def __init__(self, **given: Any) -> None:
        self.clock = ManualClock()
        self.gke = GkeEmulator(clock=self.clock)
        self.server = GkeServer(self.gke).start()
        self.settings = builders.settings(**given)
        self.events = RecordedEvents()
        self.jobsets: list[Any] = []
        self.pod_list: list[Any] = []
        self.other_owners: dict[str, list[Any]] = {}  # what else is served, by kind
        self.creator = ThreadPoolExecutor(self.settings.concurrency)
        self.deleter = ThreadPoolExecutor(self.settings.concurrency)
        self.restart()

    def restart(
        self, pools: NodePools | None = None, leading: Callable[[], bool] = lambda: True
    ) -> None:
        """The provisioner died without a word, and a new one started."""
        pools = pools or GkeNodePools(client(self.server.address), self.settings.parent)
        self.provisioner = Provisioner(
            self, pools, self.settings, clock=self.clock,
            reporter=EventReporter(self.events), create_executor=self.creator, delete_executor=self.deleter,
            is_leader=leading,
        )  # fmt: skip

    def close(self) -> None:
        self.server.close()
        self.creator.shutdown()
        self.deleter.shutdown()

    # What the provisioner sees of Kubernetes.

    def pods(self) -> list[Any]:
        return self.pod_list

    def owners(self) -> dict[tuple[str, str], pod_owners.OwnerStatus]:
        known = pod_owners.owner_statuses(pod_owners.JOBSET, self.jobsets)
        for kind, found in self.other_owners.items():
            known |= pod_owners.owner_statuses(kind, found)
        return known

    def nodes(self) -> list[Any]:
        return []

    def fetch_owner(self, namespace: str, name: str) -> pod_owners.OwnerStatus | None:
        return self.owners().get((namespace, name))

    # What tests do.

    def submit(self, name: str = "train", slices: int = 1, **asked: Any) -> None:
        self.jobsets.append(builders.jobset(name))
        self.pod_list += [builders.pod(name, job=number, **asked) for number in range(slices)]

    def end(self, name: str = "train") -> None:
        self.pod_list = []
        self.jobsets = [builders.jobset(name, Completed=self.clock.now())]

    def reconcile(self, count: int = 1, every: timedelta = timedelta(seconds=2)) -> None:
        for _ in itertools.repeat(None, count):
            self.provisioner.reconcile()
            self.provisioner.collect_results(timeout=60)
            self.clock.advance(every)

    def advance(self, by: timedelta) -> None:
        end = self.clock.now() + by
        while self.clock.now() < end:
            self.reconcile()

    def states(self) -> dict[str, str]:
        self.gke.advance()
        return {name: pool.status.name for name, pool in self.gke.pools.items()}
