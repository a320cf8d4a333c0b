"""What Google's errors mean for us: wait, look elsewhere, slow down, or stop and mend something."""

from __future__ import annotations

import re

from google.api_core import exceptions as google
from google.auth import exceptions as auth

from tpufleet.errors import (
    BadRequest,
    NoCapacity,
    PermissionMissing,
    ProviderBusy,
    ProviderError,
    ProviderUnavailable,
    QuotaExceeded,
    RateLimited,
)

# The API uses one code for "none left", "not yours" and "too fast"; its words tell them apart.
_CAPACITY = re.compile(
    r"no more capacity|insufficient (reserved )?capacity|stock ?out|resource pool exhausted"
    r"|not enough resources|unavailable in the .* zone|valid until",
    re.IGNORECASE,
)
_RATE = re.compile(
    r"per minute|per second|per 100 seconds|rate.?limit|quota exceeded for quota metric"
    r"|too many requests",
    re.IGNORECASE,
)
_QUOTA = re.compile(r"quota", re.IGNORECASE)
_EVENT_ID = re.compile(r"\s*\[EID: 0x[0-9a-f]+\]", re.IGNORECASE)
_RATE_REASONS = ("RATE_LIMIT_EXCEEDED", "rateLimitExceeded")
ROLE = "roles/tpu.admin"


def translate(error: Exception, doing: str) -> ProviderError:
    """The error of ours that this one of Google's means, in words that say what to do."""
    said = error_message(error)
    told = f"{doing}: {said}"
    reason = getattr(error, "reason", None) or ""
    match error:
        case google.PermissionDenied() | google.Forbidden() if _CAPACITY.search(said):
            return NoCapacity(told)
        case google.PermissionDenied() | google.Forbidden() if reason in _RATE_REASONS:
            return RateLimited(told)
        case google.PermissionDenied() | google.Forbidden():
            return PermissionMissing(f"{told}; {_permission_cure(said, reason)}")
        case google.Unauthenticated() | google.Unauthorized():
            return PermissionMissing(f"{told}; {_LOG_IN}")
        case auth.RefreshError() | auth.DefaultCredentialsError():
            return PermissionMissing(f"{told}; {_LOG_IN}")
        case google.ResourceExhausted() | google.TooManyRequests():
            return _exhausted(said, reason, told)
        case google.FailedPrecondition() | google.Aborted() | google.AlreadyExists():
            return NoCapacity(told) if _CAPACITY.search(said) else ProviderBusy(told)
        case google.Conflict():
            return ProviderBusy(told)
        case google.NotFound():
            return BadRequest(f"{told}; check the project, the zone, the network and the disks")
        case google.DeadlineExceeded() | google.GatewayTimeout() if _CAPACITY.search(said):
            return NoCapacity(told)  # a queued request that was not served in time
        case google.InvalidArgument() | google.OutOfRange() | google.BadRequest():
            return BadRequest(told)
        case google.MethodNotImplemented():
            return BadRequest(f"{told}; the client library is too old, or the API has moved on")
    return ProviderUnavailable(told)


def translate_status(code: int, message: str, doing: str) -> ProviderError:
    """The same for the error inside an operation, or of a queued resource."""
    return translate(google.from_grpc_status(_grpc_code(code), message), doing)


def error_message(error: Exception) -> str:
    said = getattr(error, "message", None) or str(error) or type(error).__name__
    return _EVENT_ID.sub("", " ".join(str(said).split()))[:600].rstrip(".")


def _exhausted(said: str, reason: str, told: str) -> ProviderError:
    if reason in _RATE_REASONS or _RATE.search(said):
        return RateLimited(told)
    if _CAPACITY.search(said):
        return NoCapacity(told)
    if _QUOTA.search(said):
        none = re.search(r"Limit: 0\b", said)
        cure = "; the project has none of this quota: ask for it in the console" if none else ""
        return QuotaExceeded(f"{told}{cure}")
    return NoCapacity(told)


_LOG_IN = (
    "no valid credentials: run `gcloud auth application-default login`, or give the server's "
    "machine a service account"
)


def _permission_cure(said: str, reason: str) -> str:
    if reason == "SERVICE_DISABLED" or "has not been used in project" in said:
        return "run `gcloud services enable tpu.googleapis.com`"
    if "serviceAccountUser" in said or "actAs" in said:
        return "grant roles/iam.serviceAccountUser on the service account of the machines"
    named = re.search(r"Permission '([a-z.A-Z]+)'", said)
    what = f" (it holds {named[1]})" if named else ""
    return f"grant {ROLE}{what} on the project, and check that the zone exists"


def _grpc_code(code: int) -> object:
    import grpc

    return next(
        (found for found in grpc.StatusCode if found.value[0] == code), grpc.StatusCode.UNKNOWN
    )
