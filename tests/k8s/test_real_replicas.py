"""The shipped manifests and the Helm chart as real pods on a real node: two replicas of the server,
one of which is killed, and a job that finishes. `-m scale`; the short versions are in
test_shipped_replicas.py.

Changed is only what the node lacks: there is no kube-proxy, so the Service is headless and the API
server has an address on the bridge; Postgres and the bucket are on this machine.
"""

from __future__ import annotations

import base64
import json
import socket
import threading
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from click.testing import CliRunner

from tests import fake_gcs, postgres, yaml_documents
from tests.environment.test_helm_chart import helm_rendered
from tests.k8s.real_pods import HOSTS, node_with_image
from tests.k8s.rigs import eventually
from tests.k8s.test_manifests import rendered
from tests.k8s.test_shipped_replicas import copy_both_ways, render
from tests.views.cli_runner import Tpu
from tpufleet.runtime import gcs
from tpufleet.views.cli.operators.deploy import deploy

pytestmark = pytest.mark.scale
ZONE, SYSTEM, JOBS = "us-central1-a", "tpufleet-system", "tpu-training"
FLAVOR = "v5litepod-16"  # that of the ClusterQueue; the other hundreds are not needed here
PORT = 8470


class Forwarder:
    """Passes connections on an address of the bridge to a local TCP port or Unix socket."""

    def __init__(self, host: str, target: int | str) -> None:
        self._listener, self._target = socket.create_server((host, 0)), target
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                copy_both_ways(client, self._connect())
            except OSError:
                client.close()

    def _connect(self) -> socket.socket:
        if isinstance(self._target, int):
            return socket.create_connection(("127.0.0.1", self._target))
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._target)
        return connection

    def close(self) -> None:
        self._listener.close()


class Bridge:
    """What pods reach on this machine: Postgres, a bucket, the API server."""

    def __init__(self, node: Any, bucket_url: str, database: str) -> None:
        self.host = node.network.gateway
        parts = urlsplit(database)
        query = parse_qs(parts.query)
        target = f"{query['host'][0]}/.s.PGSQL.5432" if "host" in query else parts.port
        assert target is not None
        self._forwarders = [
            Forwarder(self.host, target),
            Forwarder(self.host, node.plane.ports["apiserver"]),
        ]
        user = f"{parts.username}:{parts.password or ''}"
        options = quote(query["options"][0])
        self.database = (
            f"postgresql://{user}@{self.host}:{self._forwarders[0].port}{parts.path}"
            f"?sslmode=disable&options={options}"
        )
        self.api_port = self._forwarders[1].port
        self.bucket_url = bucket_url

    def close(self) -> None:
        for forwarder in self._forwarders:
            forwarder.close()


@pytest.fixture(scope="module")
def node(plane):
    with node_with_image(plane) as node:
        # Its taint keeps other pods off nodes with TPUs; here it is the only node.
        plane.kubectl("taint", "node", node.name, "google.com/tpu-")
        plane.kubectl("label", "node", node.name, "iam.gke.io/gke-metadata-server-enabled=true")
        yield node


@pytest.fixture
def bridge(node, monkeypatch):
    with fake_gcs.server(node.network.gateway) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        bridge = Bridge(node, url, postgres.fresh_url())
        yield bridge
        bridge.close()


def shipped_manifests(folder: Path, bucket: str, database: str) -> list[dict]:
    """What `tpu deploy init` writes, and the namespace and queues of jobs."""
    result = CliRunner().invoke(
        deploy,
        ["init", str(folder), "--project", "my-project", "--zone", ZONE, "--store", database,
         "--bucket", bucket],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return [*render(folder), *rendered("queues")]


def chart(folder: Path, bucket: str, database: str) -> list[dict]:
    """The Helm chart, the two Secrets that docs/kubernetes.md creates by hand, and queues."""
    shipped = shipped_manifests(folder, bucket, database)
    secrets = [one for one in shipped if one["kind"] == "Secret"]
    chart = helm_rendered("--set", f"project=my-project,bucket={bucket}")
    return [*chart, *rendered("queues"), *plain_names(secrets)]


def plain_names(secrets: list[dict]) -> list[dict]:
    """Without the hash that kustomize appends."""
    for secret in secrets:
        for name in ("tpufleet-store", "tpufleet-secret"):
            if secret["metadata"]["name"].startswith(name):
                secret["metadata"]["name"] = name
    return secrets


def localized(documents: list[dict], node: Any, bridge: Bridge) -> list[dict]:
    image = (node.folder / "image").read_text()
    kept = [one for one in documents if is_installed(one)]
    for one in kept:
        if one["kind"] == "Service" and one["metadata"]["name"] == "tpufleet":
            one["spec"]["clusterIP"] = "None"
        if one["kind"] == "ConfigMap" and "TPUFLEET_BUCKET" in one["data"]:
            one["data"] |= {
                "STORAGE_EMULATOR_HOST": bridge.bucket_url, "TPUFLEET_GKE_IMAGE": image,
                "TPUFLEET_GKE_PLATFORM": "cpu", "TPUFLEET_GKE_CPU": "100m",
                "TPUFLEET_GKE_MEMORY": "1Gi", "TPUFLEET_GKE_SCRATCH": "1Gi",
            }  # fmt: skip
        if one["kind"] == "Deployment":
            pod = one["spec"]["template"]["spec"]
            pod["hostAliases"] = [{"ip": bridge.host, "hostnames": ["kubernetes.default.svc"]}]
            [container] = pod["containers"]
            container["image"] = image
            container["env"] += [
                {"name": "KUBERNETES_SERVICE_HOST", "value": "kubernetes.default.svc"},
                {"name": "KUBERNETES_SERVICE_PORT", "value": str(bridge.api_port)},
            ]
    return kept


def is_installed(document: dict) -> bool:
    """Of what the server needs: no cert-manager, no provisioner."""
    metadata, group = document["metadata"], document["apiVersion"].partition("/")[0]
    if document["kind"] == "ResourceFlavor":
        return metadata["name"] == FLAVOR
    if group in ("cert-manager.io", "admissionregistration.k8s.io"):
        return False
    name = metadata["name"] if document["kind"] == "Namespace" else metadata.get("namespace")
    return name in (None, SYSTEM, JOBS)


class Replicas:
    """The Deployment in the cluster."""

    def __init__(self, plane: Any, documents: list[dict]) -> None:
        self._plane, self._text = plane, yaml_documents.dump_all(documents)
        plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=self._text)

    def kubectl(self, *args: str) -> str:
        return self._plane.kubectl(f"--namespace={SYSTEM}", *args)

    def ready(self) -> dict[str, str]:
        """Addresses of ready pods, by name."""
        items = json.loads(self.kubectl("get", "pods", "-o", "json"))["items"]
        return {
            pod["metadata"]["name"]: pod["status"]["podIP"]
            for pod in items
            if not pod["metadata"].get("deletionTimestamp")
            and any(
                one["type"] == "Ready" and one["status"] == "True"
                for one in pod["status"].get("conditions", ())
            )
        }

    def describe(self) -> str:
        pods = self.kubectl("get", "pods", "-A", "-o", "wide")
        logs = self.kubectl("logs", "-l", "app.kubernetes.io/name=tpufleet", "--tail=25")
        return f"{pods}\n{logs}"

    def close(self) -> None:
        self._plane.kubectl("-n", JOBS, "delete", "jobsets", "--all", "--timeout=100s")
        self._plane.kubectl(
            "delete", "--ignore-not-found", "--timeout=120s", "-f", "-", stdin=self._text
        )


SOURCES = {"the manifests": shipped_manifests, "the Helm chart": chart}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_job_finishes_although_a_replica_is_killed(source, plane, node, bridge, tmp_path):
    bucket = f"gs://fleet-{uuid.uuid4().hex[:12]}"
    gcs.connect().create_bucket(bucket.removeprefix("gs://"))
    documents = source(tmp_path / "my-fleet", bucket, bridge.database)
    replicas = Replicas(plane, localized(documents, node, bridge))
    try:
        eventually(lambda: len(replicas.ready()) == 2, 240, replicas.describe)
        [secret] = [
            one["data"] for one in documents
            if one["kind"] == "Secret" and "admin-token" in one["data"]
        ]  # fmt: skip
        token = tmp_path / "token"
        token.write_bytes(base64.b64decode(secret["admin-token"]))
        token.chmod(0o600)

        def person(address: str) -> Tpu:
            return Tpu(
                HOME=str(tmp_path), TPUFLEET_HOME=str(tmp_path / "person"),
                TPUFLEET_SERVER=f"http://{address}:{PORT}", TPUFLEET_TOKEN_FILE=str(token),
                TPUFLEET_INSECURE_HTTP="true",
            )  # fmt: skip

        first = replicas.ready()
        one, two = (person(address) for address in first.values())
        (tmp_path / "work").mkdir()
        (tmp_path / "work" / "count.sh").write_text(
            "for i in $(seq 40); do echo line $i; sleep 0.5; done\n"
        )
        job = {"command": ["bash", "count.sh"], "accelerator": "v5e-16", "grace": "10s",
               "workdir": str(tmp_path / "work")}  # fmt: skip
        (tmp_path / "job.yaml").write_text(json.dumps(job))
        [row] = one.json("submit", str(tmp_path / "job.yaml"))["jobs"]
        job_id = row["id"]
        describe = lambda: f"{two('why', job_id).output}\n{replicas.describe()}"
        eventually(lambda: "line 3\n" in two.ok("logs", job_id), 240, describe)
        status = json.loads(two("status", "--json").stdout)  # a problem is no reason to fail here
        leader = status["controller"]["holder"].split(":")[0]
        assert leader in replicas.ready(), leader
        replicas.kubectl("delete", "pod", leader, "--grace-period=0", "--force", "--wait=false")
        survivor = person(next(ip for name, ip in first.items() if name != leader))
        eventually(
            lambda: survivor.json("show", job_id)["job"]["state"] == "succeeded", 240, describe
        )
        assert len(survivor.json("show", job_id)["attempts"]) == 1
        logs = survivor.ok("logs", job_id)
        assert logs.count("line 40\n") == HOSTS
        eventually(lambda: len(replicas.ready()) == 2, 120, replicas.describe)
        newcomer = person(next(ip for name, ip in replicas.ready().items() if name not in first))
        assert newcomer.ok("logs", job_id) == logs
    finally:
        replicas.close()
