"""Stage 1, network: a VPC with ranges for pods and services, Cloud NAT; or an existing VPC."""

from __future__ import annotations

from tpufleet_gke.environment.config import capacity, names
from tpufleet_gke.environment.config.sections import Environment
from tpufleet_gke.environment.terraform.hcl import Block, Expression, Nested, reference, resource

# Of pods that the API server calls: our webhook, the API of Kueue, webhooks of JobSet and Kueue.
WEBHOOK_PORTS = (5000, 8082, 9443)


def network_id(environment: Environment) -> object:
    existing = environment.network.existing
    if existing is None:
        return reference("google_compute_network", "network", "id")
    project = existing.host_project or environment.project
    return f"projects/{project}/global/networks/{existing.network}"


def subnetwork_id(environment: Environment) -> object:
    existing = environment.network.existing
    if existing is None:
        return reference("google_compute_subnetwork", "nodes", "id")
    project = existing.host_project or environment.project
    return f"projects/{project}/regions/{environment.region}/subnetworks/{existing.subnetwork}"


def resources(environment: Environment) -> list[Block]:
    settings = environment.network
    blocks = [] if settings.existing else _vpc(environment)
    # The firewall of a Shared VPC is the host project's.
    if settings.private_nodes and not (settings.existing and settings.existing.host_project):
        blocks.append(webhooks(environment, environment.project))
    if settings.nat and settings.private_nodes and settings.existing is None:
        blocks += _nat(environment)
    return blocks


def _vpc(environment: Environment) -> list[Block]:
    settings = environment.network
    return [
        resource(
            "google_compute_network", "network", project=environment.project,
            name=settings.name or f"{environment.name}-network", auto_create_subnetworks=False,
            routing_mode="REGIONAL",
        ),
        resource(
            "google_compute_subnetwork", "nodes", project=environment.project,
            name=settings.subnetwork or f"{environment.name}-{environment.region}",
            region=environment.region, network=network_id(environment),
            ip_cidr_range=settings.nodes,
            private_ip_google_access=True,
            secondary_ip_range=[
                Nested(range_name="pods", ip_cidr_range=capacity.pods_range(environment)),
                Nested(range_name="services", ip_cidr_range=settings.services),
            ],
            # A range in use cannot change. It was sized with a reserve, for pools that grow;
            # `checks.live_range_problems` refuses what does not fit.
            lifecycle=Nested(ignore_changes=[Expression("secondary_ip_range")]),
        ),
    ]  # fmt: skip


def webhooks(environment: Environment, project: str) -> Block:
    name = f"{names.cluster(environment)}-webhooks"
    return resource(
        "google_compute_firewall", "webhooks",
        comment="The control plane of a private cluster reaches nodes on 443 and 10250 otherwise.",
        project=project, name=name, network=network_id(environment),
        direction="INGRESS", source_ranges=[environment.network.control_plane],
        allow=Nested(protocol="tcp", ports=[str(port) for port in WEBHOOK_PORTS]),
    )  # fmt: skip


def _nat(environment: Environment) -> list[Block]:
    name = f"{environment.name}-nat"
    return [
        resource(
            "google_compute_router", "nat", project=environment.project, name=name,
            region=environment.region, network=network_id(environment),
        ),
        resource(
            "google_compute_router_nat", "nat", project=environment.project, name=name,
            region=environment.region, router=reference("google_compute_router", "nat", "name"),
            nat_ip_allocate_option="AUTO_ONLY",
            source_subnetwork_ip_ranges_to_nat="ALL_SUBNETWORKS_ALL_IP_RANGES",
        ),
    ]  # fmt: skip
