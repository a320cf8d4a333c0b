"""The whole emulator: cloud, queue, wire, metadata and machines, started and stopped together."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from tpufleet.clocks import Clock, SystemClock
from tpufleet.errors import BadInput
from tpufleet.testbed.cloud_tpu import grpc_service
from tpufleet.testbed.cloud_tpu.admin import AdminService
from tpufleet.testbed.cloud_tpu.agent_hosts import AgentHosts
from tpufleet.testbed.cloud_tpu.capacity import UNLIMITED, CloudCapacity
from tpufleet.testbed.cloud_tpu.cloud import ZONES, Cloud, Latencies
from tpufleet.testbed.cloud_tpu.fault_plan import NO_FAULTS, FaultPlan
from tpufleet.testbed.cloud_tpu.metadata_server import MetadataServer
from tpufleet.testbed.cloud_tpu.queued_resources import QueuedResources

log = logging.getLogger(__name__)

LONGEST_REST = 0.2  # seconds between looks at what is due, on a real clock


class Emulator:
    """Give a folder to `agents` and its nodes run real agents there."""

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        zones: Sequence[str] = ZONES,
        stock: CloudCapacity = UNLIMITED,
        pace: Latencies | None = None,
        plan: FaultPlan = NO_FAULTS,
        suspends_whole: bool = True,
        agents: Path | None = None,
        address: str = "127.0.0.1:0",
    ) -> None:
        self.metadata = MetadataServer()
        self._machines = AgentHosts(agents, self.metadata) if agents is not None else None
        self.cloud = Cloud(
            clock or SystemClock(),
            zones=zones,
            stock=stock,
            pace=pace,
            plan=plan,
            machines=self._machines,
        )
        self.queue = QueuedResources(self.cloud, suspends_whole=suspends_whole)
        self.service = grpc_service.TpuService(self.cloud, self.queue)
        admin = AdminService(self.cloud)
        handlers = [*self.service.handlers(), admin.handler()]
        try:
            self._server, port = grpc_service.create_server(handlers, address)
        except BadInput:
            self.metadata.close()
            raise
        self.endpoint = f"{address.rpartition(':')[0]}:{port}"
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._real_time = clock is None or isinstance(clock, SystemClock)

    def start(self) -> None:
        if self._machines is not None:
            self._machines.start()
        self._server.start()
        if self._real_time:
            self._thread = threading.Thread(target=self._run, name="emulator", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self.service.close()
        self._server.stop(grace=1).wait()
        if self._thread is not None:
            self._thread.join()
        if self._machines is not None:
            self._machines.close()
        self.metadata.close()

    def billing_summary(self) -> str:
        """What a real cloud would have billed, in words."""
        with self.cloud.lock:
            ledger, now = self.cloud.ledger, self.cloud.settle()
            refused = sum(not answer.granted for answer in ledger.responses)
            taken = sum(entry.ended_by == "preempted" for entry in ledger.entries)
            return (
                f"{len(ledger.entries)} nodes came up, {taken} were preempted, {refused} requests "
                f"were refused; {ledger.chip_hours(now):.2f} chip hours"
            )

    def __enter__(self) -> Emulator:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing.wait(LONGEST_REST):
            try:
                with self.cloud.lock:
                    self.cloud.settle()
            except Exception:
                log.exception("a round of the emulator failed; the next follows")
