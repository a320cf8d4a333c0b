"""Workload policies, which GKE needs to place tpu7x slices: one per topology in each project and
region, created through the Compute Engine API. Creating them again is harmless."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tpufleet.backoff import Backoff
from tpufleet.errors import (
    BadInput,
    BadRequest,
    Conflict,
    FleetError,
    PermissionMissing,
    ProviderUnavailable,
    RateLimited,
    install_command,
)
from tpufleet.model.tpu import tpu_types
from tpufleet_gke.provisioner import settings
from tpufleet_gke.provisioner.model import pool_shapes

log = logging.getLogger("tpufleet_gke.provisioner")

ENDPOINT = "https://compute.googleapis.com/compute/v1"
SCOPE = "https://www.googleapis.com/auth/compute"
REGION = re.compile(r"[a-z]+(-[a-z]+)+[0-9]+")
CALL_TIMEOUT = 30.0  # seconds
MAX_ATTEMPTS = 6  # when rate limited or unavailable
RETRY_FIRST, RETRY_LONGEST = 0.5, 10.0  # seconds
OPERATIONS_TIMEOUT = 120.0  # seconds, for all operations together
POLL_SECONDS = 1.0


def required_policies() -> dict[str, dict[str, Any]]:
    """By topology."""
    prefix = f"{pool_shapes.WORKLOAD_POLICY_ACCELERATOR}-"
    # A single host needs none; the former tool made one for 2x2x1, and so does this one.
    topologies = [
        topology for name, topology, chips, *_ in tpu_types.TYPES
        if name.startswith(prefix) and chips > 1
    ]  # fmt: skip
    return {
        topology: {
            "name": pool_shapes.policy_name(topology),
            "workloadPolicy": {"type": "HIGH_THROUGHPUT", "acceleratorTopology": topology},
        }
        for topology in dict.fromkeys(topologies)
    }


class ResourcePolicies:
    """The resource policies of one region. `session` is a `requests` session with credentials."""

    def __init__(
        self,
        session: Any,
        project: str,
        region: str,
        endpoint: str = ENDPOINT,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._session, self._sleep = session, sleep
        self._region_url = f"{endpoint}/projects/{project}/regions/{region}"

    def existing_names(self) -> set[str]:
        names: set[str] = set()
        page: str | None = ""
        while page is not None:
            query = {"pageToken": page} if page else {}
            response = self._call("GET", "/resourcePolicies", params=query)
            names |= {item["name"] for item in response.get("items", ())}
            page = response.get("nextPageToken")
        return names

    def create(self, policy: Mapping[str, Any]) -> str | None:
        """Start creating. Returns the operation, or None when the policy exists."""
        try:
            return str(self._call("POST", "/resourcePolicies", json=policy)["name"])
        except Conflict:
            return None

    def operation_error(self, operation: str) -> str | None:
        """None while the operation runs; empty when it succeeded; else the error."""
        response = self._call("GET", f"/operations/{operation}")
        if response.get("status") != "DONE":
            return None
        errors = (response.get("error") or {}).get("errors") or ()
        return "; ".join(error.get("message") or error.get("code", "") for error in errors)

    def _call(self, verb: str, path: str, **options: Any) -> dict[str, Any]:
        backoff = Backoff(first=RETRY_FIRST, longest=RETRY_LONGEST)
        while True:
            with _translate_errors():
                response = self._session.request(
                    verb, self._region_url + path, timeout=CALL_TIMEOUT, **options
                )
            retryable = response.status_code == 429 or response.status_code >= 500
            delay = backoff.failed() if retryable else 0.0
            if not retryable or backoff.failures == MAX_ATTEMPTS:
                break
            self._sleep(delay)
        if response.status_code >= 400:
            raise _error(response)
        return dict(response.json())


@dataclass(frozen=True, kw_only=True, slots=True)
class EnsureResult:
    """Names of policies."""

    existing: tuple[str, ...]
    created: tuple[str, ...]
    failed: Mapping[str, str]  # with the error


def ensure_policies(
    policies: ResourcePolicies, sleep: Callable[[float], None] = time.sleep
) -> EnsureResult:
    """Create the missing policies and wait for them."""
    existing_names = policies.existing_names()
    existing: list[str] = []
    operations: dict[str, str] = {}
    for policy in required_policies().values():
        name = policy["name"]
        operation = None if name in existing_names else policies.create(policy)
        if operation is None:
            existing.append(name)
        else:
            operations[name] = operation
    created: list[str] = []
    failed: dict[str, str] = {}
    deadline = time.monotonic() + OPERATIONS_TIMEOUT
    while operations:
        for name, operation in list(operations.items()):
            error = policies.operation_error(operation)
            if error is None:
                continue
            if error:
                failed[name] = error
            else:
                created.append(name)
            del operations[name]
        if operations and time.monotonic() > deadline:
            raise ProviderUnavailable(
                f"{len(operations)} policies were not created within {OPERATIONS_TIMEOUT:g} s; "
                "run the command again"
            )
        if operations:
            sleep(POLL_SECONDS)
    return EnsureResult(existing=tuple(existing), created=tuple(created), failed=failed)


def run(
    environ: Mapping[str, str], region: str, *, dry_run: bool = False, endpoint: str = ""
) -> int:
    """`tpu provisioner --make-policies REGION`. Returns the exit status."""
    if not REGION.fullmatch(region):
        raise BadInput(f"invalid region {region!r}; expected a name such as us-central1")
    project = settings.from_environ(environ).project
    if not project:
        raise BadInput("GCP_PROJECT_ID is not set; set it to the project to create policies in")
    session = _session() if not endpoint else _plain_session()
    policies = ResourcePolicies(session, project, region, endpoint or ENDPOINT)
    if dry_run:
        names = [policy["name"] for policy in required_policies().values()]
        existing_names = policies.existing_names()
        missing = [name for name in names if name not in existing_names]
        print("\n".join([*missing, f"would create {len(missing)} policies"]))
        return 0
    result = ensure_policies(policies)
    print(
        f"{len(result.created)} policies created, {len(result.existing)} already existed, "
        f"{len(result.failed)} failed"
    )
    for name, error in result.failed.items():
        print(f"{name}: {error}")
    return 1 if result.failed else 0


def _session() -> Any:
    try:
        import google.auth
        from google.auth.transport.requests import AuthorizedSession
    except ImportError as error:
        raise BadInput(
            f"the GKE client is not installed\n  next: {install_command('tpufleet[gke]')}"
        ) from error
    with _translate_errors():
        credentials, _ = google.auth.default(scopes=[SCOPE])
    return AuthorizedSession(credentials)


def _plain_session() -> Any:
    import requests

    return requests.Session()


@contextmanager
def _translate_errors() -> Iterator[None]:
    import requests
    from google.auth import exceptions as auth

    try:
        yield
    except (requests.RequestException, auth.TransportError) as error:
        raise ProviderUnavailable(f"Compute Engine is unreachable: {error}") from error
    except auth.GoogleAuthError as error:
        raise PermissionMissing(
            f"no Google Cloud credentials: {error}; run `gcloud auth application-default login`"
        ) from error


def _error(response: Any) -> FleetError:
    try:
        detail = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        detail = response.text[:200] or f"status {response.status_code}"
    message = f"Compute Engine: {detail}"
    match response.status_code:
        case 409:
            return Conflict(message)
        case 401 | 403:
            return PermissionMissing(f"{message}; grant compute.resourcePolicies.create and .list")
        case 429:
            return RateLimited(message)
        case status if status >= 500:
            return ProviderUnavailable(message)
    return BadRequest(message)
