"""Values of the Helm chart deploy/helm/tpufleet for an environment. Pure."""

from __future__ import annotations

import yaml

from tpufleet import __version__
from tpufleet.environment.addons.team_manifests import HEADER
from tpufleet.environment.config import names
from tpufleet.environment.config.sections import Environment


def text(environment: Environment) -> str:
    first_team = next(iter(environment.teams.values()))
    values = {
        "project": environment.project,
        "image": names.server_image(environment, __version__),
        "zones": list(environment.zones),
        "queue": first_team.queue,
        "serviceAccounts": {
            "server": names.account_email(environment, names.server_account(environment)),
            "provisioner": names.account_email(environment, names.provisioner_account(environment)),
            "bridge": names.account_email(environment, names.server_account(environment)),
        },
        "replicas": {"server": environment.server.replicas},
    }
    return HEADER + yaml.safe_dump(values, sort_keys=False)
