"""Starts and stops a whole Kubernetes cluster on loopback: seconds to start, one folder each,
nothing left behind."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from tpufleet.errors import Conflict, NotFound
from tpufleet_testbed.kubernetes import (
    binaries,
    certificates,
    cluster_layout,
    components,
    extension_manifests,
)
from tpufleet_testbed.kubernetes.binaries import Build, Progress
from tpufleet_testbed.kubernetes.cluster_layout import ControlPlaneLayout
from tpufleet_testbed.kubernetes.components import Component
from tpufleet_testbed.kubernetes.control_plane import KubernetesControlPlane
from tpufleet_testbed.kubernetes.node import real_node
from tpufleet_testbed.kubernetes.processes import (
    STOP_GRACE,
    ComponentNotReady,
    ProcessRecord,
    ProcessRegistry,
)

START_ATTEMPTS = 3  # a free port may be taken before a component listens on it
SHORT_GRACE = 1.0  # seconds
# A minimal JobSet, only used in a dry run.
PROBE_JOBSET = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {"name": "probe", "namespace": "default"},
    "spec": {"replicatedJobs": [{"name": "one", "template": {"spec": {"template": {"spec": {
        "restartPolicy": "Never", "containers": [{"name": "c", "image": "none"}],
    }}}}}]},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentStatus:
    name: str
    pid: int
    alive: bool
    memory: int  # bytes


def up(
    folder: Path,
    progress: Progress = lambda message: None,
    build: Build | None = None,
) -> KubernetesControlPlane:
    """Start a cluster in `folder`, with the data that an earlier one left there. `build` replaces
    the current one, for another version of JobSet or Kueue."""
    folder = folder.absolute()
    if ProcessRegistry(folder).is_running():
        raise Conflict(
            f"a control plane is already running in {folder}; stop it with `tpu cluster local down`"
        )
    build = build or binaries.ensure(progress)
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            return _start(folder, build, progress)
        except BaseException as error:
            port_taken = ProcessRegistry(folder).ended_logs_contain("address already in use")
            down(folder, keep=True)
            retryable = isinstance(error, ComponentNotReady) and port_taken
            if not retryable or attempt == START_ATTEMPTS:
                raise
    raise AssertionError("unreachable")


def down(folder: Path, *, keep: bool = False) -> bool:
    """Stop every process of the cluster in `folder`, and delete its data. False: there is none."""
    folder = folder.absolute()
    if not (folder / "layout.json").exists():
        return False
    real_node.remove(folder)
    # The API server drains its connections on SIGTERM; not worth waiting for if its data goes.
    ProcessRegistry(folder).stop(grace=STOP_GRACE if keep else SHORT_GRACE)
    if not keep:
        shutil.rmtree(folder)
    return True


def not_running(folder: Path) -> str:
    return f"no cluster is running in {folder}; start one with `tpu cluster local up`"


def find(folder: Path) -> KubernetesControlPlane:
    """The control plane that is running in `folder`."""
    layout, build = cluster_layout.load_layout(folder.absolute()), binaries.find_cached()
    if layout is None or build is None or not ProcessRegistry(layout.folder).is_running():
        raise NotFound(not_running(folder))
    return KubernetesControlPlane(layout=layout, build=build)


def status(folder: Path) -> list[ComponentStatus]:
    layout = cluster_layout.load_layout(folder.absolute())
    node = real_node.find(layout) if layout is not None else None
    statuses = []
    for record in ProcessRegistry(folder.absolute()).all():
        process = record.process
        try:
            memory = process.memory_info().rss if process is not None else 0
            if node is not None and record.name == real_node.COMPONENT:
                memory += real_node.memory_used(node)
        except psutil.NoSuchProcess:
            process, memory = None, 0
        statuses.append(
            ComponentStatus(
                name=record.name, pid=record.pid, alive=process is not None, memory=memory
            )
        )
    return statuses


def _start(folder: Path, build: Build, progress: Progress) -> KubernetesControlPlane:
    started_at = time.monotonic()
    layout = _prepare(folder, build)
    plane = KubernetesControlPlane(layout=layout, build=build)
    registry = ProcessRegistry(folder)
    ssl_context = layout.ssl_context()

    def start(*chosen: Component) -> list[tuple[Component, ProcessRecord]]:
        return [(component, registry.start(component)) for component in chosen]

    def wait(started: list[tuple[Component, ProcessRecord]]) -> None:
        for component, record in started:
            registry.wait_ready(component, record, ssl_context)

    progress("starting etcd and the API server")
    wait(start(*components.base_components(layout, build)))
    controllers = start(*components.controller_components(layout, build))
    progress("installing JobSet and Kueue")
    plane.install(folder / "install.yaml")
    wait(start(*components.extension_components(layout, build)))
    wait(controllers)
    plane.wait_until_accepted(PROBE_JOBSET, "jobsets,jobs,workloads,clusterqueues,resourceflavors")
    progress(f"ready after {time.monotonic() - started_at:.0f} s")
    return plane


def _prepare(folder: Path, build: Build) -> ControlPlaneLayout:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    layout = cluster_layout.new_layout(folder)
    layout.save()
    if not (layout.pki / "sa.pub").exists():
        shutil.rmtree(layout.pki, ignore_errors=True)
        certificates.write_all_certificates(layout.pki)
    for name, content in components.config_files(layout).items():
        (folder / name).write_text(yaml.safe_dump(content, sort_keys=False))
    (folder / "install.yaml").write_text(
        extension_manifests.to_yaml(extension_manifests.extension_manifests(build, layout))
    )
    (folder / "kwok.yaml").write_text(
        extension_manifests.to_yaml(extension_manifests.kwok_stages(build))
    )
    return layout
