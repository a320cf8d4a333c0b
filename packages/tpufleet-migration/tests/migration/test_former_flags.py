"""Flags of `run`, `resume` and `rerun` of the former job manager, before `--`."""

from __future__ import annotations

import json

import pytest

from tests.views.job_scenarios import end_job
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.job.jobs import JobState
from tpufleet.stores.base import ChangeSet
from tpufleet_migration.former_flags import DROPPED


def spec_of(tpu, *words: str) -> dict:
    printed = tpu.ok("run", "v5e-16", *words, "--dry-run", "--json", "--", "python", "train.py")
    return json.loads(printed)["jobs"][0]["spec"]


@pytest.mark.parametrize(
    ("word", "field", "value"),
    [
        ("tag=sweep", "tags", ["sweep"]),
        ("rule=pre", "rule", "pre"),
        ("ssn=with dropout", "notes", "with dropout"),
        ("-p", "capacity", ["spot"]),
        ("-pre", "capacity", ["spot"]),
        ("-n", "capacity", ["on-demand"]),
        ("-norm", "capacity", ["on-demand"]),
        ("lr=0.1", "command", ["python", "train.py", "--config.training.learning_rate=0.1"]),
        ("config.x=a=b", "command", ["python", "train.py", "--config.x=a=b"]),
    ],
)
def test_a_flag_is_todays_option(tpu, word, field, value):
    assert spec_of(tpu, word)[field] == value


def test_the_permission_bits_are_todays_reuse(tpu, admin):
    admin.ok("pool", "create", "lab", "v5e-16")
    assert spec_of(tpu, "pm=01", "pool=lab")["reuse"] == ["own-finished"]
    assert spec_of(tpu, "pm=31", "pool=lab")["reuse"] == [
        "own-failed", "others-failed", "own-finished",
    ]  # fmt: skip


def test_a_directory_by_number(tpu, tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "train.py").write_text("pass\n")
    tpu.ok("dir", "set", str(folder), "2")
    printed = tpu.ok("run", "v5e-16", "dir=2", "--dry-run", "--json", "--", "python", "train.py")
    assert json.loads(printed)["jobs"][0]["files"] == 1


@pytest.mark.parametrize(
    ("run_config", "finetune_config", "notes"),
    [
        ("wandb_notes: ' with dropout '", "", "with dropout"),
        ("logging: {wandb_notes: deeper}", "", "deeper"),
        ("{wandb_notes: first, finetune: true}", "logging: {wandb_notes: second}", "second"),
        ("{wandb_notes: first, finetune: false}", "wandb_notes: second", "first"),
        ("wandb_notes: 3", "", ""),
        ("logging: [wandb_notes]", "", ""),
        ("wandb_notes: [", "", ""),
        ("!!python/object:os.system {}", "", ""),
        ("", "wandb_notes: second", ""),
    ],
)
def test_notes_are_those_of_the_config_of_the_program(
    tpu, work, run_config, finetune_config, notes
):
    (work / "configs").mkdir()
    (work / "configs/remote_run_config.yml").write_text(run_config)
    (work / "configs/finetune_config.yml").write_text(finetune_config)
    assert spec_of(tpu).get("notes", "") == notes
    assert spec_of(tpu, "ssn=mine")["notes"] == "mine"


def test_it_is_said_where_notes_come_from(tpu, work):
    assert "notes:" not in tpu("run", "v5e-16", "--dry-run", "--", "true").stderr
    (work / "sub/configs").mkdir(parents=True)
    (work / "sub/configs/remote_run_config.yml").write_text("wandb_notes: deeper")
    printed = tpu("run", "v5e-16", "--workdir", "sub", "--dry-run", "--", "true")
    assert "from configs/remote_run_config.yml" in printed.stderr


@pytest.mark.parametrize("word", ["-q", "monitor=False"])
def test_without_a_monitor_run_returns_at_once(tpu, word):
    assert "submitted" in tpu.ok("run", "v5e-16", word, "--", "true")


@pytest.mark.parametrize("word", sorted(DROPPED))
def test_a_flag_that_is_not_needed_is_explained(tpu, word):
    given = word if word.startswith("-") else f"{word}=x"
    answer = tpu("run", "v5e-16", given, "--dry-run", "--", "true")
    assert answer.exit_code == 0
    assert f"hint: {given} is not needed: {DROPPED[word]}" in answer.stderr


def test_values_of_options_and_the_command_are_left_alone(tpu):
    spec = spec_of(tpu, "--env", "tag=x", "--spot", "tag=y")
    assert spec["env"] == {"tag": "x"} and spec["tags"] == ["y"]
    printed = tpu.ok("run", "v5e-16", "--dry-run", "--json", "--", "./run.sh", "tag=x", "-q")
    assert json.loads(printed)["jobs"][0]["spec"]["command"] == ["./run.sh", "tag=x", "-q"]


def test_without_a_command_the_whole_line_of_today_is_shown(tpu):
    refused = tpu("run", "v5e-16", "dir=1", "tag=x")
    assert refused.exit_code == 2
    assert "next: tpu run v5e-16 --dir 1 --tag x -- python train.py" in refused.stderr


@pytest.mark.parametrize(
    ("files", "words", "command"),
    [
        ({"main.py": ""}, (), ["python", "main.py"]),
        ({"main.py": ""}, ("dir=1",), ["python", "main.py"]),
        ({"main.py": ""}, ("mel", "lr=0.1"),
         ["python", "main.py", "--config.training.learning_rate=0.1"]),
        ({"main.py": "", "configs/remote_run_config.yml": "command: python -m lab.train"}, (),
         ["python", "-m", "lab.train"]),
    ],
)  # fmt: skip
def test_without_a_command_the_default_of_the_directory_runs(tpu, work, files, words, command):
    tpu.ok("set-cur")
    for name, text in files.items():
        (work / name).parent.mkdir(exist_ok=True)
        (work / name).write_text(text)
    answer = tpu("run", "v5e-16", *words, "--dry-run", "--json")
    assert answer.exit_code == 0, answer.output
    assert f"the default in {work}" in answer.stderr
    assert json.loads(answer.stdout)["jobs"][0]["spec"]["command"] == command
    assert "submitted" in tpu.ok("run", "v5e-16", *words, "-q", "tag=x")


@pytest.mark.parametrize("verb", ["resume", "rerun"])
@pytest.mark.parametrize("word", ["tpu=v4-32", "ka=v4-32", "tpu=big"])
def test_another_tpu_is_another_type(world, tpu, verb, word):
    tpu.ok("-ta", "big", "v4-32")
    world.submit("job-1", name="train")
    end_job(world, "job-1", JobState.FAILED)
    row = tpu.json(verb, "train", word, "--detach")
    assert row["accelerator"] == "v4-32"


def test_another_tpu_may_be_a_slice_of_a_pool(world, tpu):
    pool = Pool(name="lab", provider="local", accelerator="v5litepod-64", largest=2)
    world.store.commit(ChangeSet(pools=[pool]))
    world.add_slice("s1", None, pool="lab", accelerator="v5litepod-64")
    world.submit("job-1", name="train")
    end_job(world, "job-1", JobState.FAILED)
    row = tpu.json("resume", "train", "tpu=s1", "--detach")
    assert (row["accelerator"], row["pool"]) == ("v5litepod-64", "lab")


@pytest.mark.parametrize("verb", ["resume", "rerun", "kill", "kill-job"])
@pytest.mark.parametrize("word", ["window=3", "windows=101", "-w=3", "w=3"])
def test_a_window_leads_to_the_list_of_jobs(tpu, verb, word):
    refused = tpu(verb, word)
    assert refused.exit_code == 2 and "`tpu jobs` lists them" in refused.stderr
