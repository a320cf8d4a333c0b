"""The examples really run: on a real server, with real agents, by the real command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs import markdown
from tests.server_process import Server, no_processes_left, wait_until
from tpufleet.model.api_types import JobDetail
from tpufleet.model.job.jobs import JobState

WITHIN = 400.0  # seconds; far more than any of them takes, on a busy machine too


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("examples") / "home")
    running.start()
    yield running
    running.cleanup()
    assert no_processes_left(running.home)


def submit(server: Server, example: str, *options: str) -> str:
    """The id that `tpu submit` gave it."""
    done = subprocess.run(
        [sys.executable, "-m", "tpufleet", "submit", f"examples/{example}", "--json", *options],
        cwd=markdown.ROOT,
        env=os.environ | {"TPUFLEET_HOME": str(server.home), "TPUFLEET_SERVER": server.url},
        capture_output=True,
        text=True,
        timeout=WITHIN,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["jobs"][0]["id"]


def ended(server: Server, job: str) -> JobDetail:
    wait_until(lambda: server.client.job(job).job.ended, WITHIN, lambda: job_report(server, job))
    detail = server.client.job(job)
    assert detail.job.state is JobState.SUCCEEDED, f"{detail.job.reason}\n{logs(server, job)}"
    return detail


def job_report(server: Server, job: str) -> str:
    events = [f"{event.at} {event.message}" for event in server.client.events(job).events]
    return "\n".join([*events, *logs(server, job)[-60:]])


def logs(server: Server, job: str) -> list[str]:
    return "".join(server.client.logs(job)).splitlines()


def test_hello_is_said_by_every_host(server):
    job = submit(server, "hello/job.yaml")
    ended(server, job)
    printed = sorted(line for line in logs(server, job) if "process" in line)
    assert [line.partition(",")[0] for line in printed] == [
        f"[{host}] process {host} of 4 here" for host in range(4)
    ]


def test_the_plain_program_survives_a_preemption_and_counts_right(server):
    job = submit(server, "plain/job.yaml", "--set", "env.PAUSE=0.4")
    folder = Path(server.client.job(job).job.checkpoint)
    wait_until(lambda: any(folder.glob("step_*.json")), WITHIN, server.log_tail)
    server.client.inject_fault(server.client.job(job).slices[0].id, "preempt")
    detail = ended(server, job)
    assert [attempt.end_reason for attempt in detail.attempts] == ["preempted", "finished"]
    assert [attempt.checkpoint_step for attempt in detail.attempts][1:] == [40]
    assert detail.row.progress.checkpoint_step == 40, "its checkpoints are its progress"
    assert (folder / "result.txt").read_text() == "2262\n"  # π(20000)
    assert not any("chunk 0 " in line for line in logs(server, job)), "it started over"


def test_the_training_program_learns_and_leaves_a_result(server):
    command = "command=[python, train.py, steps=40]"
    job = submit(server, "train/job.yaml", "--set", command, "--set", "accelerator=v5e-4")
    detail = ended(server, job)
    result = json.loads((Path(detail.job.checkpoint) / "result.json").read_text())
    assert result["steps"] == 40 and result["error"] < 0.01
    assert detail.attempts[-1].checkpoint_step == 40


@pytest.mark.slow
def test_two_slices_add_up_together(server):
    job = submit(server, "multislice/job.yaml")
    ended(server, job)
    # What Gloo says of its connections may stand in the middle of a line.
    output = "\n".join(logs(server, job))
    lines = re.findall(r"slice \d of 2, process \d: 16 chips add up to 120", output)
    assert sorted(lines) == [
        f"slice {i} of 2, process {i}: 16 chips add up to 120" for i in range(2)
    ]


@pytest.mark.slow
def test_of_two_jobs_in_a_pool_the_urgent_one_goes_first(server):
    make = ("pool", "create", "lab", "v5e-8", "--largest", "1", "--supersede")
    environment = os.environ | {"TPUFLEET_HOME": str(server.home), "TPUFLEET_SERVER": server.url}
    tpu = [sys.executable, "-m", "tpufleet"]
    subprocess.run([*tpu, *make], env=environment, check=True, capture_output=True)
    background = submit(server, "pool/background.yaml")
    running = lambda: server.client.job(background).job.state is JobState.RUNNING
    wait_until(running, WITHIN, server.log_tail)
    urgent = submit(server, "pool/urgent.yaml")
    ended(server, urgent)
    wait_until(running, WITHIN, server.log_tail)  # it goes on
    attempts = server.client.job(background).attempts
    assert [attempt.end_reason for attempt in attempts] == ["superseded", None]
    server.client.cancel(background)


def test_the_program_in_the_page_on_workloads_runs_alone(tmp_path):
    block = next(block for block in markdown.blocks("python") if block.page.name == "workloads.md")
    kept = {name: os.environ[name] for name in os.environ if not name.startswith("TPUFLEET_")}
    for _ in range(2):  # the second time there is nothing left to do
        subprocess.run([sys.executable, "-c", block.text], cwd=tmp_path, env=kept, check=True)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step_00000800", "step_00000900", "step_00001000",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_training_program_runs_again_after_it_is_complete(tmp_path):
    program = markdown.ROOT / "examples/train/train.py"
    kept = {name: os.environ[name] for name in os.environ if not name.startswith("TPUFLEET_")}
    for _ in range(2):
        command = [sys.executable, str(program), "steps=3"]
        subprocess.run(command, cwd=tmp_path, env=kept, check=True)
    result = json.loads((tmp_path / "checkpoints/result.json").read_text())
    assert result["steps"] == 3 and result["loss"] > 0
