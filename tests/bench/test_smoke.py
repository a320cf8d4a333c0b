"""Every benchmark runs: tiny sizes, exit status 0, and the last line is JSON."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.polling import wait_until

BENCH = Path(__file__).resolve().parents[2] / "bench"
TOY = {"EXTRACT_BENCH_TOY": "1", "JAX_PLATFORMS": "cpu"}
# Run by a benchmark in this table, or imported by one.
PARTS = {
    "agent_load",
    "databases",
    "extract_gpu_files",
    "extract_gpu_ours",
    "extract_gpu_ragged",
    "extract_gpu_shape",
    "extract_gpu_torch",
    "extract_gpu_torch_packed",
    "fleets",
    "planner_iris",
    "recovery_step_program",
    "reporting",
    "servers",
}
RUNS = {
    "planner": ["--waiting", "50", "--gangs", "8", "--free", "2", "--rounds", "1"],
    "submit": ["--calls", "3", "--rounds", "1", "--bulk", "20"],
    "listing": ["--scale", "0.005"],
    "hold": ["--jobs", "5", "--seconds", "3", "--spread", "1"],
    "scale": [
        *("--hosts", "24", "--ended", "20", "--seconds", "3", "--spread", "1"),
        *("--setups", "sqlite", "--without-loss"),
        *("--load-processes", "1"),
    ],
    "recovery": ["--slices", "6", "--losses", "1", "--at-once", "2", "--latency", "0.01"],
    "recovery_step": ["--rounds", "1", "--kind", "process crash", "--accelerator", "v5e-8"],
    "idle": ["--seconds", "0.2", "--rounds", "1"],
    "web": ["--jobs", "60", "--browsers", "4", "--seconds", "0.5", "--rounds", "1"],
    "yardstick": [],
}
# The others take long even at tiny sizes; by default only their options load.
BY_DEFAULT = {"planner", "submit", "yardstick"}
STORAGE = "extract_storage"
STORAGE_OPTIONS = ("--mib", "8", "--rounds", "1", "--units", "1000")
# With a test of their own. That of the provisioner needs a control plane:
# tests/k8s/test_provisioner_bench.py.
ELSEWHERE = (
    *("extract_cpu", "extract_gpu", "extract_models", "extract_parity", "extract_streams"),
    *("goodput", STORAGE, "provisioner"),
)
GPU_MODULES = (
    "extract_gpu_files",
    "extract_gpu_ours",
    "extract_gpu_ragged",
    "extract_gpu_shape",
    "extract_gpu_torch",
    "extract_gpu_torch_packed",
)


def run(name: str, *options: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCH / f"{name}.py"), *options],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def last_line(output: str) -> dict[str, object]:
    result = json.loads(output.strip().splitlines()[-1])
    assert isinstance(result, dict)
    return result


def test_every_file_is_covered():
    names = {path.stem for path in BENCH.glob("*.py")}
    assert names == PARTS | set(RUNS) | set(ELSEWHERE)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in RUNS],
)
def test_a_benchmark_runs_and_ends_with_json(name):
    assert last_line(run(name, *RUNS[name]))


@pytest.mark.parametrize("name", [*sorted(RUNS.keys() - BY_DEFAULT), "extract_cpu", STORAGE])
def test_a_benchmark_has_the_options_of_its_run(name):
    described = run(name, "--help")
    options = (*RUNS.get(name, ()), *(STORAGE_OPTIONS if name == STORAGE else ()))
    assert [option for option in options if option[:2] == "--" and option not in described] == []


@pytest.mark.parametrize("name", sorted(set(RUNS) - {"yardstick"} | set(ELSEWHERE)))
def test_a_benchmark_cleans_up_when_it_is_terminated(name):
    assert "run_benchmark(main)" in (BENCH / f"{name}.py").read_text()


def test_the_goals_of_recoveries_are_met_without_what_is_not_ours(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    bench = importlib.import_module("recovery_step")
    rounds = [{"total": 5.0, "restore": 1.0, "compile": 2.0}]
    measures = bench.measures_of("steps", "process crash", rounds)
    assert [(each.ours, each.met) for each in measures] == [(5.0, False), (5.0, True), (2.0, True)]
    (hung, *_) = bench.measures_of("llama", "hang", [{"total": bench.EXAMPLE_HUNG_AFTER + 14}])
    assert hung.met, "its program decides when a hang is one"


def test_a_terminated_benchmark_leaves_no_processes_and_no_files(tmp_path):
    benchmark = subprocess.Popen(
        [sys.executable, str(BENCH / "hold.py"), "--jobs", "5", "--seconds", "120"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        started = wait_until(lambda: psutil.Process(benchmark.pid).children(recursive=True))
        wait_until(lambda: list(tmp_path.glob("*/server.json")))
        benchmark.terminate()
        assert benchmark.wait(900) == 128 + signal.SIGTERM
    finally:
        benchmark.kill()
    assert not any(process.is_running() for process in started)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_cpu_extraction_runs_and_ends_with_json():
    for package in ("jax", "safetensors"):
        pytest.importorskip(package, reason=f"needs the package {package}")
    assert "ours" in last_line(run("extract_cpu", **TOY))


@pytest.mark.slow
def test_goodput_is_that_of_the_library_of_google():
    assert last_line(run("goodput", "--rounds", "1", "--steps", "100"))["met"]


@pytest.mark.slow
def test_parity_with_transformers_is_met_and_ends_with_json():
    for package in ("jax", "torch", "transformers"):
        pytest.importorskip(package, reason=f"needs the package {package}")
    result = last_line(run("extract_parity", "--models", "google/gemma-3-270m", **TOY))
    assert result["met"] and result["models"] == 1


@pytest.mark.slow
def test_the_storage_of_extractions_runs_and_ends_with_json():
    for package in ("jax", "google.cloud.storage"):
        pytest.importorskip(package, reason=f"needs the package {package}")
    measures = last_line(run(STORAGE, *STORAGE_OPTIONS, JAX_PLATFORMS="cpu"))["measures"]
    assert isinstance(measures, list) and len(measures) >= 2


def test_the_options_and_modules_of_the_gpu_benchmarks_load():
    for name in ("extract_gpu", "extract_models"):
        assert "--seconds" in run(name, "--help")
    script = "import " + ", ".join(GPU_MODULES)
    subprocess.run([sys.executable, "-c", script], cwd=BENCH, check=True, timeout=900)


@pytest.mark.slow
@pytest.mark.parametrize("child", ["moe", "qwen3-4b command"])
def test_the_measurements_of_several_models_run_without_a_gpu(child):
    pytest.importorskip("jax", reason="needs the package jax")
    facts = json.loads(run("extract_models", "--child", child, **TOY).split("FACTS ")[-1])
    assert facts["512"]["tflops"] > 0 if child == "moe" else facts["second"]["tokens"] > 0


@pytest.mark.slow
def test_streams_and_latents_are_measured():
    pytest.importorskip("jax", reason="needs the package jax")
    options = ("--entries", "5000000", "--batches", "12")
    assert last_line(run("extract_streams", *options, **TOY))


def test_the_writers_of_the_gpu_benchmark_run_without_a_gpu():
    for package in ("numpy", "ml_dtypes"):
        pytest.importorskip(package, reason=f"needs the package {package}")
    output = run("extract_gpu", "--child", "writers", **TOY)
    facts = json.loads(output.strip().splitlines()[-1].removeprefix("FACTS "))
    assert facts["raw_bytes_per_second"] > 0


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs a GPU")
def test_the_gpu_benchmark_runs_and_ends_with_json():
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs the package torch")
    assert "ours" in last_line(run("extract_gpu", "--seconds", "120", EXTRACT_BENCH_TOY="1"))
