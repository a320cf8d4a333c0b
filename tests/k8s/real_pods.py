"""A server that runs jobs on a real node, as its users see it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.rigs import eventually
from tests.views.cli_runner import Tpu
from tpufleet.errors import FleetError
from tpufleet_testbed.kubernetes import cluster_layout
from tpufleet_testbed.kubernetes.control_plane import KubernetesControlPlane
from tpufleet_testbed.kubernetes.image import builder, chroot
from tpufleet_testbed.kubernetes.image.chroot import ImageBuildError
from tpufleet_testbed.kubernetes.node import job_namespace, node_images, real_node
from tpufleet_testbed.kubernetes.node.node_config import NodeLayout

HOSTS = 4  # of the slice that the node stands for


@contextmanager
def node_with_image(plane: KubernetesControlPlane) -> Iterator[NodeLayout]:
    """A real node that has the image of this checkout. Skips the test where there can be none."""
    reason = real_node.unsupported_reason()
    if reason:
        pytest.skip(reason)
    try:
        chroot.check_requirements()
    except ImageBuildError as error:
        pytest.skip(str(error))
    image = builder.build()
    existing = real_node.find(plane.layout)
    node = existing or real_node.add(plane)
    try:
        job_namespace.save_image(node, node_images.load_image(node, image))
        yield node
    finally:
        if existing is None:
            real_node.remove(plane.layout.folder)
            plane.kubectl("delete", "node", node.name)


class Fleet:
    """A server for one namespace, and the `tpu` command connected to it."""

    def __init__(
        self,
        plane: KubernetesControlPlane,
        node: NodeLayout,
        namespace: str,
        folder: Path,
        **gke: str,
    ) -> None:
        self.plane, self.node, self.namespace = plane, node, namespace
        self.code = folder / "code"
        self.code.mkdir()
        job_namespace.apply_manifests(plane, node, namespace)
        # Not the port that the node reserves: a developer's server may use it.
        address = f"{node.network.gateway}:{cluster_layout.free_ports(1)[0]}"
        settings = job_namespace.server_settings(plane, node, namespace, queue="")
        inherited = {
            key: value for key, value in os.environ.items() if not key.startswith("TPUFLEET_")
        }
        self.environment = {
            **inherited, **settings, "TPUFLEET_LISTEN": address, "TPUFLEET_SERVER": f"http://{address}",
            "TPUFLEET_HOME": str(folder / "home"),
            "TPUFLEET_TOKEN_FILE": str(folder / "home" / "token"),
            **{f"TPUFLEET_GKE_{key.upper()}": value for key, value in gke.items()},
        }  # fmt: skip
        self._person = Tpu(**self.environment)
        self._log = folder / "server.log"
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tpufleet", "serve"],
                env=self.environment, stdout=log, stderr=log,
            )  # fmt: skip
        eventually((folder / "home" / "server.json").exists, 60, self.describe)

    @property
    def shared(self) -> Path:
        """The folder that jobs see as /shared/<namespace>."""
        return self.node.shared / self.namespace

    def tpu(self, *args: str) -> str:
        """In this process: waiting for a job calls it many times."""
        result = self._person(*args)
        if result.exit_code != 0:
            raise FleetError(result.output)
        return str(result.stdout)

    def submit(self, name: str, command: str, files: dict[str, str] | None = None, **spec: Any):
        for path, text in (files or {}).items():
            (self.code / path).write_text(text)
        job = {
            "name": name, "command": command, "accelerator": "v5e-16", "grace": "20s",
            "checkpoint": f"/shared/{self.namespace}/{name}", "workdir": str(self.code), **spec,
        }  # fmt: skip
        (self.code / f"{name}.yaml").write_text(yaml.safe_dump(job))
        self.tpu("submit", str(self.code / f"{name}.yaml"))

    def show(self, name: str) -> dict[str, Any]:
        return json.loads(self.tpu("show", name, "--json"))

    def state(self, name: str) -> str:
        return self.show(name)["job"]["state"]

    def steps(self, name: str) -> int:
        """The lowest step that any host reported; 0 until all have."""
        hosts = self.show(name)["hosts"]
        steps = [(host.get("progress") or {}).get("step") for host in hosts]
        return min(steps) if len(steps) == HOSTS and None not in steps else 0

    def result(self, name: str) -> dict[str, Any]:
        return json.loads((self.shared / name / "result.json").read_text())

    def pods(self) -> list[dict[str, Any]]:
        output = self.plane.kubectl("get", "pods", f"--namespace={self.namespace}", "--output=json")
        return json.loads(output)["items"]

    def running(self) -> list[dict[str, Any]]:
        pods = self.pods()
        up = [pod for pod in pods if pod["status"]["phase"] == "Running"]
        return up if len(up) == HOSTS == len(pods) else []

    def drain(self) -> None:
        """Drain the node, which evicts all pods of jobs, and uncordon it."""
        name = self.node.name
        try:
            self.plane.kubectl(
                "drain", name, "--pod-selector=app=tpu-worker", "--delete-emptydir-data",
                "--timeout=100s",
            )  # fmt: skip
        finally:
            self.plane.kubectl("uncordon", name)

    def describe(self) -> str:
        """State for a failed assertion."""
        pods = {pod["metadata"]["name"]: pod["status"].get("phase") for pod in self.pods()}
        return f"pods {pods} server {self._log.read_text()[-3000:]}"

    def close(self) -> None:
        self._server.terminate()
        self._server.wait(900)
        self.plane.kubectl(
            "delete", "jobsets", "--all", f"--namespace={self.namespace}", "--timeout=100s"
        )
        eventually(lambda: self.pods() == [], 100, self.describe)  # the next test needs the node
        volume = f"persistentvolume/{job_namespace.CLAIM}-{self.namespace}"
        self.plane.kubectl("delete", "--wait=false", f"namespace/{self.namespace}", volume)
