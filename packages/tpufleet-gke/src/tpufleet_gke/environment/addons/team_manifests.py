"""Where the jobs of teams run, and what `tpu cluster render` writes. Pure but for shipped files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

import tpufleet
from tpufleet_gke.environment.addons import queues
from tpufleet_gke.environment.config import names
from tpufleet_gke.environment.config.sections import Environment, Team

Json = dict[str, Any]

HEADER = "# Generated from cluster.yaml by `tpu cluster`; edit that file instead.\n"
SHIPPED = Path(tpufleet.__file__).parent / "deploy"


def teams(environment: Environment) -> list[Json]:
    """The shipped namespace of jobs with its account, role and network policy, for each team."""
    shipped = (SHIPPED / "k8s/queues/jobs.yaml").read_text()
    return [
        _of_team(environment, name, team, manifest)
        for name, team in environment.teams.items()
        for manifest in yaml.safe_load_all(shipped)
    ]


def _of_team(environment: Environment, name: str, team: Team, manifest: Json) -> Json:
    namespace, metadata = names.team_namespace(name, team), manifest["metadata"]
    if manifest["kind"] == "Namespace":
        labels = {**metadata["labels"], "tpufleet.dev/team": name}
        return {**manifest, "metadata": {"name": namespace, "labels": labels}}
    metadata = {**metadata, "namespace": namespace}
    if manifest["kind"] == "ServiceAccount":
        email = names.account_email(environment, names.team_service_account(environment, name))
        annotations = {"iam.gke.io/gcp-service-account": email}
        metadata |= {"name": team.service_account, "annotations": annotations}
    return {**manifest, "metadata": metadata}


def files(environment: Environment) -> dict[str, str]:
    """A kustomization of the teams' namespaces and queues."""
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["teams.yaml", "queues.yaml"],
    }
    return {
        "teams.yaml": HEADER + yaml.safe_dump_all(teams(environment), sort_keys=False),
        "queues.yaml": HEADER + yaml.safe_dump_all(queues.manifests(environment), sort_keys=False),
        "kustomization.yaml": HEADER + yaml.safe_dump(kustomization, sort_keys=False),
    }
