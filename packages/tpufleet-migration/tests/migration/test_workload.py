"""`tpu workload` takes the options of xpk and makes jobs of them."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from tpufleet.model.job.jobs import JobState
from tpufleet.providers.gke.manifests import priority_class
from tpufleet.views.cli import registry
from tpufleet_migration.workload import PRIORITIES, STATES


def planned(folder, monkeypatch, *options: str) -> dict:
    """The job that `tpu workload create` would submit."""
    monkeypatch.chdir(folder)
    base = ["workload", "create", "--workload", "hello", "--cluster", "c", "--command", "bash x.sh"]
    args = [*base, *options, "--dry-run", "--json"]
    done = CliRunner().invoke(registry.root(), args, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (job,) = json.loads(done.stdout)["jobs"]
    return job["spec"]


def test_the_options_of_xpk_become_fields_of_a_job(tmp_path, monkeypatch):
    (tmp_path / "env").write_text("# comment\nLR=0.1\n")
    spec = planned(
        tmp_path, monkeypatch, "--tpu-type=v5litepod-16", "--num-slices=2", "--priority=high",
        "--max-restarts=3", "--env-file=env", "--zone", "us-central1-a", "--on-demand",
        "--project=p", "--scheduler=s", "--ttl-seconds-after-finished=5",
        "--termination-grace-period-seconds=60", "--base-docker-image=gcr.io/x/y:1",
    )  # fmt: skip
    assert spec["accelerator"] == "v5litepod-16"
    assert (spec["name"], spec["slices"], spec["priority"]) == ("hello", 2, 10)
    assert spec["capacity"] == ["on-demand"]
    assert spec["pod"] == {"image": "gcr.io/x/y:1"}
    assert spec["env"] == {"LR": "0.1"}
    assert spec["zones"] == ["us-central1-a"]
    assert spec["retries"]["failure"] == 3
    assert spec["command"][-1] == "bash x.sh"


@pytest.mark.parametrize(("name", "priority"), PRIORITIES.items())
def test_a_priority_of_xpk_is_the_kueue_class_of_the_same_rank(name, priority):
    assert priority_class(priority) == name.replace("-", "")


def test_every_status_of_xpk_has_states():
    names = {"EVERYTHING", "FINISHED", "RUNNING", "QUEUED", "FAILED", "SUCCESSFUL"}
    assert set(STATES) == names


# On a server


def names(tpu, *options: str) -> set[str]:
    rows = json.loads(tpu.ok("workload", "list", "--json", *options))["jobs"]
    return {row["name"] for row in rows}


def test_workloads_are_listed_by_the_states_of_xpk(world, tpu):
    for job, name in (("job-1", "waits"), ("job-2", "runs"), ("job-3", "broke"), ("job-4", "made")):
        world.submit(job, name=name)
    world.change_job("job-2", state=JobState.RUNNING)
    world.end_job("job-3")
    world.end_job("job-4", JobState.SUCCEEDED)
    assert names(tpu) == {"waits", "runs", "broke", "made"}
    by_status = {status: names(tpu, "--filter-by-status", status) for status in STATES}
    assert by_status == {
        "EVERYTHING": {"waits", "runs", "broke", "made"},
        "FINISHED": {"broke", "made"},
        "RUNNING": {"runs"},
        "QUEUED": {"waits"},
        "FAILED": {"broke"},
        "SUCCESSFUL": {"made"},
    }
    assert names(tpu, "--filter-by-job", "runs", "--cluster", "c") == {"runs"}
    assert "runs" in tpu.ok("workload", "list")


def test_a_workload_is_deleted_by_its_name(world, tpu):
    world.submit("job-1", name="hello")
    world.submit("job-2", name="other")
    assert "hello" in tpu.ok("workload", "delete", "--workload", "hello", "--force")
    assert [item.job_id for item in world.store.inbox() if item.kind == "cancel"] == ["job-1"]
    missing = tpu("workload", "delete", "--workload", "nothing")
    assert missing.exit_code == 1 and "nothing" in missing.stderr
