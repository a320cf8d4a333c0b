"""A whole Kubernetes on loopback: up in seconds, each in its own folder, down without leftovers."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from tpufleet.errors import Conflict, FleetError, NotFound
from tpufleet.testbed.kubernetes import (
    binaries,
    certificates,
    cluster_layout,
    components,
    extension_manifests,
)
from tpufleet.testbed.kubernetes.binaries import Build, Progress
from tpufleet.testbed.kubernetes.cluster_layout import ControlPlaneLayout
from tpufleet.testbed.kubernetes.components import Component
from tpufleet.testbed.kubernetes.node import real_node
from tpufleet.testbed.kubernetes.processes import (
    GRACE,
    READY_WITHIN,
    ComponentNotReady,
    ProcessRecord,
    ProcessRegistry,
)

TRIES = 3  # a port that was free may be taken before we listen on it

LOOK_SECONDS = 0.5
SHORT_GRACE = 1.0
# A JobSet as small as can be, which is never made.
FIRST = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {"name": "first", "namespace": "default"},
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlPlane:
    """One that runs."""

    layout: ControlPlaneLayout
    build: Build

    @property
    def kubeconfig(self) -> Path:
        return self.layout.kubeconfig

    def kubectl(self, *args: str, given: str | None = None) -> str:
        """What kubectl says. FleetError with its complaint when it fails."""
        done = subprocess.run(
            [str(self.build.harness), "kubectl", f"--kubeconfig={self.kubeconfig}", *args],
            input=given,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise FleetError(f"kubectl {args[0]} failed: {done.stderr.strip()}")
        return done.stdout

    def wait_until_accepted(self, resource: dict[str, Any], kinds: str) -> None:
        """Parts that are ready are not yet a whole: the API server may call webhooks that are not
        there, and lists new kinds before it knows them."""
        deadline = time.monotonic() + READY_WITHIN
        while True:
            try:
                self.kubectl("create", "--dry-run=server", "-f", "-", given=json.dumps(resource))
                self.kubectl("get", kinds, "--all-namespaces")
                return
            except FleetError as error:
                if time.monotonic() > deadline:
                    told = f"no {resource['kind']} was taken within {READY_WITHIN:g} s: {error}"
                    raise ComponentNotReady(told) from error
                time.sleep(LOOK_SECONDS)


def up(folder: Path, progress: Progress = lambda words: None) -> ControlPlane:
    """Start one in `folder`; what an earlier one left there is used again."""
    folder = folder.absolute()
    if _runs(folder):
        raise Conflict(f"a control plane runs in {folder}; `tpu cluster local down` ends it")
    build = binaries.ensure(progress)
    for number in range(1, TRIES + 1):
        try:
            return _start(folder, build, progress)
        except BaseException as error:
            taken = ProcessRegistry(folder).ended_logs_contain("address already in use")
            down(folder, keep=True)
            if not (isinstance(error, ComponentNotReady) and taken and number < TRIES):
                raise
    raise AssertionError("unreachable")


def down(folder: Path, *, keep: bool = False) -> bool:
    """End every process of the one in `folder`, and take its data away. False: there was none."""
    folder = folder.absolute()
    if not (folder / "layout.json").exists():
        return False
    real_node.remove(folder)
    # Who keeps nothing need not wait until the API server has said goodbye to everybody.
    ProcessRegistry(folder).stop(grace=GRACE if keep else SHORT_GRACE)
    if not keep:
        shutil.rmtree(folder)
    return True


def find(folder: Path) -> ControlPlane:
    """The one that runs in `folder`."""
    layout, build = cluster_layout.load_layout(folder.absolute()), binaries.find_cached()
    if layout is None or build is None or not _runs(layout.folder):
        raise NotFound(f"no control plane runs in {folder}; `tpu cluster local up` starts one")
    return ControlPlane(layout=layout, build=build)


def _runs(folder: Path) -> bool:
    return any(one.process for one in ProcessRegistry(folder).all())


def status(folder: Path) -> list[ComponentStatus]:
    layout = cluster_layout.load_layout(folder.absolute())
    node = real_node.find(layout) if layout is not None else None
    found = []
    for one in ProcessRegistry(folder.absolute()).all():
        process = one.process
        try:
            memory = process.memory_info().rss if process is not None else 0
            if node is not None and one.name == real_node.COMPONENT:
                memory += real_node.memory_used(node)
        except psutil.NoSuchProcess:
            process, memory = None, 0
        found.append(
            ComponentStatus(name=one.name, pid=one.pid, alive=process is not None, memory=memory)
        )
    return found


def _start(folder: Path, build: Build, progress: Progress) -> ControlPlane:
    began = time.monotonic()
    layout = _prepare(folder, build)
    plane = ControlPlane(layout=layout, build=build)
    ledger = ProcessRegistry(folder)
    trust = layout.ssl_context()

    def start(*parts: Component) -> list[tuple[Component, ProcessRecord]]:
        return [(part, ledger.start(part)) for part in parts]

    def wait(started: list[tuple[Component, ProcessRecord]]) -> None:
        for part, running in started:
            ledger.wait_ready(part, running, trust, READY_WITHIN)

    progress("starting etcd and the API server")
    wait(start(*components.base_components(layout, build)))
    late = start(*components.controller_components(layout, build))
    progress("installing JobSet and Kueue")
    install = str(folder / "install.yaml")
    plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", install)
    plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    wait(start(*components.extension_components(layout, build)))
    wait(late)
    plane.wait_until_accepted(FIRST, "jobsets,jobs,workloads,clusterqueues,resourceflavors")
    progress(f"ready after {time.monotonic() - began:.0f} s")
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
