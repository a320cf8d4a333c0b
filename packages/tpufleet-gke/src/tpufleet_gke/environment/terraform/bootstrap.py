"""Stage 0: Google APIs, the automation service account and the bucket of Terraform state."""

from __future__ import annotations

from tpufleet_gke.environment.config import names
from tpufleet_gke.environment.config.sections import SERVICES, Environment
from tpufleet_gke.environment.terraform import host_project, node_pools
from tpufleet_gke.environment.terraform.hcl import (
    BILLING,
    Block,
    Expression,
    Nested,
    output,
    project_roles,
    reference,
    resource,
)

OWN_APIS = ("cloudresourcemanager", "iam", "serviceusage")
BUCKET_ROLE = "roles/storage.objectAdmin"
BUDGET_ROLE = "roles/billing.costsManager"  # on the billing account, whose administrator grants it


def services(environment: Environment) -> list[str]:
    needed = [*SERVICES, *environment.automation.services]
    if environment.tensorboard is not None:
        needed.append("aiplatform.googleapis.com")
    if environment.budget is not None:
        needed += ["billingbudgets.googleapis.com", "cloudbilling.googleapis.com"]
    if environment.server.firestore_bridge:
        needed.append("firestore.googleapis.com")
    return sorted(set(needed))


def automation_roles(environment: Environment) -> list[str]:
    roles = {*environment.automation.roles}
    if environment.tensorboard is not None:
        roles.add("roles/aiplatform.user")
    if any(node_pools.has_workload_policy(pool) for pool in environment.tpu_pools.values()):
        roles.add("roles/compute.instanceAdmin.v1")
    return sorted(roles)


def files(environment: Environment) -> dict[str, list[Block]]:
    return {
        "services.tf": _services(environment),
        "service_account.tf": _service_account(environment),
        "host_project.tf": host_project.resources(
            environment, _member(environment), _apis(environment, "compute", "container")
        ),
        "state_bucket.tf": _bucket(environment),
        "outputs.tf": [
            output(
                "automation_bucket_name", names.automation_bucket(environment),
                "Bucket of Terraform state and outputs.",
            ),
            output("automation_sa_email", account_email(environment),
                   "Service account that applies the other stages."),
        ],
    }  # fmt: skip


def account_email(environment: Environment) -> str:
    return names.account_email(environment, environment.automation.service_account)


def bucket_import(environment: Environment) -> Block:
    """The bucket exists before its state can be kept in it."""
    return Block(
        kind="import",
        body={
            "to": Expression("google_storage_bucket.automation"),
            "id": names.automation_bucket(environment),
        },
    )


def _services(environment: Environment) -> list[Block]:
    if not environment.automation.enable_apis:
        return []
    return [
        resource(
            "google_project_service", service.partition(".")[0],
            project=environment.project, service=service, disable_on_destroy=False,
        )
        for service in services(environment)
    ]  # fmt: skip


def _service_account(environment: Environment) -> list[Block]:
    account, member = environment.automation.service_account, _member(environment)
    blocks = []
    if environment.automation.create_service_account:
        blocks.append(
            resource(
                "google_service_account", "automation", project=environment.project,
                account_id=account, display_name=f"{environment.name}: applies Terraform",
                depends_on=_apis(environment),
            )
        )  # fmt: skip
    blocks += project_roles(
        environment.project, "automation", member, automation_roles(environment),
        depends_on=_apis(environment),
    )  # fmt: skip
    if environment.budget is not None:
        blocks.append(
            resource(
                "google_billing_account_iam_member", "automation", role=BUDGET_ROLE,
                billing_account_id=environment.budget.billing_account, member=member,
                provider=BILLING, depends_on=_apis(environment, "cloudbilling"),
            )
        )  # fmt: skip
    bucket: object = names.automation_bucket(environment)
    if environment.automation.create_bucket:
        bucket = reference("google_storage_bucket", "automation", "name")
    blocks.append(
        resource(
            "google_storage_bucket_iam_member", "automation", bucket=bucket, role=BUCKET_ROLE,
            member=member,
        )
    )  # fmt: skip
    return blocks


def _member(environment: Environment) -> object:
    if environment.automation.create_service_account:
        return reference("google_service_account", "automation", "member")
    return f"serviceAccount:{account_email(environment)}"


def _apis(environment: Environment, *more: str) -> list[Expression] | None:
    """APIs that this stage itself calls, and that a new project has not enabled."""
    if not environment.automation.enable_apis:
        return None
    return [Expression(f"google_project_service.{name}") for name in (*OWN_APIS, *more)]


def _bucket(environment: Environment) -> list[Block]:
    if not environment.automation.create_bucket:
        return []
    return [
        resource(
            "google_storage_bucket", "automation",
            comment="State of all stages. Former versions are kept, to recover from a mistake.",
            project=environment.project, name=names.automation_bucket(environment),
            location=(environment.automation.location or environment.region).upper(),
            uniform_bucket_level_access=True, public_access_prevention="enforced",
            force_destroy=not environment.deletion_protection,
            versioning=Nested(enabled=True),
        )
    ]  # fmt: skip
