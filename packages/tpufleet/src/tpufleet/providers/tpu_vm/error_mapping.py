"""Maps errors of the Cloud TPU API to provider errors."""

from __future__ import annotations

import re
from typing import Any

from google.api_core import exceptions as google
from google.auth import exceptions as auth

from tpufleet.errors import (
    ASK_ADMINISTRATOR,
    LOG_IN,
    BadRequest,
    NoCapacity,
    PermissionMissing,
    ProviderBusy,
    ProviderError,
    ProviderUnavailable,
    QuotaExceeded,
    RateLimited,
)
from tpufleet.model.tpu import tpu_zones

# The API uses RESOURCE_EXHAUSTED for stockouts, quota and rate limits alike, mostly without
# ErrorInfo: only its message tells them apart.
_CAPACITY = re.compile(
    r"no more capacity|insufficient (reserved )?capacity|stock ?out|resource pool exhausted"
    r"|not enough resources|unavailable in the .* zone|valid until",
    re.IGNORECASE,
)
_RATE = re.compile(
    r"per minute|per second|per 100 seconds|per day|rate.?limit|too many requests"
    r"|quota exceeded for quota metric '[^']*(requests|queries|operations)",
    re.IGNORECASE,
)
_QUOTA = re.compile(r"quota", re.IGNORECASE)
# In spite of its wording no missing role: the project may not request this type with this kind of
# capacity in this zone. Others in the same zone may be open to it.
_NOT_OPEN = re.compile(r"permission to submit requests for accelerator type", re.IGNORECASE)
_ADVICE = re.compile(r"has not been used in project|Expected OAuth 2 access token")
_EVENT_ID = re.compile(r"\s*\[EID: 0x[0-9a-f]+\]", re.IGNORECASE)
_RATE_REASONS = ("RATE_LIMIT_EXCEEDED", "rateLimitExceeded")
ROLE = "roles/tpu.admin"
# The project of gcloud itself: the one that is charged with requests of a person whose credentials
# name no quota project (cloud.google.com/docs/authentication/troubleshoot-adc).
GCLOUD_PROJECT = "764086051850"
# Policies of an organisation
# (cloud.google.com/resource-manager/docs/organization-policy/org-policy-constraints).
_CONSTRAINT = re.compile(r"constraints/([A-Za-z.]+)")
_CONSTRAINT_HINTS = {
    "compute.vmExternalIpAccess": "set `external_ips: false` in tpu_vm; `tpu init check` then "
    "names what hosts need instead",
    "gcp.resourceLocations": f"use other zones, or {ASK_ADMINISTRATOR}",
}


class NoGuestAttributes(BadRequest):
    """No host has written one yet."""


def translate(error: Exception, action: str, project: str = "") -> ProviderError:
    """Our error for one of Google's, with the next step in its message."""
    message = error_message(error)
    if _ADVICE.search(message):  # Google's; ours follows
        message = message.partition(". ")[0]
    text = f"{action}: {message}"
    reason = getattr(error, "reason", None) or ""
    if constraint := _CONSTRAINT.search(message):
        hint = _CONSTRAINT_HINTS.get(constraint[1], ASK_ADMINISTRATOR)
        return PermissionMissing(f"{text}; {hint}")
    if _NOT_OPEN.search(message):
        return QuotaExceeded(
            f"{text}; this type is not open to the project here: use another zone or kind of "
            "capacity (such as spot), or ask Google for quota"
        )
    match error:
        case google.PermissionDenied() | google.Forbidden() if _CAPACITY.search(message):
            return NoCapacity(text)
        case google.PermissionDenied() | google.Forbidden() if reason in _RATE_REASONS:
            return RateLimited(text)
        case google.PermissionDenied() | google.Forbidden():
            return PermissionMissing(f"{text}; {_permission_hint(message, reason, project)}")
        case google.Unauthenticated() | google.Unauthorized():
            return PermissionMissing(f"{text}; {LOG_IN}")
        case auth.RefreshError() | auth.DefaultCredentialsError():
            return PermissionMissing(f"{text}; {LOG_IN}")
        case google.ResourceExhausted() | google.TooManyRequests():
            return _exhausted(message, reason, text)
        case google.FailedPrecondition() | google.Aborted() | google.AlreadyExists():
            return NoCapacity(text) if _CAPACITY.search(message) else ProviderBusy(text)
        case google.Conflict():
            return ProviderBusy(text)
        case google.NotFound():
            return BadRequest(f"{text}; check the project, the zone, the network and the disks")
        case google.DeadlineExceeded() | google.GatewayTimeout() if _CAPACITY.search(message):
            return NoCapacity(text)  # a queued resource that was not granted in time
        case google.InvalidArgument() | google.OutOfRange() | google.BadRequest():
            if type_message := _type_message(message):
                return BadRequest(f"{action}: {type_message}")
            if '"GuestAttributes"' in message:
                return NoGuestAttributes(text)
            return BadRequest(f"{text}{_runtime_hint(message, action) or _network_hint(message)}")
        case google.MethodNotImplemented():
            return BadRequest(f"{text}; upgrade the client library")
    return ProviderUnavailable(text)


def translate_status(code: int, message: str, action: str) -> ProviderError:
    """The same for the status of an operation or a queued resource."""
    return translate(google.from_grpc_status(_grpc_code(code), message), action)


def raise_error(operation: Any, action: str) -> None:
    """The error of an operation that has failed; nothing for others, and for none."""
    if operation is not None and operation.HasField("error"):
        raise translate_status(operation.error.code, operation.error.message, action)


def error_message(error: Exception) -> str:
    message = getattr(error, "message", None) or str(error) or type(error).__name__
    return _EVENT_ID.sub("", " ".join(str(message).split()))[:600].rstrip(".")


def _exhausted(message: str, reason: str, text: str) -> ProviderError:
    if reason in _RATE_REASONS or _RATE.search(message):
        return RateLimited(text)
    if _CAPACITY.search(message):
        return NoCapacity(text)
    if _QUOTA.search(message):
        none = re.search(r"Limit:? 0\b", message)
        ask = "; the project has no such quota: `tpu init check` prints the request for it"
        hint = ask if none else ""
        return QuotaExceeded(f"{text}{hint}")
    return NoCapacity(text)


def _permission_hint(message: str, reason: str, project: str) -> str:
    if GCLOUD_PROJECT in message:
        return (
            "your credentials name no quota project: run `gcloud auth application-default "
            "set-quota-project PROJECT`"
        )
    if reason == "USER_PROJECT_DENIED":
        return "grant roles/serviceusage.serviceUsageConsumer on the project"
    if reason == "SERVICE_DISABLED" or "has not been used in project" in message:
        option = f" --project {project}" if project else ""
        return f"run `gcloud services enable tpu.googleapis.com{option}`"
    if "serviceAccountUser" in message or "actAs" in message:
        return "grant roles/iam.serviceAccountUser on the service account of the hosts"
    named = re.search(r"Permission '([a-z.A-Z]+)'", message)
    permission = f" (includes {named[1]})" if named else ""
    return (
        f"grant {ROLE}{permission} on the project, and check that the zone exists: "
        "`tpu init check` prints the command"
    )


def _type_message(message: str) -> str:
    """For a type that the zone does not offer, which the API says twice: shorter, with the zones
    that have it."""
    missing = re.search(r"the accelerator (\S+) was not found in zone (\S+)", message)
    if missing is None:
        return ""
    zones = ", ".join(tpu_zones.zones_of(missing[1])[:4])
    hint = f"; documented in {zones}: `tpu types --zones`, then add one to tpu_vm.zones"
    return f"{missing[0]}{hint if zones else ''}"


def _runtime_hint(message: str, action: str) -> str:
    if '"RuntimeVersion"' not in message:
        return ""
    zone = re.search(r" in (\S+)$", action)
    option = f" --zone {zone[1]}" if zone else ""
    return (
        "; correct `runtimes` in tpu_vm: `gcloud compute tpus tpu-vm versions list"
        f"{option}` lists the versions"
    )


def _network_hint(message: str) -> str:
    missing = re.search(r"\b((?:sub)?network)\b.* not found", message, re.IGNORECASE)
    if missing is None:
        return ""
    return f"; correct `{missing[1].lower()}` in tpu_vm, then run `tpu init check`"


def _grpc_code(code: int) -> object:
    import grpc

    return next(
        (status for status in grpc.StatusCode if status.value[0] == code), grpc.StatusCode.UNKNOWN
    )
