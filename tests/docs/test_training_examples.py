"""The training examples: a run that is interrupted ends exactly as one that is not."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml

from tests.docs import markdown
from tests.docs.test_examples import WITHIN, ended, job_report, logs, submit
from tests.server_process import Server, no_processes_left, wait_until
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.job import job_file
from tpufleet.model.tpu import type_lookup
from tpufleet.model.values.records import replace

EXAMPLES = markdown.EXAMPLES
needs_flax = pytest.mark.skipif(
    importlib.util.find_spec("flax") is None, reason="needs flax: pip install 'tpufleet[examples]'"
)
needs_orbax = pytest.mark.skipif(
    importlib.util.find_spec("orbax") is None,
    reason="needs orbax: pip install 'tpufleet[examples]'",
)
# Compile quickly, and once for all processes of a test; the result is the same in each.
QUICK = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_PLATFORMS": "cpu"}
SMALL = ("layers=1", "width=16", "heads=2", "length=8", "batch=8", "vocabulary=16")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("examples") / "home")
    running.start()
    yield running
    running.cleanup()
    assert no_processes_left(running.home)


def program(folder: Path, *command: str, **variables: str) -> str:
    """The output of a Python program outside tpufleet."""
    kept = {name: os.environ[name] for name in os.environ if not name.startswith("TPUFLEET_")}
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "jax"),
             "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, *command],
        cwd=markdown.ROOT, env=kept | QUICK | cache | variables,
        capture_output=True, text=True, timeout=WITHIN, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@needs_flax
@needs_orbax
@pytest.mark.parametrize(
    ("path", "settings"),
    [
        pytest.param("flax/train.py", SMALL, id="flax", marks=pytest.mark.slow),
        pytest.param(
            "llama/pretrain.py", ("batch=4", "length=8"), id="llama", marks=pytest.mark.slow
        ),
    ],
)
def test_a_run_that_is_stopped_and_continued_ends_with_the_same_bits(tmp_path, path, settings):
    driver = ("-m", "tests.docs.resumed_run", str(tmp_path), str(EXAMPLES / path))
    printed = json.loads(
        program(tmp_path, *driver, "steps=5", "every=2", *settings).splitlines()[-1]
    )
    assert printed["statuses"] == [0, 1, 0]
    whole, cut = printed["results"]
    assert cut == whole and whole["steps"] == 5


# On simulated slices


def preempt(server: Server, job: str, step: int) -> None:
    """Preempt the job once it has a checkpoint of this step, or of a later one."""

    folder = Path(server.client.job(job).job.checkpoint)

    def saved() -> bool:
        names = [path.name for path in folder.glob("[0-9]*")]
        return any(name.isdecimal() and int(name) >= step for name in names)

    wait_until(saved, WITHIN, lambda: job_report(server, job))
    server.client.inject_fault(server.client.job(job).slices[0].id, "preempt")


def result(server: Server, job: str) -> dict[str, object]:
    return json.loads((Path(server.client.job(job).job.checkpoint) / "result.json").read_text())


def set_options(**fields: object) -> list[str]:
    return [part for name, value in fields.items() for part in ("--set", f"{name}={value}")]


def compare_runs(
    server: Server, file: str, command: list[str], step: int, **fields: object
) -> None:
    """Of one job file, a run that is preempted and one that is not."""
    variables = set_options(**{f"env.{name}": value for name, value in QUICK.items()})
    options = [*set_options(**fields), *variables[:2]]  # the platform sets the other one
    plain, slow = (json.dumps([*command, f"pause={pause}"]) for pause in (0, 1))
    whole = submit(server, file, *options, *set_options(command=plain, name="whole"))
    cut = submit(server, file, *options, *set_options(command=slow, name="cut"))
    preempt(server, cut, step)
    ended(server, whole)
    attempts = ended(server, cut).attempts
    assert [attempt.end_reason for attempt in attempts] == ["preempted", "finished"]
    assert result(server, cut) == result(server, whole)
    starts = re.findall(r"from step (\d+)", "\n".join(logs(server, cut)))
    assert max(map(int, starts)) >= step, "it started over"


@pytest.mark.slow
@needs_flax
@needs_orbax
@pytest.mark.parametrize(
    "fields",
    [{"accelerator": "v5e-8"}, {"accelerator": "v5e-4", "slices": 2}],
    ids=["single-slice", "multislice"],
)
def test_flax_orbax_and_grain_continue_bit_for_bit_after_a_preemption(server, fields):
    file = "flax/multislice.yaml" if "slices" in fields else "flax/job.yaml"
    command = ["python", "train.py", "steps=16", "every=4"]
    compare_runs(server, file, command, 4, **fields)


@pytest.mark.scale
@needs_flax
@needs_orbax
@pytest.mark.parametrize(
    ("fault", "reason"), [("preempt", "preempted"), ("crash", "user_error")], ids=["slice", "crash"]
)
def test_steps_that_were_saved_on_hosts_alone_survive(server, fault, reason):
    """A new slice gets them from the disks of the other one; after a crash every host has its own.
    Nothing is at the checkpoint location."""
    arguments = [*SMALL, "steps=20", "every=1000", "emergency=1", "pause=1"]
    command = json.dumps(["python", "train.py", *arguments])
    options = set_options(**{"env.XLA_FLAGS": QUICK["XLA_FLAGS"], "command": command})
    job = submit(server, "flax/multislice.yaml", *options)
    at = wait_until(
        lambda: at if (at := reported_step(server, job)) >= 4 else None,
        WITHIN,
        lambda: job_report(server, job),
    )
    if fault == "crash":
        processes_of(server, job)[-1].kill()
    else:
        server.client.inject_fault(server.client.job(job).slices[0].id, fault)
    attempts = ended(server, job).attempts
    assert [attempt.end_reason for attempt in attempts] == [reason, "finished"]
    for process in range(2):
        text = "".join(server.client.logs(job, host=process, attempt=1))
        assert int(re.search(r"from step (\d+)", text)[1]) >= at - 2, text


def reported_step(server: Server, job: str) -> int:
    progress = server.client.job(job).row.progress
    return progress.step or 0 if progress is not None else 0


def processes_of(server: Server, job: str) -> list[psutil.Process]:
    """Of its program."""
    running = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # ended meanwhile, or another user's
            if process.cmdline()[1:2] == ["train.py"]:
                running.append((process.environ().get("TPUFLEET_JOB_ID"), process))
    return [process for owner, process in running if owner == job]


@pytest.mark.slow
@needs_orbax
def test_llama_pretraining_continues_bit_for_bit_after_a_preemption(server):
    command = ["python", "pretrain.py", "steps=16", "every=4"]
    compare_runs(server, "llama/job.yaml", command, 4, accelerator="v5e-8")


@pytest.mark.slow
@needs_orbax
def test_elastic_pretraining_goes_on_without_a_lost_slice_to_the_same_loss(server):
    """The pool has no other slice, so it ends on three."""
    pool = server.client.put_pool(
        Pool(name="elastic", provider="local", accelerator="v5litepod-4", largest=4)
    )
    options = set_options(**{"env.XLA_FLAGS": QUICK["XLA_FLAGS"], "pool": pool.name})
    results = []
    for pause, name in ((0, "undisturbed"), (1, "disturbed")):
        command = json.dumps(["python", "pretrain.py", "steps=16", "every=4", f"pause={pause}"])
        job = submit(
            server, "llama/elastic.yaml", *options, *set_options(command=command, name=name)
        )
        if name == "disturbed":
            server.client.put_pool(replace(pool, largest=3))
            preempt(server, job, 4)
        attempts = ended(server, job).attempts
        results.append(result(server, job))
    assert [len(attempt.slices) for attempt in attempts] == [4, 3]
    assert [attempt.end_reason for attempt in attempts] == ["preempted", "finished"]
    assert results[1]["loss"] == pytest.approx(results[0]["loss"], rel=1e-4)


@pytest.mark.slow
def test_fine_tuning_from_safetensors_leaves_an_adapter_that_lowers_the_loss(server):
    pytest.importorskip("optax")
    import safetensors.numpy

    job = submit(server, "llama/finetune.yaml")
    folder = Path(ended(server, job).job.checkpoint) / "adapter"
    first, last = re.findall(r"step \d+: loss ([0-9.]+)", "\n".join(logs(server, job)))
    assert float(last) < 0.8 * float(first)
    tensors = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    assert tensors[name].shape == (64, 4) and np.abs(tensors[name]).max() > 0
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "v_proj"]


@pytest.mark.slow
def test_a_sweep_finds_the_best_rate_and_compare_shows_it(server):
    variables = {"TPUFLEET_HOME": str(server.home), "TPUFLEET_SERVER": server.url}
    rates = ("0.001", "0.1", "0.01")
    printed = program(server.home, "examples/sweep/sweep.py", "v5e-1", *rates, **variables)
    assert "best: lr=0.1," in printed
    command = printed.splitlines()[-1].removeprefix("next: tpu ").split()
    compared = program(server.home, "-m", "tpufleet", *command, "--json", **variables)
    metrics = json.loads(compared)["comparison"]["metrics"]
    assert min(metrics["loss"]) == metrics["loss"][1]


@pytest.mark.slow
def test_batch_inference_counts_every_unit_once_though_a_slice_is_preempted(server, tmp_path):
    out = tmp_path / "predictions"
    command = json.dumps(["python", "infer.py", f"out={out}", "units=12", "unit_seconds=1"])
    fields = {"command": command, "accelerator": "v5e-4"}
    job = submit(server, "batch/job.yaml", *set_options(**fields))

    def kept() -> int:
        progress = server.client.job(job).row.progress
        return (progress and progress.checkpoint_step) or 0

    wait_until(lambda: kept() >= 3, WITHIN, lambda: job_report(server, job))
    server.client.inject_fault(server.client.job(job).slices[0].id, "preempt")
    detail = ended(server, job)
    assert [attempt.end_reason for attempt in detail.attempts] == ["preempted", "finished"]
    assert (detail.row.progress.step, detail.row.progress.total) == (12, 12)
    messages = [event.message for event in server.client.events(job).events]
    assert not any("no checkpoint" in message for message in messages), "units were kept"
    listing = json.loads((out / "index.json").read_text())
    assert [int(unit) for unit in listing] == list(range(12))
    read = f"import infer; print(infer.read({str(out)!r}).shape)"
    printed = program(tmp_path, "-c", read, PYTHONPATH=str(EXAMPLES / "batch"))
    assert printed.strip() == "(768,)"


@pytest.mark.slow
def test_hello_world_computes_its_parallelism_from_the_slices(server):
    job = submit(server, "sharding/job.yaml")
    ended(server, job)
    assert "dcn_data_parallelism=2 ici_fsdp_parallelism=4" in "\n".join(logs(server, job))


# Files


@pytest.mark.parametrize(("kind", "slices"), [("v5e-16", 1), ("v5e-16", 2), ("v5p-128", 4)])
def test_maxtext_gets_the_parallelism_of_its_slices(tmp_path, kind, slices):
    """The command of the job file, with the variables of a host and a python3 that prints."""
    (tmp_path / "python3").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    spec = job_file.parse_job(yaml.safe_load((EXAMPLES / "maxtext/job.yaml").read_text()))
    shape = type_lookup.find(kind)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "MAXTEXT_HOME": str(tmp_path),
        "TPUFLEET_NUM_PROCESSES": str(shape.hosts * slices),
        "TPUFLEET_CHIPS": str(shape.chips_per_host), "TPUFLEET_CHECKPOINT_DIR": "gs://b/c",
        **({"MEGASCALE_NUM_SLICES": str(slices)} if slices > 1 else {}), **spec.env,
    }  # fmt: skip
    done = subprocess.run(spec.command, env=variables, capture_output=True, text=True, check=True)
    arguments = done.stdout.split()
    assert f"dcn_data_parallelism={slices}" in arguments
    assert f"ici_fsdp_parallelism={shape.chips}" in arguments
    assert {"enable_checkpointing=true", "base_output_directory=gs://b/c"} <= set(arguments)


@pytest.mark.parametrize("loss", ["10.871", "1e-05", "2.5E+3", "nan", "inf"])
def test_every_loss_that_maxtext_prints_is_found(loss):
    spec = job_file.parse_job(yaml.safe_load((EXAMPLES / "maxtext/job.yaml").read_text()))
    line = f"completed step: 49, seconds: 1.9, TFLOP/s/device: 61.2, loss: {loss}, total_weights: 8"
    found = {name: re.search(pattern, line)[1] for name, pattern in spec.metrics.items()}
    assert found == {"step": "49", "loss": loss}


def requirement_names(file: Path) -> set[str]:
    return set(re.findall(r"^[a-z0-9-]+", file.read_text(), re.MULTILINE))


def imported_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


@pytest.mark.parametrize(
    "file", sorted(EXAMPLES.glob("*/requirements.in")), ids=lambda file: file.parent.name
)
def test_the_environment_of_an_example_has_what_its_programs_import(file):
    packages = {name.replace("-", "_") for name in requirement_names(file)}
    # Packages that others bring along, or that are imported under another name.
    packages |= {"numpy", "tpufleet", "tpufleet_activations"} | (
        {"etils", "orbax"} if "orbax_checkpoint" in packages else set()
    )
    local = {path.stem for path in file.parent.glob("*.py")}
    imported = {
        name.partition(".")[0]
        for path in file.parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in imported_names(node)
    }
    assert imported - local - set(sys.stdlib_module_names) <= packages


@pytest.mark.parametrize(
    "file", sorted(EXAMPLES.glob("*/requirements.in")), ids=lambda file: file.parent.name
)
def test_the_environment_of_an_example_is_locked(file):
    """`scripts/lock` renews the versions; TPU VMs install exactly these."""
    locked = file.with_suffix(".txt").read_text()
    assert requirement_names(file) | {"libtpu"} <= requirement_names(file.with_suffix(".txt"))
    assert all("==" in line for line in locked.splitlines() if line[0] not in " #")
    assert len(re.findall(r"==.*\\\n    --hash=", locked)) == len(re.findall(r"[\w\]]==", locked))


def test_the_llama_example_stays_under_400_lines():
    lines = [
        (EXAMPLES / "llama" / name).read_text().splitlines() for name in ("model.py", "pretrain.py")
    ]
    assert sum(map(len, lines)) < 400
