"""Jobs on nodes whose hosts are machines of their own: Ubuntu 22.04 in its own network, with the
real startup script, bundle and agent."""

from __future__ import annotations

import ensurepip
import hashlib
import os
import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from tests.providers.tpu_vm import host_network
from tests.providers.tpu_vm.bare_hosts import BareHosts
from tests.providers.tpu_vm.emulated_fleet import Fleet
from tests.providers.tpu_vm.ubuntu_host import build_bundle
from tpufleet_testbed.cloud_tpu.locations import IMMEDIATE

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
    return mounts, hosts, sorted(os.listdir("/sys/class/net"))


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
