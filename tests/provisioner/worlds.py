"""A provisioner around Google's client and an emulated GKE, on a clock that tests move."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from tests.provisioner import making
from tpufleet.clocks import ManualClock
from tpufleet.emulator_gke.pools import Gke
from tpufleet.emulator_gke.server import GkeServer, client
from tpufleet.provisioner import families
from tpufleet.provisioner.gke import GkeNodePools, NodePools
from tpufleet.provisioner.loop import Provisioner
from tpufleet.provisioner.telling import Teller


class Records:
    """Events, as they would be written."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str, str]] = []  # kind of object, reason, words

    def record(self, about: Any, reason: str, words: str, *, warning: bool = False) -> None:
        self.all.append((about["kind"], reason, words))

    def reasons(self) -> list[str]:
        return [reason for _, reason, _ in self.all]


class World:
    """The edge of Kubernetes is plain lists; GKE is spoken to over gRPC."""

    def __init__(self, **given: Any) -> None:
        self.clock = ManualClock()
        self.gke = Gke(clock=self.clock)
        self.server = GkeServer(self.gke).start()
        self.settings = making.settings(**given)
        self.records = Records()
        self.jobset_list: list[Any] = []
        self.pod_list: list[Any] = []
        self.others: dict[str, list[Any]] = {}  # what else is served, by kind
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
            teller=Teller(self.records), creator=self.creator, deleter=self.deleter,
            leading=leading,
        )  # fmt: skip

    def close(self) -> None:
        self.server.close()
        self.creator.shutdown()
        self.deleter.shutdown()

    # What the provisioner sees of Kubernetes.

    def pods(self) -> list[Any]:
        return self.pod_list

    def owners(self) -> dict[tuple[str, str], families.Owner]:
        known = families.owners(families.JOBSET, self.jobset_list)
        for kind, found in self.others.items():
            known |= families.owners(kind, found)
        return known

    def nodes(self) -> list[Any]:
        return []

    def owner_now(self, namespace: str, name: str) -> families.Owner | None:
        return self.owners().get((namespace, name))

    # What tests do.

    def submit(self, name: str = "train", slices: int = 1, **asked: Any) -> None:
        self.jobset_list.append(making.jobset(name))
        self.pod_list += [making.pod(name, job=number, **asked) for number in range(slices)]

    def end(self, name: str = "train") -> None:
        self.pod_list = []
        self.jobset_list = [making.jobset(name, Completed=self.clock.now())]

    def rounds(self, count: int = 1, every: timedelta = timedelta(seconds=2)) -> None:
        for _ in itertools.repeat(None, count):
            self.provisioner.round()
            self.provisioner.settle(within=60)
            self.clock.advance(every)

    def pass_time(self, by: timedelta) -> None:
        end = self.clock.now() + by
        while self.clock.now() < end:
            self.rounds()

    def states(self) -> dict[str, str]:
        self.gke.advance()
        return {name: pool.status.name for name, pool in self.gke.pools.items()}
