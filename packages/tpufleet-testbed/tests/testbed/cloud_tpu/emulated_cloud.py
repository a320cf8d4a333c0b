"""An emulator on a manual clock, with Google's client connected to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from google.cloud import tpu_v2alpha1

from tests.testbed.cloud_tpu.clients import PARENT, alpha_client_of, client_of
from tests.testbed.cloud_tpu.maintenance import plan_maintenance
from tpufleet.clocks import ManualClock
from tpufleet_testbed.cloud_tpu.capacity import CapacityLimit
from tpufleet_testbed.cloud_tpu.emulator import Emulator
from tpufleet_testbed.cloud_tpu.host_backend import HostBackend
from tpufleet_testbed.cloud_tpu.locations import IMMEDIATE
from tpufleet_testbed.cloud_tpu.nodes import NodeRecord

FIXED = replace(IMMEDIATE, boot=timedelta(seconds=90), deletion=timedelta(seconds=20))


class _Hosts(HostBackend):
    """Every host has written these guest attributes."""

    def __init__(self, attributes: dict[str, str]) -> None:
        self._attributes = attributes

    def guest_attributes(
        self, node: NodeRecord, host: int, query_path: str
    ) -> dict[tuple[str, str], str]:
        found = {tuple(path.split("/", 1)): value for path, value in self._attributes.items()}
        return {(namespace, key): value for (namespace, key), value in found.items()}


class EmulatedCloud:
    def __init__(self, **settings: object) -> None:
        self.clock = ManualClock()
        self.emulator = Emulator(clock=self.clock, **settings)  # type: ignore[arg-type]
        self.emulator.start()
        self.client = client_of(self.emulator.endpoint)
        self._alpha: tpu_v2alpha1.TpuClient | None = None

    @property
    def alpha_client(self) -> tpu_v2alpha1.TpuClient:
        if self._alpha is None:
            self._alpha = alpha_client_of(self.emulator.endpoint)
        return self._alpha

    def disable_api(self) -> None:
        self.emulator.project.state.disabled_apis.add("tpu.googleapis.com")

    def enable_api(self) -> None:
        """By the request that `gcloud services enable` sends."""
        path = "/services/v1/projects/p/services/tpu.googleapis.com:enable"
        assert self.emulator.project.answer(path, {}, "POST")[0] == 200

    def advance(self, seconds: float) -> None:
        self.clock.advance(timedelta(seconds=seconds))

    def state(self, node_id: str) -> str:
        return self.client.get_node(name=f"{PARENT}/nodes/{node_id}", timeout=900).state.name

    def queue_state(self, queued_id: str) -> str:
        name = f"{PARENT}/queuedResources/{queued_id}"
        return self.client.get_queued_resource(name=name, timeout=900).state.state.name

    def billed(self) -> list[tuple[str, float]]:
        """Each billed node, and for how many seconds."""
        with self.emulator.cloud.lock:
            now = self.emulator.cloud.run_due()
            return [
                (entry.node, ((entry.ended_at or now) - entry.began_at).total_seconds())
                for entry in self.emulator.cloud.ledger.entries
            ]

    def record(self, node_id: str, parent: str = PARENT) -> NodeRecord:
        with self.emulator.cloud.lock:
            self.emulator.cloud.run_due()
            return self.emulator.cloud.node(f"{parent}/nodes/{node_id}")

    def preempt(self, node_id: str) -> None:
        record = self.record(node_id)
        with self.emulator.cloud.lock:
            self.emulator.cloud.reclaim(record, self.clock.now())

    def empty(self) -> None:
        """No zone has any stock."""
        self._limit(nodes=(CapacityLimit(most=0),))

    def limit_quota(self, most: int) -> None:
        """Of every kind, in every zone."""
        self._limit(quota=(CapacityLimit(most=most),))

    def _limit(self, **limits: tuple[CapacityLimit, ...]) -> None:
        cloud = self.emulator.cloud
        cloud.stock = replace(cloud.stock, **limits)

    def remove(self, last_part: str) -> None:
        """Of a network or another resource of the project, by the last part of its name."""
        self.emulator.project.state.missing.add(last_part)

    def kill_host(self, node_id: str, host: int) -> None:
        self.emulator.cloud.kill_host(self.record(node_id), host)

    def plan_maintenance(
        self, node_id: str, days: float, *, parent: str = PARENT, scheduled: bool = True
    ) -> None:
        record = self.record(node_id, parent)
        plan_maintenance(self.emulator.cloud, record, timedelta(days=days), scheduled=scheduled)

    def write_guest_attribute(self, node_id: str, path: str, value: str) -> None:
        """As each host of the node would."""
        assert self.record(node_id)
        self.emulator.cloud.hosts = _Hosts({path: value})

    def seconds_until(self, condition: Callable[[], bool], limit: int = 3600) -> int:
        for second in range(limit):
            if condition():
                return second
            self.advance(1)
        raise AssertionError(f"not within {limit} s")

    def close(self) -> None:
        self.emulator.close()
