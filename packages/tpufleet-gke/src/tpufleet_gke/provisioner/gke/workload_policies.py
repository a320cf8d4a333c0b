"""Workload policies, which GKE needs to place tpu7x slices: one per topology in each project and
region, created through the Compute Engine API. Creating them again is harmless."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tpufleet import schema
from tpufleet.backoff import Backoff
from tpufleet.errors import BadInput, BadRequest, FleetError, PermissionMissing, ProviderUnavailable
from tpufleet.model.tpu import tpu_types
from tpufleet.providers.tpu_vm.google_rest import Answer, GoogleRest
from tpufleet_gke.locations import Region
from tpufleet_gke.provisioner import settings
from tpufleet_gke.provisioner.model import pool_shapes

MAX_ATTEMPTS = 6  # when rate limited or unavailable
RETRY_FIRST, RETRY_LONGEST = 0.5, 10.0  # seconds
OPERATIONS_TIMEOUT = 120.0  # seconds, for all operations together
POLL_SECONDS = 1.0


def required_policies() -> dict[str, dict[str, Any]]:
    """By name."""
    prefix = f"{pool_shapes.WORKLOAD_POLICY_ACCELERATOR}-"
    # A single host needs none; the former tool made one for 2x2x1, and so does this one.
    topologies = [
        topology for name, topology, chips, *_ in tpu_types.TYPES
        if name.startswith(prefix) and chips > 1
    ]  # fmt: skip
    return {
        pool_shapes.policy_name(topology): {
            "name": pool_shapes.policy_name(topology),
            "workloadPolicy": {"type": "HIGH_THROUGHPUT", "acceleratorTopology": topology},
        }
        for topology in topologies
    }


class ResourcePolicies:
    """The resource policies of one region."""

    def __init__(
        self,
        google: GoogleRest,
        project: str,
        region: str,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._google, self._sleep = google, sleep
        self._region = f"compute/v1/projects/{project}/regions/{region}"

    def missing(self) -> list[str]:
        """Names of the required policies that do not exist."""
        existing: set[str] = set()
        query: dict[str, str] | None = {}
        while query is not None:
            page = self._get("/resourcePolicies", query, "compute.resourcePolicies.list").body
            existing |= {item["name"] for item in page.get("items", ())}
            query = {"pageToken": page["nextPageToken"]} if "nextPageToken" in page else None
        return [name for name in required_policies() if name not in existing]

    def create(self, name: str) -> str | None:
        """Start creating. Returns the operation, or None when the policy exists."""
        path, policy = f"{self._region}/resourcePolicies", required_policies()[name]
        answer = self._call(
            lambda: self._google.post("compute", path, policy), "compute.resourcePolicies.create"
        )
        return None if answer.status == 409 else str(answer.body["name"])

    def operation_error(self, operation: str) -> str | None:
        """None while the operation runs; empty when it succeeded; else the error."""
        path = f"/operations/{operation}"
        response = self._get(path, {}, "compute.regionOperations.get").body
        if response.get("status") != "DONE":
            return None
        errors = (response.get("error") or {}).get("errors") or ()
        return "; ".join(error.get("message") or error.get("code", "") for error in errors)

    def _get(self, path: str, query: Mapping[str, str], permission: str) -> Answer:
        return self._call(
            lambda: self._google.get("compute", self._region + path, **query), permission
        )

    def _call(self, send: Callable[[], Answer], permission: str) -> Answer:
        backoff = Backoff(first=RETRY_FIRST, longest=RETRY_LONGEST)
        answer = send()
        while answer.status == 429 or answer.status >= 500:
            delay = backoff.failed()
            if backoff.failures == MAX_ATTEMPTS:
                break
            self._sleep(delay)
            answer = send()
        if answer.status < 400 or answer.status == 409:
            return answer
        kind: type[FleetError] = BadRequest
        hint = ""
        if answer.status in (401, 403):
            kind, hint = PermissionMissing, f"; grant {permission}"
        elif answer.status == 429 or answer.status >= 500:
            kind = ProviderUnavailable
        raise kind(f"Compute Engine: {answer.message}{hint}")


@dataclass(frozen=True, slots=True)
class CreatedPolicies:
    created: tuple[str, ...]
    failed: Mapping[str, str]  # with the error


def create_missing(
    policies: ResourcePolicies, sleep: Callable[[float], None] = time.sleep
) -> CreatedPolicies:
    """Create the missing policies and wait for them."""
    started = {name: policies.create(name) for name in policies.missing()}
    running = {name: operation for name, operation in started.items() if operation is not None}
    errors: dict[str, str] = {}
    deadline = time.monotonic() + OPERATIONS_TIMEOUT
    while True:
        for name, operation in list(running.items()):
            if (error := policies.operation_error(operation)) is not None:
                errors[name] = error
                del running[name]
        if not running:
            break
        if time.monotonic() > deadline:
            raise ProviderUnavailable(
                f"policies were not created within {OPERATIONS_TIMEOUT:g} s: "
                f"{', '.join(running)}; run the command again"
            )
        sleep(POLL_SECONDS)
    failed = {name: error for name, error in errors.items() if error}
    return CreatedPolicies(tuple(name for name in errors if name not in failed), failed)


def run(environ: Mapping[str, str], region: str, *, dry_run: bool = False, root: str = "") -> int:
    """`tpu provisioner --make-policies REGION`. Returns the exit status. `root` is of an
    emulator."""
    schema.parse(Region, region, path="--make-policies")
    project = settings.from_environ(environ).project
    if not project:
        raise BadInput("GCP_PROJECT_ID is not set; set it to the project to create policies in")
    policies = ResourcePolicies(GoogleRest(root, project), project, region)
    if dry_run:
        missing = policies.missing()
        print("\n".join([*missing, f"would create {len(missing)} policies"]))
        return 0
    result = create_missing(policies)
    existing = len(required_policies()) - len(result.created) - len(result.failed)
    print(
        f"{len(result.created)} policies created, {existing} already existed, "
        f"{len(result.failed)} failed"
    )
    for name, error in result.failed.items():
        print(f"{name}: {error}")
    return 1 if result.failed else 0
