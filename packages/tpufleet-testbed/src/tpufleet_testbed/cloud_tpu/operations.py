"""Long-running operations: started, polled, and finished with a result or an error."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime

from google.cloud.tpu_v2.types import cloud_tpu
from google.longrunning import operations_pb2
from google.protobuf import any_pb2, empty_pb2, message
from google.rpc import status_pb2

from tpufleet_testbed.cloud_tpu import api_errors
from tpufleet_testbed.servers import ApiError


@dataclass(slots=True)
class Operations:
    now: Callable[[], datetime]
    _operations: dict[str, operations_pb2.Operation] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def begin(self, target: str, verb: str, now: datetime) -> str:
        """On a resource, or in a location."""
        parent = "/".join(target.split("/")[:4])
        name = (
            f"{parent}/operations/operation-{int(now.timestamp() * 1000)}-{next(self._numbers):08x}"
        )
        metadata = cloud_tpu.OperationMetadata(
            create_time=now, target=target, verb=verb, api_version="v2"
        )
        packed = any_pb2.Any()
        packed.Pack(cloud_tpu.OperationMetadata.pb(metadata))
        self._operations[name] = operations_pb2.Operation(name=name, metadata=packed)
        return name

    def succeed(self, name: str, result: message.Message | None = None) -> None:
        operation = self._operations.get(name)  # None: deleted by a client
        if operation is not None and not operation.done:
            self._end(operation)
            operation.response.Pack(result if result is not None else empty_pb2.Empty())

    def fail(self, name: str, error: ApiError) -> None:
        operation = self._operations.get(name)  # None: deleted by a client
        if operation is not None and not operation.done:
            self._end(operation)
            operation.error.CopyFrom(status_pb2.Status(code=error.number, message=error.message))

    def get(self, name: str) -> operations_pb2.Operation:
        operation = self._operations.get(name)
        if operation is None:
            raise api_errors.api_error("not-found", target=name)
        return operation

    def list_under(self, parent: str) -> list[operations_pb2.Operation]:
        return [
            operation
            for name, operation in self._operations.items()
            if name.startswith(f"{parent}/")
        ]

    def delete(self, name: str) -> empty_pb2.Empty:
        self.get(name)
        del self._operations[name]
        return empty_pb2.Empty()

    def _end(self, operation: operations_pb2.Operation) -> None:
        operation.done = True
        metadata = cloud_tpu.OperationMetadata.pb(cloud_tpu.OperationMetadata())
        operation.metadata.Unpack(metadata)
        metadata.end_time.FromDatetime(self.now())
        operation.metadata.Pack(metadata)
