"""A server with the provider `gke`: a submitted job becomes a JobSet, whose agents run it."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.k8s.rigs import ZONE, eventually
from tpufleet.kubernetes.connections import JOBSET, POD, SECRET
from tpufleet.providers.gke import states


class Fleet:
    """A server, and the `tpu` command connected to it."""

    def __init__(self, rig, folder: Path, **variables: str) -> None:
        self.rig, self.folder, self.code = rig, folder, folder / "code"
        self.code.mkdir()
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("TPUFLEET_")},
            "TPUFLEET_HOME": str(folder / "home"),
            "TPUFLEET_GKE_IMAGE": "registry/agent:1",
            "TPUFLEET_GKE_ZONES": ZONE,
            "TPUFLEET_GKE_NAMESPACE": rig.namespace,
            "TPUFLEET_GKE_KUBECONFIG": str(rig.plane.kubeconfig),
            "TPUFLEET_GKE_CPU": "1",
            "TPUFLEET_GKE_MEMORY": "1Gi",
            **variables,
        }
        self._log = open(folder / "server.log", "wb")  # noqa: SIM115 (closed below)
        argv = [sys.executable, "-m", "tpufleet", "serve", "--provider", "gke"]
        self.processes = [
            subprocess.Popen(argv, env=self.environment, stdout=self._log, stderr=self._log)
        ]
        eventually((folder / "home" / "server.json").exists, 60, self.log)

    def log(self) -> str:
        return (self.folder / "server.log").read_text()[-3000:]

    def tpu(self, *args: str) -> str:
        argv = [sys.executable, "-m", "tpufleet", *args]
        done = subprocess.run(
            argv, env=self.environment, capture_output=True, text=True, check=False,
            cwd=self.code,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run_pod(self, pod: dict) -> None:
        """Act as the kubelet: run the containers of a pod as processes of this machine, with its
        mounted Secret, resolvable addresses and simulated chips."""
        folder = self.folder / pod["metadata"]["name"]
        (folder / "seats").mkdir(parents=True)
        name = pod["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-name"]
        secret = self.rig.connection.get(SECRET, name, self.rig.namespace)
        for index, entry in secret["data"].items():
            (folder / "seats" / index).write_bytes(base64.b64decode(entry))
        overrides = {
            "TPUFLEET_SEATS": str(folder / "seats"), "TPUFLEET_SEAT_FILE": str(folder / "seat"),
            "TPUFLEET_WORK": str(folder / "work"), "TPUFLEET_ADDRESS": "127.0.0.1",
            "TPUFLEET_PLATFORM": "cpu", "HOME": str(folder),
        }  # fmt: skip
        (first,), (container,) = pod["spec"]["initContainers"], pod["spec"]["containers"]
        assert self._start(pod, first, overrides).wait(900) == 0
        del overrides["TPUFLEET_SEATS"]
        self.processes.append(self._start(pod, container, overrides))

    def _start(self, pod: dict, container: dict, overrides: dict) -> subprocess.Popen[bytes]:
        annotations = pod["metadata"]["annotations"]
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        for variable in container["env"]:
            path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
            environment[variable["name"]] = variable.get("value") or annotations[path.split("'")[1]]
        command = [sys.executable, *container["command"][1:]]
        return subprocess.Popen(
            command, env=environment | overrides, stdout=self._log, stderr=self._log
        )

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(900)
        self._log.close()


@pytest.fixture
def fleet(rig, tmp_path):
    fleet = Fleet(rig, tmp_path)
    yield fleet
    fleet.close()


def test_a_job_becomes_a_jobset_whose_agents_run_it_to_its_end(fleet, rig):
    rig.add_pool("serving", count=1, topology="2x2")
    job = {
        "name": "hello", "command": "echo hello from $TPUFLEET_ACCELERATOR", "accelerator": "v5e-4",
        "capacity": "on-demand", "priority": 10, "tags": ["challenge=7", "sweep", "app=other"],
    }  # fmt: skip
    (fleet.code / "job.yaml").write_text(json.dumps(job))
    fleet.tpu("submit", "job.yaml")
    (jobset,) = eventually(lambda: rig.connection.list(JOBSET, rig.namespace)[0], 60, fleet.log)
    shown = json.loads(fleet.tpu("show", "hello", "--json"))
    assert jobset["metadata"]["labels"]["job-id"] == shown["job"]["id"]
    assert jobset["metadata"]["labels"]["challenge"] == "7"
    assert jobset["metadata"]["labels"]["app"] == "tpu-worker"
    (pod,) = eventually(
        lambda: list(filter(states.is_running, rig.connection.list(POD, rig.namespace)[0])),
        60,
        rig.describe,
    )
    fleet.run_pod(pod)
    eventually(
        lambda: json.loads(fleet.tpu("show", "hello", "--json"))["job"]["state"] == "succeeded",
        90, fleet.log,
    )  # fmt: skip
    assert "hello from v5litepod-4" in fleet.tpu("logs", "hello")
    assert not (fleet.folder / pod["metadata"]["name"] / "seat").exists()
    fleet.tpu("serve", "--stop")
    assert "HTTP Request" not in (fleet.folder / "server.log").read_text()
