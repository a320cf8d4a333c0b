"""The errors that the Cloud TPU API is known to return, with its own messages, by name."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

Code = grpc.StatusCode
NO_CAPACITY = (
    'There is no more capacity in the zone "{zone}"; you can try in another zone where Cloud TPU '
    "Nodes are offered (see https://cloud.google.com/tpu/docs/regions)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiErrorKind:
    code: grpc.StatusCode
    message: str  # may hold {zone}, {region}, {target} and {method}
    reason: str = ""  # of the ErrorInfo that Google adds to some


ERROR_KINDS: dict[str, ApiErrorKind] = {
    "stockout": ApiErrorKind(code=Code.RESOURCE_EXHAUSTED, message=NO_CAPACITY),
    "reservation": ApiErrorKind(
        code=Code.RESOURCE_EXHAUSTED,
        message="Insufficient reserved capacity. Contact customer support to increase your "
        "reservation.",
    ),
    "quota": ApiErrorKind(
        code=Code.RESOURCE_EXHAUSTED,
        message="Quota limit 'TPUV6EPreemptiblePerProjectPerRegionForTPUAPI' has been exceeded. "
        "Limit: 0 in region {region}.",
    ),
    "rate": ApiErrorKind(
        code=Code.RESOURCE_EXHAUSTED,
        message="Quota exceeded for quota metric 'Default requests' and limit 'Default requests "
        "per minute' of service 'tpu.googleapis.com' for consumer 'project_number:1'.",
        reason="RATE_LIMIT_EXCEEDED",
    ),
    "permission": ApiErrorKind(
        code=Code.PERMISSION_DENIED,
        message="Permission 'tpu.nodes.create' denied on '{target}' (or it may not exist).",
    ),
    "disabled": ApiErrorKind(
        code=Code.PERMISSION_DENIED,
        message="Cloud TPU API has not been used in project 1 before or it is disabled. Enable it "
        "and then retry.",
        reason="SERVICE_DISABLED",
    ),
    "unauthenticated": ApiErrorKind(
        code=Code.UNAUTHENTICATED,
        message="Request had invalid authentication credentials.",
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
    "internal": ApiErrorKind(code=Code.INTERNAL, message="an internal error has occurred"),
    "deadline": ApiErrorKind(
        code=Code.DEADLINE_EXCEEDED, message="Deadline expired before completion."
    ),
    "unknown": ApiErrorKind(code=Code.UNKNOWN, message="Unknown error."),
}


class ApiError(Exception):
    """An error response."""

    def __init__(self, code: grpc.StatusCode, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.reason = code, message, reason

    @property
    def number(self) -> int:
        return int(self.code.value[0])


def api_error(kind: str, *, zone: str = "", target: str = "", method: str = "") -> ApiError:
    entry = ERROR_KINDS[kind]
    message = entry.message.format(
        zone=zone, region=zone.rpartition("-")[0], target=target, method=method
    )
    return ApiError(entry.code, message, entry.reason)
