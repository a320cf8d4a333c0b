"""Which errors of Compute Engine are a stockout, a quota, a fault of the request or of access."""

from __future__ import annotations

from typing import Any

import pytest

from tests.providers.compute.errors import NO_QUOTA, STOCKOUT
from tpufleet.errors import (
    BadRequest,
    NoCapacity,
    PermissionMissing,
    ProviderBusy,
    ProviderUnavailable,
    QuotaExceeded,
    RateLimited,
)
from tpufleet.providers.compute import error_mapping
from tpufleet.providers.tpu_vm.google_rest import Answer


def coded(code: str, message: str = "it failed") -> dict[str, Any]:
    return {"code": code, "message": message}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (STOCKOUT, NoCapacity),
        (NO_QUOTA, QuotaExceeded),
        (coded("ZONE_RESOURCE_POOL_EXHAUSTED"), NoCapacity),
        (coded("RESOURCE_POOL_EXHAUSTED"), NoCapacity),
        (coded("INSUFFICIENT_CAPACITY"), NoCapacity),
        (coded("INTERNAL_ERROR", "Internal error. Please try again"), NoCapacity),
        (coded("UNSUPPORTED_OPERATION"), NoCapacity),
        (coded("UNSUPPORTED_OPERATION", "[pd-balanced, ct6e-standard-4t] features are not "
               "compatible for creating instance"), BadRequest),
        (coded("VM_MIN_COUNT_NOT_REACHED"), NoCapacity),
        (coded("RESOURCE_OPERATION_RATE_EXCEEDED"), RateLimited),
        (coded("CONCURRENT_OPERATIONS_QUOTA_EXCEEDED"), RateLimited),
        (coded("IP_SPACE_EXHAUSTED_WITH_DETAILS"), QuotaExceeded),
        (coded("PERMISSIONS_ERROR"), PermissionMissing),
        (coded("CONDITION_NOT_MET", "Unsupported TPU configuration"), BadRequest),
        (coded("CONDITION_NOT_MET", "Constraint constraints/compute.vmExternalIpAccess violated "
               "for project 7"), PermissionMissing),
        (coded("SERVICE_UNAVAILABLE"), ProviderUnavailable),
        (coded("BACKEND_ERROR"), ProviderUnavailable),
        (coded("INVALID", "Specified reservations [r] do not exist."), BadRequest),
        (coded("INVALID", "Specified reservation r does not have available resources for the "
               "request."), NoCapacity),
        (coded("INVALID", "The reservation cannot be used, it requires reservation to be in READY "
               "state."), NoCapacity),
        (coded("INVALID", "No available resources in specified reservations"), BadRequest),
    ],
    ids=lambda value: value["code"] if isinstance(value, dict) else None,
)  # fmt: skip
def test_errors_of_operations_and_groups(error, kind):
    found = error_mapping.of_errors([error], "create s in us-central1-a")
    assert type(found) is kind
    assert str(found).startswith("create s in us-central1-a: ")


def test_a_stockout_and_a_quota_keep_their_details():
    assert str(error_mapping.of_errors([STOCKOUT], "create s")).endswith(
        "Google names us-east5-b instead"
    )
    assert "limit 0 of TPUS-PER-TPU-FAMILY-per-project-" in str(
        error_mapping.of_errors([NO_QUOTA], "create s")
    )


def test_an_error_that_no_wait_ends_comes_before_a_stockout():
    assert isinstance(error_mapping.of_errors([STOCKOUT, NO_QUOTA], "create s"), QuotaExceeded)
    assert error_mapping.of_errors([], "create s") is None


def answer(status: int, reason: str = "", message: str = "it failed") -> Answer:
    error = {"code": status, "message": message, "errors": [{"reason": reason, "message": message}]}
    return Answer(status=status, body={"error": error})


@pytest.mark.parametrize(
    ("answer", "kind", "hint"),
    [
        (answer(401), PermissionMissing, "application-default login"),
        (answer(403, "forbidden"), PermissionMissing, "roles/compute.instanceAdmin.v1"),
        (answer(403, "accessNotConfigured"), PermissionMissing,
         "gcloud services enable compute.googleapis.com --project my-project"),
        (answer(403, "rateLimitExceeded"), RateLimited, ""),
        (answer(429), RateLimited, ""),
        (answer(403, "quotaExceeded"), QuotaExceeded, ""),
        (answer(400, "resourceInUseByAnotherResource"), ProviderBusy, ""),
        (answer(400, "resourceNotReady"), ProviderBusy, ""),
        (answer(412, "conditionNotMet"), ProviderBusy, ""),
        (answer(400, "invalid"), BadRequest, ""),
        (answer(404, "notFound"), BadRequest, "check the project, the zone"),
        (answer(503), ProviderUnavailable, ""),
        (answer(503, "resourcePoolExhausted", "The zone z does not have enough resources available "
                "to fulfill the request."), NoCapacity, ""),
    ],
    ids=lambda value: str(value.status) if isinstance(value, Answer) else None,
)  # fmt: skip
def test_answers(answer, kind, hint):
    found = error_mapping.of_answer(answer, "create s", "my-project")
    assert type(found) is kind and hint in str(found)


@pytest.mark.parametrize(
    ("message", "refused"),
    [
        ("BULK mode is not supported for provisioning model SPOT", True),
        ("BULK mode in target size policy does not support SPOT instances.", True),
        (
            "Target size policy mode BULK is supported only for FLEX_START and RESERVATION_BOUND",
            True,
        ),
        ("Provisioning model STANDARD cannot be used: not supported in bulk mode", True),
        ("Bulk mode is not available in zone us-east5-a", True),
        ("Standby pools are not supported in BULK mode.", False),
        ("Repairs must be disabled for MIGs with FLEX_START instances in BULK mode.", False),
        ("MIGs with TPU accelerator topology require BULK mode in target size policy", False),
        ("The URL is malformed", False),
    ],
)
def test_a_refusal_of_bulk_mode_is_told_from_a_demand_for_it(message, refused):
    assert error_mapping.refuses_bulk(message) is refused
