"""Values of the Helm chart deploy/helm/tpufleet, and settings of the kustomize overlay. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from tpufleet import __version__
from tpufleet.model.tpu.type_lookup import short_name
from tpufleet.model.values import encoding
from tpufleet_gke.environment.addons import compute_classes
from tpufleet_gke.environment.addons.team_manifests import HEADER
from tpufleet_gke.environment.config import capacity, names
from tpufleet_gke.environment.config.sections import Environment, TpuPool

BRIDGE_REPLICAS = 2  # one takes over the claims of the other


def text(environment: Environment) -> str:
    """values.yaml of the chart."""
    values = {
        "project": environment.project,
        "image": names.server_image(environment, __version__),
        "bucket": server_bucket(environment),
        "zones": list(environment.zones),
        "serviceAccounts": _accounts(environment),
        "settings": _server_settings(environment),
        "replicas": {"server": environment.server.replicas},
    }
    if environment.server.firestore_bridge and environment.tpu_pools:
        values["bridge"] = _bridge_options(environment)
        values["replicas"] = {"server": environment.server.replicas, "bridge": BRIDGE_REPLICAS}
    return HEADER + yaml.safe_dump(values, sort_keys=False)


def _bridge_options(environment: Environment) -> list[str]:
    """The smallest slices that there are, because the code of a document is one program."""

    def size(pool: TpuPool) -> tuple[bool, int, int]:
        shape = capacity.shape(pool)
        return not pool.slices, shape.hosts, shape.chips

    pool = min(environment.tpu_pools.values(), key=size)
    kind = "queued" if pool.capacity == "flex-start" else pool.capacity
    return [f"--accelerator={short_name(pool.type)}", f"--capacity={kind}"]


def settings_env(environment: Environment) -> str:
    """settings.env of deploy/k8s/overlays/gke."""
    accounts = _accounts(environment)
    settings = {
        "GOOGLE_CLOUD_PROJECT": environment.project,
        "TPUFLEET_GKE_IMAGE": names.server_image(environment, __version__),
        "TPUFLEET_GKE_ZONES": ",".join(environment.zones),
        "TPUFLEET_BUCKET": server_bucket(environment),
        **_server_settings(environment),
        **{f"{name.upper()}_ACCOUNT": email for name, email in accounts.items()},
    }
    return HEADER + "".join(f"{name}={value}\n" for name, value in settings.items())


def server_bucket(environment: Environment) -> str:
    """The first bucket; without one, that of the automation."""
    first = next(iter(environment.buckets), None)
    bucket = names.bucket(environment, first) if first else names.automation_bucket(environment)
    return f"gs://{bucket}/tpufleet"


def _server_settings(environment: Environment) -> dict[str, str]:
    """Settings of the server that follow from slices and teams."""
    pools = environment.tpu_pools.values()
    aware = dict.fromkeys(pool.type for pool in pools if pool.topology_aware)
    reserved = {pool.type: pool.reservation for pool in pools if pool.reservation}
    settings = {
        "TPUFLEET_GKE_TEAMS": encoding.to_json(_teams(environment)).decode(),
        "TPUFLEET_GKE_TOPOLOGY_AWARE": ",".join(aware),
        "TPUFLEET_GKE_RESERVATIONS": _pairs(reserved),
        "TPUFLEET_GKE_COMPUTE_CLASSES": _pairs(compute_classes.class_names(environment)),
    }
    return {name: value for name, value in settings.items() if value}


def _pairs(values: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in values.items())


def _teams(environment: Environment) -> dict[str, dict[str, object]]:
    return {
        name: {
            "namespace": names.team_namespace(name, team),
            "queue": team.queue,
            "service_account": team.service_account,
            **({"users": list(team.users)} if team.users else {}),
        }
        for name, team in environment.teams.items()
    }


def _accounts(environment: Environment) -> dict[str, str]:
    return {
        part: names.account_email(environment, names.account(environment, part))
        for part in names.ACCOUNTS
    }
