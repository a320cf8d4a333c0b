"""Sources of slices: the providers of a server, and manually created TPU VMs."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tpufleet.clocks import SystemClock
from tpufleet.compose import local_jobs
from tpufleet.config import Config, is_loopback
from tpufleet.errors import BadInput, no_project, optional_packages
from tpufleet.model.fleet.preflight import Check
from tpufleet.model.job.jobs import Capacity
from tpufleet.model.tpu import prices
from tpufleet.providers.base import Provider
from tpufleet.providers.local import fault_plan
from tpufleet.providers.local.provider import LocalProvider
from tpufleet.providers.local.stock import Stock
from tpufleet.stores.base import Store

if TYPE_CHECKING:
    from tpufleet.providers.compute.settings import ComputeSettings
    from tpufleet.providers.tpu_vm.google_rest import GoogleRest

    # Re-exported: the command line must not import a provider.
    from tpufleet.providers.tpu_vm.manual_nodes import ManualNodes as ManualNodes
    from tpufleet.providers.tpu_vm.preflight import Preflight
    from tpufleet.providers.tpu_vm.project_resources import ProjectResources
    from tpufleet.providers.tpu_vm.settings import GoogleSettings, TpuVmSettings


def providers(settings: Config, store: Store) -> dict[str, Provider]:
    """The providers that are enabled on this server."""
    return {name: _provider(name, settings, store) for name in settings.enabled_providers}


def _provider(name: str, settings: Config, store: Store) -> Provider:
    if name == "tpu-vm" and settings.tpu_vm is not None:
        return _tpu_vm(settings, store)
    if name == "compute" and settings.compute is not None:
        return _compute(settings, store)
    if name == "gke" and settings.gke is not None:
        return _gke(settings.gke, store)
    if name == "local":
        plan_file = settings.data / "faults.yaml"
        plan = fault_plan.load(plan_file) if plan_file.exists() else fault_plan.NO_FAULTS
        hidden = _private_paths(settings)
        contained = local_jobs.containment_of_jobs(settings, hidden)
        everyone, members = local_jobs.users_of_jobs(contained)
        return LocalProvider(
            settings.data / "local",
            stock=Stock(hosts=settings.local_hosts),
            plan=plan,
            hidden=hidden,
            job_user=everyone,
            member_job_user=members,
            jobs=local_jobs.report(contained),
            containers=settings.local_containers,
            inherit=settings.local_env,
        )
    raise BadInput(
        f"providers: {name} is enabled but not configured\n"
        f"  next: set {name.replace('-', '_')} in {settings.config_file}"
    )


def _private_paths(settings: Config) -> list[Path]:
    """What no job may read: token, secret, database, configuration with credentials, keys."""
    files = (
        settings.token_file,
        settings.config_file,
        settings.secret_file,
        settings.admin_token_file,
        settings.tls_key,
    )
    found = (settings.home, settings.data, *(path for path in files if path is not None))
    return list(dict.fromkeys(found))


def _gke(document: Mapping[str, Any], store: Store) -> Provider:
    from tpufleet.providers.gke import provider

    with optional_packages("the gke provider", "k8s"):
        return provider.open_provider(document, fleet=fleet_id(store), clock=SystemClock())


def _tpu_vm(settings: Config, store: Store) -> Provider:
    with _tpu_vm_client():
        from tpufleet.providers.tpu_vm import settings as tpu_vm
        from tpufleet.providers.tpu_vm.provider import TpuVmProvider
    parsed = tpu_vm.parse(settings.tpu_vm or {})
    if not parsed.emulated:
        _check_hosts_can_start("tpu_vm", parsed, settings)
    return TpuVmProvider(parsed, fleet=fleet_id(store), folder=settings.data / "tpu-vm")


def _compute(settings: Config, store: Store) -> Provider:
    with optional_packages("the compute provider", "compute"):
        from tpufleet.providers.compute import settings as compute
        from tpufleet.providers.compute.provider import ComputeProvider
    parsed = compute.parse(settings.compute or {})
    if not parsed.emulated:
        _check_hosts_can_start("compute", parsed, settings)
    return ComputeProvider(parsed, fleet=fleet_id(store), folder=settings.data / "compute")


def _check_hosts_can_start(section: str, parsed: GoogleSettings, settings: Config) -> None:
    if is_loopback(settings.public_url or f"http://{settings.listen}"):
        raise BadInput(
            f"public_url is {settings.public_url or 'not set'}: TPU hosts would be paid for, and "
            "could not reach this server\n"
            "  next: `tpu deploy server` runs it on a VM that they reach; or set public_url in "
            f"{settings.config_file}, an address of this machine that they reach"
        )
    if not parsed.bundle:
        raise BadInput(
            f"{section}: bundle is not set, so hosts could not install tpufleet\n"
            f"  next: run `tpu deploy bundle` and put what it prints into {settings.config_file}"
        )


def run_emulated_startup_script(endpoint: str, node: str) -> None:
    """On the hosts of an emulated node, which has no ssh."""
    with _tpu_vm_client():
        from tpufleet.providers.tpu_vm import fault_injection
    body = json.dumps({"node": node}).encode()
    fault_injection.call_admin(endpoint, "RunStartupScript", body)


def reset_emulated_instances(settings: Config, zone: str, slice_id: str) -> None:
    """The startup script runs at each boot."""
    with optional_packages("the compute provider", "compute"):
        from tpufleet.providers.compute import settings as compute
        from tpufleet.providers.compute.api import ComputeApi
        from tpufleet.providers.compute.naming import SLICE, Location
        from tpufleet.providers.tpu_vm.google_rest import GoogleRest
    parsed = compute.parse(settings.compute or {})
    api = ComputeApi(GoogleRest(parsed.endpoint, parsed.project), parsed.project)
    location = Location(project=parsed.project, zone=zone)
    for vm in api.instances(location, slice_id, SLICE):
        api.update(f"{location.instance(vm['name'])}/reset")


def manual_nodes(
    settings: Config, project: str | None, report: Callable[[str], None]
) -> ManualNodes:
    """TPU VMs that the user manages directly, with the credentials on this machine."""
    with _tpu_vm_client():
        from tpufleet.providers.tpu_vm import api
        from tpufleet.providers.tpu_vm import settings as tpu_vm
        from tpufleet.providers.tpu_vm.manual_nodes import ManualNodes
    document = dict(settings.tpu_vm or {})
    project = project or document.get("project") or os.environ.get("GOOGLE_CLOUD_PROJECT")
    if not project:
        raise no_project()
    # The settings require a zone; one that the user did not choose is not passed on.
    parsed = tpu_vm.parse({**tpu_vm.REQUIRED_EXAMPLE, **document, "project": project})
    cloud = api.TpuApi(lambda: api.connect(parsed.endpoint), project=parsed.project)
    return ManualNodes(cloud, parsed, report, zones=parsed.zones if "zones" in document else ())


def project_resources(settings: Config, report: Callable[[str], None]) -> ProjectResources:
    """What the cloud project contains, read with the credentials on this machine."""
    parsed, rest = google_project(settings)
    with _tpu_vm_client():
        from tpufleet.providers.tpu_vm import api
        from tpufleet.providers.tpu_vm.project_resources import ProjectResources
    tpus: api.TpuApi | None = None
    if settings.tpu_vm is not None:
        endpoint = tpu_vm_settings(settings).endpoint
        tpus = api.TpuApi(lambda: api.connect(endpoint), project=parsed.project)

    urls = [url for url in (settings.server, settings.public_url) if url]
    own = [urlsplit(url).hostname or "" for url in urls] or ["127.0.0.1", "localhost"]
    return ProjectResources(
        rest,
        tpus,
        parsed.project,
        prices.price_table(settings.prices),
        own,
        report,
    )


def preflight(settings: Config, slices: Sequence[tuple[str, Capacity]] = ()) -> list[Check]:
    """Check the cloud project of the configuration, with the credentials on this machine."""
    from tpufleet.providers.tpu_vm.preflight import PreflightInput

    checks: list[Check] = []
    for kind, parsed, rest in _preflights(settings):
        wanted = PreflightInput(
            settings=parsed,
            emulated=parsed.emulated,
            bucket=settings.bucket or "",
            public_url=settings.public_url or "",
            server=settings.server or "",
            ca_file=str(settings.ca_file or ""),
            slices=slices,
        )
        # What both providers need is shown once.
        checks += [check for check in kind(wanted, rest).run() if check not in checks]
    return checks


def _preflights(settings: Config) -> Iterator[tuple[type[Preflight], Any, GoogleRest]]:
    """Of the providers that are configured."""
    from tpufleet.providers.compute.preflight import ComputePreflight
    from tpufleet.providers.tpu_vm.preflight import Preflight

    if settings.tpu_vm is not None or settings.compute is None:
        parsed = tpu_vm_settings(settings)
        yield Preflight, parsed, google_rest(parsed)
    if settings.compute is not None:
        yield ComputePreflight, *_compute_project(settings.compute)


def google_project(settings: Config) -> tuple[GoogleSettings, GoogleRest]:
    """The cloud project of the configuration, and its APIs."""
    if settings.tpu_vm is None and settings.compute is not None:
        return _compute_project(settings.compute)
    parsed = tpu_vm_settings(settings)
    return parsed, google_rest(parsed)


def _compute_project(section: Mapping[str, Any]) -> tuple[ComputeSettings, GoogleRest]:
    from tpufleet.providers.compute import settings as compute
    from tpufleet.providers.tpu_vm.google_rest import GoogleRest

    parsed = compute.parse(section)
    return parsed, GoogleRest(parsed.endpoint, parsed.project)


def tpu_vm_settings(settings: Config) -> TpuVmSettings:
    """The cloud project of the configuration."""
    if settings.tpu_vm is None:
        raise no_project(f"tpu_vm in {settings.config_file}")
    with _tpu_vm_client():
        from tpufleet.providers.tpu_vm import settings as tpu_vm
    return tpu_vm.parse(settings.tpu_vm)


def google_rest(settings: TpuVmSettings) -> GoogleRest:
    """Of Google Cloud, or of the emulator that the settings name."""
    with _tpu_vm_client():
        from tpufleet.providers.tpu_vm import api
    return api.connect_rest(settings.endpoint, settings.project)


def _tpu_vm_client() -> contextlib.AbstractContextManager[None]:
    return optional_packages("the tpu-vm provider", "tpu-vm")


def delete_local_slices(home: Path) -> None:
    """Delete all simulated slices of this state folder. No server may be running there."""
    LocalProvider(home / "local").release_all()


def stop_local_slices(home: Path, reason: str) -> int:
    """Kill all simulated slices of this state folder; how many ran. No server may be running
    there; the next one finds them lost for this reason."""
    return LocalProvider(home / "local").stop_all(reason)


def fleet_id(store: Store) -> str:
    """The label on slices of this installation."""
    if store.metadata("fleet") is None:
        # Unless another server was faster.
        store.put_metadata("fleet", secrets.token_hex(4), replace=False)
    label = store.metadata("fleet")
    assert label is not None
    return label
