"""Tags, notes, names, searches and comparisons, as a user types them."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest

from tests.polling import wait_until
from tests.service.harness import ServiceHarness
from tests.views.cli_runner import Tpu
from tpufleet.model.fleet.hosts import Progress
from tpufleet.model.job.jobs import JobState
from tpufleet.views.line_plot import line_plot


@pytest.fixture
def ended(world: ServiceHarness) -> str:
    world.submit("job-1", name="resnet", tags=["sweep-1"])
    world.end_job("job-1", JobState.FAILED)
    return "job-1"


@pytest.mark.parametrize("state", ["live", "ended"])
def test_tags_notes_name_and_priority_change(tpu: Tpu, world: ServiceHarness, state):
    world.submit("job-1", name="resnet", tags=["sweep-1", "sweep-2", "keep"])
    if state == "ended":
        tpu.ok("jobs")  # rows of ended jobs are cached
        world.end_job("job-1")
        tpu.ok("jobs")
    assert "tags keep, paper" in tpu.ok("tag", "resnet", "paper", "--remove", "sweep-*")
    tpu.ok("note", "resnet", "diverged", "at", "900")
    tpu.ok("note", "resnet", "--append", "again")
    assert tpu.json("jobs", "resnet")["jobs"][0]["notes"] == "diverged at 900\nagain"
    assert "diverged at 900" in tpu.ok("note", "resnet")
    tpu.ok("priority", "resnet", "7")
    tpu.ok("rename", "resnet", "baseline")
    (row,) = tpu.json("jobs", "tag:paper diverged")["jobs"]
    assert (row["name"], row["priority"], row["tags"]) == ("baseline", 7, ["keep", "paper"])
    assert tpu("show", "resnet").exit_code != 0
    assert "edited" in tpu.ok("events", "baseline")


def test_notes_are_printed_without_control_characters(tpu: Tpu, ended):
    tpu.ok("edit", "resnet", "--note", "first\nsecond \x1b[2J")
    shown = tpu.ok("note", "resnet")
    assert "second �[2J" in shown and "\x1b" not in shown


def test_only_the_owner_and_admins_change_a_job(world: ServiceHarness, tpu: Tpu, admin: Tpu):
    world.submit("job-1", by="ada", name="hers")
    refused = tpu("tag", "ada/hers", "mine")
    assert refused.exit_code != 0 and "job job-1 (hers) belongs to ada" in refused.stderr
    world.submit("job-2", name="his")
    admin.ok("tag", "mel/his", "seen")


def test_invalid_changes_follow_the_rules_of_the_job_file(tpu: Tpu, ended):
    assert "name:" in tpu("rename", "resnet", "No Spaces").stderr
    assert "nothing to change" in tpu("tag", "resnet").stderr


def test_jobs_are_found_by_a_query(world: ServiceHarness, tpu: Tpu, ended):
    world.submit("job-2", name="other", by="ada", notes="a resnet too")
    ids = lambda *query: [row["id"] for row in tpu.json("jobs", *query)["jobs"]]
    assert ids("resnet") == ["job-1"]  # mine by default
    assert ids("owner:*", "resnet") == ["job-2", "job-1"]
    assert ids("owner:ada state:live") == ["job-2"]
    assert ids("-state:failed") == []
    wrong = tpu("jobs", "colour:red")
    assert wrong.exit_code != 0 and "unknown key 'colour'" in wrong.stderr


def test_many_jobs_are_tagged_by_a_query(world: ServiceHarness, tpu: Tpu):
    for number in range(3):
        world.submit(f"job-{number}", name=f"train-{number}")
    assert "pass --yes" in tpu("tag", "--query", "name:train-*", "x").stderr
    assert len(tpu.ok("tag", "--query", "name:train-*", "x", "--yes").splitlines()) == 3
    assert len(tpu.json("jobs", "tag:x")["jobs"]) == 3
    assert "pass one of JOB, --query" in tpu("tag", "--query", " ", "y", "--yes").stderr


def run_with_metrics(world: ServiceHarness, job_id: str, losses: list[float], **spec) -> None:
    world.submit(job_id, **spec)
    world.add_slice(f"s-{job_id}", job_id)
    world.change_job(job_id, state=JobState.STARTING)
    attempt = world.add_attempt(job_id, 0, f"s-{job_id}")
    world.change_job(job_id, state=JobState.RUNNING)
    for step, loss in enumerate(losses):
        world.clock.advance(timedelta(seconds=5))
        progress = Progress(step=step * 10, metrics={"loss": loss}, at=world.clock.now())
        world.send_heartbeat(f"s-{job_id}/0", attempt_id=attempt.id, progress=progress)
    wait_until(lambda: len(world.store.metric_points(job_id)) == len(losses))


def test_a_job_without_metrics_is_told_how_to_report_them(world: ServiceHarness, tpu: Tpu):
    world.submit("job-1", name="silent")
    assert "runtime.progress(step, loss=loss)" in tpu("compare", "silent").stderr


def test_metrics_are_kept_after_the_end_and_searched(world: ServiceHarness, tpu: Tpu):
    run_with_metrics(world, "job-1", [2.0, 1.0, 0.25], name="good")
    world.end_job("job-1", JobState.SUCCEEDED)
    points = tpu.json("compare", "good")["points"]
    assert [(point["step"], point["values"]["loss"]) for point in points] == [
        (0, 2.0), (10, 1.0), (20, 0.25),
    ]  # fmt: skip
    assert [row["id"] for row in tpu.json("jobs", "loss<0.3 step>=20")["jobs"]] == ["job-1"]
    assert tpu.json("jobs", "loss>0.3")["jobs"] == []
    assert "A good (job-): 0.25" in tpu.ok("compare", "good")


def test_two_jobs_are_compared(world: ServiceHarness, tpu: Tpu, work):
    tpu.ok("run", "v5e-16", "--name", "one", "-d", "--", "python", "train.py", "lr=0.1")
    (work / "train.py").write_text("print('goodbye')\n")
    tpu.ok("run", "v5e-16", "--name", "two", "-d", "--slices", "2", "--", "python", "train.py",
           "lr=0.2")  # fmt: skip
    run_with_metrics(world, "job-3", [2.0, 1.0], name="three")
    shown = tpu.ok("compare", "one", "two", "--diff")
    assert (
        re.search(r"^lr +0\.1 +0\.2$", shown, re.MULTILINE)
        and "slices" in shown
        and "accelerator" not in shown
    )
    assert "-print('hello')" in shown and "+print('goodbye')" in shown
    compared = tpu.json("compare", "one", "two", "three")["comparison"]
    assert compared["metrics"]["loss"] == [None, None, 1.0]
    assert [code["same"] for code in compared["code"]] == [False, False]
    assert "one has reported no metrics" in tpu("compare", "one").stderr


def test_only_the_retries_that_differ_are_compared(world: ServiceHarness, tpu: Tpu):
    world.submit("job-1", name="one")
    world.submit("job-2", name="two", retries={"failure": 3})
    compared = tpu.json("compare", "one", "two")["comparison"]["config"]
    assert compared == {"retries.failure": ["0", "3"]}


def test_a_plot_has_axes_letters_and_a_legend():
    lines = line_plot("loss", {"a": [(0, 1.0), (10, 0.0)], "b": [(0, 0.5)], "c": []}, 21, 5)
    assert lines[0] == "loss" and lines[1].startswith("1 │A") and lines[5].rstrip().endswith("A")
    assert lines[-3:] == ["   A a: 0", "   B b: 0.5", "   C c: no values"]
    assert line_plot("loss", {"a": [(0, float("nan"))]}) == ["loss: no values"]
