"""Classifies GKE failures: retry, try another location, or wait for someone to act. Pure."""

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
from tpufleet_gke.provisioner.model.cluster_state import FailureCause

# A failed operation has only a status code, which several causes share, and Google's text. Texts of
# machines that a zone does not have, and of reservations, are those in
# https://cloud.google.com/kubernetes-engine/docs/troubleshooting/node-pools and in Google's cluster
# autoscaler, https://github.com/kubernetes/autoscaler (cloudprovider/gce).
_STOCKOUT_TEXT = re.compile(
    r"GCE_STOCKOUT|RESOURCE_POOL_EXHAUSTED|resource pool exhausted|out of stock|no more capacity|"
    r"does not have enough resources|does not (currently )?have sufficient capacity|stockout|"
    r"machine type with name .* does not exist in zone|invalid machine type .* in zone|"
    r"constraints/gcp\.resourceLocations|"
    r"could not find the given reservation|must use ReservationAffinity of|"
    r"the reservation must exist in the same project|aggregate ?reservation|"
    r"target a reservation with workload_type|requires reservation to be in READY state|"
    r"reservation .* is incorrect for the requested resources|RESERVATION_[A-Z_]+",
    re.IGNORECASE,
)
# Addresses and the size of a cluster are limits of the same sort: someone has to raise them.
_QUOTA_TEXT = re.compile(
    r"QUOTA_EXCEEDED|quota .*exceeded|exceeded .*quota|Insufficient (\w+ )?quota|"
    r"IP_SPACE_EXHAUSTED|does not have available private IP space|"
    r"cannot find pod range with enough available IPs|cluster byte size limit reached",
    re.IGNORECASE,
)
_PERMISSION_TEXT = re.compile(
    r"service account.* does not exist|Required .* permission|"
    r"service account is missing required permissions|PERMISSIONS_ERROR|"
    r"does not have access to service account|serviceaccounts\.actAs|"
    r"constraints/[A-Za-z.]+|API has not been used in project",
    re.IGNORECASE,
)
_BUSY_TEXT = re.compile(r"incompatible operation|operation .* in progress|try again", re.IGNORECASE)
_BY_CONDITION = {
    "GCE_STOCKOUT": FailureCause.OUT_OF_STOCK,
    "GCE_QUOTA_EXCEEDED": FailureCause.QUOTA,
    "GKE_SERVICE_ACCOUNT_DELETED": FailureCause.PERMISSION,
    "NODE_SERVICE_ACCOUNT_MISSING_PERMISSIONS": FailureCause.PERMISSION,
    "CLOUD_KMS_KEY_ERROR": FailureCause.PERMISSION,
    "CLOUD_KMS_KEY_DESTROYED": FailureCause.PERMISSION,
}
# google.rpc.Code
_BY_CODE = {
    3: FailureCause.INVALID_REQUEST,  # INVALID_ARGUMENT
    5: FailureCause.INVALID_REQUEST,  # NOT_FOUND
    7: FailureCause.PERMISSION,  # PERMISSION_DENIED
    11: FailureCause.INVALID_REQUEST,  # OUT_OF_RANGE
    12: FailureCause.INVALID_REQUEST,  # UNIMPLEMENTED
    16: FailureCause.PERMISSION,  # UNAUTHENTICATED
}
RESOURCE_EXHAUSTED = 8


def classify_operation(code: int, message: str) -> FailureCause:
    """Of a failed operation. Google's text is more specific than the code."""
    if _STOCKOUT_TEXT.search(message):
        return FailureCause.OUT_OF_STOCK
    if _QUOTA_TEXT.search(message):
        return FailureCause.QUOTA
    if _PERMISSION_TEXT.search(message):
        return FailureCause.PERMISSION
    if _BUSY_TEXT.search(message):
        return FailureCause.TRANSIENT
    if code == RESOURCE_EXHAUSTED:
        return FailureCause.OUT_OF_STOCK
    return _BY_CODE.get(code, FailureCause.TRANSIENT)


def classify_pool(conditions: Iterable[str], message: str) -> FailureCause:
    """Of a pool with an error."""
    for code in conditions:
        if code in _BY_CONDITION:
            return _BY_CONDITION[code]
    return classify_operation(0, message)


def classify_error(error: FleetError) -> FailureCause:
    """Of a rejected call."""
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
