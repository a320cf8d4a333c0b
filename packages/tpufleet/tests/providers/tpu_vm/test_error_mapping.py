"""Every error of the API, through Google's client, and its provider error."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from google.api_core import exceptions as google
from google.auth import exceptions as auth

from tests.providers.tpu_vm.emulated_tpus import order
from tpufleet.errors import (
    BadRequest,
    NoCapacity,
    PermissionMissing,
    ProviderBusy,
    ProviderUnavailable,
    QuotaExceeded,
    RateLimited,
)
from tpufleet.model.fleet.cloud_slices import CloudState
from tpufleet.model.fleet.pools import RefusalKind
from tpufleet.providers.tpu_vm import error_mapping
from tpufleet_testbed.cloud_tpu import api_errors
from tpufleet_testbed.cloud_tpu.fault_plan import CallFault, CloudFaultPlan
from tpufleet_testbed.cloud_tpu.locations import IMMEDIATE

CHIP_QUOTA = (
    "Quota exceeded for quota metric 'TPU v5 lite PodSlice chips' and limit 'TPU v5 lite PodSlice "
    "chips per project per zone' of service 'tpu.googleapis.com' for consumer 'project_number:1'."
)
EXHAUSTED_QUOTA = (
    "Quota 'TPUV5sPreemptibleLitepodServingPerProjectPerZoneForTPUAPI' exhausted. Limit 0 in zone "
    "us-central1-a"
)
REQUEST_QUOTA = (
    "Quota exceeded for quota metric 'Write requests' and limit 'Write requests per minute' of "
    "service 'tpu.googleapis.com' for consumer 'project_number:1'."
)
ERRORS = {
    "stockout": (NoCapacity, "no more capacity in the zone"),
    "reservation": (NoCapacity, "reserved capacity"),
    "quota": (QuotaExceeded, "`tpu init check` prints the request"),
    "rate": (RateLimited, "per minute"),
    "permission": (PermissionMissing, "`tpu init check` prints the command"),
    "not-open": (QuotaExceeded, "another zone or kind of capacity"),
    "disabled": (
        PermissionMissing,
        "`gcloud services enable tpu.googleapis.com --project my-project`",
    ),
    "unauthenticated": (PermissionMissing, "gcloud auth application-default login"),
    "bad-request": (BadRequest, "not valid"),
    "conflict": (ProviderBusy, "present state"),
    "aborted": (ProviderBusy, "aborted"),
    "not-found": (BadRequest, "check the project"),
    "unavailable": (ProviderUnavailable, "unavailable"),
    "internal": (ProviderUnavailable, "internal"),
    "deadline": (ProviderUnavailable, "Deadline"),
    "unknown": (ProviderUnavailable, "Unknown"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error_of_a_request(tpus, name):
    kind, message = ERRORS[name]
    world = tpus(
        plan=CloudFaultPlan(calls=(CallFault(error=name, method="CreateNode", calls=(1,)),))
    )
    with pytest.raises(kind, match=message) as caught:
        world.provider.request(order("a"))
    assert type(caught.value) is kind
    assert world.listed() == {}


@pytest.mark.parametrize(
    ("name", "state", "kind"),
    [
        ("stockout", CloudState.REFUSED, RefusalKind.CAPACITY),
        ("quota", CloudState.REFUSED, RefusalKind.QUOTA),
        ("permission", CloudState.REFUSED, RefusalKind.ACCESS),
        ("internal", CloudState.FAILED, RefusalKind.CAPACITY),
        ("bad-request", CloudState.REFUSED, RefusalKind.REQUEST),
    ],
)
def test_error_of_an_operation(tpus, name, state, kind):
    world = tpus(latencies=replace(IMMEDIATE, stockout=timedelta(seconds=30)))
    world.limit(0)
    world.provider.request(order("a"))
    assert world.listed()["a"].state is CloudState.CREATING
    with world.emulator.cloud.lock:
        operation = world.emulator.cloud.operations.list_under("projects")[0]
        world.emulator.cloud.nodes.clear()
        world.emulator.cloud.operations.fail(operation.name, api_errors.api_error(name, zone="z"))
    world.reopen()  # the operation was written down
    seen = world.listed()["a"]
    assert (seen.state, seen.refusal) == (state, kind) and seen.message
    assert world.listed()["a"].state is state, "until it is released"
    world.provider.release(seen.id, seen.zone)
    assert world.listed() == {}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (google.ResourceExhausted("Too many requests"), RateLimited),
        (google.ResourceExhausted("something else"), NoCapacity),
        (google.ResourceExhausted(CHIP_QUOTA), QuotaExceeded),
        (google.ResourceExhausted(EXHAUSTED_QUOTA), QuotaExceeded),
        (google.ResourceExhausted(REQUEST_QUOTA), RateLimited),
        (google.FailedPrecondition("Insufficient reserved capacity."), NoCapacity),
        (google.Forbidden("you may not"), PermissionMissing),
        (google.PermissionDenied("iam.serviceAccounts.actAs is missing"), PermissionMissing),
        (google.InvalidArgument('Invalid. The "GuestAttributes" value "a/" was not found'),
         error_mapping.NoGuestAttributes),
        (google.Unauthorized("who are you"), PermissionMissing),
        (google.Conflict("already being deleted"), ProviderBusy),
        (google.BadGateway("502"), ProviderUnavailable),
        (google.RetryError("gave up", None), ProviderUnavailable),
        (google.MethodNotImplemented("no"), BadRequest),
        (auth.RefreshError("expired"), PermissionMissing),
        (auth.DefaultCredentialsError("none"), PermissionMissing),
        (auth.TransportError("no route"), ProviderUnavailable),
    ],
    ids=lambda item: type(item).__name__ if isinstance(item, Exception) else "",
)  # fmt: skip
def test_client_errors_are_translated(error, kind):
    assert type(error_mapping.translate(error, "create a")) is kind


# Answers of the real service that users have published: code, message, and where.
PUBLISHED = {
    "no capacity (terraform-provider-google 21243)": (
        8,
        'There is no more capacity in the zone "us-central1-c"; you can try in another zone where '
        "Cloud TPU Nodes are offered (see https://cloud.google.com/tpu/docs/regions) "
        "[EID: 0x9f48947a7d57c8d]",
        NoCapacity,
    ),
    "no capacity without a reservation (skypilot 4579)": (
        8,
        "Insufficient reserved capacity. Contact customer support to increase your reservation. "
        "[EID: 0x7adf6d58c08b0aa4]",
        NoCapacity,
    ),
    "quota of a region (marin 1612)": (
        8,
        "Quota limit 'TPUV6EPreemptiblePerProjectPerRegionForTPUAPI' has been exceeded. Limit: 0 "
        "in region us-east5.",
        QuotaExceeded,
    ),
    "quota of a region and a zone": (
        8,
        "Quota limit 'TPUV2sPodPerProjectPerRegionForTPUAPI,TPUV2sPodPerProjectPerZoneForTPUAPI' "
        "has been exceeded. Limit: 0,0 in region us-central1,zone us-central1-a.",
        QuotaExceeded,
    ),
    "quota of a queued resource (marin 87)": (
        8,
        "Quota 'TPUV4sPreemptiblePodPerProjectPerRegionForTPUAPI' exhausted. Limit 20800 in region "
        "us-central2",
        QuotaExceeded,
    ),
    # Users report it for one type and kind of capacity, such as v6e on demand, in a project whose
    # spot requests in the same zone are accepted.
    "a type that is not open to the project": (
        7,
        'User does not have permission to submit requests for accelerator type "v5litepod-4" in '
        "location us-central1-a",
        QuotaExceeded,
    ),
    "too many creations (marin 6198)": (
        8,
        "Quota exceeded for quota metric 'Create requests' and limit 'Maximum number of CreateNode "
        "requests per minute' of service 'tpu.googleapis.com' for consumer 'project_number:1'.",
        RateLimited,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_answers_of_the_service_are_understood(name):
    code, message, kind = PUBLISHED[name]
    assert type(error_mapping.translate_status(code, message, "create a")) is kind


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (
            google.FailedPrecondition(
                "Constraint constraints/compute.vmExternalIpAccess violated for project 1."
            ),
            "external_ips: false",
        ),
        (
            google.InvalidArgument(
                "Location violates constraint constraints/gcp.resourceLocations"
            ),
            "use other zones",
        ),
        (
            google.FailedPrecondition("Constraint constraints/compute.requireShieldedVm violated"),
            "ask the administrator",
        ),
        (
            google.PermissionDenied(
                "Cloud TPU API has not been used in project 764086051850 before or it is disabled."
            ),
            "set-quota-project",
        ),
    ],
    ids=["external addresses", "locations", "another constraint", "no quota project"],
)
def test_what_an_administrator_or_a_login_must_change_is_named(error, hint):
    translated = error_mapping.translate(error, "create a")
    assert type(translated) is PermissionMissing and hint in str(translated)


@pytest.mark.parametrize("name", ["disabled", "unauthenticated"])
def test_one_sentence_of_google_and_one_command_are_enough(tpus, name):
    plan = CloudFaultPlan(calls=(CallFault(error=name, method="CreateNode"),))
    with pytest.raises(PermissionMissing) as caught:
        tpus(plan=plan).provider.request(order("a"))
    assert len(str(caught.value)) < 230 and "`gcloud " in str(caught.value)


def test_a_message_has_one_line_and_no_event_id():
    error = google.ResourceExhausted("There is no\nmore capacity. [EID: 0x1bc8f9d790be9142]")
    assert str(error_mapping.translate(error, "create a")) == "create a: There is no more capacity"


def test_a_hanging_call_fails_at_its_deadline(tpus):
    plan = CloudFaultPlan(calls=(CallFault(error="hang", method="CreateNode"),))
    world = tpus(plan=plan, deadline=0.3)
    with pytest.raises(ProviderUnavailable):
        world.provider.request(order("a"))


def test_a_type_that_the_zone_lacks_is_explained_with_the_zones_that_have_it(tpus):
    with pytest.raises(BadRequest) as refused:
        tpus().provider.request(order("a", accelerator="v4-8"))
    assert str(refused.value) == (
        "create a in us-central1-a: the accelerator v4-8 was not found in zone us-central1-a; "
        "documented in us-central2-b: `tpu types --zones`, then add one to tpu_vm.zones"
    )


def test_an_unknown_runtime_version_is_explained_with_its_setting(world):
    world.reopen(runtimes={"v5e": "v9-beta"})
    with pytest.raises(BadRequest, match=r'"v9-beta"; correct `runtimes` in tpu_vm: `gcloud .* '
                       r"versions list --zone us-central1-a`"):  # fmt: skip
        world.provider.request(order("a"))


@pytest.mark.parametrize(("field", "value"), [("network", "lab"), ("subnetwork", ("lab",))])
def test_a_network_that_does_not_exist_is_named_with_its_setting(world, field, value):
    world.emulator.project.state.missing.add("lab")
    world.reopen(**{field: value})
    with pytest.raises(BadRequest, match=f'/lab" was not found.*`{field}` in tpu_vm.*init check'):
        world.provider.request(order("a"))
