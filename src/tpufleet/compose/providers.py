"""Where slices come from: the providers of a server, TPU VMs by hand, and the emulator."""

from __future__ import annotations

import os
import secrets
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpufleet.clocks import SystemClock
from tpufleet.config import Config
from tpufleet.errors import BadInput
from tpufleet.providers.base import Provider
from tpufleet.providers.local import fault_plan
from tpufleet.providers.local.provider import LocalProvider
from tpufleet.stores.base import Store

if TYPE_CHECKING:
    # Re-exported: the command line must not import a provider.
    from tpufleet.providers.tpu_vm.manual_nodes import ManualNodes as ManualNodes


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatorOptions:
    listen: str
    folder: Path | None  # working folder of agents; None: nodes run no agent
    zones: tuple[str, ...]  # empty: all of Google's
    plan: Path | None
    nodes: dict[str, int]  # maximum number of nodes by zone
    boot: timedelta
    notice: timedelta


def providers(settings: Config, store: Store) -> dict[str, Provider]:
    """Every source of slices that this server can use."""
    plan_file = settings.data / "faults.yaml"
    plan = fault_plan.load(plan_file) if plan_file.exists() else fault_plan.NO_FAULTS
    found: dict[str, Provider] = {"local": LocalProvider(settings.data / "local", plan=plan)}
    if settings.tpu_vm is not None:
        found["tpu-vm"] = _tpu_vm(settings, store)
    if settings.gke is not None:
        found["gke"] = _gke(settings.gke, store)
    return found


def _gke(written: Mapping[str, Any], store: Store) -> Provider:
    from tpufleet.providers.gke import provider

    try:
        return provider.open_provider(written, fleet=fleet_id(store), clock=SystemClock())
    except ImportError as error:
        raise BadInput(f"GKE needs {error.name}; run `pip install 'tpufleet[k8s]'`") from error


def _tpu_vm(settings: Config, store: Store) -> Provider:
    try:
        from tpufleet.providers.tpu_vm import settings as tpu_vm
        from tpufleet.providers.tpu_vm.provider import TpuVmProvider
    except ImportError as error:
        raise _no_client(error) from error
    read = tpu_vm.parse(settings.tpu_vm or {})
    return TpuVmProvider(read, fleet=fleet_id(store), folder=settings.data / "tpu-vm")


def manual_nodes(settings: Config, project: str | None, tell: Callable[[str], None]) -> ManualNodes:
    """TPU VMs by hand, with the credentials of whoever sits here."""
    try:
        from tpufleet.providers.tpu_vm import api
        from tpufleet.providers.tpu_vm import manual_nodes as byhand
        from tpufleet.providers.tpu_vm import settings as tpu_vm
    except ImportError as error:
        raise _no_client(error) from error
    written = dict(settings.tpu_vm or {})
    project = project or written.get("project") or os.environ.get("GOOGLE_CLOUD_PROJECT")
    if not project:
        raise BadInput("which project? Give --project, or tpu_vm.project in the config file")
    read = tpu_vm.parse({"zones": ["us-central1-a"], **written, "project": project})
    cloud = api.TpuApi(lambda: api.connect(read.endpoint))
    # A zone was only put there because settings must have one: nobody chose it.
    return byhand.ManualNodes(cloud, read, tell, zones=read.zones if "zones" in written else ())


def _no_client(error: ImportError) -> BadInput:
    return BadInput(
        f"TPU VMs need Google's client ({error.name} is missing); "
        "run `pip install 'tpufleet[tpu-vm]'`"
    )


def run_emulator(options: EmulatorOptions) -> int:
    """Run a Cloud TPU API until told to end. The exit status."""
    try:
        from tpufleet.testbed.cloud_tpu import capacity, fault_plan
        from tpufleet.testbed.cloud_tpu.cloud import ZONES, Latencies
        from tpufleet.testbed.cloud_tpu.emulator import Emulator
    except ImportError as error:
        raise _no_client(error) from error
    plan = fault_plan.load(options.plan) if options.plan else fault_plan.NO_FAULTS
    limits = [capacity.CapacityLimit(zone=zone, most=most) for zone, most in options.nodes.items()]
    emulator = Emulator(
        zones=options.zones or ZONES,
        stock=capacity.CloudCapacity(nodes=(*limits, *plan.stock), quota=plan.quota),
        latencies=Latencies(
            boot=options.boot, deletion=timedelta(seconds=2), notice_period=options.notice
        ),
        plan=plan,
        agents_folder=options.folder,
        address=options.listen,
    )
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with emulator:
        print(f"Cloud TPU API at {emulator.endpoint} (tpu_vm.endpoint in the config)", flush=True)
        ended.wait()
        print(emulator.billing_summary(), flush=True)
    return 0


def delete_local_slices(home: Path) -> None:
    """Take away every simulated slice of this state folder, when no server runs there."""
    LocalProvider(home / "local").release_all()


def fleet_id(store: Store) -> str:
    """The label that marks slices as this installation's."""
    found = store.metadata("fleet")
    if found is None:
        store.put_metadata("fleet", secrets.token_hex(4))
        found = store.metadata("fleet")
    assert found is not None
    return found
