"""What the command line does without a server: help, checks, refusals."""

from __future__ import annotations

import json
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
import yaml

import tpufleet
from tests.views.cli_runner import Tpu
from tpufleet.model.job import job_file
from tpufleet.model.job.job_file import parse_job
from tpufleet.model.tpu import prices
from tpufleet.views.cli import registry
from tpufleet.views.cli.jobs.submit import estimate_text
from tpufleet.views.cli.output import CommandGroup

EVERY_OPTION = [
    "--name", "tiny-lm", "--reserved", "--spot", "--on-demand", "--queued",
    "--zone", "us-central1-a", "--zone", "europe-west4-b",
    "--provider", "tpu-vm", "--provider", "gke",
    "--slices", "2", "--pool", "lab", "--env", "LR=0.1", "--env", "EMPTY=", "--secret", "KEY=wandb",
    "--workdir", ".", "--checkpoint", "gs://bucket/x", "--setup", "pip install x",
    "--timeout", "12h",
    "--priority", "-3", "--rule", "resume", "--retries", "failure=2", "--retries", "hang=0",
    "--set", "processes_per_host=1",
    "--set", "crash_loop=5", "--set", "grace=1m", "--set", "hung_after=none",
    "--tag", "a", "--tag", "b",
    "--note", "with dropout", "--metric", "loss=loss: ([0-9.]+)", "--max-cost", "20",
    "--set", "max_hours=8", "--python", "3.12", "--dependency", "jax[tpu]", "--dependency", "optax",
    "--mount", "data:/data", "--notify", "team", "--notify", "mail:failure",
    "--reuse", "own-finished", "--reuse", "own-failed", "--require-reservation",
]  # fmt: skip
SAME_AS_FILE = """
name: tiny-lm
accelerator: v5e-16
command: [python, train.py, "lr=0.01"]
capacity: [reserved, spot, on-demand, queued]
zones: [us-central1-a, europe-west4-b]
providers: [tpu-vm, gke]
slices: 2
processes_per_host: 1
pool: lab
env: {LR: 0.1, EMPTY: ""}
secrets: {KEY: wandb}
workdir: .
checkpoint: gs://bucket/x
setup: pip install x
timeout: 12h
priority: -3
rule: resume
retries: {failure: 2, hang: 0}
crash_loop: 5
grace: 60
hung_after: none
tags: [a, b]
notes: with dropout
metrics: {loss: "loss: ([0-9.]+)"}
max_cost: 20
max_hours: 8
python: "3.12"
dependencies: ["jax[tpu]", optax]
mounts: ["data:/data"]
notify: [team, "mail:failure"]
reuse: [own-finished, own-failed]
require_reservation: true
"""


PASSED_ON = {"cluster local kubectl"}  # to another program, with its options
NO_EXAMPLE = {"agent"}


@pytest.mark.parametrize("name", registry.root().lazy_commands)
def test_each_command_has_help_with_an_example(alone, name):
    tpu = registry.root()
    command = tpu.get_command(click.Context(tpu), name)
    assert command is not None
    paths = [name]
    if isinstance(command, click.Group):
        assert alone.ok(name, "--help").startswith(f"Usage: tpu {name}")
        paths = [path for path, _ in leaf_commands(command, (name,)) if path not in PASSED_ON]
    for path in paths:
        printed = alone.ok(*path.split(), "--help")
        assert printed.startswith(f"Usage: tpu {path}")
        # The usage says it all of a command that has nothing but arguments, --json and --yes.
        options = {*re.findall(r"^  (?:-\w, )?(--[\w-]+)", printed, re.MULTILINE)}
        simple = len(options - {"--json", "--yes", "--help"}) < 3
        assert name in NO_EXAMPLE or simple or "\n  Example" in printed


def test_the_help_of_submit_lists_every_field_of_a_job_file(alone):
    printed = alone.ok("submit", "--help")
    assert all(f"\n  {field.name} " in printed for field in job_file.FIELDS)


# Commands that open a shell, run until stopped or write files.
WITHOUT_JSON = {
    "top", "ssh", "dash", "vm ssh", "vm shell", "cluster local kubectl", "agent",
    "bridge firestore", "emulator", "tensorboard",
    "provisioner", "extract import", "extract export", "extract streams",
    "extract manifest",
    "extract repair", "init",
}  # fmt: skip


def leaf_commands(
    group: click.Group, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from leaf_commands(command, (*path, name))
        if not isinstance(command, click.Group) or isinstance(command, CommandGroup):
            yield " ".join((*path, name)), command


def test_every_command_with_a_result_has_a_json_option():
    without = {
        path
        for path, command in leaf_commands(registry.root())
        if not any("--json" in option.opts for option in command.params)
    }
    small_changes = {path for path in without if path.startswith("config ")}
    assert without - small_changes <= WITHOUT_JSON  # some are of other distributions


def test_help_costs_little_more_than_importing_click():
    """The best of several runs, in turns: other processes make some of them slower."""

    def cpu_seconds(code: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    runs = [
        (
            cpu_seconds("from tpufleet.__main__ import run; run(['--help'])"),
            cpu_seconds("import click"),
        )
        for _ in range(5)
    ]
    ours, click = (min(times) for times in zip(*runs, strict=True))
    assert ours < 2 * click


def test_help_imports_nothing_but_click_and_the_standard_library():
    code = (
        "import sys; from tpufleet.__main__ import run; run(['--help']); "
        "print(*sorted({name.split('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    heavy = {"rich", "httpx", "msgspec", "yaml", "starlette", "uvicorn", "pathspec", "psutil"}
    assert "click" in loaded and not loaded & heavy


def test_run_and_submit_create_the_same_job(alone, work):
    (work / "job.yaml").write_text(SAME_AS_FILE)
    command = ["python", "train.py", "lr=0.01"]
    by_run = json.loads(
        alone.ok("run", "v5e-16", "--dry-run", "--json", *EVERY_OPTION, "--", *command)
    )
    by_submit = alone.json("submit", "job.yaml", "--dry-run")
    assert by_run == by_submit
    assert job_file.parse_job(by_run["jobs"][0]["spec"]) == job_file.parse_job(
        yaml.safe_load(SAME_AS_FILE)
    )


def test_every_field_of_a_job_file_has_an_option():
    written = yaml.safe_load(SAME_AS_FILE)
    # An image replaces `python` and `dependencies`; a pool has pods already.
    assert {*written, "image", "pod"} == {field.name for field in job_file.FIELDS}


def test_a_single_argument_with_spaces_is_a_script(alone, work):
    printed = json.loads(alone.ok("run", "v5e-4", "--dry-run", "--json", "--", "echo a | wc -c"))
    assert printed["jobs"][0]["spec"]["command"][-2:] == ["-c", "echo a | wc -c"]


def test_set_overrides_fields_of_the_file(alone, work):
    (work / "job.yaml").write_text(SAME_AS_FILE)
    printed = alone.json(
        "submit", "job.yaml", "--dry-run", "--set", "env.SEED=7", "--set", "zones=[local-a]",
        "--set", "retries.failure=9", "--set", "pool=",
    )  # fmt: skip
    spec = printed["jobs"][0]["spec"]
    assert spec["env"] == {"LR": "0.1", "EMPTY": "", "SEED": "7"}
    assert spec["zones"] == ["local-a"]
    assert spec["retries"]["failure"] == 9 and spec["retries"]["hang"] == 0
    assert "pool" not in spec


def test_a_file_may_hold_several_jobs_and_be_standard_input(alone, work):
    jobs = "command: [a]\naccelerator: v4-8\n---\ncommand: [b]\naccelerator: v4-8\n---\n"
    printed = alone.json("submit", "-", "--dry-run", input=jobs)
    assert [job["spec"]["name"] for job in printed["jobs"]] == ["a", "b"]


def test_the_snapshot_is_the_folder_of_the_file(alone, work, monkeypatch):
    (work / "sub").mkdir()
    (work / "sub/job.yaml").write_text("command: [a]\naccelerator: v4-8\n")
    printed = alone.json("submit", "sub/job.yaml", "--dry-run")
    assert printed["jobs"][0]["files"] == 1
    printed = alone.json("submit", "sub/job.yaml", "--dry-run", "--set", "workdir=..")
    assert printed["jobs"][0]["files"] == 2


def test_a_dry_run_prints_a_job_file_that_can_be_submitted(alone, work):
    printed = alone.ok("run", "v5e-16", "--dry-run", "--", "python", "train.py")
    plain = next(iter(yaml.safe_load_all(printed)))
    assert job_file.parse_job(plain) == job_file.parse_job(
        {"accelerator": "v5e-16", "command": ["python", "train.py"]}
    )


def test_a_dry_run_prints_chips_of_types_that_are_named_after_cores(alone):
    assert "32 chips" in alone.ok("run", "tpu7x-64", "--dry-run", "--", "true")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "v5e-15", "--", "x"],
         "error: accelerator: "),
        (["run", "v5e-16", "--slices", "two", "--", "x"], "error: slices: "),
        (["run", "v5e-16", "--env", "LR", "--", "x"], "error: --env LR: "),
        (["run", "v5e-16", "python", "--lr", "1"], "put options of your own command after `--`"),
        (["run", "v5e-16", "--host", "x", "--", "x"], "use a number such as 0, or all"),
        (["run", "v5e-16", "--workdir", "/nowhere/at/all", "--", "x"], "is not a folder"),
        (["submit", "nothing.yaml"], "error: cannot read nothing.yaml: No such file"),
        (["submit", "."], "error: cannot read .: Is a directory"),
        (["jbos"], "error: unknown command 'jbos'; did you mean `tpu jobs`?"),
        (["xyzzy"], "`tpu --help` lists all commands"),
        (["--server", "nowhere", "jobs"],
         "error: --server: 'nowhere' is not a server URL; for example https://host:port"),
        (["logs", "x", "--host", "-1"], "error: invalid value for '--host'"),
        (["cancel"], "error: pass one of JOB, --all"),
        (["pool", "create", "Lab", "v5e-16"], "lab"),
        (["pool", "create", "lab", "v5e-17"], "v5e-16"),
        (["pool", "create", "lab", "v5e-16", "--smallest", "3", "--largest", "2"],
         "must not be larger"),
        (["pool", "create", "lab", "v5e-16", "--idle-after", "soon"], "is not a duration"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_invalid_input_is_reported_with_status_two(alone, work, args, message):
    answer = alone(*args)
    assert answer.exit_code == 2
    assert message in answer.stderr
    assert all(line.startswith(("error: ", "  ")) for line in answer.stderr.splitlines())


def test_completion_is_of_the_shell_that_one_uses(alone, monkeypatch):
    monkeypatch.setenv("SHELL", "/usr/bin/zsh")
    assert alone.ok("config", "completion") == alone.ok("config", "completion", "zsh")
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert "`tpu config completion bash`, zsh or fish" in alone("config", "completion").stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("command: [a\n", "error: job.yaml: line 2: "),
        ("command: a\ncommand: b\n", "error: job.yaml: line 2: duplicate key command; remove one"),
        ("", "error: job.yaml: empty file; `command`"),
        ("- a\n", "error: job.yaml: each document must be a mapping of fields"),
        ("a: !!python/object:os.system x\n", "error: job.yaml: line 1: "),
        ("a: 0x" + "f" * 9000 + "\n", "error: job.yaml: a: unknown field"),
        ("[" * 5000, "error: job.yaml: "),
        ("? {a: 1}\n: 2\n", "error: job.yaml: "),
        ("zones: us-east1\nrul: x\n", "error: job.yaml: zones: 'us-east1' is not a zone"),
    ],
    ids=["torn", "twice", "empty", "list", "object", "huge", "deep", "odd-key", "faults"],
)
def test_an_invalid_job_file_is_reported(alone, work, content, message):
    (work / "job.yaml").write_text(content)
    answer = alone("submit", "job.yaml")
    assert answer.exit_code == 2
    assert message in answer.stderr
    assert "Traceback" not in answer.stderr


def test_all_errors_of_all_jobs_are_reported_at_once(alone, work):
    (work / "job.yaml").write_text(
        "command: [a]\naccelerator: v4-9\n---\ncommand: [b]\naccelerator: v4-8\nslices: 0\n"
    )
    answer = alone("submit", "job.yaml")
    assert [line.partition(": ")[2].partition(": ")[0] for line in answer.stderr.splitlines()] == [
        "job.yaml (job 1)", "job.yaml (job 2)",
    ]  # fmt: skip


@pytest.mark.parametrize("args", [["jobs"], ["show", "x"], ["logs", "x"], ["slices"], ["why", "x"]])
def test_reading_without_a_server_prints_the_next_step_and_starts_nothing(alone, tmp_path, args):
    answer = alone(*args)
    assert answer.exit_code == 1
    assert "no server is running on this machine" in answer.stderr
    assert not (tmp_path / "state").exists()


@pytest.fixture
def elsewhere(tmp_path, alone) -> Tpu:
    """A user with a token of some server."""
    token = tmp_path / "token"
    token.write_text("x")
    token.chmod(0o600)
    return Tpu(**alone.environ, TPUFLEET_TOKEN_FILE=str(token))


def test_a_frozen_server_is_given_up_after_the_time_of_the_settings(elsewhere):
    elsewhere.environ["TPUFLEET_REQUEST_TIMEOUT"] = "1s"
    with socket.create_server(("127.0.0.1", 0)) as listener:  # connects, and never answers
        answer = elsewhere("--server", f"http://127.0.0.1:{listener.getsockname()[1]}", "jobs")
    assert answer.exit_code == 1
    assert "does not answer (timed out)" in answer.stderr


def test_an_unreachable_server_is_named(elsewhere):
    answer = elsewhere("--server", "http://127.0.0.1:1", "jobs")
    assert answer.exit_code == 1
    assert answer.stderr.startswith("error: ")
    assert "http://127.0.0.1:1" in answer.stderr


@pytest.mark.parametrize(("typed", "message"), [("v9-3", "unknown TPU type"), ("lab", "token")])
def test_a_mistyped_type_is_named_before_a_missing_token(alone, typed, message):
    tpu = Tpu(**alone.environ, TPUFLEET_SERVER="http://127.0.0.1:9")
    answer = tpu("run", typed, "--", "true")
    assert message in answer.stderr


def test_a_traceback_is_shown_only_in_debug_mode(alone, work):
    assert "Traceback" not in alone("submit", "nothing.yaml").stderr
    asked = Tpu(**alone.environ, TPUFLEET_DEBUG="1")
    assert "Traceback" in asked("submit", "nothing.yaml").stderr


def test_rules_shows_the_policy(alone):
    by_name = {row["rule"]: row for row in alone.json("config", "rules")["rules"]}
    assert by_name["pre"] == {
        "rule": "pre", "preempted": "reapply", "connection_lost": "resume", "device_busy": "pass",
    }  # fmt: skip
    assert set(by_name) == {"auto", "pre", "pass", "reapply", "rerun", "resume"}


def test_the_types_are_listed_without_a_server(alone):
    printed = alone.json("types", "v5e")["types"]
    assert {"v5litepod-16"} <= {row["name"] for row in printed}
    table = alone.ok("types", "v5e").splitlines()
    assert table[0].split()[:3] == ["TYPE", "ALIAS", "CHIPS"]
    assert ["v5litepod-16", "v5e-16", "16", "4"] in [line.split()[:4] for line in table]
    assert "write one of tpu7x, v2" in alone("types", "v9").stderr
    [found] = alone.json("types", "tpu7x-2x4x4")["types"]
    assert (found["name"], found["chips"]) == ("tpu7x-64", 32)
    for large in ("v5p-13824", "v5p-24x24x24"):
        assert "largest slice has 6,144 chips: v5p-12288" in alone("types", large).stderr
    for unknown in ("tpu7x-2x2x2x2", "tpu8t-4xx", "tpu7x-"):
        assert "unknown TPU type" in alone("types", unknown).stderr
    [offer] = alone.json("types", "--zones", "tpu7x-64")["offers"]
    assert (offer["zone"], len(offer["capacity"])) == ("us-central1-c", 4)


def test_types_lists_the_zones_of_a_type_with_date_and_source(alone):
    table = alone.ok("types", "--zones", "v5e-16")
    assert "v5e-16" in table and "us-west4-a" in table and "us-central2-b" not in table
    assert "https://cloud.google.com/tpu/docs/regions-zones" in table and "As of 20" in table
    offers = alone.json("types", "us-central2-b")["offers"]
    assert {offer["accelerator"].split("-")[0] for offer in offers} == {"v4"}
    assert offers[0]["capacity"] == ["spot", "on-demand", "reserved", "queued"]


def test_stopping_without_a_server_is_not_an_error(alone):
    assert alone.json("serve", "--stop") == {"stopped": False}


def test_a_dry_run_of_a_simulated_job_says_so_and_names_no_price(alone):
    shown = alone.ok("run", "v5e-4", "--dry-run", "--", "true")
    assert "# simulated on the server's machine" in shown and "$" not in shown
    real = alone.ok("run", "v5e-4", "--dry-run", "--provider", "tpu-vm", "--", "true")
    assert "estimate: $" in real and "simulated" not in real


def test_the_price_of_a_job_is_shown_with_its_date_and_the_most_that_it_can_cost(alone):
    job = ("run", "tpu7x-16", "--on-demand", "--provider", "compute", "--dry-run")
    assert "$96.00 per hour" in (shown := alone.ok(*job, "--max-cost", "5", "--", "true"))
    assert "at most $5.00" in shown and "cloud.google.com/tpu/pricing" in shown
    assert "2026-09" in shown


def test_a_limit_on_cost_that_has_no_effect_is_said_when_the_job_is_submitted():
    """Of a type that a later release may have before its price is published."""
    job = {"command": "x", "accelerator": "tpu7x-16"}
    unpriced = estimate_text(prices.estimate(parse_job(job), {}))
    assert "no price is known" in unpriced and "no effect" not in unpriced
    limited = estimate_text(prices.estimate(parse_job({**job, "max_cost": 5}), {}))
    assert "without it `max_cost` has no effect" in limited


def test_the_version_is_an_option_too(alone):
    assert alone.ok("--version") == alone.ok("version") == f"tpufleet {tpufleet.__version__}\n"


def test_a_command_warns_once_of_a_misspelt_variable(tmp_path):
    tpu = Tpu(HOME=str(tmp_path), TPUFLEET_HOME=str(tmp_path / "state"), TPUFLEET_SERVR="x")
    warning = "warning: TPUFLEET_SERVR: unknown variable; did you mean TPUFLEET_SERVER?"
    assert tpu("jobs").stderr.count(warning) == 1


@pytest.mark.parametrize(
    "server, insecure, warns",
    [
        ("http://192.0.2.7:1", "", True),
        ("http://192.0.2.7:1", "true", False),
        ("http://127.0.0.1:1", "", False),
        ("https://192.0.2.7:1", "", False),
    ],
)
def test_a_token_that_is_sent_unencrypted_to_another_machine_is_warned_of(
    tmp_path, server, insecure, warns
):
    token = tmp_path / "token"
    token.write_text("tpf_x")
    token.chmod(0o600)
    tpu = Tpu(
        HOME=str(tmp_path),
        TPUFLEET_SERVER=server,
        TPUFLEET_TOKEN_FILE=str(token),
        TPUFLEET_INSECURE_HTTP=insecure,
        TPUFLEET_REQUEST_TIMEOUT="1s",
    )
    assert ("your token can be read on the way" in tpu("jobs").stderr) == warns
