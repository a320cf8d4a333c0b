"""Admin service of the emulator, on the same port: inject faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import grpc

from tpufleet.errors import BadInput, no_such_host
from tpufleet.model.values import encoding
from tpufleet_testbed import servers
from tpufleet_testbed.cloud_tpu.api_errors import Code
from tpufleet_testbed.cloud_tpu.cloud import Cloud
from tpufleet_testbed.cloud_tpu.nodes import NodeRecord, State
from tpufleet_testbed.servers import ApiError

ADMIN = "tpufleet_testbed.cloud_tpu.Admin"


@dataclass(frozen=True, kw_only=True, slots=True)
class InjectFault:
    node: str  # short or full name
    fault: Literal[
        "preempt", "terminate", "preempt-notice", "maintenance", "kill-host", "stall-host", "vanish"
    ]
    host: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StartupRun:
    node: str


class AdminService:
    def __init__(self, cloud: Cloud, project_url: str = "") -> None:
        self._cloud = cloud
        self._project_url = project_url

    def handler(self) -> grpc.GenericRpcHandler:
        methods: dict[str, Callable[[bytes], Any]] = {
            "InjectFault": self._inject_fault,
            "RunStartupScript": self._run_startup_script,
            "ProjectApi": lambda body: {"url": self._project_url},
        }
        return servers.grpc_service(
            ADMIN, {name: (None, self._wrap(method)) for name, method in methods.items()}
        )

    def _wrap(self, method: Callable[[bytes], Any]) -> Callable[[bytes], bytes]:
        def handle(body: bytes) -> bytes:
            with self._cloud.lock:
                self._cloud.run_due()
                return encoding.to_json(method(body))

        return handle

    def _inject_fault(self, body: bytes) -> dict[str, str]:
        request = encoding.from_json(body, InjectFault)
        node, now = self._find(request.node), self._cloud.clock.now()
        if request.fault in ("kill-host", "stall-host"):
            host = request.host if request.host is not None else -1
            if not 0 <= host < node.accelerator.hosts:
                raise no_such_host(request.node, node.accelerator.hosts, host)
        match request.fault:
            case "preempt":
                self._cloud.reclaim(node, now)
            case "terminate":
                self._cloud.reclaim(node, now, State.TERMINATED)
            case "preempt-notice":
                self._cloud.send_notice(node, "preempted", now)
            case "maintenance":
                self._cloud.send_notice(node, "maintenance", now)
            case "kill-host":
                self._cloud.kill_host(node, request.host or 0)
            case "stall-host":
                self._cloud.hosts.stall_host(node, request.host or 0)
            case "vanish":
                self._cloud.vanish(node, now)
        return {"node": node.id, "state": node.state.name}

    def _run_startup_script(self, body: bytes) -> dict[str, str]:
        """What a user does with ssh on the hosts of a node."""
        node = self._find(encoding.from_json(body, StartupRun).node)
        if node.state is not State.READY:
            raise BadInput(f"{node.id} is {node.state.name}")
        self._cloud.hosts.run_startup_script(node)
        return {"node": node.id, "state": node.state.name}

    def _find(self, name: str) -> NodeRecord:
        for node in self._cloud.nodes.values():
            if name in (node.id, node.name):
                return node
        raise ApiError(Code.NOT_FOUND, f"node {name!r} not found")
