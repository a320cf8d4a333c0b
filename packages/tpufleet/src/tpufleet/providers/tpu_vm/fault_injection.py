"""Fault injection through the admin service of an emulator."""

from __future__ import annotations

import json

import grpc

from tpufleet.errors import BadRequest, ProviderUnavailable, unreachable
from tpufleet.providers.base import Fault

DEADLINE = 10.0


def inject(endpoint: str, node: str, fault: Fault, host: int | None) -> None:
    body = json.dumps({"node": node, "fault": fault.value, "host": host}).encode()
    call_admin(endpoint, "InjectFault", body)


def project_api(endpoint: str) -> str:
    """URL of the REST APIs of the emulator."""
    return str(json.loads(call_admin(endpoint, "ProjectApi"))["url"])


def call_admin(endpoint: str, method: str, body: bytes = b"{}") -> bytes:
    with grpc.insecure_channel(endpoint) as channel:
        try:
            method_call = channel.unary_unary(f"/tpufleet_testbed.cloud_tpu.Admin/{method}")
            return method_call(body, timeout=DEADLINE)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
                raise BadRequest(error.details()) from error
            emulator = f"the emulator at {endpoint}"
            raise ProviderUnavailable(unreachable(emulator, error)) from error
