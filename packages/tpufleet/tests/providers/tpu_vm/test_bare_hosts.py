"""Jobs on nodes whose hosts are machines of their own: Ubuntu 22.04 in its own network, with the
real startup script, bundle and agent."""

from __future__ import annotations

import ensurepip
import hashlib
import json
import os
import shutil
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from google.cloud import tpu_v2

from tests.providers.tpu_vm import host_network
from tests.providers.tpu_vm.bare_hosts import BareHosts
from tests.providers.tpu_vm.emulated_fleet import Fleet
from tests.providers.tpu_vm.ubuntu_host import build_bundle
from tpufleet.providers.tpu_vm import api
from tpufleet_testbed.cloud_tpu.locations import IMMEDIATE
from tpufleet_testbed.servers import HttpServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ZONE = "us-central2-b"
# Ends when it is told to, at every host.
HOLD = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
while not (folder / "end").exists():
    time.sleep(0.2)
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    host_network.require_namespaces()
    return build_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture
def shared(tmp_path):
    """A folder on a disk that all hosts share, with what jobs need of a package index."""
    shared = tmp_path / "shared"
    (shared / "wheels").mkdir(parents=True)
    for wheel in Path(ensurepip.__file__).parent.glob("_bundled/pip*.whl"):
        shutil.copy(wheel, shared / "wheels")
    shared.chmod(0o777)
    return shared


@pytest.fixture
def fleet(tmp_path, bundle, shared):
    before = machine_wide(tmp_path)
    digest = hashlib.sha256(bundle.read_bytes()).hexdigest()
    fleet = Fleet(
        tmp_path / "fleet",
        (ZONE,),
        settings={"bundle": f"gs://{bundle.name}", "bundle_sha256": digest},
        latencies=replace(IMMEDIATE, boot=timedelta(seconds=1), deletion=timedelta(seconds=1)),
    )
    fleet.hosts = BareHosts(
        tmp_path / "hosts", fleet.emulator, bundle=bundle, shared=shared, internet=()
    )
    yield fleet
    fleet.close()
    fleet.hosts.close()
    assert machine_wide(tmp_path) == before, "nothing of the hosts is left on this machine"


def machine_wide(folder):
    """What hosts have of this machine: mounts, processes, network interfaces."""
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if str(folder) in line]
    commands = [" ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"])]
    hosts = [each for each in commands if str(folder / "hosts") in each]
    return mounts, hosts, host_network.interfaces()


# What runs in place of gcloud: `gcloud compute tpus tpu-vm ssh NODE … --command=COMMAND`.
GCLOUD = """#!{python}
import json, sys, urllib.request
[command] = [each.partition("=")[2] for each in sys.argv if each.startswith("--command=")]
body = json.dumps([sys.argv[5], command]).encode()
status, printed = json.load(urllib.request.urlopen("{url}", body))
print(printed)
sys.exit(status)
"""


@pytest.fixture
def ssh(fleet, tmp_path):
    """The hosts can be reached with gcloud, and the client knows of no emulator."""

    def answer(method, path, headers, body):
        done = fleet.hosts.ssh(*json.loads(body))
        return 200, {}, json.dumps([done.returncode, done.stdout + done.stderr]).encode()

    server = HttpServer(answer)
    gcloud = tmp_path / "bin" / "gcloud"
    gcloud.parent.mkdir()
    gcloud.write_text(GCLOUD.format(python=sys.executable, url=server.url))
    gcloud.chmod(0o755)
    settings = json.loads(fleet.tpu.environ["TPUFLEET_TPU_VM"])
    del settings["endpoint"]
    fleet.tpu.environ["TPUFLEET_TPU_VM"] = json.dumps(settings)
    fleet.tpu.environ["PATH"] = f"{gcloud.parent}{os.pathsep}{os.environ['PATH']}"
    yield
    server.close()


def run_in_pool(fleet, shared, **spec) -> tuple[str, str]:
    """The job, which has succeeded, and its output."""
    [job] = fleet.submit({
        "pool": "lab", "dependencies": [],
        "env": {"UV_FIND_LINKS": f"{shared}/wheels", "UV_NO_INDEX": "1", "UV_OFFLINE": "1"},
        **spec,
    })  # fmt: skip
    ended = ("succeeded", "failed", "cancelled")
    fleet.until(lambda: fleet.states()[job] in ended, "it ends", 300)
    log = fleet.tpu("logs", job).output
    assert fleet.states()[job] == "succeeded", log + fleet.hosts.logs()
    return job, log


def test_a_tpu_vm_of_a_person_is_adopted_with_ssh_runs_a_job_and_is_as_before(fleet, ssh, shared):
    client = api.connect(fleet.emulator.endpoint)
    node = tpu_v2.Node(
        accelerator_type="v4-16", runtime_version="tpu-ubuntu2204-base", metadata={"team": "vision"}
    )
    parent = f"projects/my-project/locations/{ZONE}"
    client.create_node(parent=parent, node_id="mels", node=node)
    fleet.tpu.ok("pool", "create", "lab", "v4-16", "--provider", "tpu-vm", "--zone", ZONE)
    fleet.until(lambda: fleet.hosts.count("mels") == 2, "its hosts run")
    adopted = fleet.tpu("adopt", "mels", "--pool", "lab")
    assert adopted.exit_code == 0, adopted.output + fleet.hosts.logs()
    program = "import os; print('host', os.environ['TPU_WORKER_ID'])"
    _, log = run_in_pool(fleet, shared, command=["python", "-c", program], accelerator="v4-16")
    assert "host 0" in log and "host 1" in log
    fleet.tpu.ok("adopt", "undo", "mels")
    agents = lambda: [each.run("systemctl", "is-active").returncode
                      for each in fleet.hosts.machines("mels")]  # fmt: skip
    fleet.until(lambda: 0 not in agents(), "its agents end")
    [found] = [each for each in client.list_nodes(parent=parent)]
    assert dict(found.metadata) == {"team": "vision"} and found.state == tpu_v2.Node.State.READY
    client.delete_node(name=found.name)
    fleet.until(lambda: not fleet.nodes(), "its owner deletes it")


def test_a_job_with_mounts_leaves_a_slice_of_a_pool_that_cannot_mount(fleet, shared):
    """Its hosts could not install gcsfuse, and one of them got it later."""
    fleet.tpu.ok(
        "pool", "create", "lab", "v4-8", "--provider", "tpu-vm", "--zone", ZONE,
        "--smallest", "2", "--largest", "2",
    )  # fmt: skip

    def slices() -> list[str]:
        rows = fleet.tpu.json("inventory")["rows"]
        return sorted(row["id"] for row in rows if row["state"] == "free")

    fleet.until(lambda: len(slices()) == 2, "its slices are ready", 600)
    first, second = slices()
    [other] = fleet.hosts.machines(second)
    program = other.root / "usr/local/bin/gcsfuse"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    job, _ = run_in_pool(
        fleet, shared,
        command=["echo", "mounted"], accelerator="v4-8", mounts=["my-data:/mnt/buckets/data"],
    )  # fmt: skip
    attempts = fleet.tpu.json("show", job)["attempts"]
    assert [(each["end_reason"], each["slices"]) for each in attempts] == [
        ("setup_failed", [first]), ("finished", [second]),
    ]  # fmt: skip


def test_hosts_of_a_scarce_gang_that_start_again_keep_its_slices(fleet, shared, tmp_path):
    """An agent crashes; another host is off for longer than silence is tolerated; one reboots."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "hold.py").write_text(HOLD)
    [job] = fleet.submit({
        "command": ["python", "hold.py", str(shared)], "workdir": str(code), "slices": 2,
        "accelerator": "v4-16", "capacity": "on-demand", "dependencies": [],
        "env": {"UV_FIND_LINKS": f"{shared}/wheels", "UV_NO_INDEX": "1", "UV_OFFLINE": "1"},
    })  # fmt: skip

    def attempts() -> list[dict]:
        return fleet.tpu.json("show", job)["attempts"]

    def runs(number: int) -> bool:
        assert fleet.states()[job] not in ("succeeded", "failed", "cancelled"), logs()
        return len(attempts()) == number and fleet.states()[job] == "running"

    def logs() -> str:
        return fleet.tpu("logs", job).output + fleet.hosts.logs()

    fleet.until(lambda: runs(1), "it runs", 600)
    first, second = nodes = fleet.nodes()
    assert [len(fleet.hosts.machines(node)) for node in nodes] == [2, 2]
    fleet.hosts.machines(first)[1].signal_agent("KILL")
    fleet.until(lambda: runs(2), "the agent is started again", 300)
    off = fleet.hosts.machines(second)[0]
    off.power_off()
    waiting = lambda: "to come back" in fleet.tpu("why", job).output
    fleet.until(waiting, "the slice waits for its host", 300)
    fleet.hosts.boot_again(off)
    fleet.until(lambda: runs(3), "the host is back", 300)
    last = fleet.hosts.machines(first)[0]
    last.power_off()
    fleet.hosts.boot_again(last)
    fleet.until(lambda: runs(4), "the host has rebooted", 300)
    (shared / "end").touch()
    fleet.until(lambda: fleet.states()[job] == "succeeded", "it ends", 300)

    assert {tuple(attempt["slices"]) for attempt in attempts()} == {tuple(attempts()[0]["slices"])}
    with fleet.emulator.cloud.lock:
        created = [entry.node for entry in fleet.emulator.cloud.ledger.entries]
    assert sorted(created) == nodes, "no other node was created"
    fleet.until(lambda: not fleet.nodes(), "every node is deleted", 120)
