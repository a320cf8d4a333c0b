"""A worker of `tpu extract deploy` on a host that has nothing: Ubuntu 22.04, the startup script, a
real bundle and agent."""

from __future__ import annotations

import io
import re
import shutil
import tarfile
from dataclasses import replace

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from tests.activations.test_fleet import plan
from tests.agent.control_plane import FakeControlPlane
from tests.agent.test_environment_variables import ASSIGNMENT
from tests.polling import wait_until
from tests.providers.tpu_vm.ubuntu_host import CERTIFICATES, UbuntuHost, build_bundle
from tpufleet.model.job.attempts import AttemptId
from tpufleet_activations import fleet
from tpufleet_activations.cli.deploy import worker_requirements
from tpufleet_activations.io import verification
from tpufleet_activations.io.storage import LocalFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def snapshot() -> bytes:
    """As `deploy` submits it."""
    content = worker_requirements().encode()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        entry = tarfile.TarInfo("requirements.txt")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def test_a_worker_extracts_on_a_host_that_has_only_the_agent(tmp_path, model_folder):
    folder = tmp_path / "lab"
    folder.mkdir()
    model = shutil.copytree(model_folder, folder / "model")
    out = plan(folder, model)
    [job] = fleet.worker_jobs(out, zones=["us-a"], workers_per_zone=1, accelerator="v5e-4")
    control_plane = FakeControlPlane()
    host = UbuntuHost(tmp_path / "host", build_bundle(tmp_path / "bundle"), control_plane.url)
    there = host.root / folder.relative_to("/")
    try:
        # A disk that all hosts share, say.
        shutil.copytree(folder, there)
        host.run("chmod", "-R", "a+rwX", str(folder))
        for parent in folder.parents[:-1]:
            host.run("chmod", "a+x", str(parent))
        assert host.startup().returncode == 0, host.agent_log()
        wait_until(lambda: control_plane.heartbeats, 120, host.agent_log)
        control_plane.snapshots["d1"] = snapshot()
        control_plane.assignment = replace(
            ASSIGNMENT,
            # There are no chips in this machine.
            env={"JAX_PLATFORMS": "cpu", "SSL_CERT_FILE": CERTIFICATES},
            attempt_id=AttemptId("j1.0"),
            command=tuple(job["command"]),
            snapshot="d1",
            checkpoint="",
            num_processes=1,
            process_id=0,
            worker_id=0,
        )

        def log() -> str:
            return control_plane.log("j1.0")

        ended = re.compile("command: .*exited with status|exited with status [1-9]", re.DOTALL)
        wait_until(lambda: ended.search(log()), 600, log)
        assert "exited with status 0" in log().partition("command: ")[2], log()
        copied = shutil.copytree(there / "out", tmp_path / "out")  # the host's disk is unmounted
        report = verification.verify(LocalFolder(copied))
        assert report.intact and report.samples == 32, report.problems
    finally:
        host.close()
        control_plane.close()
