"""`tpu extract deploy` and `board`: preparing the dataset, submitting jobs, fleet status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.activations import synthetic
from tests.activations.tiny_model import SMALL_DEVICES, task
from tests.server_process import Server, no_processes_left, wait_until
from tests.service.harness import ServiceHarness
from tests.views.cli_runner import Tpu
from tests.views.conftest import cli_for_user
from tpufleet.errors import BadInput, Conflict
from tpufleet.model.job.jobs import ENDED_STATES
from tpufleet.runtime.units import Units
from tpufleet.stores.base import JobQuery
from tpufleet.stores.memory import MemoryStore
from tpufleet_activations import fleet, plans
from tpufleet_activations.io import datasets, unit_writer, verification
from tpufleet_activations.io.storage import LocalFolder

SITES = ("--site", "resid_post.[0,1],mlp_out.2")


def pairs(number: int) -> list:
    """A task as datasets write it: input and output of each pair, the last being the test."""
    new_task = task(number)
    return [[pair["input"], pair["output"]] for pair in new_task["train"] + new_task["test"]]


def write_pairs(path: Path, count: int) -> Path:
    rows = [json.dumps({"examples": pairs(number)}) for number in range(count)]
    path.write_text("\n".join([*rows, json.dumps({"examples": "nothing"})]))
    return path


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path / "home")
    server.start()
    yield server
    server.cleanup()
    assert no_processes_left(server.home)


@pytest.fixture
def world(tmp_path):
    """A control plane without any capacity: jobs wait."""
    (tmp_path / "server").mkdir()
    world = ServiceHarness(MemoryStore(), tmp_path / "server")
    world.start()
    yield world
    world.close()


def arguments(out: str, model: Path, data: Path, *more: str) -> list[str]:
    wanted = ["--zones", "local-a,local-b", "--tpu-type", "v5e-4", "--model", str(model)]
    return ["extract", "deploy", out, *wanted, "--dataset", str(data), *SITES, *more]


@pytest.mark.slow
def test_a_fleet_extracts_and_verifies_a_dataset(server, tmp_path, model_folder):
    out, folder = f"file://{tmp_path / 'out'}", LocalFolder(tmp_path / "out")
    data = write_pairs(tmp_path / "pairs.jsonl", 5)
    tpu = Tpu(HOME=str(tmp_path), TPUFLEET_HOME=str(server.home))
    watched = (
        "--monitor",
        "--monitor_interval",
        "0.5",
        "--max_samples",
        "4",
    )  # spelling of the older scripts
    answer = tpu(
        *arguments(out, model_folder, data, *watched, "--stream-offset", "6", "--max-length=1600"),
        "--compute=f32",
        "--",
        "--writers=2",
    )
    errors = "\n".join(str(row) for row in server.client.all_jobs())
    assert answer.exit_code == 0, f"{answer.output}\n{errors}\n{server.log_tail()}"
    assert "uploaded 4 tasks (0 invalid) in 2 streams; planned 32 samples" in answer.stderr
    assert sorted(folder.names("streams/")) == [f"streams/stream_{n:03d}.jsonl" for n in (6, 7)]
    report = verification.verify(folder)
    assert report.intact and report.samples == 32, report.problems
    assert {row["task_id"] for row in map(datasets.Dataset(folder).metadata, range(32))} == {
        f"task_{number:08x}" for number in range(4)
    }

    status = tpu.json("extract", "board", out)
    assert [row["name"] for row in status["workers"]] == ["tpu-local-a-0", "tpu-local-b-0"]
    assert sum(row["samples"] for row in status["workers"]) == status["totals"]["samples"] == 32
    assert status["done"] and status["needs_recovery"] == 0
    table = tpu.ok("extract", "board", out).splitlines()
    assert table[0].split("  ")[0] == "TPU NAME" and table[0].split()[2:] == [
        "STATUS", "SAMPLES", "SHARDS", "GCS",
    ]  # fmt: skip
    assert table[3].split()[:4] == ["TOTALS", "32", "of", "32"]
    assert table[4].startswith("Healthy: ") and "Needs Recovery: 0" in table[4]
    for row in server.client.all_jobs(state="live"):
        wait_until(
            lambda row=row: server.client.job(row.id).row.state in ENDED_STATES,
            120,
            lambda: "the other worker finds that all is done",
        )


def test_workers_outlive_the_monitor_and_a_second_deploy_starts_only_missing_ones(
    world, tmp_path, model_folder
):
    out = f"file://{tmp_path / 'out'}"
    data = write_pairs(tmp_path / "pairs.jsonl", 2)
    tpu = cli_for_user(world, tmp_path, "mel")
    call = arguments(out, model_folder, data, "--monitor", "--monitor-interval=0.1", "--json")
    left = subprocess.Popen(
        [sys.executable, "-m", "tpufleet", *call],
        env={**os.environ, **SMALL_DEVICES, **tpu.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    seen = json.loads(left.stdout.readline())
    assert {row["status"] for row in seen["workers"]} <= {"QUEUED", "MISSING"}
    left.send_signal(signal.SIGINT)
    _, errors = left.communicate(timeout=900)
    assert left.returncode == 130 and "Traceback" not in errors
    assert f"`tpu extract board {out}` shows them" in errors
    jobs = world.store.jobs(JobQuery())
    assert len(jobs) == 2
    assert not any(job.state in ENDED_STATES or job.cancel_requested_by for job in jobs)
    answer = tpu("extract", "deploy", out, "--zones", "local-a,local-b,local-c", "--skip-dataset",
                 "--tpu-type", "v5e-4")  # fmt: skip
    assert answer.exit_code == 0, answer.output
    assert "submitted tpu-local-c-0" in answer.stderr
    assert "2 workers are already running" in answer.stderr
    assert sorted(job.spec.name for job in world.store.jobs(JobQuery())) == [
        "tpu-local-a-0", "tpu-local-b-0", "tpu-local-c-0",
    ]  # fmt: skip


def test_create_tpus_creates_a_pool(world, tmp_path):
    out = f"file://{tmp_path / 'out'}"
    plans.write(LocalFolder(tmp_path / "out"), synthetic.plan())
    admin = cli_for_user(world, tmp_path, "ada")
    more = ("--tpu-type", "v5e-8", "--create-tpus", "--provider", "local", "--skip-dataset")
    answer = admin("extract", "deploy", out, "--zones", "local-a", "--workers_per_zone=3", *more)
    assert answer.exit_code == 0, answer.output
    (pool,) = world.store.pools()
    assert (pool.name, pool.smallest, pool.largest) == (fleet.fleet_tag(out), 3, 3)
    assert {job.spec.pool for job in world.store.jobs(JobQuery())} == {pool.name}


def test_dry_run_and_skip_launch_submit_nothing(world, tmp_path, model_folder):
    out = f"file://{tmp_path / 'out'}"
    data = write_pairs(tmp_path / "pairs.jsonl", 2)
    tpu = cli_for_user(world, tmp_path, "mel")
    printed = tpu(*arguments(out, model_folder, data, "--dry-run", "--json"))
    documents = json.loads(printed.stdout)
    assert documents and all(document["command"] for document in documents)
    dry = tpu(*arguments(out, model_folder, data, "--dry-run"))
    assert dry.exit_code == 0 and dry.stdout.count('"command"') == 2
    assert not fleet.is_planned(out)
    assert tpu(*arguments(out, model_folder, data, "--skip-launch")).exit_code == 0
    assert fleet.is_planned(out) and world.store.jobs(JobQuery()) == []
    again = tpu(*arguments(out, model_folder, data, "--skip-launch"))
    assert again.exit_code == 1 and "--skip-dataset" in again.stderr


@pytest.mark.parametrize(
    "message, more",
    [
        ("has no plan", ("file:///nowhere/x", "--skip-dataset")),
        ("OUT or --gcs-bucket", ()),
        ("OUT or --gcs-bucket", ("gs://b/x", "--gcs_bucket", "b")),
        ("folder on this machine", ("/tmp/x",)),
    ],
)
def test_invalid_deployments_are_rejected_with_a_message(tmp_path, message, more):
    tpu = Tpu(HOME=str(tmp_path), TPUFLEET_HOME=str(tmp_path / "state"))
    answer = tpu("extract", "deploy", "--zones", "local-a", *more)
    assert answer.exit_code != 0 and message in answer.stderr


def test_fleet_status_combines_all_runs_of_a_worker(tmp_path):
    folder, clock = LocalFolder(tmp_path), lambda: 1_000.0
    out = f"file://{tmp_path}"
    wanted = plans.write(folder, synthetic.plan(samples=12, unit_samples=4))
    done = Units(folder, count=3, worker="job-1-0-0", clock=clock)
    claim = done.claim()
    files = synthetic.record(folder, wanted, claim)
    done.commit(claim, unit_writer.commit_outcome(wanted, claim.unit, files))
    Units(folder, count=3, worker="job-3-0-0", clock=clock).claim()
    Units(folder, count=3, worker="job-2-0-0", clock=lambda: 900.0).claim()
    jobs = [
        fleet.WorkerJob(name="tpu-a-0", job_id="job-3", state="running"),
        fleet.WorkerJob(name="tpu-a-1", job_id="job-2", state="recovering"),
        fleet.WorkerJob(name="tpu-a-0", job_id="job-1", state="failed"),
    ]
    status = fleet.fleet_status(out, jobs, now=1_030.0)
    first, second = status["workers"]
    assert (first["status"], first["samples"], first["shards"]) == ("READY", 4, 1)
    assert first["bytes"] == files[0]["size"] and first["working"]
    assert (second["status"], second["samples"], second["working"]) == ("PREEMPT", 0, False)
    assert (status["healthy"], status["working"], status["needs_recovery"]) == (1, 1, 1)
    tokens = files[0]["tensors"]["tokens"][1][0]
    assert status["totals"] == {
        "samples": 4, "of": 12, "shards": 1, "bytes": files[0]["size"], "tokens": tokens
    }  # fmt: skip
    assert not status["done"]


def test_streams_of_an_interrupted_call_are_deleted(tmp_path, model_folder):
    data = write_pairs(tmp_path / "pairs.jsonl", 6)
    folder = LocalFolder(tmp_path / "out")
    folder.create("streams/stream_003.jsonl", b"left by a call for four workers")
    folder.create("streams/notes.md", b"of somebody else")
    near = os.path.relpath(model_folder)
    facts = fleet.prepare_dataset(str(tmp_path / "out"), streams=2, dataset=str(data), model=near)
    assert facts["samples"] == 48
    assert Path(plans.load(folder).model).is_absolute(), "workers start in other folders"
    streams = ["streams/stream_000.jsonl", "streams/stream_001.jsonl"]
    assert folder.names("streams/") == ["streams/notes.md", *streams]


def test_a_planned_dataset_is_not_prepared_again(tmp_path):
    plans.write(LocalFolder(tmp_path), synthetic.plan())
    with pytest.raises(Conflict, match="already planned"):
        fleet.prepare_dataset(str(tmp_path), streams=2, dataset="x")


def test_a_dataset_without_pairs_is_rejected(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"examples": 1}')
    with pytest.raises(BadInput, match="no ARC pairs"):
        fleet.prepare_dataset(
            str(tmp_path / "out"), streams=2, dataset=str(tmp_path / "rows.jsonl")
        )
