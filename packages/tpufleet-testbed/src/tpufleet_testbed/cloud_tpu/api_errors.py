"""The errors that the Cloud TPU API is known to return, with its own messages, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import yaml

from tpufleet_testbed.servers import ApiError

Code = grpc.StatusCode
SERVICE = "tpu.googleapis.com"
PROJECT_NUMBER = 1
# The permission of each method (cloud.google.com/iam/docs/roles-permissions/tpu).
PERMISSIONS = {
    "CreateNode": "tpu.nodes.create",
    "DeleteNode": "tpu.nodes.delete",
    "GetNode": "tpu.nodes.get",
    "ListNodes": "tpu.nodes.list",
    "StartNode": "tpu.nodes.start",
    "StopNode": "tpu.nodes.stop",
    "UpdateNode": "tpu.nodes.update",
    "CreateQueuedResource": "tpu.nodes.create",
    "DeleteQueuedResource": "tpu.nodes.delete",
    "GetQueuedResource": "tpu.nodes.get",
    "ListQueuedResources": "tpu.nodes.list",
    "ListAcceleratorTypes": "tpu.acceleratortypes.list",
    "ListRuntimeVersions": "tpu.runtimeversions.list",
    "ListLocations": "tpu.locations.list",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiErrorKind:
    code: grpc.StatusCode
    message: str
    reason: str = ""  # of the ErrorInfo that Google adds to some
    domain: str = "googleapis.com"
    metadata: Mapping[str, str] = field(default_factory=dict)  # of the ErrorInfo


ERROR_KINDS = {
    name: ApiErrorKind(**{**fields, "code": Code[fields["code"]]})
    for name, fields in yaml.safe_load(
        Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    ).items()
}


def api_error(kind: str, *, zone: str = "", target: str = "", method: str = "") -> ApiError:
    entry = ERROR_KINDS[kind]
    values = {
        "zone": zone,
        "region": zone.rpartition("-")[0],
        "target": target,
        "method": method,
        "permission": PERMISSIONS.get(method, "tpu.nodes.create"),
    }
    metadata = {key: value.format(**values) for key, value in entry.metadata.items()}
    return ApiError(
        entry.code, entry.message.format(**values), entry.reason, entry.domain, metadata
    )


def invalid_argument(detail: str) -> ApiError:
    return ApiError(Code.INVALID_ARGUMENT, f"Cloud TPU received an invalid argument. {detail}")


def bad_request(detail: str) -> ApiError:
    return ApiError(Code.INVALID_ARGUMENT, f"Cloud TPU received a bad request. {detail}")
