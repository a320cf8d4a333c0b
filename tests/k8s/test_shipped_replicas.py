"""The shipped Deployment with its two replicas: real servers with its arguments and environment,
disks of their own, one Postgres, one bucket, and a load balancer in the place of its Service."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
import threading
import uuid
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests import fake_gcs, postgres, yaml_documents
from tests.k8s.test_manifests import kubectl
from tests.polling import wait_until
from tests.ports import free_port
from tests.views.cli_runner import Tpu
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import FleetError
from tpufleet.runtime import gcs
from tpufleet.views.cli.operators.deploy import deploy

pytest.importorskip("google.cloud.tpu_v2", reason="needs the extra `tpu-vm`")
ZONE = "us-central1-a"


class LoadBalancer:
    """Passes each connection to the next backend that accepts it."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.ports: list[int] = []
        self._turn = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            backend = self._connect()
            if backend is None:
                client.close()
                continue
            copy_both_ways(client, backend)

    def _connect(self) -> socket.socket | None:
        for _ in self.ports:
            self._turn += 1
            try:
                return socket.create_connection(
                    ("127.0.0.1", self.ports[self._turn % len(self.ports)])
                )
            except OSError:
                continue  # not up, or killed
        return None

    def close(self) -> None:
        self._listener.close()


def copy_both_ways(client: socket.socket, backend: socket.socket) -> None:
    for source, target in ((client, backend), (backend, client)):
        threading.Thread(target=_copy, args=(source, target), daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass  # reset: the other side is closed below
    finally:
        for each in (source, target):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


class Replica:
    """One pod of the Deployment, as a process: same arguments, environment and mounted files."""

    def __init__(self, folder: Path, manifests: list[dict], port: int, **overrides: str) -> None:
        [deployment] = [
            each
            for each in manifests
            if each["kind"] == "Deployment" and each["metadata"]["name"] == "tpufleet"
        ]
        self.folder, self.port = folder, port
        self._objects = {(each["kind"], each["metadata"]["name"]): each for each in manifests}
        pod = deployment["spec"]["template"]["spec"]
        [container] = pod["containers"]
        paths = self._mount(pod, container)
        environment = self._environment(container)
        for name, value in environment.items():
            for mounted, real in paths.items():
                if value.startswith(f"{mounted}/") or value == mounted:
                    environment[name] = str(real) + value.removeprefix(mounted)
        arguments = [
            each.replace("0.0.0.0:8470", f"127.0.0.1:{port}") for each in container["args"]
        ]
        kept = {key: value for key, value in os.environ.items() if not key.startswith("TPUFLEET_")}
        with (folder / "server.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tpufleet", *arguments],
                env={**kept, **environment, **overrides}, cwd=folder, stdout=log, stderr=log,
            )  # fmt: skip

    def _mount(self, pod: dict, container: dict) -> dict[str, Path]:
        volumes = {each["name"]: each for each in pod["volumes"]}
        paths = {}
        for mount in container["volumeMounts"]:
            path = self.folder / mount["name"]
            path.mkdir(parents=True)
            volume = volumes[mount["name"]]
            if "configMap" in volume:
                for name, text in self._objects["ConfigMap", volume["configMap"]["name"]][
                    "data"
                ].items():
                    (path / name).write_text(text)
            if "secret" in volume:
                secret = self._objects["Secret", volume["secret"]["secretName"]]
                for name, data in secret["data"].items():
                    (path / name).write_bytes(_decode(data))
                    (path / name).chmod(volume["secret"]["defaultMode"])
            paths[mount["mountPath"]] = path
        return paths

    def _environment(self, container: dict) -> dict[str, str]:
        values: dict[str, str] = {}
        for source in container["envFrom"]:
            values |= self._objects["ConfigMap", source["configMapRef"]["name"]]["data"]
        for each in container["env"]:
            reference = each.get("valueFrom", {}).get("secretKeyRef")
            values[each["name"]] = (
                each["value"]
                if reference is None
                else _decode(
                    self._objects["Secret", reference["name"]]["data"][reference["key"]]
                ).decode()
            )
        return values

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        return (self.folder / "server.log").read_text(errors="replace")[-3000:]


def _decode(data: str) -> bytes:
    return base64.b64decode(data)


@pytest.fixture
def overlay(tmp_path):
    """What `tpu deploy init` writes, with a database and a bucket that exist."""
    result = CliRunner().invoke(
        deploy,
        ["init", str(tmp_path / "my-fleet"), "--project", "my-project", "--zone", ZONE,
         "--store", postgres.fresh_url(), "--bucket", f"gs://fleet-{uuid.uuid4().hex[:12]}/state"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return tmp_path / "my-fleet"


def render(folder: Path) -> list[dict]:
    command = [*kubectl(), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return yaml_documents.load_all(done.stdout)


@pytest.fixture
def storage(monkeypatch):
    with fake_gcs.server() as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        yield url


@pytest.mark.slow
def test_a_job_finishes_although_the_replica_that_leads_is_killed(overlay, storage, tmp_path):
    from tpufleet_testbed.cloud_tpu.cloud import Latencies
    from tpufleet_testbed.cloud_tpu.emulator import Emulator

    manifests = render(overlay)
    [settings] = [
        each["data"]
        for each in manifests
        if each["kind"] == "ConfigMap" and "TPUFLEET_BUCKET" in each["data"]
    ]
    gcs.connect().create_bucket(settings["TPUFLEET_BUCKET"].split("/")[2])
    emulator = Emulator(
        zones=(ZONE,),
        agents_folder=tmp_path / "machines",
        latencies=Latencies(boot=timedelta(seconds=0.5)),
    )
    emulator.start()
    balancer = LoadBalancer()
    # Slices are emulated TPU VMs, which run real agents; the pods of gke would need a real node.
    overrides = {
        "TPUFLEET_PUBLIC_URL": balancer.url,
        "TPUFLEET_PROVIDERS": "tpu-vm",
        "TPUFLEET_PROVIDER": "tpu-vm",
        "TPUFLEET_TPU_VM": json.dumps(
            {"project": "my-project", "zones": [ZONE], "endpoint": emulator.endpoint}
        ),
    }
    replicas: list[Replica] = []
    try:
        for name in ("one", "two"):
            replica = Replica(tmp_path / name, manifests, free_port(), **overrides)
            replicas.append(replica)
            balancer.ports.append(replica.port)
        token = (overlay / "secrets" / "admin-token").read_text()
        clients = [
            FleetClient(f"http://127.0.0.1:{each.port}", token, timeout=900) for each in replicas
        ]

        def up() -> bool:
            assert all(each.process.poll() is None for each in replicas), [
                each.log() for each in replicas
            ]
            try:
                return all(client.me().name == "admin" for client in clients)
            except FleetError:
                return False

        wait_until(up, 60, lambda: "\n".join(each.log() for each in replicas), interval=0.2)
        person = Tpu(
            HOME=str(tmp_path),
            TPUFLEET_HOME=str(tmp_path / "person"),
            TPUFLEET_SERVER=balancer.url,
            TPUFLEET_TOKEN_FILE=str(overlay / "secrets" / "admin-token"),
        )
        person.ok("secret", "set", "token", input="hunter2")
        (tmp_path / "work").mkdir()
        (tmp_path / "work" / "count.sh").write_text(
            "for i in $(seq 60); do echo line $i; sleep 0.2; done\n"
            "echo ${#TOKEN} characters\necho 42 > $TPUFLEET_RUN_DIR/result\n"
        )
        job = tmp_path / "job.yaml"
        job.write_text(
            json.dumps(
                {"command": ["bash", "count.sh"], "accelerator": "v5e-4",
                 "workdir": str(tmp_path / "work"), "secrets": {"TOKEN": "token"}}
            )
        )  # fmt: skip
        [row] = person.json("submit", str(job))["jobs"]
        job_id = row["id"]

        def describe() -> str:
            why = person("why", job_id).output
            return "\n".join((why, *(each.log() for each in replicas)))

        wait_until(lambda: "line 5\n" in person.ok("logs", job_id), 90, describe, interval=0.3)
        report = clients[0].status().controller
        assert report is not None
        index = [str(each.process.pid) for each in replicas].index(report.holder.split(":")[1])
        replicas[index].kill()
        survivor, left = clients[1 - index], replicas[1 - index]
        wait_until(lambda: survivor.job(job_id).row.ended_at, 120, describe, interval=0.5)
        detail = survivor.job(job_id)
        ends = [(each.end_reason, each.message) for each in detail.attempts]
        assert (detail.row.state, len(ends)) == ("succeeded", 1), ends
        lines = [f"[0] line {number}" for number in range(1, 61)] + ["[0] 7 characters"]
        logs = person.ok("logs", job_id)
        assert [line for line in logs.splitlines() if "tpufleet" not in line] == lines
        # One that starts later, with an empty disk, serves everything too.
        replicas[index] = Replica(tmp_path / "three", manifests, replicas[index].port, **overrides)
        wait_until(up, 60, replicas[index].log, interval=0.2)
        left.kill()
        assert person.ok("logs", job_id) == logs
        assert clients[index].result(job_id) == b"42\n"
        assert clients[index].secrets().own == ("token",)
        assert person.json("rerun", job_id, "--detach"), "its code is there"
    finally:
        for replica in replicas:
            if replica.process.poll() is None:
                replica.kill()
        balancer.close()
        emulator.close()


@pytest.mark.slow
def test_two_pods_are_admitted_and_one_that_is_deleted_comes_back(overlay, rig):
    """The manifests on a real API server, whose nodes only pretend to run pods. What the containers
    do is above."""
    ours = ("tpufleet-system", "tpu-training")
    manifests = [
        each
        for each in render(overlay)
        if (
            each["metadata"].get("namespace") in ours and not each["apiVersion"].startswith("kueue")
        )
        or (each["kind"] == "Namespace" and each["metadata"]["name"] in ours)
    ]
    rig.add_plain_node("system")
    rig.plane.kubectl("label", "node", "system", "iam.gke.io/gke-metadata-server-enabled=true")
    text = yaml_documents.dump_all(manifests)
    kubectl = lambda *args: rig.plane.kubectl("--namespace=tpufleet-system", *args)
    try:
        rig.plane.kubectl("apply", "--server-side", "-f", "-", stdin=text)
        available = ("wait", "--for=condition=Available", "deployment/tpufleet", "--timeout=120s")
        kubectl(*available)
        kubectl("wait", "--for=jsonpath={.status.readyReplicas}=2", *available[2:])
        names = kubectl("get", "pods", "-o", "name").split()
        assert len(names) == 2
        kubectl("delete", "--wait=false", names[0])
        kubectl("wait", "--for=jsonpath={.status.readyReplicas}=2", *available[2:])
        # Applying again changes nothing.
        again = rig.plane.kubectl("apply", "--server-side", "-f", "-", stdin=text)
        assert "created" not in again
    finally:
        rig.plane.kubectl("delete", "--ignore-not-found", "--wait=false", "-f", "-", stdin=text)
