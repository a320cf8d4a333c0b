"""The former job manager took a user anywhere among the arguments. A name after a former verb is
recognised: it is dropped when it is the caller's, and never becomes a tag, a key or a job."""

from __future__ import annotations

import pytest

from tests.service.harness import ServiceHarness
from tests.views.cli_runner import Tpu
from tests.views.job_scenarios import end_job
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.job.jobs import JobState
from tpufleet.stores.base import ChangeSet


@pytest.fixture(autouse=True)
def jobs(world: ServiceHarness) -> None:
    """Two of mel, one of them ended; one of mo."""
    pool = Pool(name="lab", provider="local", accelerator="v5litepod-16", largest=2)
    world.store.commit(ChangeSet(pools=[pool]))
    world.submit("job-1", name="train", pool="lab")
    world.submit("job-2", name="eval")
    end_job(world, "job-2", JobState.SUCCEEDED)
    world.submit("job-3", name="theirs", by="mo", pool="lab")


# What a user types, without the name, and what must be in the output.
LINES = {
    "add-tag": (("add-tag", "train", "paper"), "tags paper\n"),
    "kill": (("kill", "train"), "train (job-1)"),
    "kill-window": (("-kw", "train"), "train (job-1)"),
    "get-stage-dir": (("get-stage-dir", "train"), "train"),
    "clean": (("clean", "--yes"), "archived: 1 job"),
    "clean -re": (("clean", "-re", "--yes"), "archived: 1 job"),
    "clear-finished": (("clear-finished",), "archived: 1 job"),
    "clear-all": (("clear-all", "--yes"), "archived: 1 job"),
    "set-cur": (("set-cur", "3"), "3"),
    "set-dir": (("set-dir", "/tmp", "2"), "/tmp"),
    "ls": (("ls",), ""),
    "get-settings": (("get-settings",), "monitor_upd_time"),
    "set-settings": (("set-settings", "monitor_upd_time", "7"), "monitor_upd_time is now 7"),
    "reset-settings": (("reset-settings",), "all settings reset"),
    "alias": (("-a", "sd", "config.seed"), "config.seed"),
    "show-config-alias": (("-sa",), "config.training.learning_rate"),
    "zhan": (("zhan", "lab"), "lab"),
    "vq": (("vq",), "train"),
    "dequeue": (("dequeue", "train"), "train (job-1)"),
}


@pytest.mark.parametrize(
    "user", ["mel", *(pytest.param(way, marks=pytest.mark.slow) for way in ("user=mel", "id=3"))]
)
@pytest.mark.parametrize(("line", "shown"), LINES.values(), ids=LINES)
def test_my_own_name_is_not_needed(tpu: Tpu, line, shown, user):
    answer = tpu(*line, user)
    assert answer.exit_code == 0, answer.output
    assert shown in answer.stdout
    assert f"hint: {user} is not needed" in answer.stderr


def test_the_name_may_stand_anywhere(tpu: Tpu):
    assert "tags paper\n" in tpu.ok("add-tag", "user=mel", "train", "paper")
    assert "tags paper, best\n" in tpu.ok("add-tag", "train", "best", "mel", "--remove", "old")


@pytest.mark.parametrize("verb", [("kill",), ("add-tag", "paper"), ("get-stage-dir",)])
def test_a_job_of_another_user_is_named_with_its_owner(tpu: Tpu, verb):
    answer = tpu(verb[0], "theirs", *verb[1:], "mo")
    assert "hint: jobs of mo are written mo/JOB" in answer.stderr
    if verb[0] == "get-stage-dir":
        assert answer.exit_code == 0 and "theirs" in answer.stdout
    else:
        assert answer.exit_code != 0 and "belongs to mo" in answer.stderr


@pytest.mark.parametrize(
    "line", [("clean",), ("set-cur", "3"), ("reset-settings",), ("zhan", "lab")]
)
def test_a_command_about_what_is_mine_does_not_run_for_another_user(world, tpu: Tpu, line):
    answer = tpu(*line, "mo")
    assert answer.exit_code == 2
    assert "you are mel, not mo" in answer.stderr
    assert world.client("mel").reservations() == () and tpu.json("jobs")["jobs"]


def test_the_queue_of_a_user(tpu: Tpu):
    shown = tpu.ok("vq", "mo")
    assert "theirs" in shown and "train" not in shown
    assert tpu.ok("queue", "--user", "mo") == shown


def test_a_word_that_is_no_user_stays_a_word(tpu: Tpu):
    assert "tags paper, baseline\n" in tpu.ok("add-tag", "train", "paper", "baseline")
    assert tpu("kill", "nobody").exit_code != 0
    assert "not needed" not in tpu("kill", "mel").stderr, "the only word is the job"


def test_a_user_is_no_command_to_run(tpu: Tpu):
    for line in (("run", "v5e-16", "mel"), ("run", "v5e-16", "dir=1", "mel")):
        answer = tpu(*line)
        assert answer.exit_code == 2 and "no command to run" in answer.stderr, answer.output
        assert "-- python train.py" in answer.stderr
    assert tpu.json("jobs", "name:mel*")["jobs"] == []


@pytest.mark.parametrize("verb", ["resume", "rerun"])
def test_resume_for_a_user(world: ServiceHarness, tpu: Tpu, verb):
    world.submit("job-4", name="broken")
    end_job(world, "job-4", JobState.FAILED)
    answer = tpu(verb, "broken", "mel", "--detach")
    assert answer.exit_code == 0, answer.output
    newest = tpu.json("jobs")["jobs"][0]["id"]
    assert "mel" not in tpu.json("show", newest)["job"]["spec"]["command"]


def test_queue_with_a_type_submits(tpu: Tpu):
    """It was the verb that put a job into the queue; today `run` does."""
    answer = tpu("queue", "v5e-16", "tag=x", "pool=lab", "pm=11", "mel", "--", "python", "train.py")
    assert answer.exit_code == 0, answer.output
    assert "`tpu run --detach v5e-16`" in answer.stderr
    assert tpu.json("jobs", "tag:x")["jobs"]
    assert "no command to run" in tpu("queue", "v5e-16", "mel").stderr


@pytest.mark.parametrize(
    ("verb", "advice"),
    [
        ("delete", ("`tpu cancel train`", "`tpu archive train`", "`tpu archive purge train`")),
        ("restart", ("`tpu rerun train`", "`tpu resume train`")),
        ("describe", ("`tpu show train`",)),
        ("-dtpu", ("`tpu show train`",)),
        ("check-status", ("`tpu why train`",)),
        ("reapply", ("`tpu resume train`",)),
        ("lian", ("`tpu exec train",)),
    ],
)
def test_a_job_after_a_verb_of_nodes_leads_to_the_verbs_of_jobs(tpu: Tpu, verb, advice):
    answer = tpu(verb, "train")
    assert answer.exit_code == 2, answer.output
    assert "error: train (job-1) is a job, not a VM" in answer.stderr
    assert all(command in answer.stderr for command in advice), answer.stderr
    assert "tpu vm" not in answer.stderr
