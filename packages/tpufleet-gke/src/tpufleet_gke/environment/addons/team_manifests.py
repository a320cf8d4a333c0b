"""Namespaces and service accounts of teams, and what `tpu cluster render` writes. Pure."""

from __future__ import annotations

from typing import Any

import yaml

from tpufleet_gke.environment.addons import queues
from tpufleet_gke.environment.config import names
from tpufleet_gke.environment.config.sections import Environment

Json = dict[str, Any]

HEADER = "# Generated from cluster.yaml by `tpu cluster`; edit that file instead.\n"


def teams(environment: Environment) -> list[Json]:
    found: list[Json] = []
    for name, team in environment.teams.items():
        namespace = names.team_namespace(name, team)
        email = names.account_email(environment, names.team_service_account(environment, name))
        found += [
            {
                "apiVersion": "v1",
                "kind": "Namespace",
                "metadata": {
                    "name": namespace,
                    "labels": {
                        "pod-security.kubernetes.io/enforce": "restricted",
                        "tpufleet.dev/jobs": "true",
                        "tpufleet.dev/team": name,
                    },
                },
            },
            {
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": {
                    "name": team.service_account,
                    "namespace": namespace,
                    "annotations": {"iam.gke.io/gcp-service-account": email},
                },
            },
        ]
    return found


def files(environment: Environment) -> dict[str, str]:
    """A kustomization of the team's namespaces and queues."""
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
