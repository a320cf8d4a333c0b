"""How JAX finds its gang on a TPU VM: its own code, with the variables of a workload and with the
attributes that Google's service writes to the metadata server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("jax", reason="pip install jax")
pytest.importorskip("requests", reason="JAX reads metadata with it")

from tests.agent.test_environment_variables import ASSIGNMENT, SETTINGS, built
from tpufleet.agent import metadata, settings
from tpufleet_testbed.cloud_tpu.metadata_server import MetadataServer, instance_values

HOSTS = 4
# What `jax.distributed.initialize()` does on a TPU VM, without starting the service.
DETECT = """
import json, os, sys
from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster
for environ in json.load(sys.stdin):
    for name in [each for each in os.environ if each.startswith(("MEGASCALE_", "TPU_", "JAX_"))]:
        del os.environ[name]
    os.environ.update(environ)
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    print(json.dumps([
        address or GceTpuCluster.get_coordinator_address(5, None),
        GceTpuCluster.get_process_count(), GceTpuCluster.get_process_id(),
    ]))
"""


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    served = MetadataServer()
    yield served
    served.close()


def describe(server: MetadataServer, slice_index: int, num_slices: int) -> str:
    """One node, as in its attributes: each line of tpu-env is YAML."""
    prefix = "gang" if num_slices > 1 else "alone"
    node = f"{prefix}-{slice_index}"
    lines = ["ACCELERATOR_TYPE: 'v5litepod-16'", f"NODE_ID: '{node}'", "ZONE: 'us-central1-a'"]
    if num_slices > 1:  # of a queued resource
        lines += [
            "MEGASCALE_COORDINATOR_ADDRESS: '10.0.0.0'",
            f"MEGASCALE_NUM_SLICES: '{num_slices}'",
            f"MEGASCALE_SLICE_ID: '{slice_index}'",
        ]
    names = [f"{prefix}-{index}" for index in range(num_slices)]
    attributes = {
        "tpu-env": "\n".join(lines),
        "worker-network-endpoints": ",".join(
            f"unknown:unknown:10.0.{slice_index}.{host}" for host in range(HOSTS)
        ),
        "tpufleet-server": "https://fleet.example",
        "tpufleet-slices": json.dumps(names),
        "tpufleet-tokens": json.dumps({name: "t" for name in names}),
        "tpufleet-hosts": str(HOSTS),
        "tpufleet-chips": "4",
    }
    server.put(node, instance_values(attributes) | {"network-interfaces/0/ip": "10.0.0.7"})
    return node


def variables(
    server: MetadataServer, node: str, host: int, slice_index: int, num_slices: int
) -> dict[str, str]:
    """Of the workload on one host, as its agent sets them."""
    identity = {"TPUFLEET_METADATA": f"{server.url}/{node}/{host}", "TPUFLEET_WORK": "/w"}
    agent = settings.from_environ(metadata.complete_environ(identity))
    return {
        **built(
            settings=replace(agent, token=SETTINGS.token),
            worker_id=host,
            hostnames=tuple(f"10.0.{slice_index}.{each}" for each in range(HOSTS)),
            slice_index=slice_index,
            num_slices=num_slices,
            process_id=slice_index * HOSTS + host,
            num_processes=num_slices * HOSTS,
            coordinator_address="10.0.0.0:8476",
            megascale_coordinator="10.0.0.0",
        ),
        "GCE_METADATA_IP": f"{server.url.removeprefix('http://')}/{node}/{host}",
    }


def detected(environs: list[dict[str, str]]) -> list[list[object]]:
    done = subprocess.run(
        [sys.executable, "-c", DETECT], input=json.dumps(environs), text=True, check=True,
        capture_output=True, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_jax_finds_the_gang_that_the_fleet_has_formed(server):
    """Also a slice of a multislice request that runs a job of its own: libtpu and JAX would wait
    for the other slices, which the metadata still names."""
    alone = describe(server, 0, num_slices=1)
    expected, environs = [], []
    for host in range(HOSTS):
        environs.append(variables(server, alone, host, slice_index=0, num_slices=1))
        expected.append(["10.0.0.0:8476", HOSTS, host])
    gang = [describe(server, index, num_slices=2) for index in (0, 1)]
    for index, node in enumerate(gang):
        for host in range(HOSTS):
            environs.append(variables(server, node, host, slice_index=index, num_slices=2))
            expected.append(["10.0.0.0:8476", 2 * HOSTS, index * HOSTS + host])
    for host in range(HOSTS):
        environs.append(variables(server, gang[1], host, slice_index=0, num_slices=1))
        expected.append(["10.0.0.0:8476", HOSTS, host])
    assert detected(environs) == expected


def test_a_slice_that_was_never_part_of_a_multislice_gets_no_such_variables():
    assert not [name for name in built() if name.startswith("MEGASCALE_")]
    assert ASSIGNMENT.num_slices == 1
