"""The whole emulator: cloud, queued resources, gRPC server, metadata server and hosts."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from tpufleet.clocks import Clock, SystemClock
from tpufleet.errors import BadInput
from tpufleet_testbed.cloud_tpu import api_errors, fault_plan, grpc_service
from tpufleet_testbed.cloud_tpu.admin import AdminService
from tpufleet_testbed.cloud_tpu.agent_hosts import AgentHosts
from tpufleet_testbed.cloud_tpu.capacity import UNLIMITED, CloudCapacity
from tpufleet_testbed.cloud_tpu.cloud import Cloud
from tpufleet_testbed.cloud_tpu.fault_plan import NO_FAULTS, CloudFaultPlan
from tpufleet_testbed.cloud_tpu.locations import ZONES, Latencies
from tpufleet_testbed.cloud_tpu.metadata_server import MetadataServer
from tpufleet_testbed.cloud_tpu.project_api import ProjectApi
from tpufleet_testbed.cloud_tpu.queued_resources import QueuedResources
from tpufleet_testbed.cloud_tpu.queued_rest import QueuedRest
from tpufleet_testbed.cloud_tpu.scheduled_faults import schedule_faults
from tpufleet_testbed.compute_engine.engine import ComputeEngine
from tpufleet_testbed.compute_engine.vm_hosts import VmAgents, VmHosts
from tpufleet_testbed.servers import GrpcServer


class Emulator:
    """With `agents_folder`, the nodes run real agents, which keep their files there."""

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        zones: Sequence[str] = ZONES,
        stock: CloudCapacity = UNLIMITED,
        latencies: Latencies | None = None,
        plan: CloudFaultPlan = NO_FAULTS,
        suspend_whole_gang: bool = True,
        agents_folder: Path | None = None,
        address: str = "127.0.0.1:0",
    ) -> None:
        clock = clock or SystemClock()
        self.metadata = MetadataServer()
        self._hosts = (
            AgentHosts(agents_folder, self.metadata) if agents_folder is not None else None
        )
        vms = VmAgents(self._hosts.processes, self.metadata) if self._hosts else VmHosts()
        self.engine = ComputeEngine(clock, plan=plan.compute, hosts=vms)
        self.project = ProjectApi(engine=self.engine, port=_next_port(address))
        self.cloud = Cloud(
            clock,
            zones=zones,
            stock=stock,
            latencies=latencies,
            plan=plan,
            hosts=self._hosts,
        )
        schedule_faults(self.cloud, plan)
        self.queue = QueuedResources(self.cloud, suspend_whole_gang=suspend_whole_gang)
        self.project.queued = QueuedRest(self.cloud, self.queue, self.engine.reservations.end_of)
        state = self.project.state
        self.cloud.missing = state.missing
        self.service = grpc_service.TpuService(
            self.cloud, self.queue, lambda: api_errors.SERVICE not in state.disabled_apis
        )
        admin = AdminService(self.cloud, self.project.url)
        handlers = [*self.service.handlers(), admin.handler()]
        real_time = isinstance(clock, SystemClock)
        try:
            self._server = GrpcServer(handlers, address, self._run_due if real_time else None)
        except BadInput:
            self.metadata.close()
            self.project.close()
            raise
        self.endpoint = self._server.address

    def start(self) -> None:
        if self._hosts is not None:
            self._hosts.start()
        self._server.start()

    def close(self) -> None:
        self.service.close()
        self._server.close()
        if self._hosts is not None:
            self._hosts.close()
        self.metadata.close()
        self.project.close()

    def billing_summary(self) -> str:
        """One line: nodes, VMs, preemptions, stockouts and billed chip hours."""
        with self.cloud.lock:
            nodes, now = self.cloud.ledger, self.cloud.run_due()
        with self.engine.lock:
            self.engine.run_due()
            vms = self.engine.ledger
            entries = [*nodes.entries, *vms.entries]
            preempted = sum(entry.ended_by == "preempted" for entry in entries)
            hours = nodes.chip_hours(now) + vms.chip_hours(now)
            return (
                f"{len(nodes.entries)} nodes and {len(vms.entries)} VMs created, {preempted} "
                f"preempted, {nodes.denied + vms.denied} requests denied; {hours:.2f} chip hours"
            )

    def __enter__(self) -> Emulator:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_due(self) -> None:
        with self.cloud.lock:
            self.cloud.run_due()
        with self.engine.lock:
            self.engine.run_due()


def _next_port(address: str) -> int:
    """Of the REST APIs: the next one, if it is free."""
    port = int(address.rpartition(":")[2])
    if port == 0:
        return 0
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port + 1))
        except (OSError, OverflowError):
            return 0
    return port + 1


def run_emulator(
    listen: str,
    agents_folder: Path | None,  # None: nodes run no agent
    plan_file: Path | None,
    speed: float,  # of all operations
) -> int:
    """Run the Cloud TPU emulator until SIGTERM or SIGINT. Returns the exit status."""
    plan = fault_plan.load(plan_file) if plan_file else NO_FAULTS
    latencies = plan.compute.latencies.divided_by(speed)
    plan = replace(plan, compute=replace(plan.compute, latencies=latencies))
    emulator = Emulator(
        stock=CloudCapacity(nodes=plan.stock, quota=plan.quota),
        latencies=plan.latencies.divided_by(speed),
        plan=plan,
        agents_folder=agents_folder,
        address=listen,
    )
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    with emulator:
        print(
            f"Cloud TPU API at {emulator.endpoint} (set tpu_vm.endpoint in the config file)",
            flush=True,
        )
        print(f"Compute Engine at {emulator.project.url} (set compute.endpoint)", flush=True)
        stopping.wait()
        print(emulator.billing_summary(), flush=True)
    return 0
