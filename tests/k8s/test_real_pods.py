"""Jobs whose pods really run, on a real node: containers, their agents, JAX between them."""

from __future__ import annotations

import itertools
import json
import os

import pytest

from tests.k8s.real_pods import HOSTS, Fleet
from tests.k8s.rigs import eventually
from tpufleet.testbed.kubernetes.image import builder
from tpufleet.testbed.kubernetes.node import job_namespace, node_images, real_node

pytestmark = pytest.mark.timeout(900)
_numbers = itertools.count(1)

STEPS = 90
# What a program can find out about the pod that it runs in.
LOOK = """
import json, os, pathlib
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
def writable(path):
    try:
        pathlib.Path(path, "probe").touch()
        return True
    except OSError:
        return False
found = {
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
folder = pathlib.Path(os.environ["TPUFLEET_CHECKPOINT_DIR"], "found")
folder.mkdir(parents=True, exist_ok=True)
name = os.environ["TPUFLEET_ATTEMPT"] + "-" + os.environ["TPUFLEET_PROCESS_ID"]
(folder / name).write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def node(plane):
    """Not for longer: pods of other tests, which KWOK is to play, would come to it."""
    why_not = real_node.unsupported_reason()
    if why_not:
        pytest.skip(why_not)
    image = builder.build()
    found = real_node.find(plane.layout)
    ours = found is None
    if found is None:
        found = real_node.add(plane)
    try:
        job_namespace.save_image(found, node_images.load_image(found, image))
        yield found
    finally:
        if ours:
            real_node.remove(plane.layout.folder)
            plane.kubectl("delete", "node", found.name)


@pytest.fixture
def fleet_with(plane, node, tmp_path):
    """Start a server with these settings of the provider."""
    made: list[Fleet] = []

    def start(**gke: str) -> Fleet:
        namespace = f"real-{os.getpid()}-{next(_numbers)}"
        made.append(Fleet(plane, node, namespace, tmp_path, **gke))
        return made[-1]

    yield start
    for fleet in made:
        fleet.close()


def training(**settings: object) -> str:
    words = " ".join(f"{key}={value}" for key, value in settings.items())
    return f"python look.py\nexec python -m tpufleet.demo.train {words}"


def test_a_job_that_is_evicted_checkpoints_in_its_grace_and_ends_as_if_it_had_been_left_alone(
    fleet_with,
):
    fleet = fleet_with()
    fleet.submit("calm", training(steps=STEPS, checkpoint_every=30), {"look.py": LOOK})
    eventually(lambda: fleet.state("calm") == "succeeded", 300, fleet.told)
    eventually(lambda: fleet.pods() == [], 120, fleet.told)

    # Nothing is saved before its end, unless it is told to end.
    fleet.submit("shaken", training(steps=STEPS, checkpoint_every=STEPS, step_seconds=0.5))
    eventually(lambda: fleet.steps("shaken") >= 3, 300, fleet.told)
    pods = fleet.running()
    seen = fleet.steps("shaken")
    fleet.drain()
    eventually(lambda: fleet.state("shaken") == "succeeded", 300, fleet.told)

    attempts = fleet.show("shaken")["attempts"]
    assert [attempt["ended_because"] for attempt in attempts] == ["preempted", "finished"]
    saved = attempts[0]["checkpoint_step"]
    assert saved == attempts[1]["start_step"]
    assert seen <= saved < STEPS
    assert f"{4 * HOSTS} devices, {HOSTS} hosts, step {saved}" in fleet.tpu("logs", "shaken")
    calm, shaken = fleet.result("calm"), fleet.result("shaken")
    assert shaken["params_sha256"] == calm["params_sha256"] and shaken["loss"] == calm["loss"]
    assert (calm["attempts"], shaken["attempts"]) == ([0], [0, 1])

    for pod in pods:
        look_at(pod)
    found = [json.loads(path.read_text()) for path in (fleet.shared / "shaken/found").iterdir()]
    assert len(found) == 2 * HOSTS
    for one in found:
        listen_to(one)


def look_at(pod: dict) -> None:
    """What the pod was asked to be."""
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


def listen_to(found: dict) -> None:
    """What a program in the pod found it to be."""
    assert found["uid"] == 65532 and 0 not in found["groups"]
    assert set(found["capabilities"].values()) == {0}
    assert found["seccomp"] == 2 and found["no_new_privileges"] == 1
    assert found["root_writable"] == [] and found["scratch_writable"] == ["/work", "/tmp"]
    assert found["service_account"] is False
    assert found["kubernetes_environment"] == found["secret_environment"] == []
    names = found["addresses"].split(",")
    assert len(names) == HOSTS
    assert found["coordinator"].rpartition(":")[0] == names[0]
    (jobset,) = {name.partition(".")[2] for name in names}
    assert names == [f"{jobset}-slice-0-{host}.{jobset}" for host in range(HOSTS)]


def test_an_image_that_cannot_be_pulled_is_told_in_words(fleet_with):
    fleet = fleet_with(image="localhost/nobody-made-this:1")
    fleet.submit("stuck", "true")
    eventually(
        lambda: "the image localhost/nobody-made-this:1 cannot be pulled" in fleet.tpu(
            "why", "stuck"),
        60, fleet.told,
    )  # fmt: skip


def test_a_program_that_takes_more_memory_than_its_pod_has_is_told_so_and_not_tried_for_ever(
    fleet_with,
):
    fleet = fleet_with(memory="256Mi")
    eats = "import os; os.environ['TPUFLEET_PROCESS_ID'] == '2' and bytearray(2**30)"
    fleet.submit(
        "hungry", f'python -c "{eats}; import time; time.sleep(60)"', retries={"memory": 0}
    )
    eventually(lambda: fleet.state("hungry") == "failed", 120, fleet.told)
    assert "out of host memory" in fleet.tpu("why", "hungry")
    (attempt,) = fleet.show("hungry")["attempts"]
    assert attempt["ended_because"] == "out_of_host_memory"
    assert "host 2" in attempt["words"]


def test_a_pod_that_fills_its_disk_is_evicted_by_the_kubelet_and_the_reason_is_told(fleet_with):
    fleet = fleet_with(scratch="32Mi")
    fill = "head -c 200M /dev/zero > $TPUFLEET_RUN_DIR/big"
    fills = f"[ $TPUFLEET_PROCESS_ID != 1 ] || {fill}; sleep 120"
    fleet.submit("wasteful", fills, retries={"infrastructure": 0})
    eventually(lambda: fleet.state("wasteful") == "failed", 150, fleet.told)
    (attempt,) = fleet.show("wasteful")["attempts"]
    # By the agent, or by the kubelet where it was quicker; in either case it is no preemption.
    told = {
        "disk_full": "/work holds 20", "host_lost": "Usage of EmptyDir volume",
    }  # fmt: skip
    assert told[attempt["ended_because"]] in attempt["words"]
