"""Jobs whose pods run as containers on a real node: agents, JAX across pods, evictions."""

from __future__ import annotations

import itertools
import json
import os

import pytest

from tests.k8s.real_pods import HOSTS, Fleet, node_with_image
from tests.k8s.rigs import eventually
from tpufleet_testbed.kubernetes.node import job_namespace

# By default a pod of the pause image runs on such a node, in test_real_node.py.
pytestmark = pytest.mark.slow
_numbers = itertools.count(1)

STEPS = 40
# Reports what a workload sees of its pod.
LOOK = """
import json, os, pathlib
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
def writable(path):
    try:
        pathlib.Path(path, "probe").touch()
        return True
    except OSError:
        return False
report = {
    "uid": os.getuid(),
    "groups": sorted({os.getgid(), *os.getgroups()}),
    "capabilities": {key: int(status[key], 16) for key in status if key.startswith("Cap")},
    "seccomp": int(status["Seccomp"]),
    "no_new_privileges": int(status["NoNewPrivs"]),
    "root_writable": [path for path in ("/", "/opt/tpufleet", "/usr", "/etc") if writable(path)],
    "scratch_writable": [path for path in ("/work", "/tmp") if writable(path)],
    "service_account": os.path.exists("/var/run/secrets/kubernetes.io"),
    "kubernetes_environment": [key for key in os.environ if key.startswith("KUBERNETES_")],
    "secret_environment": [key for key in os.environ if "TOKEN" in key],
    "addresses": os.environ["TPU_WORKER_HOSTNAMES"],
    "coordinator": os.environ["TPUFLEET_COORDINATOR_ADDRESS"],
}
folder = pathlib.Path(os.environ["TPUFLEET_CHECKPOINT_DIR"], "reports")
folder.mkdir(parents=True, exist_ok=True)
name = os.environ["TPUFLEET_ATTEMPT"] + "-" + os.environ["TPUFLEET_PROCESS_ID"]
(folder / name).write_text(json.dumps(report))
"""


@pytest.fixture(scope="module")
def node(plane):
    """Module scope: pods of other tests, meant for KWOK nodes, would be scheduled to it."""
    with node_with_image(plane) as node:
        yield node


@pytest.fixture
def fleet_with(plane, node, tmp_path):
    """Starts servers with these settings of the provider."""
    fleets: list[Fleet] = []

    def start(**gke: str) -> Fleet:
        namespace = f"real-{os.getpid()}-{next(_numbers)}"
        fleets.append(Fleet(plane, node, namespace, tmp_path, **gke))
        return fleets[-1]

    yield start
    for fleet in fleets:
        fleet.close()


def training(**settings: object) -> str:
    options = " ".join(f"{key}={value}" for key, value in settings.items())
    return f"exec python -m tpufleet.demo.train {options}"


def test_an_evicted_job_checkpoints_in_its_grace_period_and_reaches_the_same_result(
    fleet_with,
):
    fleet = fleet_with()
    look = "python look.py\n"
    files = {"look.py": LOOK}
    fleet.submit("undisturbed", look + training(steps=STEPS, checkpoint_every=10), files)
    eventually(lambda: fleet.state("undisturbed") == "succeeded", 300, fleet.describe)
    eventually(lambda: fleet.pods() == [], 120, fleet.describe)

    # Saves only at the end, or on a notice.
    command = training(steps=STEPS, checkpoint_every=STEPS, step_seconds=0.5)
    fleet.submit("evicted", look + command)
    eventually(lambda: fleet.steps("evicted") >= 3, 300, fleet.describe)
    pods = fleet.running()
    seen = fleet.steps("evicted")
    fleet.drain()
    eventually(lambda: fleet.state("evicted") == "succeeded", 300, fleet.describe)

    attempts = fleet.show("evicted")["attempts"]
    assert [attempt["end_reason"] for attempt in attempts] == ["preempted", "finished"]
    saved = attempts[0]["checkpoint_step"]
    assert saved == attempts[1]["start_step"]
    assert seen <= saved < STEPS
    assert f"{4 * HOSTS} devices, {HOSTS} hosts, step {saved}" in fleet.tpu("logs", "evicted")
    undisturbed, evicted = fleet.result("undisturbed"), fleet.result("evicted")
    assert (
        evicted["params_sha256"] == undisturbed["params_sha256"]
        and evicted["loss"] == undisturbed["loss"]
    )
    assert (undisturbed["attempts"], evicted["attempts"]) == ([0], [0, 1])

    for pod in pods:
        check_pod_spec(pod)
    reports = [
        json.loads(path.read_text()) for path in (fleet.shared / "evicted/reports").iterdir()
    ]
    assert len(reports) == 2 * HOSTS
    for report in reports:
        check_pod_environment(report)


@pytest.mark.parametrize("kind", ["pod", "jobset"])
def test_from_a_deleted_object_to_the_next_step(fleet_with, kind):
    """How long it took, and with what, is printed with -s."""
    fleet = fleet_with()
    fleet.submit("train", training(steps=10_000, checkpoint_every=10, step_seconds=0.2))
    eventually(lambda: fleet.steps("train") >= 13, 300, fleet.describe)
    names = [fleet.pods()[-1]["metadata"]["name"]] if kind == "pod" else ["--all"]
    fleet.plane.kubectl("delete", kind, *names, f"--namespace={fleet.namespace}", "--wait=false")
    [recovery] = eventually(lambda: fleet.show("train")["recoveries"], 300, fleet.describe)
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in recovery["parts"].items())
    print(f"{kind} deleted → next step: {recovery['seconds']:.1f} s ({parts})")
    assert recovery["resumed_step"] >= 10


def test_a_job_has_the_account_and_volumes_that_it_names_and_kubectl_shows_its_output(fleet_with):
    fleet = fleet_with()
    kubectl = lambda *args: fleet.plane.kubectl("-n", fleet.namespace, *args)
    kubectl("create", "serviceaccount", "trainer")
    fleet.shared.mkdir(parents=True, exist_ok=True)
    (fleet.shared / "hello").write_text("hello from a volume\n")
    fleet.submit(
        "own", f"cat /mine/{fleet.namespace}/hello\nsleep 300", pod={
            "service_account": "trainer", "memory": "512Mi", "labels": {"team": "nlp"},
            "volumes": {"/mine": job_namespace.CLAIM},
        },
    )  # fmt: skip
    eventually(lambda: len(fleet.running()) == HOSTS, 300, fleet.describe)
    job_id = fleet.show("own")["row"]["id"]
    shown = lambda: kubectl("logs", "-l", f"job-id={job_id}", "-c", "agent", "--tail=-1")
    eventually(lambda: shown().count("hello from a volume\n") == HOSTS, 120, fleet.describe)
    for pod in fleet.running():
        assert pod["spec"]["serviceAccountName"] == "trainer"
        assert pod["metadata"]["labels"]["team"] == "nlp"
        [container] = pod["spec"]["containers"]
        assert container["resources"]["limits"]["memory"] == "512Mi"
    fleet.tpu("cancel", "own", "--yes")


def check_pod_spec(pod: dict) -> None:
    """The pod as the API server has it."""
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (*spec["containers"], *spec.get("initContainers", ())):
        security = container["securityContext"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["privileged"] is False
    assert not [volume for volume in spec["volumes"] if "projected" in volume]


def check_pod_environment(report: dict) -> None:
    """The pod as the workload sees it."""
    assert report["uid"] == 65532 and 0 not in report["groups"]
    assert set(report["capabilities"].values()) == {0}
    assert report["seccomp"] == 2 and report["no_new_privileges"] == 1
    assert report["root_writable"] == [] and report["scratch_writable"] == ["/work", "/tmp"]
    assert report["service_account"] is False
    assert report["kubernetes_environment"] == []
    assert report["secret_environment"] == ["TPUFLEET_TOKEN_FILE"]  # that of the attempt
    names = report["addresses"].split(",")
    assert len(names) == HOSTS
    assert report["coordinator"].rpartition(":")[0] == names[0]
    (jobset,) = {name.partition(".")[2] for name in names}
    assert names == [f"{jobset}-slice-0-{host}.{jobset}" for host in range(HOSTS)]


def test_an_image_that_cannot_be_pulled_is_reported(fleet_with):
    fleet = fleet_with(image="localhost/does-not-exist:1")
    fleet.submit("stuck", "true")
    eventually(
        lambda: "localhost/does-not-exist:1" in fleet.tpu("why", "stuck"), 60, fleet.describe
    )


def test_a_workload_that_exceeds_its_memory_limit_fails_as_out_of_host_memory(
    fleet_with,
):
    fleet = fleet_with(memory="256Mi")
    allocate = "import os; os.environ['TPUFLEET_PROCESS_ID'] == '2' and bytearray(2**30)"
    fleet.submit(
        "over-memory", f'python -c "{allocate}; import time; time.sleep(60)"', retries={"memory": 0}
    )
    eventually(lambda: fleet.state("over-memory") == "failed", 120, fleet.describe)
    (attempt,) = fleet.show("over-memory")["attempts"]
    assert attempt["end_reason"] == "out_of_host_memory"
    assert "host 2" in attempt["message"]


def test_a_pod_that_exceeds_its_disk_limit_fails_with_the_reason(fleet_with):
    fleet = fleet_with(scratch="32Mi")
    fill = "head -c 200M /dev/zero > $TPUFLEET_RUN_DIR/big"
    command = f"[ $TPUFLEET_PROCESS_ID != 1 ] || {fill}; sleep 120"
    fleet.submit("over-disk", command, retries={"infrastructure": 0})
    eventually(lambda: fleet.state("over-disk") == "failed", 150, fleet.describe)
    (attempt,) = fleet.show("over-disk")["attempts"]
    # Detected by the agent or by the kubelet, whichever is first; never a preemption.
    messages = {"disk_full": "/work", "host_lost": "Usage of EmptyDir volume"}
    assert messages[attempt["end_reason"]] in attempt["message"]
