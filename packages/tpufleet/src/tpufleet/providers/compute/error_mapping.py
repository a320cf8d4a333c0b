"""Maps errors of Compute Engine to provider errors: of answers, of operations, and of groups and
VMs that wait (cloud.google.com/compute/docs/troubleshooting/troubleshooting-vm-creation)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

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
from tpufleet.providers.tpu_vm.google_rest import Answer

API = "compute.googleapis.com"
ROLES = "roles/compute.instanceAdmin.v1 and roles/iam.serviceAccountUser"
# Codes of a stockout. A flex-start request without capacity may end with INTERNAL_ERROR after
# minutes, and a VM that is preempted while it is created with one of the last two.
CAPACITY_CODES = (
    "ZONE_RESOURCE_POOL_EXHAUSTED", "RESOURCE_POOL_EXHAUSTED", "INSUFFICIENT_CAPACITY",
    "VM_MIN_COUNT_NOT_REACHED", "INTERNAL_ERROR", "UNSUPPORTED_OPERATION", "RESOURCE_NOT_READY",
)  # fmt: skip
# Of a reservation, all with other codes: full, or not begun, can change by itself.
_RESERVATION_BUSY = re.compile(
    r"does not have available resources|requires reservation to be in READY state", re.IGNORECASE
)
_CAPACITY_TEXT = re.compile(
    r"does not have enough resources|resource pool exhausted|stock ?out", re.IGNORECASE
)
_MISSING = re.compile(r"\bnot (found|exist)\b")
_CONSTRAINT = re.compile(r"constraints/([A-Za-z.]+)")
# A zone that refuses bulk mode, for some provisioning model or at all; unlike one that requires it,
# or refuses something in it. Google's wording is not known.
_NO_BULK = re.compile(
    r"(?=.*\bbulk\b)(?!.*\brequires? bulk)(?=.*(\bnot\b|n't\b|\bonly\b|\bunsupported\b))"
    r".*(provisioning|\bspot\b|\bstandard\b|on-demand|flex.start|reservation.bound"
    r"|bulk mode is (not|unsupported))",
    re.IGNORECASE,
)
# Whatever the code, and however long one waits.
_PERMANENT_TEXT = re.compile(r"not compatible|unsupported TPU configuration", re.IGNORECASE)
_RATE_CODES = re.compile(r"RATE_LIMIT|RATE_EXCEEDED|CONCURRENT_OPERATIONS", re.IGNORECASE)
_PASSING_CODES = ("SERVICE_UNAVAILABLE", "BACKEND_ERROR", "TIMEOUT")
_RATE_REASONS = ("rateLimitExceeded", "userRateLimitExceeded", "RATE_LIMIT_EXCEEDED")
_BUSY_REASONS = ("resourceNotReady", "conditionNotMet", "resourceInUseByAnotherResource")
_DISABLED_REASONS = ("accessNotConfigured", "SERVICE_DISABLED", "API_DISABLED")


class MissingResource(BadRequest):
    """What a request refers to does not exist: one of these names."""

    def __init__(self, message: str, names: Collection[str]) -> None:
        super().__init__(message)
        self.names = names


def of_answer(answer: Answer, action: str, project: str) -> ProviderError:
    """For an HTTP status of 400 and above."""
    found, text = reasons(answer.body), f"{action}: {_clean(answer.message)}"
    if any(reason in _RATE_REASONS for reason in found) or answer.status == 429:
        return RateLimited(text)
    if answer.status == 401:
        return PermissionMissing(f"{text}; {LOG_IN}")
    if "quotaExceeded" in found:
        return QuotaExceeded(text)
    if constraint := _CONSTRAINT.search(answer.message):
        return _policy_violation(text, constraint[1])
    if answer.status == 403 and any(reason in _DISABLED_REASONS for reason in found):
        return PermissionMissing(
            f"{text.partition('. ')[0]}; run `gcloud services enable {API} --project {project}`"
        )
    if answer.status == 403:
        return PermissionMissing(f"{text}; grant {ROLES} on the project: `tpu init check`")
    if _CAPACITY_TEXT.search(answer.message):
        return NoCapacity(text)
    if answer.status >= 500:
        return ProviderUnavailable(text)
    if answer.status in (409, 412) or any(reason in _BUSY_REASONS for reason in found):
        return ProviderBusy(text)
    hint = "; check the project, the zone, the network and the image" if answer.missing else ""
    if _MISSING.search(answer.message):
        return MissingResource(f"{text}{hint}", re.findall(r"[\w-]+", answer.message))
    return BadRequest(f"{text}{hint}")


def of_errors(errors: Sequence[Mapping[str, Any]], action: str) -> ProviderError | None:
    """For the error list of an operation, a group or a VM. The first that is not a consequence of
    another: a stockout of one VM stops its siblings."""
    found = [_of_error(error, action) for error in errors]
    final = [error for error in found if not isinstance(error, NoCapacity)]
    return next(iter(final), next(iter(found), None))


def refuses_bulk(message: str) -> bool:
    """Whether a group is refused only because of bulk mode."""
    return bool(_NO_BULK.match(message))


def _of_error(error: Mapping[str, Any], action: str) -> ProviderError:
    code, message = str(error.get("code", "")), _clean(str(error.get("message", "")))
    text = f"{action}: {message or code}"
    if _RATE_CODES.search(code) or code in _RATE_REASONS:
        return RateLimited(text)
    if code in _PASSING_CODES:
        return ProviderUnavailable(text)
    if _PERMANENT_TEXT.search(message):
        return BadRequest(text)
    if "QUOTA" in code:
        return QuotaExceeded(text + _quota_detail(error))
    if code.startswith("IP_SPACE_EXHAUSTED"):
        return QuotaExceeded(f"{text}; enlarge the subnetwork, or use another one")
    if constraint := _CONSTRAINT.search(message):
        return _policy_violation(text, constraint[1])
    if _RESERVATION_BUSY.search(message):
        return NoCapacity(text)
    if code.startswith(CAPACITY_CODES) or _CAPACITY_TEXT.search(message):
        return NoCapacity(text + _zones_detail(error))
    if code in ("PERMISSIONS_ERROR", "PERMISSION_DENIED"):
        return PermissionMissing(f"{text}; grant {ROLES} on the project: `tpu init check`")
    return BadRequest(text)


def _policy_violation(text: str, constraint: str) -> ProviderError:
    if constraint == "compute.vmExternalIpAccess":
        return PermissionMissing(f"{text}; set `external_ips: false` in compute")
    return PermissionMissing(f"{text}; {ASK_ADMINISTRATOR}")


def _quota_detail(error: Mapping[str, Any]) -> str:
    for detail in error.get("errorDetails", ()):
        quota = detail.get("quotaInfo") or {}
        if quota.get("metricName"):
            where = quota.get("dimensions") or {}
            place = ", ".join(f"{key} {value}" for key, value in sorted(where.items()))
            name = quota.get("limitName") or quota["metricName"]
            return f" (limit {quota.get('limit', 0):g} of {name}{place and f', {place}'})"
    return ""


def _zones_detail(error: Mapping[str, Any]) -> str:
    for detail in error.get("errorDetails", ()):
        zones = ((detail.get("errorInfo") or {}).get("metadatas") or {}).get("zonesAvailable")
        if zones:
            return f"; Google names {zones} instead"
    return ""


def reasons(body: Mapping[str, Any]) -> list[str]:
    error = body.get("error")
    if not isinstance(error, Mapping):
        return []
    listed = [str(each.get("reason", "")) for each in error.get("errors", ())]
    return listed + [str(each.get("reason", "")) for each in error.get("details", ())]


def _clean(text: str) -> str:
    return " ".join(text.split())[:600].rstrip(".")
