"""What only an emulator can do, over the same port: hurt nodes, force states, show the ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from tpufleet.errors import BadInput
from tpufleet.model import encoding
from tpufleet.testbed.cloud_tpu.api_errors import ApiError, Code
from tpufleet.testbed.cloud_tpu.cloud import Cloud
from tpufleet.testbed.cloud_tpu.nodes import Health, NodeRecord, State

ADMIN = "tpufleet.testbed.cloud_tpu.Admin"


@dataclass(frozen=True, kw_only=True, slots=True)
class InjectFault:
    node: str  # short name, or whole
    fault: str
    host: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ForceState:
    node: str
    state: str
    health: str | None = None


class AdminService:
    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud

    def handler(self) -> grpc.GenericRpcHandler:
        methods: dict[str, Callable[[bytes], Any]] = {
            "Hurt": self._hurt,
            "Force": self._force,
            "Ledger": self._ledger,
        }
        return grpc.method_handlers_generic_handler(
            ADMIN,
            {
                name: grpc.unary_unary_rpc_method_handler(self._answering(method))
                for name, method in methods.items()
            },
        )

    def _answering(
        self, method: Callable[[bytes], Any]
    ) -> Callable[[bytes, grpc.ServicerContext], bytes]:
        def answer(body: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                with self._cloud.lock:
                    self._cloud.settle()
                    return encoding.to_json(method(body))
            except ApiError as error:
                context.abort(error.code, error.message)
            except BadInput as error:
                context.abort(Code.INVALID_ARGUMENT, str(error))
            raise AssertionError("abort returned")

        return answer

    def _hurt(self, body: bytes) -> dict[str, str]:
        asked = encoding.from_json(body, InjectFault)
        node, now = self._find(asked.node), self._cloud.clock.now()
        if asked.fault in ("kill-host", "stall-host"):
            host = asked.host if asked.host is not None else -1
            if not 0 <= host < node.accelerator.hosts:
                last = node.accelerator.hosts - 1
                raise BadInput(f"which host of {asked.node}? Give one from 0 to {last}")
        match asked.fault:
            case "preempt":
                self._cloud.take(node, now)
            case "terminate":
                self._cloud.take(node, now, State.TERMINATED)
            case "preempt-notice":
                self._cloud.give_notice(node, "preempted", now)
            case "maintenance":
                self._cloud.give_notice(node, "maintenance", now)
            case "kill-host":
                self._cloud.kill_host(node, asked.host or 0)
            case "stall-host":
                self._cloud.machines.stall_host(node, asked.host or 0)
            case "vanish":
                self._cloud.vanish(node, now)
            case _:
                raise BadInput(f"no fault is called {asked.fault!r}")
        return {"node": node.id, "state": node.state.name}

    def _force(self, body: bytes) -> dict[str, str]:
        asked = encoding.from_json(body, ForceState)
        node = self._find(asked.node)
        try:
            state = State[asked.state]
            health = Health[asked.health] if asked.health else None
        except KeyError as error:
            raise BadInput(f"no state is called {error}") from error
        self._cloud.put(node, state, health, self._cloud.clock.now())
        return {"node": node.id, "state": node.state.name}

    def _ledger(self, body: bytes) -> dict[str, Any]:
        now = self._cloud.clock.now()
        return {
            "now": now,
            "entries": self._cloud.ledger.entries,
            "answers": self._cloud.ledger.responses,
            "chip_hours": self._cloud.ledger.chip_hours(now),
            "running": len(self._cloud.ledger.running()),
        }

    def _find(self, name: str) -> NodeRecord:
        for node in self._cloud.nodes.values():
            if name in (node.id, node.name):
                return node
        raise ApiError(Code.NOT_FOUND, f"there is no node {name!r}")
