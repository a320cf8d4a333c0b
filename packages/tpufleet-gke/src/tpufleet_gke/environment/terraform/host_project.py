"""Stage 0, host project of a Shared VPC: what GKE and the automation account need there.

https://cloud.google.com/kubernetes-engine/docs/how-to/cluster-shared-vpc
"""

from __future__ import annotations

from tpufleet_gke.environment.config.sections import Environment
from tpufleet_gke.environment.terraform import network
from tpufleet_gke.environment.terraform.hcl import Block, Expression, resource

AGENT_ROLE = "roles/container.hostServiceAgentUser"
NETWORK_ROLE = "roles/compute.networkUser"


def resources(
    environment: Environment, automation: object, apis: list[Expression] | None
) -> list[Block]:
    """Service agents are named by the number of the project, and exist once GKE is enabled."""
    existing = environment.network.existing
    if existing is None or not existing.host_project or not existing.create_grants:
        return []
    number = Expression("data.google_project.project.number")
    gke = f"serviceAccount:service-{number}@container-engine-robot.iam.gserviceaccount.com"
    members = {
        "gke": gke,
        "google_apis": f"serviceAccount:{number}@cloudservices.gserviceaccount.com",
        "automation": automation,
    }
    blocks = [
        Block(
            kind="data", labels=("google_project", "project"),
            body={"project_id": environment.project, **({"depends_on": apis} if apis else {})},
        ),
        resource(
            "google_project_iam_member", "host_gke", project=existing.host_project,
            role=AGENT_ROLE, member=gke, depends_on=apis,
        ),
    ]  # fmt: skip
    blocks += [
        resource(
            "google_compute_subnetwork_iam_member", f"host_{key}", project=existing.host_project,
            region=environment.region, subnetwork=existing.subnetwork, role=NETWORK_ROLE,
            member=member, depends_on=apis,
        )
        for key, member in members.items()
    ]  # fmt: skip
    if environment.network.private_nodes:
        blocks.append(network.webhooks(environment, existing.host_project))
    return blocks
