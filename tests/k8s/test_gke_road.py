"""The road of docs/gke-environment.md in one piece, from an empty cluster: rehearse, install, a job
of each of two teams through the server, one preempted by the other, both finished, everything
removed; then a pool grows, and a second plan is clean.

What only pretends: Google Cloud (a rehearsal), nodes (KWOK), and the kubelet, for which the test
starts the agent of each pod as a process. The server has its shipped settings, secrets and role."""

from __future__ import annotations

import base64
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from tests import fake_gcs, postgres
from tests.environment import terraform_programs
from tests.environment.environments import EXAMPLE
from tests.environment.test_helm_chart import helm
from tests.k8s.rigs import Rig, eventually
from tests.k8s.test_manifests import third_party_crds
from tests.k8s.test_roles import account
from tests.k8s.test_shipped_replicas import Replica, render
from tests.ports import free_port
from tests.views.cli_runner import Tpu
from tpufleet.errors import FleetError
from tpufleet.kubernetes.connections import POD, SECRET
from tpufleet.runtime import gcs

pytest.importorskip("grpc", reason="needs the extra `gke`: pip install 'tpufleet[gke]'")

TEAMS = ("research", "serving")
SYSTEM = ("tpufleet-system", "tpu-provisioner-system")
CLUSTER_KINDS = (
    "namespaces", "clusterroles", "clusterrolebindings", "mutatingwebhookconfigurations",
    "clusterqueues.kueue.x-k8s.io", "cohorts.kueue.x-k8s.io", "resourceflavors.kueue.x-k8s.io",
    "workloadpriorityclasses.kueue.x-k8s.io", "admissionchecks.kueue.x-k8s.io",
)  # fmt: skip
# On its second attempt it succeeds. It takes its time to stop, as if it saved a checkpoint.
TWICE = (
    "f={folder}/$TPUFLEET_PROCESS_ID; [ -e $f ] && exit 0; touch $f; "
    "trap 'sleep 12; exit 143' TERM; sleep 600 & wait"
)


class Kubelet:
    """Starts the container of each running pod of a job as a process, and ends it with its pod."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        self._rig, self._folder = rig, folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(60)
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def _run(self) -> None:
        while not self._stop.wait(0.5):
            try:
                pods = [pod for team in TEAMS for pod in self._rig.connection.list(POD, team)[0]]
                self._update(pods)
            except FleetError:
                continue

    def _update(self, pods: list[dict]) -> None:
        running = {
            pod["metadata"]["uid"]: pod
            for pod in pods
            if pod["status"].get("phase") == "Running"
            and not pod["metadata"].get("deletionTimestamp")
        }
        for uid, process in self._processes.items():
            if uid not in running and process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for uid, pod in running.items():
            if uid not in self._processes and (seat := self._seat(pod)):
                self._processes[uid] = self._start(pod, seat)

    def _seat(self, pod: dict) -> str | None:
        """What the init container hands to the agent."""
        metadata = pod["metadata"]
        name = metadata["labels"]["jobset.sigs.k8s.io/jobset-name"]
        secret = self._rig.connection.find(SECRET, name, metadata["namespace"]) or {}
        entry = (secret.get("data") or {}).get(metadata["labels"]["jobset.sigs.k8s.io/job-index"])
        return base64.b64decode(entry).decode() if entry else None

    def _start(self, pod: dict, seat: str) -> subprocess.Popen[bytes]:
        folder = self._folder / pod["metadata"]["name"]
        (folder / "work").mkdir(parents=True)
        (folder / "seat").write_text(seat)
        [container] = pod["spec"]["containers"]
        values: dict[str, str] = {}
        for each in container["env"]:
            path = (each.get("valueFrom") or {}).get("fieldRef", {}).get("fieldPath", "")
            key = path.partition("'")[2].rstrip("']")
            value = pod["metadata"]["annotations"][key] if key else each["value"]
            for known, known_value in values.items():
                value = value.replace(f"$({known})", known_value)
            values[each["name"]] = value.replace("/work", str(folder / "work"))
        values["TPUFLEET_SEAT_FILE"] = str(folder / "seat")
        kept = {name: value for name, value in os.environ.items() if "TPUFLEET" not in name}
        with (folder / "log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, *container["command"][1:]],
                env={**kept, **values}, cwd=folder, stdout=log, stderr=log,
            )  # fmt: skip


class Road:
    def __init__(self, rig: Rig, folder: Path) -> None:
        self.rig, self.folder = rig, folder
        self._person = Tpu(HOME=str(folder), TPUFLEET_HOME=str(folder / "home"))

    def run(self, line: str) -> str:
        """A line of the page: `tpu` in this process, other programs as they are."""
        program, *args = shlex.split(line)
        if program == "tpu":
            return self._person.ok(*args)
        done = subprocess.run(
            [program, *args], cwd=self.folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def names(self) -> dict[str, set[str]]:
        """All objects of the cluster that the road may leave behind."""
        return {
            kind: set(self.rig.plane.kubectl("get", kind, "-o", "name").split())
            for kind in CLUSTER_KINDS
        }


@pytest.fixture
def road(rig, tmp_path, monkeypatch) -> Road:
    """With kubectl and helm that lead to the local cluster."""
    programs = tmp_path / "bin"
    programs.mkdir()
    kubectl = f'exec {rig.plane.build.harness} kubectl "$@"'
    for name, command in {"kubectl": kubectl, "helm": f'exec {helm()} "$@"'}.items():
        (programs / name).write_text(f"#!/bin/sh\n{command}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("KUBECONFIG", str(rig.plane.kubeconfig))
    monkeypatch.setenv("TPUFLEET_TERRAFORM", terraform_programs.opentofu())
    monkeypatch.chdir(tmp_path)
    for crd in third_party_crds("monitoring.coreos.com"):  # another test may have installed it
        rig.plane.kubectl("delete", "crd", "--ignore-not-found", crd["metadata"]["name"])
    return Road(rig, tmp_path)


@pytest.fixture
def storage(monkeypatch):
    with fake_gcs.server() as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        yield url


def one_slice(slices: int) -> str:
    """The shipped example with one v5e-16, which is guaranteed to research, or with more."""
    document = yaml.safe_load(EXAMPLE.read_text())
    document["tpu_pools"]["v5e-16-spot"]["slices"] = slices
    document["teams"]["research"]["quota"]["v5e-16"] = slices
    document["teams"]["serving"]["quota"]["v5e-16"] = 0
    return yaml.safe_dump(document)


@pytest.mark.slow
@pytest.mark.timeout(880)
def test_from_an_empty_cluster_to_finished_jobs_of_two_teams_and_back(road, storage):
    before = road.names()
    file = road.folder / "cluster.yaml"
    file.write_text(one_slice(1))
    database = postgres.fresh_url()

    road.run("tpu cluster apply --rehearse --yes")
    # The local cluster has the add-ons but cert-manager, in whose place are its kinds.
    road.run("tpu cluster install --queues-only")
    crds = yaml.safe_dump_all(third_party_crds("cert-manager.io"))
    road.rig.plane.kubectl("apply", "-f", "-", stdin=crds)
    road.rig.plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    road.run("tpu cluster render --folder rendered")
    road.run(
        "tpu deploy init my-fleet --project my-project --zone us-central1-a "
        f"--store {shlex.quote(database)}"
    )
    shutil.copy(road.folder / "rendered/settings.env", road.folder / "my-fleet/settings.env")
    # Both ways to install the server, after the queues.
    road.run("kubectl apply --server-side -k my-fleet")
    road.run("kubectl delete -k my-fleet")
    road.run(
        "helm upgrade --install tpufleet rendered/helm/tpufleet --values rendered/helm/values.yaml"
    )
    create = "kubectl -n tpufleet-system create secret generic"
    files = [f"--from-file=my-fleet/secrets/{name}" for name in ("secret", "admin-token")]
    road.run(f"{create} tpufleet-store --from-file=url=my-fleet/secrets/store-url")
    road.run(f"{create} tpufleet-secret {' '.join(files)}")
    road.run("tpu cluster install --queues-only")  # again: it changes nothing that is Helm's
    # Its pods only pretend to run, and would block the Jobs of JobSets.
    road.run("kubectl delete mutatingwebhookconfiguration tpu-provisioner-admission-controller")

    run_jobs(road, storage)

    road.run("helm uninstall tpufleet")
    road.run("kubectl delete -k rendered/k8s")
    eventually(lambda: not left(road, before), 120, lambda: str(left(road, before)))

    file.write_text(one_slice(20))
    road.run("tpu cluster apply --rehearse --yes")
    assert road.run("tpu cluster plan --rehearse").startswith("no changes\n")


def left(road: Road, before: dict[str, set[str]]) -> dict[str, set[str]]:
    """What is there that was not before."""
    return {kind: names for kind, now in road.names().items() if (names := now - before[kind])}


def run_jobs(road: Road, storage: str) -> None:
    rig, folder = road.rig, road.folder
    rig.add_pool(f"{rig.namespace}-v5e", **{"cloud.google.com/gke-spot": "true"})
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    bucket = "fleet-of-the-road"
    gcs.connect().create_bucket(bucket)
    server = Replica(
        folder / "server", render(folder / "my-fleet"), port,
        TPUFLEET_PUBLIC_URL=url, TPUFLEET_BUCKET=f"gs://{bucket}", STORAGE_EMULATOR_HOST=storage,
        TPUFLEET_GKE_KUBECONFIG=str(account(rig.plane, "tpufleet", SYSTEM[0], folder)),
    )  # fmt: skip
    kubelet = Kubelet(rig, folder / "pods")
    try:
        check_jobs(road, url, server)
    finally:
        kubelet.close()
        server.kill()


def check_jobs(road: Road, url: str, server: Replica) -> None:
    rig, folder = road.rig, road.folder
    environ = {"HOME": str(folder), "TPUFLEET_SERVER": url}
    token = str(folder / "my-fleet/secrets/admin-token")
    admin = Tpu(**environ, TPUFLEET_HOME=str(folder / "admin"), TPUFLEET_TOKEN_FILE=token)

    def describe() -> str:
        logs = [path.read_text()[-2000:] for path in (folder / "pods").glob("*/log")]
        shown = [admin("why", job).output for job in jobs.values()]
        return "\n".join([rig.describe(), *shown, *logs, server.log()])

    code = folder / "code"
    code.mkdir()
    jobs: dict[str, str] = {}
    eventually(lambda: admin("status").exit_code == 0, 60, describe)
    people = {}
    for name in ("ada", "dan"):
        admin.ok("user", "add", name, "--role", "member")
        file = folder / f"{name}.token"
        file.touch(mode=0o600)
        file.write_text(admin.ok("token", "create", "--user", name))
        home = str(folder / name)
        people[name] = Tpu(**environ, TPUFLEET_HOME=home, TPUFLEET_TOKEN_FILE=str(file))

    def submit(person: str, name: str, command: str) -> None:
        job = {"name": name, "command": command, "accelerator": "v5e-16", "capacity": ["spot"]}
        path = code / f"{name}.yaml"
        path.write_text(json.dumps(job))
        jobs[name] = people[person].json("submit", str(path))["jobs"][0]["id"]

    def state(name: str) -> str:
        return admin.json("show", jobs[name])["job"]["state"]

    marks = folder / "marks"
    marks.mkdir()
    # Dan is in no team but the one that is open to all; it borrows the slice of research.
    submit("dan", "borrower", TWICE.format(folder=marks))
    eventually(lambda: len(list(marks.iterdir())) == 4, 180, describe)
    check_pods(road, "serving")
    # Research takes its slice back.
    submit("ada", "owner", f"until [ -e {folder}/checked ]; do sleep 0.2; done")
    eventually(lambda: state("owner") == "running", 240, describe)
    check_pods(road, "research")
    (folder / "checked").touch()
    eventually(lambda: state("owner") == "succeeded", 240, describe)
    eventually(lambda: state("borrower") == "succeeded", 240, describe)
    attempts = admin.json("show", jobs["borrower"])["attempts"]
    assert [each["end_reason"] for each in attempts] == ["preempted", "finished"]
    why = admin.ok("why", jobs["borrower"])
    assert f"Preempted to accommodate job {jobs['owner']} due to reclamation" in why
    research = ("submit", str(code / "owner.yaml"), "--set", "pod.team=research")
    jobs["intruder"] = people["dan"].json(*research)["jobs"][0]["id"]
    eventually(lambda: state("intruder") == "failed", 60, describe)
    assert "research is not a team of dan" in admin.ok("why", jobs["intruder"])
    eventually(lambda: not any(pods_of(road, team) for team in TEAMS), 120, describe)


def pods_of(road: Road, team: str) -> list[dict]:
    return list(road.rig.connection.list(POD, team)[0])


def check_pods(road: Road, team: str) -> None:
    """In its namespace, they have the account that Terraform bound to a Google one."""
    [name] = {pod["spec"]["serviceAccountName"] for pod in pods_of(road, team)}
    found = json.loads(road.run(f"kubectl -n {team} get serviceaccount {name} -o json"))
    email = found["metadata"]["annotations"]["iam.gke.io/gcp-service-account"]
    records = json.loads((road.folder / ".rehearsal/google-cloud.json").read_text())
    [bound] = [
        record
        for record in records.values()
        if record.get("member") == f"serviceAccount:my-project.svc.id.goog[{team}/{name}]"
    ]
    assert bound["service_account_id"].endswith(f"/{email}")
    assert bound["role"] == "roles/iam.workloadIdentityUser"
