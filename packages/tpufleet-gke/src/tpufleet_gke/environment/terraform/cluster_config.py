"""Stage 2: service accounts of teams, server and provisioner, bound by Workload Identity.

Objects inside the cluster are applied by `tpu cluster apply` itself: Terraform would need their
CRDs at plan time, before anything has installed them.
"""

from __future__ import annotations

from tpufleet_gke.environment.config import names
from tpufleet_gke.environment.config.sections import Environment
from tpufleet_gke.environment.terraform.hcl import Block, output, project_roles, reference, resource

OBJECT_USER = "roles/storage.objectUser"
BUCKET_READER = "roles/storage.legacyBucketReader"
PROVISIONER_NAMESPACE = "tpu-provisioner-system"
PROVISIONER_KSA = "tpu-provisioner-controller-manager"
SERVER_KSA = "tpufleet"
BRIDGE_KSA = "tpufleet-bridge"
# What the provisioner calls, and nothing else. Those of a cluster are those of its node pools.
PROVISIONER_PERMISSIONS = (
    "compute.regionOperations.get", "compute.resourcePolicies.create",
    "compute.resourcePolicies.get", "compute.resourcePolicies.list", "container.clusters.get",
    "container.clusters.update", "container.operations.get", "container.operations.list",
)  # fmt: skip


def files(environment: Environment) -> dict[str, list[Block]]:
    return {
        "teams.tf": _teams(environment),
        "server.tf": _server(environment),
        "provisioner.tf": _provisioner(environment),
        "outputs.tf": [
            output(
                "team_service_accounts",
                {
                    team: reference("google_service_account", f"team_{team}", "email")
                    for team in environment.teams
                },
                "Google service account of each team's jobs.",
            )
        ],
    }


def writable_buckets(environment: Environment, team: str) -> list[str]:
    return [
        name for name, bucket in environment.buckets.items()
        if not bucket.teams or team in bucket.teams
    ]  # fmt: skip


def _teams(environment: Environment) -> list[Block]:
    blocks = []
    for name, team in environment.teams.items():
        key = f"team_{name}"
        blocks += _account(
            environment, key, names.team_service_account(environment, name),
            f"jobs of team {name}", names.team_namespace(name, team), team.service_account,
        )  # fmt: skip
        extra = ["roles/aiplatform.user"] if environment.tensorboard is not None else []
        roles = [*team.roles, *extra]
        blocks += project_roles(environment.project, key, _member(key), roles)
        for bucket in writable_buckets(environment, name):
            blocks += _bucket_access(environment, key, bucket)
    return blocks


def _server(environment: Environment) -> list[Block]:
    blocks = _account(
        environment, "server", names.account(environment, "server"), "tpufleet server",
        names.SERVER_NAMESPACE, SERVER_KSA,
    )  # fmt: skip
    for bucket in environment.buckets:
        blocks += _bucket_access(environment, "server", bucket)
    if not environment.server.firestore_bridge:
        return blocks
    blocks += _account(
        environment, "bridge", names.account(environment, "bridge"), "Firestore bridge",
        names.SERVER_NAMESPACE, BRIDGE_KSA,
    )  # fmt: skip
    roles = ["roles/datastore.user"]
    return [*blocks, *project_roles(environment.project, "bridge", _member("bridge"), roles)]


def _provisioner(environment: Environment) -> list[Block]:
    role = f"{environment.name}_provisioner".replace("-", "_")
    return [
        *_account(
            environment, "provisioner", names.account(environment, "provisioner"),
            "provisioner", PROVISIONER_NAMESPACE, PROVISIONER_KSA,
        ),
        resource(
            "google_project_iam_custom_role", "provisioner", project=environment.project,
            role_id=role, title=f"{environment.name}: provisioner",
            permissions=list(PROVISIONER_PERMISSIONS),
        ),
        resource(
            "google_project_iam_member", "provisioner", project=environment.project,
            role=reference("google_project_iam_custom_role", "provisioner", "id"),
            member=_member("provisioner"),
        ),
        resource(
            "google_service_account_iam_member", "provisioner_uses_nodes",
            comment="New nodes run as the service account of nodes.",
            service_account_id=_account_id(environment, names.node_account(environment)),
            role="roles/iam.serviceAccountUser", member=_member("provisioner"),
        ),
    ]  # fmt: skip


def _account(
    environment: Environment, key: str, account: str, purpose: str, namespace: str, ksa: str
) -> list[Block]:
    """A Google service account that one Kubernetes service account acts as."""
    pool = names.workload_pool(environment)
    return [
        resource(
            "google_service_account", key, project=environment.project, account_id=account,
            display_name=f"{environment.name}: {purpose}",
        ),
        resource(
            "google_service_account_iam_member", f"{key}_workload_identity",
            service_account_id=reference("google_service_account", key, "name"),
            role="roles/iam.workloadIdentityUser",
            member=f"serviceAccount:{pool}[{namespace}/{ksa}]",
        ),
    ]  # fmt: skip


def _bucket_access(environment: Environment, key: str, bucket: str) -> list[Block]:
    return [
        resource(
            "google_storage_bucket_iam_member", f"{key}_{bucket}_{suffix}",
            bucket=names.bucket(environment, bucket), role=role, member=_member(key),
        )
        for suffix, role in (("objects", OBJECT_USER), ("reader", BUCKET_READER))
    ]  # fmt: skip


def _member(key: str) -> object:
    return reference("google_service_account", key, "member")


def _account_id(environment: Environment, account: str) -> str:
    email = names.account_email(environment, account)
    return f"projects/{environment.project}/serviceAccounts/{email}"
