"""Test rig: a namespace on a real control plane, an emulated GKE, and provisioner processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.k8s.patient_connection import PatientConnection
from tests.polling import wait_until
from tests.testbed.gke.faulty_gke import FaultyGke
from tpufleet.clocks import SystemClock
from tpufleet.errors import FleetError
from tpufleet.kubernetes.connections import EVENT, JOBSET, NAMESPACE, NODE, POD
from tpufleet_gke.provisioner.main import ProvisionerOptions, ProvisionerProgram
from tpufleet_gke.provisioner.model import label_keys
from tpufleet_gke.provisioner.settings import from_environ as settings_from_environ
from tpufleet_testbed.gke.grpc_server import GkeServer
from tpufleet_testbed.gke.kwok_backend import KwokNodes
from tpufleet_testbed.kubernetes import kwok_nodes
from tpufleet_testbed.kubernetes.control_plane import KubernetesControlPlane

ZONE = "us-central1-a"
EXIT_CODE = "local.tpufleet.dev/exit-code"
EXCLUSIVE = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
PROVISIONER_SETTINGS = {
    "GCP_PROJECT_ID": "p", "GCP_CLUSTER_LOCATION": "us-central1", "GCP_CLUSTER": "c",
    "GCP_ZONE": ZONE, "NODE_MIN_LIFESPAN": "100ms", "POLL_INTERVAL": "300ms",
}  # fmt: skip
V5E = {
    "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
    "cloud.google.com/gke-tpu-topology": "4x4",
}


def eventually(condition: Callable[[], Any], within: float = 60.0, what: object = "") -> Any:
    """The first truthy result; errors of the API server or the network are retried. `within`
    seconds are enough on a machine that does nothing else; a slower one has three times as many."""
    failure: Exception | None = None

    def attempt() -> Any:
        nonlocal failure
        try:
            failure = None
            return condition()
        except (FleetError, OSError) as error:
            failure = error
            return None

    def describe() -> str:
        return f"{what() if callable(what) else what} {failure or ''}"

    return wait_until(attempt, 3 * within, describe, interval=0.25)


class Rig:
    def __init__(self, plane: KubernetesControlPlane, namespace: str, folder: Path) -> None:
        self.plane, self.namespace, self.folder = plane, namespace, folder
        self.connection = PatientConnection(plane.kubeconfig, manager="tests", timeout=900)
        self.gke = FaultyGke(
            clock=SystemClock(),
            nodes=KwokNodes(self.connection),
            creation_time=timedelta(seconds=0.4),
            deletion_time=timedelta(seconds=0.4),
        )
        self.server = GkeServer(self.gke).start()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[tuple[threading.Thread, threading.Event]] = []
        self._pools: list[str] = []
        self._plain: list[str] = []
        labels = {"tpufleet.dev/jobs": "true"}
        self.connection.apply(NAMESPACE, {"metadata": {"name": namespace, "labels": labels}})

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for _, stop in self._threads:
            stop.set()
        for thread, _ in self._threads:
            thread.join(900)
        for jobset in self.connection.list(JOBSET, self.namespace)[0]:
            self.connection.delete(JOBSET, jobset["metadata"]["name"], self.namespace)
        self.server.close()
        self.connection.delete(NAMESPACE, self.namespace)  # and every pod in it
        pools = {*self.gke.pools, *self._pools}
        names = [
            node["metadata"]["name"] for node in self.connection.list(NODE)[0]
            if node["metadata"]["labels"].get(kwok_nodes.POOL) in pools
            or node["metadata"]["name"] in self._plain
        ]  # fmt: skip
        self._in_parallel(lambda name: self.connection.delete(NODE, name), names)
        self.connection.close()

    def _in_parallel(self, call: Callable[[Any], Any], each: Sequence[Any]) -> None:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(call, each))

    # Node pools without a provisioner

    def add_pool(
        self, name: str, count: int = 4, topology: str = "4x4",
        accelerator: str = V5E["cloud.google.com/gke-tpu-accelerator"],
        machine_type: str = "ct5lp-hightpu-4t", **labels: str,
    ) -> None:  # fmt: skip
        pool = kwok_nodes.KwokNodePool(
            name=name, nodes=count, accelerator=accelerator, topology=topology,
            machine_type=machine_type, chips=4, zone=ZONE, labels=labels,
        )  # fmt: skip
        self._pools.append(name)
        manifests = kwok_nodes.node_manifests(pool)
        self._in_parallel(lambda node: self.connection.create(NODE, node), manifests)

    def add_plain_node(self, name: str) -> None:
        """Add a node without TPU chips."""
        resources = {"cpu": "8", "memory": "32Gi", "pods": "50"}
        self._plain.append(name)
        self.connection.create(NODE, {
            "metadata": {
                "name": name, "annotations": dict(kwok_nodes.KWOK_ANNOTATIONS),
                "labels": {kwok_nodes.POOL: "plain"},
            },
            "status": {"allocatable": resources, "capacity": resources},
        })  # fmt: skip

    # Provisioners

    def provision_here(self, **variables: str) -> None:
        """A provisioner in a thread of this process: starting one as a process of its own takes
        seconds of CPU, most of it for imports. `provision` is for tests about the process."""
        settings = settings_from_environ({**PROVISIONER_SETTINGS, **variables})
        options = ProvisionerOptions(
            kubeconfig=self.plane.kubeconfig, gke_endpoint=self.server.address,
            metrics_address="127.0.0.1:0", probe_address="127.0.0.1:0", namespace=self.namespace,
        )  # fmt: skip
        stop = threading.Event()
        program = ProvisionerProgram(settings, options)
        thread = threading.Thread(target=program.run, args=(stop,), daemon=True)
        thread.start()
        self._threads.append((thread, stop))

    def provision(
        self, *options: str, kubeconfig: Path | None = None, namespace: str = "",
        **variables: str,
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        environment = {**PROVISIONER_SETTINGS, **variables}
        with open(self.folder / "provisioner.log", "ab") as log:
            process = subprocess.Popen(
                [
                    sys.executable, "-m", "tpufleet", "provisioner",
                    "--kubeconfig", str(kubeconfig or self.plane.kubeconfig),
                    "--gke-endpoint", self.server.address,
                    "--metrics-bind-address", "127.0.0.1:0",
                    "--health-probe-bind-address", "127.0.0.1:0",
                    "--namespace", namespace or self.namespace, *options,
                ],
                env={**os.environ, **environment}, stdout=log, stderr=log,
            )  # fmt: skip
        self._processes.append(process)
        return process

    def page(self, path: str) -> str:
        """A page of the metrics or probe server of the latest provisioner."""
        addresses = re.findall(r"metrics on (\S+), probes on (\S+)", self._whole_log())
        if len(addresses) < len(self._processes):
            raise FleetError("the provisioner does not listen yet")
        metrics, probes = addresses[-1]
        address = metrics if path == "metrics" else probes
        with urllib.request.urlopen(f"http://{address}/{path}", timeout=900) as response:
            return response.read().decode()

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGKILL)
        process.wait()

    def log(self) -> str:
        return self._whole_log()[-4000:]

    def _whole_log(self) -> str:
        path = self.folder / "provisioner.log"
        return path.read_text() if path.exists() else ""

    # JobSets as users write them

    def submit(
        self,
        name: str,
        *,
        slices: int = 1,
        hosts: int = 4,
        run_for: str = "",
        select: dict[str, str] | None = None,
        labels: dict[str, str] | None = None,
        annotations: dict[str, str] | None = None,
        restarts: int = 3,
        exclusive: bool = True,
        accelerator: dict[str, str] = V5E,
    ) -> None:
        exits = {EXIT_CODE: "0", "local.tpufleet.dev/run-for": run_for} if run_for else {}
        pod = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "nodeSelector": {**accelerator, **(select or {})},
            "tolerations": [
                {"key": "google.com/tpu", "operator": "Exists"},
                {"key": "cloud.google.com/gke-spot", "operator": "Exists"},
            ],
            "containers": [
                {"name": "main", "image": "busybox", "resources": {"limits": {"google.com/tpu": 4}}}
            ],
        }
        job = {
            "parallelism": hosts, "completions": hosts, "backoffLimit": 0,
            "template": {
                "metadata": {"annotations": {**exits, **(annotations or {})}}, "spec": pod,
            },
        }  # fmt: skip
        self.connection.create(JOBSET, {
            "metadata": {
                "name": name, "namespace": self.namespace, "labels": labels or {},
                "annotations": EXCLUSIVE if exclusive else {},
            },
            "spec": {
                "failurePolicy": {"maxRestarts": restarts},
                "replicatedJobs": [
                    {"name": "slice", "replicas": slices, "template": {"spec": job}}
                ],
            },
        })  # fmt: skip

    def pods(self, jobset: str, phase: str | None = None) -> list[Any]:
        pods, _ = self.connection.list(
            POD, self.namespace, labels={"jobset.sigs.k8s.io/jobset-name": jobset}
        )
        return [
            pod for pod in pods
            if (phase is None or pod["status"].get("phase") == phase)
            and not pod["metadata"].get("deletionTimestamp")
        ]  # fmt: skip

    def end_pods(self, jobset: str, code: int = 0) -> None:
        for pod in self.pods(jobset):
            self.end_pod(pod, code)

    def end_pod(self, pod: Any, code: int = 0) -> None:
        change = {"metadata": {"annotations": {EXIT_CODE: str(code)}}}
        self.connection.patch(POD, pod["metadata"]["name"], change, self.namespace)

    def condition(self, jobset: str, kind: str) -> bool:
        conditions = self.connection.get(JOBSET, jobset, self.namespace).get("status", {})
        return any(
            condition["type"] == kind and condition["status"] == "True"
            for condition in conditions.get("conditions") or ()
        )

    def running(self, jobset: str, count: int) -> bool:
        return len(self.pods(jobset, "Running")) == count

    def events(self) -> set[str]:
        events, _ = self.connection.list(EVENT)
        return {
            event["reason"] for event in events
            if event.get("source", {}).get("component") == "tpu-provisioner"
            and event["involvedObject"].get("namespace") in (self.namespace, None)
        }  # fmt: skip

    def describe(self) -> str:
        """State for a failed assertion."""
        pods = {
            pod["metadata"]["name"]: (pod["status"].get("phase"), pod["spec"].get("nodeName"))
            for pod in self.connection.list(POD, self.namespace)[0]
        }
        pools = {
            name: (pool.status.name, pool.config.labels.get(label_keys.PARENT_NAME))
            for name, pool in self.gke.pools.items()
        }
        ended = [process.poll() for process in self._processes]
        return f"pods {pods} pools {pools} provisioners {ended} {self.log()}"
