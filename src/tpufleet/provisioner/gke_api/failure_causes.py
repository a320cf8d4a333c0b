"""What GKE's refusals mean: wait, ask elsewhere, or have somebody change something. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tpufleet.errors import (
    BadRequest,
    Conflict,
    FleetError,
    NoCapacity,
    Permanent,
    PermissionMissing,
    QuotaExceeded,
)
from tpufleet.provisioner.planning.cluster_state import FailureCause

_STOCK = re.compile(
    r"GCE_STOCKOUT|ZONE_RESOURCE_POOL_EXHAUSTED|does not have enough resources|out of stock|"
    r"no more capacity|stockout",
    re.IGNORECASE,
)
_QUOTA = re.compile(r"QUOTA_EXCEEDED|quota .*exceeded|exceeded .*quota|Insufficient .* quota", re.I)
_BUSY = re.compile(r"incompatible operation|operation .* in progress|try again", re.IGNORECASE)
_CONDITIONS = {
    "GCE_STOCKOUT": FailureCause.OUT_OF_STOCK,
    "GCE_QUOTA_EXCEEDED": FailureCause.QUOTA,
    "GKE_SERVICE_ACCOUNT_DELETED": FailureCause.PERMISSION,
    "NODE_SERVICE_ACCOUNT_MISSING_PERMISSIONS": FailureCause.PERMISSION,
    "CLOUD_KMS_KEY_ERROR": FailureCause.PERMISSION,
    "CLOUD_KMS_KEY_DESTROYED": FailureCause.PERMISSION,
}
# google.rpc.Code, by number.
_CODES = {
    3: FailureCause.INVALID_REQUEST,
    5: FailureCause.INVALID_REQUEST,
    7: FailureCause.PERMISSION,
    11: FailureCause.INVALID_REQUEST,
    12: FailureCause.INVALID_REQUEST,
    16: FailureCause.PERMISSION,
}
RESOURCE_EXHAUSTED = 8


def classify_operation(code: int, message: str) -> FailureCause:
    """Of a failed operation. What it says is clearer than its code."""
    if _STOCK.search(message):
        return FailureCause.OUT_OF_STOCK
    if _QUOTA.search(message):
        return FailureCause.QUOTA
    if _BUSY.search(message):
        return FailureCause.TRANSIENT
    if code == RESOURCE_EXHAUSTED:
        return FailureCause.OUT_OF_STOCK
    return _CODES.get(code, FailureCause.TRANSIENT)


def classify_pool(conditions: Iterable[str], message: str) -> FailureCause | None:
    """Of a pool that is not well. None: it does not say."""
    for code in conditions:
        if code in _CONDITIONS:
            return _CONDITIONS[code]
    return classify_operation(0, message) if message else None


def classify_error(error: FleetError) -> FailureCause:
    """Of a call that was refused."""
    match error:
        case NoCapacity():
            return FailureCause.OUT_OF_STOCK
        case QuotaExceeded():
            return FailureCause.QUOTA
        case PermissionMissing():
            return FailureCause.PERMISSION
        case BadRequest():
            return FailureCause.INVALID_REQUEST
        case Conflict():
            return FailureCause.TRANSIENT
        case Permanent():
            return FailureCause.INVALID_REQUEST
    return FailureCause.TRANSIENT
