"""The errors that the Cloud TPU API is known to return, with its own messages, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc

Code = grpc.StatusCode
NO_CAPACITY = (
    'There is no more capacity in the zone "{zone}"; you can try in another zone where Cloud TPU '
    "Nodes are offered (see https://cloud.google.com/tpu/docs/regions)"
)
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
    "CreateQueuedResource": "tpu.queuedResources.create",
    "DeleteQueuedResource": "tpu.queuedResources.delete",
    "GetQueuedResource": "tpu.queuedResources.get",
    "ListQueuedResources": "tpu.queuedResources.list",
    "ListAcceleratorTypes": "tpu.acceleratortypes.list",
    "ListRuntimeVersions": "tpu.runtimeversions.list",
    "ListLocations": "tpu.locations.list",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiErrorKind:
    code: grpc.StatusCode
    message: str  # may hold {zone}, {region}, {target}, {method} and {permission}
    reason: str = ""  # of the ErrorInfo that Google adds to some
    domain: str = "googleapis.com"
    metadata: Mapping[str, str] = field(default_factory=dict)  # of the ErrorInfo


_CONSUMER = {"service": SERVICE, "consumer": f"projects/{PROJECT_NUMBER}"}
ERROR_KINDS: dict[str, ApiErrorKind] = {
    "stockout": ApiErrorKind(code=Code.RESOURCE_EXHAUSTED, message=NO_CAPACITY),
    "reservation": ApiErrorKind(
        code=Code.FAILED_PRECONDITION,
        message="Insufficient reserved capacity. Contact customer support to increase your "
        "reservation.",
    ),
    "quota": ApiErrorKind(
        code=Code.RESOURCE_EXHAUSTED,
        message="Quota limit 'TPUV6EPreemptiblePerProjectPerZoneForTPUAPI' has been exceeded. "
        "Limit: 0 in zone {zone}.",
    ),
    "rate": ApiErrorKind(
        code=Code.RESOURCE_EXHAUSTED,
        message="Quota exceeded for quota metric 'Default requests' and limit 'Default requests "
        "per minute' of service 'tpu.googleapis.com' for consumer 'project_number:1'.",
        reason="RATE_LIMIT_EXCEEDED",
        metadata={
            **_CONSUMER,
            "quota_metric": "tpu.googleapis.com/default",
            "quota_limit": "defaultPerMinutePerProject",
            "quota_location": "global",
        },
    ),
    "permission": ApiErrorKind(
        code=Code.PERMISSION_DENIED,
        message="Permission '{permission}' denied on '{target}' (or it may not exist).",
        reason="IAM_PERMISSION_DENIED",
        domain="iam.googleapis.com",
        metadata={"service": SERVICE, "permission": "{permission}", "resource": "{target}"},
    ),
    # Of one type and kind of capacity in one zone; the project may be allowed others there.
    "not-open": ApiErrorKind(
        code=Code.PERMISSION_DENIED,
        message="User does not have permission to submit requests for accelerator type "
        '"v5litepod-16" in location {zone}',
    ),
    "disabled": ApiErrorKind(
        code=Code.PERMISSION_DENIED,
        message="Cloud TPU API has not been used in project 1 before or it is disabled. Enable it "
        "by visiting https://console.developers.google.com/apis/api/tpu.googleapis.com/overview"
        "?project=1 then retry. If you enabled this API recently, wait a few minutes for the "
        "action to propagate to our systems and retry.",
        reason="SERVICE_DISABLED",
        metadata=_CONSUMER,
    ),
    "unauthenticated": ApiErrorKind(
        code=Code.UNAUTHENTICATED,
        message="Request had invalid authentication credentials. Expected OAuth 2 access token, "
        "login cookie or other valid authentication credential.",
        reason="ACCESS_TOKEN_EXPIRED",
        metadata={"service": SERVICE, "method": "google.cloud.tpu.v2.Tpu.{method}"},
    ),
    "location": ApiErrorKind(
        code=Code.PERMISSION_DENIED,
        message="Permission denied on 'locations/{zone}' (or it may not exist).",
        reason="LOCATION_POLICY_VIOLATED",
        metadata={**_CONSUMER, "location": "{zone}"},
    ),
    "bad-request": ApiErrorKind(
        code=Code.INVALID_ARGUMENT,
        message="Cloud TPU received an invalid argument. The field is not valid.",
    ),
    "conflict": ApiErrorKind(
        code=Code.FAILED_PRECONDITION,
        message="Cloud TPU received a bad request. {target} cannot be changed in its present "
        "state.",
    ),
    "aborted": ApiErrorKind(
        code=Code.ABORTED, message="The operation was aborted; another one won."
    ),
    "not-found": ApiErrorKind(code=Code.NOT_FOUND, message="Resource '{target}' was not found"),
    "exists": ApiErrorKind(code=Code.ALREADY_EXISTS, message="Resource '{target}' already exists"),
    "unavailable": ApiErrorKind(
        code=Code.UNAVAILABLE, message="The service is currently unavailable."
    ),
    # A listing returns it as an unreachable zone; other calls fail as above.
    "unreachable": ApiErrorKind(code=Code.UNAVAILABLE, message="The zone cannot be reached."),
    # Of listings only, which are eventually consistent: they succeed, and lack nodes that exist, or
    # answer as they did before.
    "omitted": ApiErrorKind(code=Code.OK, message=""),
    "stale": ApiErrorKind(code=Code.OK, message=""),
    "internal": ApiErrorKind(code=Code.INTERNAL, message="an internal error has occurred"),
    "deadline": ApiErrorKind(
        code=Code.DEADLINE_EXCEEDED, message="Deadline expired before completion."
    ),
    "unknown": ApiErrorKind(code=Code.UNKNOWN, message="Unknown error."),
}


class ApiError(Exception):
    """An error response."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        reason: str = "",
        domain: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.reason = code, message, reason
        self.domain, self.metadata = domain, dict(metadata or {})

    @property
    def number(self) -> int:
        return int(self.code.value[0])


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
