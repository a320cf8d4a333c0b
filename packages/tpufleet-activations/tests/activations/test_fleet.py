"""`tpu extract deploy` and `board`: submitting jobs, fleet status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.activations import synthetic
from tests.activations.tiny_model import SMALL_DEVICES
from tests.activations.tiny_model import tpu as extract
from tests.repository import ROOT
from tests.server_process import Server, no_processes_left, wait_until
from tests.service.harness import ServiceHarness
from tests.views.cli_runner import Tpu
from tests.views.conftest import cli_for_user
from tests.views.job_scenarios import end_job
from tpufleet.model.job.jobs import ENDED_STATES, JobState
from tpufleet.runtime.units import Units
from tpufleet.stores.base import JobQuery
from tpufleet.stores.memory import MemoryStore
from tpufleet_activations import fleet, plans
from tpufleet_activations.cli.deploy import REQUIREMENTS, deploy
from tpufleet_activations.io import unit_writer, verification
from tpufleet_activations.io.storage import LocalFolder

SITES = ("--site", "resid_post.[0,1],mlp_out.2")


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path / "home")
    server.start()
    yield server
    server.cleanup()
    assert no_processes_left(server.home)


@pytest.fixture
def world(tmp_path):
    """A server without any capacity: jobs wait."""
    (tmp_path / "server").mkdir()
    world = ServiceHarness(MemoryStore(), tmp_path / "server")
    world.start()
    yield world
    world.close()


def plan(folder: Path, model: Path) -> str:
    """The address of a planned dataset of 32 samples."""
    data = folder / "prompts.jsonl"
    data.write_text("\n".join(json.dumps({"text": f"prompt {n} " * 9}) for n in range(32)))
    options = ("--max-length", 1600, "--compute", "f32")
    code, text = extract("plan", folder / "out", "--model", model, "--data", data, *SITES, *options)
    assert code == 0, text
    return f"file://{folder / 'out'}"


def arguments(out: str, *more: str) -> list[str]:
    return ["extract", "deploy", out, "--zones", "local-a,local-b", "--tpu-type", "v5e-4", *more]


@pytest.mark.slow
def test_a_fleet_extracts_and_verifies_a_dataset(server, tmp_path, model_folder):
    out, folder = plan(tmp_path, model_folder), LocalFolder(tmp_path / "out")
    tpu = Tpu(HOME=str(tmp_path), TPUFLEET_HOME=str(server.home))
    answer = tpu(*arguments(out, "--monitor", "--monitor-interval", "0.5", "--", "--writers=2"))
    errors = "\n".join(str(row) for row in server.client.all_jobs())
    assert answer.exit_code == 0, f"{answer.output}\n{errors}\n{server.log_tail()}"
    report = verification.verify(folder)
    assert report.intact and report.samples == 32, report.problems

    status = tpu.json("extract", "board", out)
    assert [row["name"] for row in status["workers"]] == ["tpu-local-a-0", "tpu-local-b-0"]
    assert sum(row["samples"] for row in status["workers"]) == status["totals"]["samples"] == 32
    assert status["done"] and status["needs_recovery"] == 0
    header, *table = tpu.ok("extract", "board", out).splitlines()
    assert header == f"EXTRACTION FLEET  {out}"
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
    out = plan(tmp_path, model_folder)
    tpu = cli_for_user(world, tmp_path, "mel")
    call = arguments(out, "--monitor", "--monitor-interval=0.1", "--json")
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
    answer = tpu("extract", "deploy", out, "--zones", "local-a,local-b,local-c",
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
    more = ("--tpu-type", "v5e-8", "--create-tpus", "--provider", "local")
    answer = admin("extract", "deploy", out, "--zones", "local-a", "--workers-per-zone=3", *more)
    assert answer.exit_code == 0, answer.output
    (pool,) = world.store.pools()
    assert (pool.name, pool.smallest, pool.largest) == (fleet.fleet_tag(out), 3, 3)
    assert {job.spec.pool for job in world.store.jobs(JobQuery())} == {pool.name}


def test_the_board_says_what_is_done_about_a_worker_that_is_lost(world, tmp_path):
    out = f"file://{tmp_path / 'out'}"
    plans.write(LocalFolder(tmp_path / "out"), synthetic.plan())
    tpu = cli_for_user(world, tmp_path, "mel")
    assert tpu(*arguments(out)).exit_code == 0
    failed, recovering = sorted(world.store.jobs(JobQuery()), key=lambda job: job.spec.name)
    end_job(world, failed.id, JobState.FAILED, reason="out of disk")
    world.change_job(recovering.id, state=JobState.RECOVERING, reason="preempted")
    shown = tpu.ok("extract", "board", out)
    assert "Needs Recovery: 2" in shown
    assert f"tpu-local-a-0: out of disk; `tpu rerun {failed.id}`" in shown
    assert "tpu-local-b-0: preempted;" in shown


def test_the_page_lists_what_deploy_takes():
    page = (ROOT / "docs/extraction.md").read_text()
    for option in deploy.params:
        name = option.opts[0]
        assert f"`{name}" in page or not name.startswith("--"), name


def test_workers_install_what_they_import_at_versions_that_were_tested():
    pins = {line.split(" ")[0] for line in REQUIREMENTS.read_text().splitlines() if line[0] != " "}
    tested = (ROOT / "requirements/test.txt").read_text().splitlines()
    names = {pin.partition("==")[0] for pin in pins}
    assert {"boto3", "click", "jax", "libtpu", "tokenizers"} <= names
    assert pins - {line.split(" ")[0] for line in tested} == {
        pin for pin in pins if pin.startswith("libtpu==")
    }


def test_a_dry_run_submits_nothing(world, tmp_path):
    tpu = cli_for_user(world, tmp_path, "mel")
    printed = tpu(*arguments("gs://lab/acts", "--dry-run", "--json"))
    documents = json.loads(printed.stdout)
    assert documents and all(document["command"] for document in documents)
    dry = tpu(*arguments("gs://lab/acts", "--dry-run"))
    assert dry.exit_code == 0 and dry.stdout.count('"command"') == 2
    assert str(REQUIREMENTS) in dry.stdout
    assert world.store.jobs(JobQuery()) == []


@pytest.mark.parametrize(
    "message, more",
    [
        ("has no plan", ("file:///nowhere/x",)),
        ("folder on this machine", ("/tmp/x",)),
        ("different zones", ("gs://b/x", "--zones", "a,a")),
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
    tokens = files[0]["tensors"]["tokens"][2][0]
    assert status["totals"] == {
        "samples": 4, "of": 12, "shards": 1, "bytes": files[0]["size"], "tokens": tokens
    }  # fmt: skip
    assert not status["done"]
