"""The benchmark of the provisioner runs, at a tiny size."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tests.bench.test_smoke import BENCH, last_line, run

OPTIONS = ("--jobsets", "3", "--nodes", "2", "--operation", "1", "--run-for", "1", "--within", "90")


def test_the_benchmark_runs_and_creates_one_pool_for_each_jobset(plane):
    pytest.importorskip("google.cloud.container_v1", reason="needs the extra `gke`")
    output = run("provisioner", *OPTIONS, "--cluster", str(plane.layout.folder))
    measures = {one["name"]: one["ours"] for one in last_line(output)["measures"]}
    assert measures["pools created per JobSet"] == 1


def test_blocking_workers_wait_for_each_operation_and_their_poll(monkeypatch):
    pytest.importorskip("lightkube", reason="needs the extra `k8s`")
    monkeypatch.syspath_prepend(str(BENCH))
    spec = importlib.util.spec_from_file_location("provisioner_bench", BENCH / "provisioner.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert module.former_waits([0.0] * 7, operation=12.0) == [0, 0, 0, 15, 15, 15, 30]
