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
from tpufleet.provisioner.seen import Trouble

_STOCK = re.compile(
    r"GCE_STOCKOUT|ZONE_RESOURCE_POOL_EXHAUSTED|does not have enough resources|out of stock|"
    r"no more capacity|stockout",
    re.IGNORECASE,
)
_QUOTA = re.compile(r"QUOTA_EXCEEDED|quota .*exceeded|exceeded .*quota|Insufficient .* quota", re.I)
_BUSY = re.compile(r"incompatible operation|operation .* in progress|try again", re.IGNORECASE)
_CONDITIONS = {
    "GCE_STOCKOUT": Trouble.STOCK,
    "GCE_QUOTA_EXCEEDED": Trouble.QUOTA,
    "GKE_SERVICE_ACCOUNT_DELETED": Trouble.PERMISSION,
    "NODE_SERVICE_ACCOUNT_MISSING_PERMISSIONS": Trouble.PERMISSION,
    "CLOUD_KMS_KEY_ERROR": Trouble.PERMISSION,
    "CLOUD_KMS_KEY_DESTROYED": Trouble.PERMISSION,
}
# google.rpc.Code, by number.
_CODES = {
    3: Trouble.REQUEST,
    5: Trouble.REQUEST,
    7: Trouble.PERMISSION,
    11: Trouble.REQUEST,
    12: Trouble.REQUEST,
    16: Trouble.PERMISSION,
}
RESOURCE_EXHAUSTED = 8


def of_operation(code: int, words: str) -> Trouble:
    """Of a failed operation. What it says is clearer than its code."""
    if _STOCK.search(words):
        return Trouble.STOCK
    if _QUOTA.search(words):
        return Trouble.QUOTA
    if _BUSY.search(words):
        return Trouble.PASSING
    if code == RESOURCE_EXHAUSTED:
        return Trouble.STOCK
    return _CODES.get(code, Trouble.PASSING)


def of_pool(conditions: Iterable[str], words: str) -> Trouble | None:
    """Of a pool that is not well. None: it does not say."""
    for code in conditions:
        if code in _CONDITIONS:
            return _CONDITIONS[code]
    return of_operation(0, words) if words else None


def of_error(error: FleetError) -> Trouble:
    """Of a call that was refused."""
    match error:
        case NoCapacity():
            return Trouble.STOCK
        case QuotaExceeded():
            return Trouble.QUOTA
        case PermissionMissing():
            return Trouble.PERMISSION
        case BadRequest():
            return Trouble.REQUEST
        case Conflict():
            return Trouble.PASSING
        case Permanent():
            return Trouble.REQUEST
    return Trouble.PASSING
