"""Programs that know JAX and nothing of tpufleet, on a slice of Compute Engine: JAX itself, of two
versions, with the variables of the agent and the metadata of the emulated VMs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("google.auth", reason="pip install 'tpufleet[compute]'")
pytest.importorskip("uv", reason="pip install uv")

import uv

from tests.agent.test_environment_variables import SETTINGS, built
from tests.providers.compute.emulated_compute import EmulatedCompute
from tests.providers.orders import order
from tpufleet.agent import metadata, settings
from tpufleet.model.fleet.cloud_slices import CloudState
from tpufleet_testbed.cloud_tpu.metadata_server import MetadataServer
from tpufleet_testbed.compute_engine.vm_hosts import VmHosts

pytestmark = pytest.mark.slow

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpufleet" / "jax"
OLD = "0.9.2"  # the last one that cannot read names without addresses
UNREACHABLE = ("Could not connect", "dns error", "error sending request", "Failed to fetch")
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


def python_with(version: str) -> Path:
    """Of an environment that stays in the cache."""
    folder = CACHE / f"{version}-{sys.version_info.major}.{sys.version_info.minor}"
    if not (folder / "complete").exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as draft:
            programs = f"{draft}/environment"
            for command in (
                ["venv", "--python", sys.executable, programs],
                ["pip", "install", "--python", programs, f"jax=={version}", "requests"],
            ):
                done = subprocess.run(
                    [uv.find_uv_bin(), *command], capture_output=True, text=True, check=False
                )
                if any(text in done.stderr for text in UNREACHABLE) and "CI" not in os.environ:
                    pytest.skip("the package index is not reachable")
                assert done.returncode == 0, done.stderr
            shutil.rmtree(folder, ignore_errors=True)
            Path(programs).rename(folder)
        (folder / "complete").touch()
    return folder / "bin" / "python"


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
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
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
        python = python_with(version)
    for worker, (status, out) in enumerate(run(python, hosts)):
        assert status == 0 and f"{version}: {worker} of 2, [0 1]" in out, out


def test_that_version_cannot_read_the_metadata_itself(hosts):
    """Without what the agent sets for it."""
    for status, out in run(python_with(OLD), hosts, left_out="OMPI_"):
        assert status != 0 and "IndexError" in out, out
