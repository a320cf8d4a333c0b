"""Names of what an environment consists of. Every stage and manifest takes them from here."""

from __future__ import annotations

from tpufleet_gke.environment.config.sections import Environment, Team

LONGEST_ACCOUNT = 30  # of a Google service account
LONGEST_BUCKET = 63
LONGEST_NODE_POOL = 40
SERVER_NAMESPACE = "tpufleet-system"  # of the shipped manifests
# Of the Google service account of each part; node and team accounts have their own.
ACCOUNTS = {"server": "tpufleet", "bridge": "tpufleet-bridge", "provisioner": "provisioner"}


def cluster(environment: Environment) -> str:
    return environment.cluster.name or f"{environment.name}-cluster"


def pods_range(environment: Environment) -> str:
    existing = environment.network.existing
    return existing.pods_range if existing else "pods"


def services_range(environment: Environment) -> str:
    existing = environment.network.existing
    return existing.services_range if existing else "services"


def automation_bucket(environment: Environment) -> str:
    return environment.automation.bucket or bucket(environment, "automation")


def bucket(environment: Environment, name: str) -> str:
    return f"{environment.project.rpartition(':')[2]}-{environment.name}-{name}"


def account_email(environment: Environment, account: str) -> str:
    return f"{account}@{environment.project}.iam.gserviceaccount.com"


def node_account(environment: Environment) -> str:
    return environment.nodes.service_account or f"{environment.name}-gke-nodes"


def team_service_account(environment: Environment, team: str) -> str:
    return environment.service_accounts.get(team) or f"{environment.name}-{team}-jobs"


def account(environment: Environment, part: str) -> str:
    """Of a part in ACCOUNTS."""
    return environment.service_accounts.get(part) or f"{environment.name}-{ACCOUNTS[part]}"


def team_namespace(name: str, team: Team) -> str:
    return team.namespace or name


def registry_location(environment: Environment) -> str:
    return environment.registry.location or environment.region


def image_path(environment: Environment) -> str:
    location = registry_location(environment)
    return f"{location}-docker.pkg.dev/{environment.project}/{environment.registry.name}"


def server_image(environment: Environment, version: str) -> str:
    return environment.server.image or f"{image_path(environment)}/tpufleet:{version}"


def workload_pool(environment: Environment) -> str:
    return f"{environment.project}.svc.id.goog"
