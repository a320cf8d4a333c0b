"""Runs the server on a VM of the cloud project: builds what it installs, and drives the API."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tpufleet.compose import host_bundle
from tpufleet.compose.providers import google_project, project_resources
from tpufleet.config import Config
from tpufleet.errors import BadInput
from tpufleet.model.fleet.paid_resources import PaidResource
from tpufleet.providers.tpu_vm import preflight_accounts
from tpufleet.providers.tpu_vm.server_vm import Plan as Plan  # for the command
from tpufleet.providers.tpu_vm.server_vm import ServerVm, ServerVmSettings
from tpufleet.service.transport.auth import new_token as new_token  # for the command

# Of a server; hosts can install the same bundle.
SERVER_EXTRAS = "gcs,tpu-vm"
INSTANCE_ADMIN = "roles/compute.instanceAdmin.v1"  # for slices of Compute Engine


def server_vm(
    config: Config, *, zone: str | None, report: Callable[[str], None], **options: Any
) -> ServerVm:
    """In the cloud project of the configuration."""
    parsed, rest = google_project(config)
    if parsed.network:
        options["network"] = parsed.network_path
    roles = {preflight_accounts.TPU_ADMIN: config.tpu_vm, INSTANCE_ADMIN: config.compute}
    settings = ServerVmSettings(
        slice_roles=tuple(role for role, section in roles.items() if section is not None),
        project=parsed.project,
        zone=zone,
        default_zone=parsed.zones[0],
        subnetwork=parsed.subnetwork_path,
        **options,
    )
    return ServerVm(rest, settings, report)


def shares_account(config: Config, service_account: str) -> bool:
    """Whether programs of jobs can act as the server: hosts hand out tokens of their account."""
    sections = [section for section in (config.tpu_vm, config.compute) if section is not None]
    return any((each.get("service_account") or "default") == service_account for each in sections)


def live_slices(
    config: Config, vm: ServerVm, report: Callable[[str], None], *, with_state: bool
) -> list[PaidResource]:
    """What would run on, and cost money, if this server were deleted, or the state from which it
    can be made again."""
    if hosts := vm.hosts():
        return project_resources(config, report).of_server(hosts)
    return orphans(config, report) if with_state else []


def orphans(config: Config, report: Callable[[str], None]) -> list[PaidResource]:
    """What earlier servers left in the project."""
    return project_resources(config, report).orphans()


def metadata(config: Config, bundle: tuple[str, str], token: str) -> dict[str, str]:
    """Of the VM: the bundle, the configuration and the hash of the admin's token. Nothing in it is
    secret: everyone who may see the VM can read its metadata."""
    url, checksum = bundle
    return {
        "tpufleet-bundle": url,
        "tpufleet-bundle-sha256": checksum,
        "tpufleet-config": yaml.safe_dump(server_document(config, url, checksum), sort_keys=False),
        "tpufleet-admin-token-sha256": hashlib.sha256(token.encode()).hexdigest(),
    }


def server_document(config: Config, bundle: str, checksum: str) -> dict[str, Any]:
    """The config file of the server: what this machine's has of the cloud and of limits."""
    sections: dict[str, Any] = {"tpu_vm": config.tpu_vm, "compute": config.compute}
    for name, section in sections.items():
        if section is not None:
            sections[name] = {"bundle": bundle, "bundle_sha256": checksum, **section}
    document = {
        "bucket": config.bucket,
        **sections,
        "prices": config.prices,
        "budgets": config.budgets,
        "retention": config.retention,
        "slices_per_user": config.slices_per_user,
    }
    set_values = {key: value for key, value in document.items() if value is not None}
    plain: dict[str, Any] = json.loads(json.dumps(set_values, default=dict))
    return plain


def build_bundle(
    config: Config, report: Callable[[str], None], python_folder: Path | None = None
) -> tuple[str, str]:
    """URL and checksum of a bundle with this version of tpufleet."""
    if config.bucket is None:
        raise BadInput(
            "no bucket for the bundle that the VM installs\n"
            f"  next: set bucket in {config.config_file}, or pass --bundle and --bundle-sha256"
        )
    with tempfile.TemporaryDirectory(prefix="tpufleet-server-") as folder:
        target = Path(folder) / "bundle.tar.gz"
        built = host_bundle.build(
            target, python_folder=python_folder, extras=SERVER_EXTRAS, report=report
        )
        return host_bundle.upload(built, config.bucket), built.sha256
