"""Queues of two teams on a real Kueue: guaranteed quota, borrowing, reclaim, priorities."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
import yaml

from tests.environment.environments import environment
from tests.k8s.rigs import eventually
from tpufleet.kubernetes.connections import JOBSET
from tpufleet.model.fleet.preflight import passed
from tpufleet_gke.environment.addons import example_jobsets, install, queues
from tpufleet_testbed.kubernetes import binaries

ROOT = Path(__file__).parents[2]
QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"


class Teams:
    """Two namespaces, three slices of v5e-16: two of red, one of blue."""

    def __init__(self, rig) -> None:
        self.rig = rig
        self.red, self.blue = f"{rig.namespace}-red", f"{rig.namespace}-blue"
        self.built = environment(
            tpu_pools={"v5e": {"type": "v5e-16", "slices": 3}},
            teams={self.red: {"quota": {"v5e-16": 2}}, self.blue: {"quota": {"v5e-16": 1}}},
        )
        build = binaries.find_cached()
        assert build is not None
        config = ["--kubeconfig", str(rig.plane.kubeconfig)]
        self.kubectl = install.Kubectl(command=[str(build.harness), "kubectl", *config])

    def submit(self, team: str, name: str, priority: str = "medium") -> None:
        pod = {
            "restartPolicy": "Never",
            "nodeSelector": {
                "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
                "cloud.google.com/gke-tpu-topology": "4x4",
            },
            "securityContext": {"runAsNonRoot": True, "runAsUser": 1000,
                                "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{
                "name": "main", "image": "busybox",
                "securityContext": {"allowPrivilegeEscalation": False,
                                    "capabilities": {"drop": ["ALL"]}},
                "resources": {"requests": {"cpu": "4", "memory": "16Gi", "google.com/tpu": "4"},
                              "limits": {"google.com/tpu": "4"}},
            }],
        }  # fmt: skip
        job = {"parallelism": 4, "completions": 4, "backoffLimit": 0, "template": {"spec": pod}}
        self.rig.connection.create(JOBSET, {
            "metadata": {"name": name, "namespace": team,
                         "labels": {QUEUE: "tpu-training-jobs", PRIORITY: priority}},
            "spec": {"replicatedJobs": [
                {"name": "slice", "replicas": 1, "template": {"spec": job}}]},
        })  # fmt: skip

    def admitted(self) -> set[str]:
        """JobSets that are not suspended."""
        return {
            jobset["metadata"]["name"]
            for namespace in (self.red, self.blue)
            for jobset in self.rig.connection.list(JOBSET, namespace)[0]
            if not jobset["spec"].get("suspend")
        }

    def settle(self, *expected: str) -> None:
        eventually(lambda: self.admitted() == set(expected), 120, lambda: sorted(self.admitted()))

    def close(self) -> None:
        self.kubectl.run("delete", "namespace", self.red, self.blue, "--wait=false")
        # The next test has a cohort of the same name: what is applied to one that is being deleted
        # goes with it.
        for name in (self.red, self.blue):
            self.kubectl.run("delete", "clusterqueue", name, "--timeout=100s")
        self.kubectl.run("delete", "cohort", queues.SHARED_COHORT, "--timeout=100s")


@pytest.fixture
def teams(rig):
    teams = Teams(rig)
    install.apply_queues(teams.built, teams.kubectl, lambda message: None)
    yield teams
    teams.close()


@pytest.mark.slow
def test_two_teams_borrow_reclaim_and_preempt(teams):
    def queue_checks():
        found = install.checks(teams.built, teams.kubectl)
        return [check for check in found if check.name.startswith("queue")]

    eventually(lambda: passed(queue_checks()), 60, queue_checks)
    # Red has two slices, and borrows the one that blue leaves idle.
    for name in ("red-1", "red-2", "red-3"):
        teams.submit(teams.red, name)
    teams.settle("red-1", "red-2", "red-3")
    # A fourth one has to wait.
    teams.submit(teams.red, "red-4", "low")
    # Blue takes its slice back from a borrower, though its priority is lower.
    teams.submit(teams.blue, "blue-1", "verylow")
    eventually(lambda: "blue-1" in teams.admitted(), 120, lambda: sorted(teams.admitted()))
    assert len(teams.admitted()) == 3 and "red-4" not in teams.admitted()
    # Within red, a higher priority preempts a lower one; blue keeps its slice.
    teams.submit(teams.red, "red-urgent", "veryhigh")
    eventually(lambda: "red-urgent" in teams.admitted(), 120, lambda: sorted(teams.admitted()))
    eventually(lambda: len(teams.admitted()) == 3, 60, lambda: sorted(teams.admitted()))
    assert "blue-1" in teams.admitted()
    assert board_metrics() <= kueue_metrics(teams), "the dashboard shows what Kueue does not have"


def board_metrics() -> set[str]:
    board = (ROOT / "deploy/monitoring/grafana-provisioner.json").read_text()
    return set(re.findall(r"\bkueue_\w+", board))


def kueue_metrics(teams: Teams) -> set[str]:
    """Names of the metrics that Kueue exports, read as Prometheus reads them: with a token."""
    namespace, run = teams.red, teams.kubectl.run
    account = f"--serviceaccount={namespace}:prometheus"
    run("create", "serviceaccount", "prometheus", "-n", namespace)
    run("create", "clusterrolebinding", namespace, "--clusterrole=cluster-admin", account)
    token = run("create", "token", "prometheus", "-n", namespace).strip()
    port = teams.rig.plane.layout.ports["kueue_metrics"]
    url, header = f"https://127.0.0.1:{port}/metrics", {"Authorization": f"Bearer {token}"}
    try:
        page = httpx.get(url, headers=header, verify=False, timeout=900)
        page.raise_for_status()
    finally:
        run("delete", "clusterrolebinding", namespace)
    return set(re.findall(r"^(kueue_\w+)\{", page.text, re.MULTILINE))


def test_kueue_accepts_the_queues_of_every_kind_of_capacity(rig):
    built = environment(
        tpu_pools={
            "a": {"type": "v5e-16", "slices": 2},
            "b": {"type": "v5e-16", "capacity": "spot"},
            "c": {"type": "v6e-16", "capacity": "flex-start"},
            "d": {"type": "v5p-128", "capacity": "reserved", "reservation": "r"},
        },
        teams={f"{rig.namespace}-x": {"borrow": False}, f"{rig.namespace}-y": {"lend": False}},
    )
    build = binaries.find_cached()
    assert build is not None
    config = ["--kubeconfig", str(rig.plane.kubeconfig)]
    kubectl = install.Kubectl(command=[str(build.harness), "kubectl", *config])
    # LocalQueues need their namespace, which a dry run does not create.
    documents = [item for item in queues.manifests(built) if item["kind"] != "LocalQueue"]
    printed = kubectl.run(
        "apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", "-",
        stdin=yaml.safe_dump_all(documents),
    )  # fmt: skip
    assert len(printed.splitlines()) == len(documents)


@pytest.mark.slow
def test_the_example_jobsets_are_accepted_and_queued(teams):
    image = "us-docker.pkg.dev/my-project/ml-images/maxtext:1"
    for suffix, jobset in {
        "hello": example_jobsets.hello_world(
            teams.built, teams.blue, "v5e-16", slices=1, image=image, suffix="hello"),
        "maxtext": example_jobsets.maxtext(
            teams.built, teams.blue, "v5e-16", slices=1, image=image, suffix="maxtext",
            run_name="r", output="gs://b", dataset="gs://d"),
    }.items():  # fmt: skip
        teams.kubectl.apply([jobset])
        name = f"tpu-training-job-{suffix}"
        eventually(lambda name=name: name in teams.admitted(), 120, lambda: teams.admitted())


@pytest.fixture
def aware(rig):
    """One team, two v5e-16 that always exist, and quota for three."""
    team = f"{rig.namespace}-aware"
    pool = {"type": "v5e-16", "slices": 3, "managed_by": "terraform", "topology_aware": True}
    built = environment(tpu_pools={"v5e": pool}, teams={team: {}})
    build = binaries.find_cached()
    assert build is not None
    config = ["--kubeconfig", str(rig.plane.kubeconfig)]
    kubectl = install.Kubectl(command=[str(build.harness), "kubectl", *config])
    install.apply_queues(built, kubectl, lambda message: None)
    for name in ("slice-a", "slice-b"):
        rig.add_pool(name)
    yield rig, built, team, kubectl
    kubectl.run("delete", "namespace", team, "--wait=false")
    kubectl.run("delete", "clusterqueue", team, "--wait=false")
    kubectl.run("delete", "resourceflavor", "v5litepod-16", "--wait=false")
    kubectl.run("delete", "topology", "tpu-slices", "--wait=false")


@pytest.mark.slow
def test_kueue_places_each_slice_in_one_node_pool_and_waits_for_whole_ones(aware):
    rig, built, team, kubectl = aware

    def submit(name: str, slices: int) -> None:
        jobset = example_jobsets.hello_world(
            built, team, "v5e-16", slices=slices, image="busybox", suffix=name
        )
        kubectl.apply([jobset])

    def workloads() -> dict[str, dict]:
        printed = kubectl.run("get", "workloads", "-n", team, "-o", "json")
        return {
            item["metadata"]["ownerReferences"][0]["name"].rpartition("-")[2]: item
            for item in json.loads(printed)["items"]
        }

    def admission(name: str) -> dict | None:
        return workloads().get(name, {}).get("status", {}).get("admission")

    submit("two", 2)
    eventually(lambda: admission("two"), 120, workloads)
    (assigned,) = admission("two")["podSetAssignments"]
    assert assigned["topologyAssignment"]["levels"][-1] == "kubernetes.io/hostname"
    # Quota is left for one more slice, but there is none: all eight hosts are taken.
    submit("three", 1)
    waiting = lambda: [
        condition["message"]
        for condition in workloads().get("three", {}).get("status", {}).get("conditions", [])
        if condition["type"] == "QuotaReserved"
    ]
    eventually(lambda: any("topology" in message for message in waiting()), 120, workloads)
    assert admission("three") is None
    # A third slice appears.
    rig.add_pool("slice-c")
    eventually(lambda: admission("three"), 120, workloads)
