"""Programs that know JAX and nothing of tpufleet, on a slice of Compute Engine: JAX itself, of two
versions, with the variables of the agent and the metadata of the emulated VMs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("google.auth", reason="pip install 'tpufleet[compute]'")

from tests import cached_environments
from tests.agent.test_environment_variables import SETTINGS, built
from tests.ports import free_port
from tests.providers.compute.emulated_compute import EmulatedCompute
from tests.providers.orders import order
from tpufleet.agent import metadata, settings
from tpufleet.model.fleet.cloud_slices import CloudState
from tpufleet_testbed.cloud_tpu.metadata_server import MetadataServer
from tpufleet_testbed.compute_engine.vm_hosts import VmHosts

pytestmark = pytest.mark.slow

OLD = "0.9"  # the last one that cannot read names without addresses
# Where libtpu finds chips, JAX looks for a cluster of TPUs, and reads the metadata. These are CPUs.
PROGRAM = """
import os, sys
import jax
os.environ.pop("TPU_SKIP_MDS_QUERY", None)
from jax._src.clusters import cloud_tpu_cluster, cluster
cloud_tpu_cluster.running_in_cloud_tpu_vm = cluster.running_in_cloud_tpu_vm = True
jax.distributed.initialize(initialization_timeout=300)
from jax.experimental import multihost_utils
ranks = multihost_utils.process_allgather(jax.numpy.array([jax.process_index()]))
seen = f"{jax.__version__}: {jax.process_index()} of {jax.process_count()}, {ranks.ravel()}"
sys.stdout.write(f"\\n{seen}\\n")
"""


class PublishedVms(VmHosts):
    """VMs that are only their metadata."""

    def __init__(self, server: MetadataServer) -> None:
        self._server = server

    def boot(self, vm, values) -> None:
        self._server.put(vm.key, dict(values))


@pytest.fixture
def hosts(tmp_path) -> Iterator[list[str]]:
    """Addresses of the metadata of a slice with two hosts, in the order of workers."""
    world = EmulatedCompute(tmp_path)
    world.engine.hosts = PublishedVms(world.emulator.metadata)
    world.provider.request(order("a", accelerator="v5p-16"))
    while world.listed()["a"].state is not CloudState.UP:
        world.pass_time(5)
    vms = sorted(world.engine.vms.values(), key=lambda vm: vm.worker)
    yield [f"{world.emulator.metadata.url}/{vm.key}/0" for vm in vms]
    world.close()


def old_python() -> Path:
    return cached_environments.programs(f"jax-{OLD}") / "python"


def variables(host: str, worker: int, port: int) -> dict[str, str]:
    """Of the workload on one host, as its agent sets them."""
    identity = {"TPUFLEET_METADATA": host, "TPUFLEET_WORK": "/w"}
    agent = settings.from_environ(metadata.complete_environ(identity))
    assert agent.host_index == worker
    return built(
        settings=replace(agent, token=SETTINGS.token), worker_id=worker, slice_index=0,
        hostnames=("127.0.0.1", "127.0.0.1"), process_id=worker, num_processes=2,
        coordinator_address=f"127.0.0.1:{port}", accelerator="v5p-16",
    )  # fmt: skip


def run(python: Path, hosts: list[str], left_out: str = "none") -> list[tuple[int, str]]:
    """Exit status and output of the program on each host."""
    port = free_port()
    running = [
        subprocess.Popen(
            [str(python), "-c", PROGRAM], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={
                **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
                **{
                    name: value
                    for name, value in variables(host, worker, port).items()
                    if not name.startswith(left_out)
                },
                "GCE_METADATA_IP": host.removeprefix("http://"), "JAX_PLATFORMS": "cpu",
            },
        )
        for worker, host in enumerate(hosts)
    ]  # fmt: skip
    return [(each.returncode, out) for each in running for out in [each.communicate()[0]]]


@pytest.mark.parametrize("version", [OLD, "installed"])
def test_initialize_without_arguments_joins_the_hosts_of_a_slice(hosts, version):
    if version == "installed":
        jax = pytest.importorskip("jax", minversion="0.10.0", reason="pip install 'jax>=0.10.0'")
        version, python = jax.__version__, Path(sys.executable)
    else:
        python = old_python()
    for worker, (status, out) in enumerate(run(python, hosts)):
        assert status == 0 and re.search(rf"{version}\S*: {worker} of 2, \[0 1\]", out), out


def test_that_version_cannot_read_the_metadata_itself(hosts):
    """Without what the agent sets for it."""
    for status, out in run(old_python(), hosts, left_out="OMPI_"):
        assert status != 0 and "IndexError" in out, out
