"""VMs of the emulated Compute Engine that run real agents."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest

pytest.importorskip("google.cloud.compute_v1", reason="pip install google-cloud-compute")

from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import compute_v1 as api

from tests.testbed.compute_engine.emulated_compute import PROJECT, ZONE, disk
from tpufleet_testbed.cloud_tpu.emulator import Emulator
from tpufleet_testbed.cloud_tpu.fault_plan import CloudFaultPlan
from tpufleet_testbed.compute_engine.fault_plan import IMMEDIATE, ComputeFaultPlan
from tpufleet_testbed.servers import HttpServer

METADATA = {
    "startup-script": "#!/bin/bash", "tpufleet-slices": '["s-1"]', "tpufleet-hosts": "1",
    "tpufleet-chips": "4", "tpufleet-accelerator": "v6e-4", "tpufleet-tokens": '{"s-1": "secret"}',
}  # fmt: skip


@pytest.fixture
def fleet():
    """A server that refuses all agents, and what they sent."""
    requests: list[tuple[str, str]] = []
    arrived = threading.Event()

    def answer(method, path, headers, body):
        requests.append((path, headers.get("authorization", "")))
        arrived.set()
        return 503, {}, json.dumps({"error": "later"}).encode()

    server = HttpServer(answer)
    yield server.url, requests, arrived
    server.close()


def test_a_running_vm_runs_an_agent_which_ends_with_it(fleet, tmp_path):
    url, requests, arrived = fleet
    plan = CloudFaultPlan(compute=ComputeFaultPlan(latencies=IMMEDIATE))
    items = [{"key": key, "value": value} for key, value in METADATA.items()]
    with Emulator(plan=plan, agents_folder=tmp_path / "agents") as emulator:
        options = ClientOptions(api_endpoint=emulator.project.url)
        credentials = AnonymousCredentials()
        instances = api.InstancesClient(credentials=credentials, client_options=options)
        operations = api.ZoneOperationsClient(credentials=credentials, client_options=options)
        instances.insert_unary(
            project=PROJECT, zone=ZONE,
            instance_resource=api.Instance(
                name="vm", machine_type=f"zones/{ZONE}/machineTypes/ct6e-standard-4t",
                disks=[disk()], network_interfaces=[{"network": "global/networks/default"}],
                scheduling={"on_host_maintenance": "TERMINATE"},
                metadata={"items": [*items, {"key": "tpufleet-server", "value": url}]},
            ),
        )  # fmt: skip
        assert arrived.wait(60)
        path, authorization = requests[0]
        assert path.endswith("/register") and authorization == "Bearer secret"
        deletion = instances.delete_unary(project=PROJECT, zone=ZONE, instance="vm")
        ended = operations.wait(project=PROJECT, zone=ZONE, operation=deletion.name)
        assert ended.status is api.Operation.Status.DONE
        assert not emulator.engine.ledger.running()


# Without the address of the coordinator, for which JAX asks the DNS of the network.
READ = """
import json
from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster as cluster
print(json.dumps([cluster._get_worker_list_in_slice(), cluster._get_process_id_in_slice()]))
"""


@pytest.mark.slow
def test_jax_of_today_reads_the_metadata_of_a_slice_and_former_ones_could_not(emulated):
    """Until 0.9.2 it took the third part of `name:id:address`, and these names have no parts."""
    pytest.importorskip("jax", minversion="0.10.0", reason="pip install 'jax>=0.10.0'")
    pytest.importorskip("requests", reason="JAX reads metadata with it")
    world = emulated()
    world.running_slice(topology="2x4", size=2)
    names = [world.record(worker).name for worker in (0, 1)]
    address = f"{world.metadata.url.removeprefix('http://')}/{names[1]}/0"
    read = subprocess.run(
        [sys.executable, "-c", READ], check=True, capture_output=True, text=True,
        env={**os.environ, "GCE_METADATA_IP": address, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert json.loads(read.stdout) == [names, 1]
    assert not any(":" in name for name in names)
