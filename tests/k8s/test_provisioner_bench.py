"""The benchmark of the provisioner runs, at a tiny size, and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests.bench.test_smoke import BENCH, last_line, run
from tests.polling import wait_until
from tpufleet_testbed.kubernetes import binaries
from tpufleet_testbed.kubernetes.processes import ProcessRegistry

# JobSets of one shape, whose pods go to any pool that is free: also one that is to be deleted.
OPTIONS = (
    "--jobsets",
    "6",
    "--nodes",
    "2",
    "--operation",
    "1",
    "--run-for",
    "1",
    "--within",
    "120",
)


@pytest.mark.slow
def test_the_benchmark_ends_and_no_pool_is_deleted_under_a_jobset(plane):
    pytest.importorskip("google.cloud.container_v1", reason="needs the extra `gke`")
    output = run("provisioner", *OPTIONS, "--cluster", str(plane.layout.folder))
    measures = {one["name"]: one["ours"] for one in last_line(output)["measures"]}
    assert measures["JobSets that failed"] == 0
    assert measures["pools created per JobSet"] <= 1


def test_blocking_workers_wait_for_each_operation_and_their_poll(monkeypatch):
    pytest.importorskip("lightkube", reason="needs the extra `k8s`")
    monkeypatch.syspath_prepend(str(BENCH))
    spec = importlib.util.spec_from_file_location("provisioner_bench", BENCH / "provisioner.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert module.former_waits([0.0] * 7, operation=12.0) == [0, 0, 0, 15, 15, 15, 30]


STARTED_BY = {
    "the benchmark": [str(BENCH / "provisioner.py")],
    "tpu cluster local up": ["-m", "tpufleet", "cluster", "local", "up"],
}


@pytest.mark.slow
@pytest.mark.parametrize("argv", STARTED_BY.values(), ids=STARTED_BY)
def test_a_control_plane_does_not_outlive_who_was_terminated_while_starting_it(argv, tmp_path):
    for package in ("lightkube", "google.cloud.container_v1"):
        pytest.importorskip(package, reason="needs the extras `k8s` and `gke`")
    if binaries.find_cached() is None or shutil.which("openssl") is None:
        pytest.skip("control plane not built; run `tpu cluster local build` (requires Go)")
    environment = {"TMPDIR": str(tmp_path), "TPUFLEET_HOME": str(tmp_path)}
    process = subprocess.Popen([sys.executable, *argv], env={**os.environ, **environment})
    try:
        found = wait_until(lambda: list(tmp_path.rglob("processes.json")))
        registry = ProcessRegistry(found[0].parent)
        started = wait_until(lambda: len(registry.all()) > 1 and registry.all())
        process.terminate()
        assert process.wait(900) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert [record.name for record in started if record.process] == []
