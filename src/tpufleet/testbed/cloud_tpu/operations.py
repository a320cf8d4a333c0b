"""Long-running operations: begun, looked at again, and done one way or the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime

from google.cloud.tpu_v2.types import cloud_tpu
from google.longrunning import operations_pb2
from google.protobuf import any_pb2, empty_pb2, message
from google.rpc import status_pb2

from tpufleet.testbed.cloud_tpu import api_errors
from tpufleet.testbed.cloud_tpu.api_errors import ApiError


@dataclass(slots=True)
class Operations:
    _all: dict[str, operations_pb2.Operation] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def begin(self, parent: str, target: str, verb: str, now: datetime) -> str:
        name = f"{parent}/operations/operation-{next(self._numbers)}"
        told = cloud_tpu.OperationMetadata(
            create_time=now, target=target, verb=verb, api_version="v2"
        )
        packed = any_pb2.Any()
        packed.Pack(cloud_tpu.OperationMetadata.pb(told))
        self._all[name] = operations_pb2.Operation(name=name, metadata=packed)
        return name

    def succeed(self, name: str, result: message.Message | None = None) -> None:
        operation = self._all.get(name)  # none: somebody deleted it
        if operation is not None and not operation.done:
            operation.done = True
            operation.response.Pack(result if result is not None else empty_pb2.Empty())

    def fail(self, name: str, error: ApiError) -> None:
        operation = self._all.get(name)  # none: somebody deleted it
        if operation is not None and not operation.done:
            operation.done = True
            operation.error.CopyFrom(status_pb2.Status(code=error.number, message=error.message))

    def get(self, name: str) -> operations_pb2.Operation:
        found = self._all.get(name)
        if found is None:
            raise api_errors.api_error("not-found", target=name)
        return found

    def of_parent(self, parent: str) -> list[operations_pb2.Operation]:
        return [found for name, found in self._all.items() if name.startswith(f"{parent}/")]

    def forget(self, name: str) -> None:
        self.get(name)
        del self._all[name]
