"""The examples on hosts that have nothing: Ubuntu 22.04, the startup script, the bundle, the agent
and the packages of the index, each host in a network of its own. JAX computes on their CPUs."""

from __future__ import annotations

import hashlib
import socket
from dataclasses import replace
from datetime import timedelta

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from tests.docs import markdown
from tests.providers.tpu_vm import host_network
from tests.providers.tpu_vm.bare_hosts import BareHosts
from tests.providers.tpu_vm.emulated_fleet import Fleet
from tests.providers.tpu_vm.ubuntu_host import build_bundle
from tpufleet_testbed.cloud_tpu.locations import IMMEDIATE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

ZONE = "us-central1-a"
# Name of a job file below examples, and what its log has.
EXAMPLES = {
    "hello/job.yaml": "process 3 of 4 here",
    "plain/job.yaml": "",
    "multislice/job.yaml": "",
    "train/job.yaml": "",
    "batch/job.yaml": "",
    "sharding/job.yaml": "",
    "llama/job.yaml": "",
    "llama/finetune.yaml": "",
    "llama/elastic.yaml": "",
    "flax/job.yaml": "",
    "flax/multislice.yaml": "",
    "sweep/jobs.yaml": "lr=0.1 loss=",
    "extract/job.yaml": "",
}
# On GKE; with other sizes and buckets; the programs of other examples in a pool.
NOT_HERE = ("maxtext/*", "jobset/*", "gke/*", "*/*full.yaml", "pool/*")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    host_network.require_namespaces()
    for name in host_network.PACKAGE_INDEX:
        try:
            socket.create_connection((name, 443), timeout=30).close()
        except OSError as error:
            pytest.skip(f"the package index is not reachable: {name}: {error}")
    folder = tmp_path_factory.mktemp("examples")
    bundle = build_bundle(folder / "bundle")
    shared = folder / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    digest = hashlib.sha256(bundle.read_bytes()).hexdigest()
    fleet = Fleet(
        folder / "fleet",
        (ZONE,),
        settings={"bundle": f"gs://{bundle.name}", "bundle_sha256": digest},
        latencies=replace(IMMEDIATE, boot=timedelta(seconds=1), deletion=timedelta(seconds=1)),
    )
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    fleet.hosts = BareHosts(
        folder / "hosts", fleet.emulator, bundle=bundle, shared=shared, environ=devices
    )
    fleet.shared = shared
    yield fleet
    fleet.close()
    fleet.hosts.close()


# The others are as large: a host with JAX takes a gigabyte.
ORDINARY = {"hello/job.yaml", "batch/job.yaml", "extract/job.yaml"}


@pytest.mark.parametrize(
    ("example", "printed"),
    [
        pytest.param(*each, id=each[0], marks=() if each[0] in ORDINARY else pytest.mark.scale)
        for each in EXAMPLES.items()
    ],
)
def test_an_example_runs_on_hosts_that_have_nothing(fleet, example, printed):
    options = ["--set", f"checkpoint={fleet.shared / example.replace('/', '-')}"]
    if example == "sweep/jobs.yaml":  # its jobs write none, and may not share a folder
        options = []
    submitted = fleet.tpu.json("submit", str(markdown.ROOT / "examples" / example), *options)
    jobs = [job["id"] for job in submitted["jobs"]]
    states = lambda: {fleet.states()[job] for job in jobs}
    fleet.until(lambda: states() <= {"succeeded", "failed", "cancelled"}, example, 1800)
    log = "".join(fleet.tpu("logs", job).output for job in jobs)
    assert states() == {"succeeded"}, log + fleet.hosts.logs()
    assert printed in log
    fleet.until(lambda: not fleet.nodes(), "every node is deleted", 120)


def test_every_job_file_among_the_examples_runs_here_or_is_named():
    folder = markdown.ROOT / "examples"
    elsewhere = {path for pattern in NOT_HERE for path in folder.glob(pattern)}
    here = {path.relative_to(folder).as_posix() for path in {*folder.rglob("*.yaml")} - elsewhere}
    assert here == set(EXAMPLES)
