"""Checks before the first spend what the service accounts of TPU hosts and of a server may do.

The default account of a project has roles/editor only where its organisation allows automatic
grants: cloud.google.com/iam/docs/service-account-types#default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tpufleet.errors import ProviderUnavailable
from tpufleet.model.fleet.preflight import Check, failed, ok, warning
from tpufleet.providers.tpu_vm.google_rest import Answer, GoogleRest

NAME = "hosts' account"
ROLE = "roles/storage.objectUser"
TPU_ADMIN = "roles/tpu.admin"
SERVER_ROLES = ("roles/iam.serviceAccountUser", ROLE)  # besides those for its slices
# Each allows to read and write objects (cloud.google.com/storage/docs/access-control/iam-roles).
# Editors get it through the default roles of a bucket.
SUFFICIENT = frozenset(
    {ROLE, "roles/storage.objectAdmin", "roles/storage.admin", "roles/owner", "roles/editor"}
)


def grants_for_server(
    rest: GoogleRest, project: str, account: str, slice_roles: Sequence[str] = (TPU_ADMIN,)
) -> list[str]:
    """Commands for what the account of a server lacks. `account`: empty for the default one. None
    if that cannot be read."""
    policy = rest.post("projects", f"v1/projects/{project}:getIamPolicy", {})
    try:
        account = account or default_account_of(rest, project)
    except ProviderUnavailable:
        return []
    if policy.status != 200:
        return []
    granted = _roles(policy.body, account)
    if granted & {"roles/owner", "roles/editor"}:
        return []
    return [
        grant(f"projects {project}", f"serviceAccount:{account}", role)
        for role in (*slice_roles, *SERVER_ROLES)
        if role not in granted
    ]


def grant(resource: str, member: str, role: str) -> str:
    """The command. `resource` as gcloud writes it: `projects my-project`."""
    kind, _, name = resource.rpartition(" ")
    return f"gcloud {kind} add-iam-policy-binding {name} --member={member} --role={role}"


def default_account_of(rest: GoogleRest, project: str) -> str:
    """cloud.google.com/compute/docs/access/service-accounts#default_service_account"""
    number = str(rest.get("projects", f"v1/projects/{project}").body.get("projectNumber", ""))
    if not number:
        raise ProviderUnavailable("the number of the project is not known")
    return f"{number}-compute@developer.gserviceaccount.com"


def unknown(project: str, name: str, answer: Answer, fix: str = "") -> Check:
    """What cannot be checked, and why."""
    if service := answer.disabled_service:
        fix = f"gcloud services enable {service} --project {project}"
        return warning(name, f"cannot be checked: {service} is not enabled", fix)
    return warning(name, f"cannot be checked: {answer.message or 'no access'}", fix)


def check_hosts_account(rest: GoogleRest, project: str, account: str, bucket: str) -> Check:
    """`account`: empty for the default one of the project."""
    account = account or default_account_of(rest, project)
    of_bucket = rest.get("storage", f"storage/v1/b/{bucket}/iam")
    of_project = rest.post("projects", f"v1/projects/{project}:getIamPolicy", {})
    granted = _roles(of_bucket.body, account) | _roles(of_project.body, account)
    fix = grant(f"storage buckets gs://{bucket}", f"serviceAccount:{account}", ROLE)
    if granted & SUFFICIENT:
        return ok(NAME, f"{account} can use gs://{bucket}")
    for answer in (of_bucket, of_project):
        if answer.status != 200:
            return unknown(project, NAME, answer, fix)
    return failed(
        NAME, f"{account} cannot use gs://{bucket}: hosts could not install the bundle", fix
    )


def _roles(policy: Mapping[str, Any], account: str) -> set[str]:
    """Roles without a condition; everyone's count too."""
    members = {f"serviceAccount:{account}", "allUsers", "allAuthenticatedUsers"}
    return {
        binding.get("role", "")
        for binding in policy.get("bindings", ())
        if members & set(binding.get("members", ())) and not binding.get("condition")
    }
