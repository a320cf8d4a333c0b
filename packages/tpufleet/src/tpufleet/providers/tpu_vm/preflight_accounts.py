"""Checks before the first spend what the service accounts of TPU hosts and of a server may do.

The default account of a project has roles/editor only where its organisation allows automatic
grants: cloud.google.com/iam/docs/service-account-types#default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpufleet.model.fleet.preflight import Check, CheckStatus
from tpufleet.providers.tpu_vm.google_rest import GoogleRest

NAME = "hosts' account"
ROLE = "roles/storage.objectUser"
SERVER_ROLES = ("roles/tpu.admin", "roles/iam.serviceAccountUser", ROLE)
# Each allows to read and write objects (cloud.google.com/storage/docs/access-control/iam-roles).
# Editors get it through the default roles of a bucket.
SUFFICIENT = frozenset(
    {ROLE, "roles/storage.objectAdmin", "roles/storage.admin", "roles/owner", "roles/editor"}
)


def default_account(project_number: str) -> str:
    """cloud.google.com/compute/docs/access/service-accounts#default_service_account"""
    return f"{project_number}-compute@developer.gserviceaccount.com"


def grants_for_server(rest: GoogleRest, project: str, account: str) -> list[str]:
    """Commands for what the account of a server lacks. `account`: empty for the default one. None
    if that cannot be read."""
    account = account or default_account_of(rest, project)
    policy = rest.post("projects", f"v1/projects/{project}:getIamPolicy", {})
    if not account or policy.status != 200:
        return []
    granted = _roles(policy.body, account)
    if granted & {"roles/owner", "roles/editor"}:
        return []
    return [
        f"gcloud projects add-iam-policy-binding {project} "
        f"--member=serviceAccount:{account} --role={role}"
        for role in SERVER_ROLES
        if role not in granted
    ]


def default_account_of(rest: GoogleRest, project: str) -> str:
    """Empty if the project cannot be read."""
    number = str(rest.get("projects", f"v1/projects/{project}").body.get("projectNumber", ""))
    return default_account(number) if number else ""


def check_hosts_account(rest: GoogleRest, project: str, account: str, bucket: str) -> Check:
    """`account`: empty for the default one of the project."""
    account = account or default_account_of(rest, project)
    if not account:
        message = "cannot be checked: the number of the project is not known"
        return Check(name=NAME, status=CheckStatus.WARNING, message=message)
    of_bucket = rest.get("storage", f"storage/v1/b/{bucket}/iam")
    of_project = rest.post("projects", f"v1/projects/{project}:getIamPolicy", {})
    granted = _roles(of_bucket.body, account) | _roles(of_project.body, account)
    fix = (
        f"gcloud storage buckets add-iam-policy-binding gs://{bucket} "
        f"--member=serviceAccount:{account} --role={ROLE}"
    )
    if granted & SUFFICIENT:
        message = f"{account} can use gs://{bucket}"
        return Check(name=NAME, status=CheckStatus.OK, message=message)
    if of_bucket.status != 200 or of_project.status != 200:
        message = f"cannot be checked: {of_bucket.message or of_project.message or 'no access'}"
        return Check(name=NAME, status=CheckStatus.WARNING, message=message, fix=fix)
    message = f"{account} cannot use gs://{bucket}: hosts could not install the bundle"
    return Check(name=NAME, status=CheckStatus.FAILED, message=message, fix=fix)


def _roles(policy: Mapping[str, Any], account: str) -> set[str]:
    """Roles without a condition; everyone's count too."""
    members = {f"serviceAccount:{account}", "allUsers", "allAuthenticatedUsers"}
    return {
        binding.get("role", "")
        for binding in policy.get("bindings", ())
        if members & set(binding.get("members", ())) and not binding.get("condition")
    }
