"""A multislice job on Compute Engine whose VMs are machines of their own: Ubuntu 22.04 in its own
network, with the real startup script, bundle and agent, and the metadata of a slice."""

from __future__ import annotations

import ensurepip
import hashlib
import json
import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("google.auth", reason="pip install 'tpufleet[compute]'")

from tests.providers.compute.bare_vms import BareVms
from tests.providers.tpu_vm import host_network
from tests.providers.tpu_vm.emulated_fleet import Fleet
from tests.providers.tpu_vm.test_bare_hosts import machine_wide
from tests.providers.tpu_vm.ubuntu_host import build_bundle
from tpufleet_testbed.cloud_tpu.fault_plan import CloudFaultPlan
from tpufleet_testbed.compute_engine.fault_plan import IMMEDIATE, ComputeFaultPlan, Switches

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ZONE = "us-east5-a"
# Each process meets the others of its slice at the coordinator, and says who it is.
MEET = """
import json, os, socket, time
host, port = os.environ["JAX_COORDINATOR_ADDRESS"].rsplit(":", 1)
number, count = int(os.environ["TPUFLEET_PROCESS_ID"]), int(os.environ["TPUFLEET_NUM_PROCESSES"])
if number == 0:
    with socket.create_server((host, int(port))) as server:
        met = [0, *(int(server.accept()[0].makefile().readline()) for _ in range(count - 1))]
    print("met", sorted(met), flush=True)
while number:
    try:
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"%d\\n" % number)
        break
    except ConnectionRefusedError:
        time.sleep(0.2)
names = ("MEGASCALE_SLICE_ID", "MEGASCALE_NUM_SLICES", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES")
print("identity", json.dumps([os.environ[name] for name in names]), flush=True)
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    host_network.require_namespaces()
    return build_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture
def fleets(tmp_path, bundle):
    opened, before = [], machine_wide(tmp_path)
    shared = tmp_path / "shared"  # what jobs need of a package index
    (shared / "wheels").mkdir(parents=True)
    for wheel in Path(ensurepip.__file__).parent.glob("_bundled/pip*.whl"):
        shutil.copy(wheel, shared / "wheels")
    shared.chmod(0o777)

    def make(**plan) -> Fleet:
        second = timedelta(seconds=1)
        latencies = replace(IMMEDIATE, boot=second, deletion=second)
        compute = ComputeFaultPlan(latencies=latencies, **plan)
        digest = hashlib.sha256(bundle.read_bytes()).hexdigest()
        fleet = Fleet(
            tmp_path / "fleet", (ZONE,), provider="compute", plan=CloudFaultPlan(compute=compute),
            settings={
                "bundle": f"gs://{bundle.name}", "bundle_sha256": digest, "gang_patience": "60s",
            },
        )  # fmt: skip
        fleet.hosts = BareVms(
            tmp_path / "hosts", fleet.emulator, bundle=bundle, shared=shared, internet=()
        )
        fleet.wheels = shared / "wheels"
        opened.append(fleet)
        return fleet

    yield make
    for fleet in opened:
        fleet.close()
        fleet.hosts.close()
    assert machine_wide(tmp_path) == before, "nothing of the hosts is left on this machine"


@pytest.mark.parametrize("metadata", ["boot", "topology"])
def test_a_multislice_job_runs_on_vms_that_have_nothing(fleets, tmp_path, metadata):
    """Also where the metadata of the slice comes only once its chips are joined."""
    fleet = fleets(switches=Switches(metadata=metadata))
    code = tmp_path / "code"
    code.mkdir()
    (code / "meet.py").write_text(MEET)
    [job] = fleet.submit({
        "command": ["python", "meet.py"], "workdir": str(code), "slices": 2,
        "accelerator": "v5p-16", "capacity": "on-demand", "dependencies": [],
        "env": {"UV_FIND_LINKS": str(fleet.wheels), "UV_NO_INDEX": "1", "UV_OFFLINE": "1"},
    })  # fmt: skip
    ended = ("succeeded", "failed", "cancelled")
    fleet.until(lambda: fleet.states()[job] in ended, "it ends", 600)
    log = fleet.tpu("logs", job).output
    assert fleet.states()[job] == "succeeded", log + fleet.hosts.logs()
    assert "met [0, 1, 2, 3]" in log
    found = [json.loads(line.partition("identity ")[2]) for line in log.splitlines()
             if "identity " in line]  # fmt: skip
    assert sorted(each[:3] for each in found) == [
        [str(tpu_slice), "2", str(worker)] for tpu_slice in range(2) for worker in range(2)
    ]
    assert {len(each[3].split(",")) for each in found} == {2}, "the hosts of its own slice"
    attempts = fleet.tpu.json("show", job)["attempts"]
    assert [attempt["end_reason"] for attempt in attempts] == ["finished"]
    engine = fleet.emulator.engine
    fleet.until(lambda: not engine.ledger.running(), "every VM is deleted", 120)
    assert len(engine.ledger.entries) == 4, "no VM was created twice"
