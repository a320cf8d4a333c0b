"""The workload policies that GKE places slices of tpu7x by: one for each topology, made once for a
project and region through the Compute Engine API. Making them again is no harm."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tpufleet.errors import (
    BadInput,
    BadRequest,
    Conflict,
    FleetError,
    PermissionMissing,
    ProviderUnavailable,
    RateLimited,
)
from tpufleet.model import tpu_types
from tpufleet.provisioner import settings
from tpufleet.provisioner.gke_api import pool_shapes
from tpufleet.provisioner.settings import ProvisionerSettings

log = logging.getLogger("tpufleet.provisioner")

ENDPOINT = "https://compute.googleapis.com/compute/v1"
SCOPE = "https://www.googleapis.com/auth/compute"
REGION = re.compile(r"[a-z]+(-[a-z]+)+[0-9]+")
PATIENCE = 30.0  # seconds for one answer
TRIES, FIRST_PAUSE, LONGEST_PAUSE = 6, 0.5, 10.0  # when told to slow down
DONE_WITHIN = 120.0  # seconds for all operations together
BAD, BUSY = 400, 429  # the least status of an error; of one that says to slow down


def required_policies() -> dict[str, dict[str, Any]]:
    """By topology."""
    prefix = f"{pool_shapes.WORKLOAD_POLICY_ACCELERATOR}-"
    topologies = [row[1] for row in tpu_types.TYPES if row[0].startswith(prefix)]
    return {
        topology: {
            "name": pool_shapes.policy_name(topology),
            "workloadPolicy": {"type": "HIGH_THROUGHPUT", "acceleratorTopology": topology},
        }
        for topology in dict.fromkeys(topologies)
    }


class ResourcePolicies:
    """The resource policies of one region. `session` is one of `requests`, with credentials."""

    def __init__(
        self,
        session: Any,
        project: str,
        region: str,
        endpoint: str = ENDPOINT,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._session, self._sleep = session, sleep
        self._region = f"{endpoint}/projects/{project}/regions/{region}"

    def existing_names(self) -> set[str]:
        """Names of those that exist."""
        names: set[str] = set()
        page: str | None = ""
        while page is not None:
            query = {"pageToken": page} if page else {}
            said = self._call("GET", "/resourcePolicies", params=query)
            names |= {item["name"] for item in said.get("items", ())}
            page = said.get("nextPageToken")
        return names

    def create(self, policy: Mapping[str, Any]) -> str | None:
        """Start; the operation that makes it. None: it is there."""
        try:
            return str(self._call("POST", "/resourcePolicies", json=policy)["name"])
        except Conflict:
            return None

    def operation_result(self, operation: str) -> str | None:
        """None while it goes on; empty when it ended well; else what went wrong."""
        said = self._call("GET", f"/operations/{operation}")
        if said.get("status") != "DONE":
            return None
        errors = (said.get("error") or {}).get("errors") or ()
        return "; ".join(error.get("message") or error.get("code", "") for error in errors)

    def _call(self, verb: str, path: str, **more: Any) -> dict[str, Any]:
        for number in range(1, TRIES + 1):
            with _translated():
                answer = self._session.request(verb, self._region + path, timeout=PATIENCE, **more)
            busy = answer.status_code == BUSY or answer.status_code >= 500
            if not busy or number == TRIES:
                break
            self._sleep(min(FIRST_PAUSE * 2 ** (number - 1), LONGEST_PAUSE))
        if answer.status_code >= BAD:
            raise _error(answer)
        return dict(answer.json())


def ensure_policies(
    policies: ResourcePolicies, sleep: Callable[[float], None] = time.sleep
) -> dict[str, str]:
    """Make what is missing. By name: `there`, `made`, or why it could not be made."""
    there = policies.existing_names()
    outcome, started = {}, {}
    for policy in required_policies().values():
        name = policy["name"]
        operation = None if name in there else policies.create(policy)
        if operation is None:
            outcome[name] = "there"
        else:
            started[name] = operation
    deadline = time.monotonic() + DONE_WITHIN
    while started:
        for name, operation in list(started.items()):
            said = policies.operation_result(operation)
            if said is not None:
                outcome[name] = said or "made"
                del started[name]
        if started and time.monotonic() > deadline:
            raise ProviderUnavailable(f"{len(started)} policies are not made yet; try again")
        if started:
            sleep(1.0)
    return outcome


def run(
    environ: Mapping[str, str], region: str, *, dry_run: bool = False, endpoint: str = ""
) -> int:
    """`tpu provisioner --make-policies REGION`: the exit status."""
    if not REGION.fullmatch(region):
        raise BadInput(f"{region!r} is no region; regions look like us-central1")
    given: ProvisionerSettings = settings.from_environ(environ)
    if not given.project:
        raise BadInput("GCP_PROJECT_ID is not set; it names the project that gets the policies")
    session = _session() if not endpoint else _plain_session()
    policies = ResourcePolicies(session, given.project, region, endpoint or ENDPOINT)
    if dry_run:
        missing = [
            one["name"]
            for one in required_policies().values()
            if one["name"] not in policies.existing_names()
        ]
        print("\n".join([*missing, f"{len(missing)} would be made"]))
        return 0
    outcome = ensure_policies(policies)
    troubles = {name: said for name, said in outcome.items() if said not in ("there", "made")}
    made = sum(said == "made" for said in outcome.values())
    print(f"{made} policies made, {len(outcome) - made - len(troubles)} were there")
    for name, said in troubles.items():
        print(f"{name}: {said}")
    return 1 if troubles else 0


def _session() -> Any:
    try:
        import google.auth
        from google.auth.transport.requests import AuthorizedSession
    except ImportError as error:
        raise BadInput("GKE needs the extra: pip install 'tpufleet[gke]'") from error
    with _translated():
        credentials, _ = google.auth.default(scopes=[SCOPE])
    return AuthorizedSession(credentials)


def _plain_session() -> Any:
    import requests

    return requests.Session()


@contextmanager
def _translated() -> Iterator[None]:
    import requests
    from google.auth import exceptions as auth

    try:
        yield
    except (requests.RequestException, auth.TransportError) as error:
        raise ProviderUnavailable(f"Compute Engine does not answer: {error}") from error
    except auth.GoogleAuthError as error:
        raise PermissionMissing(
            f"no credentials: {error}; `gcloud auth application-default login`"
        ) from error


def _error(answer: Any) -> FleetError:
    try:
        said = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        said = answer.text[:200] or f"status {answer.status_code}"
    words = f"Compute Engine: {said}"
    match answer.status_code:
        case 409:
            return Conflict(words)
        case 401 | 403:
            return PermissionMissing(f"{words}; grant compute.resourcePolicies.create and .list")
        case 429:
            return RateLimited(words)
        case code if code >= 500:
            return ProviderUnavailable(words)
    return BadRequest(words)
