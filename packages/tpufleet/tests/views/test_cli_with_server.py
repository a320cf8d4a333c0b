"""The command line against a real server, with the real client."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from zoneinfo import ZoneInfo

import pytest

from tests.polling import wait_until
from tests.views.job_scenarios import end_job, record_event, start_job
from tpufleet.client import snapshots
from tpufleet.model.api_types import PurgeRequest
from tpufleet.model.fleet.host_commands import HostCommandResult
from tpufleet.model.fleet.hosts import Phase, Progress
from tpufleet.model.job.attempts import AttemptState, Startup
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.jobs import ENDED_STATES, JobId, JobState
from tpufleet.model.values import encoding
from tpufleet.stores.base import ChangeSet, JobQuery
from tpufleet.views.cli import output


def only_job(world):
    return world.store.jobs(JobQuery(limit=2))[0]


def test_run_uploads_the_spec_and_the_code(world, tpu, work, tmp_path):
    printed = tpu.ok("run", "v5e-16", "--detach", "--env", "LR=0.1", "--", "python", "train.py")
    job = only_job(world)
    assert printed == f"submitted train-{job.id[:4]} as {job.id} on 1 × v5e-16\n"
    assert (job.owner, job.spec.env, job.spec.command) == (
        "mel", {"LR": "0.1"}, ("python", "train.py"),
    )  # fmt: skip
    scanned = snapshots.scan(work)
    assert job.snapshot == scanned.digest
    kept = io.BytesIO()
    snapshots.pack(scanned, kept)
    copy = tmp_path / "copy"
    copy.mkdir()
    snapshots.unpack(io.BytesIO(kept.getvalue()), copy)
    assert (copy / "train.py").read_text() == "print('hello')\n"


def test_an_unchanged_folder_keeps_its_digest(world, tpu):
    for name in ("one", "two"):
        tpu.ok("run", "v5e-4", "--detach", "--name", name, "--", "python", "train.py")
    one, two = world.store.jobs(JobQuery(limit=2))
    assert one.snapshot == two.snapshot and one.id != two.id


def test_an_empty_folder_can_be_submitted(world, tpu, work):
    (work / "train.py").unlink()
    tpu.ok("run", "v5e-4", "--detach", "--", "hostname")
    assert only_job(world).snapshot is not None


def test_default_names_are_unique_and_found_by_their_beginning(world, tpu):
    for _ in range(3):
        tpu.ok("run", "v5e-4", "--detach", "--", "python", "train.py")
    jobs = world.store.jobs(JobQuery())
    assert len({job.spec.name for job in jobs}) == 3
    assert tpu.json("show", "train")["job"]["id"] == jobs[0].id
    assert tpu.json("show", "mel/train")["job"]["id"] == jobs[0].id
    assert tpu.json("show", "@last")["job"]["id"] == jobs[0].id


def test_submit_is_all_or_nothing(world, tpu, work):
    good = "command: [a]\naccelerator: v4-8\n"
    (work / "job.yaml").write_text(f"{good}---\n{good}pool: nowhere\n")
    answer = tpu("submit", "job.yaml")
    assert answer.exit_code != 0
    assert answer.stderr.startswith("error: job.yaml (job 2): pool: no pool named 'nowhere'")
    alone = tpu("run", "v4-8", "--pool", "nowhere", "--", "a")
    assert alone.stderr.startswith("error: pool: no pool named 'nowhere'")
    assert world.store.jobs(JobQuery()) == []
    (work / "job.yaml").write_text(f"{good}---\n{good}name: b\n")
    rows = tpu.json("submit", "job.yaml")["jobs"]
    assert [row["name"] for row in rows] == [f"a-{rows[0]['id'][:4]}", "b"]


def test_jobs_are_listed_as_table_and_json(world, tpu, admin):
    world.submit("job-1", tags=["sweep"])
    world.submit("job-2", by="mo")
    start_job(world, "job-3")
    table = tpu.ok("jobs").splitlines()
    assert table[0].split()[:4] == ["ID", "NAME", "STATE", "TYPE"]
    assert [line.split()[0] for line in table[1:]] == ["job-3", "job-1"]
    assert table[1].split()[2] == "running" and table[1].endswith("all 4 hosts run")
    ids = lambda *args: [row["id"] for row in tpu.json("jobs", *args)["jobs"]]
    assert ids("--all-users") == ["job-3", "job-2", "job-1"]
    assert ids("--state", "running", "--state", "failed") == ["job-3"]
    assert ids("--tag", "sweep") == ["job-1"]
    assert ids("--limit", "1") == ["job-3"]
    assert "no jobs; start one with `tpu run" in admin("jobs").stderr
    assert tpu("jobs", "--state", "failed").stderr == "no jobs match\n"
    assert tpu("jobs", "--name", "nothing").stderr == "no jobs match\n"
    assert tpu("jobs", "--archived").stderr == "no jobs match\n"


def test_show_prints_everything_about_a_job(world, tpu):
    start_job(world, name="tiny-lm", zones=["local-a"])
    progress = Progress(step=30, total=120, at=world.clock.now(), metrics={"loss": 0.25})
    world.send_heartbeat("slice-1/0", phase=Phase.RUNNING, attempt_id="job-1.0", progress=progress)
    wait_until(lambda: tpu.json("show", "job-1")["row"]["progress"])
    printed = tpu.ok("show", "tiny-lm")
    for expected in ("job-1 (tiny-lm)", "running: all 4 hosts run", "30/120 (25%)", "loss 0.25",
                  "python train.py", "1 × v5e-16, spot", "slice-1", "local-a"):  # fmt: skip
        assert expected in printed
    assert tpu("show", "missing").stderr.startswith("error: ")


def test_show_prints_the_parts_of_a_recovery(world, tpu):
    first, ended = start_job(world), world.clock.now()
    fault = ended - timedelta(seconds=2)
    failed = replace(
        first, state=AttemptState.ENDED, end_reason=EndReason.PREEMPTED, fault_at=fault,
        ended_at=ended, last_step=25,
    )  # fmt: skip
    world.store.commit(ChangeSet(attempts=[failed]))
    second = world.add_attempt("job-1", 1, "slice-1")
    startup = Startup(
        assigned_at=ended, started_at=ended, stepped_at=ended + timedelta(seconds=4),
        first_step=21, advanced_at=ended + timedelta(seconds=9),
    )  # fmt: skip
    world.store.commit(ChangeSet(attempts=[replace(second, startup=startup)]))
    line = "attempt 1: resumed at step 20, 5 steps again; next step 11.0 s after "
    parts = "(detect 2.0 s, program 4.0 s, redo 5.0 s)"
    printed = tpu.ok("show", "job-1")
    assert line in printed and parts in printed, printed


def test_show_prints_the_newest_checkpoint_of_each_attempt(world, tpu):
    first, now = start_job(world), world.clock.now()
    lost = replace(first, state=AttemptState.ENDED, ended_at=now, checkpoint_step=10, last_step=11)
    world.store.commit(ChangeSet(attempts=[lost]))
    world.add_attempt("job-1", 1, "slice-1", start_step=40, running_at=now)  # saved, not reported
    progress = Progress(step=75, checkpoint_step=70, at=now)
    world.send_heartbeat("slice-1/0", phase=Phase.RUNNING, attempt_id="job-1.1", progress=progress)
    wait_until(lambda: tpu.json("show", "job-1")["row"]["progress"]["step"])
    attempts = tpu.json("show", "job-1")["attempts"]
    assert [each["checkpoint_step"] for each in attempts] == [40, 70]
    assert "step 40" in tpu.ok("show", "job-1")


def test_why_explains_the_state(world, tpu):
    world.submit()
    answer = tpu.json("why", "job-1")
    assert answer["state"] == "queued" and answer["message"]
    assert tpu.ok("why", "job-1").splitlines()[0] == answer["message"]


def test_logs_that_are_not_there_are_explained(world, tpu):
    world.submit("job-1", name="train")
    assert "has not started: no output" in tpu("logs", "train").stderr
    world.add_slice("s-1", "job-1")
    world.change_job("job-1", state=JobState.STARTING)
    world.add_attempt("job-1", 0, "s-1", running_at=world.clock.now())
    world.change_job("job-1", state=JobState.RUNNING)
    assert "no output of train (job-1) yet" in tpu("logs", "train").stderr
    world.change_job("job-1", state=JobState.FAILED, ended_at=world.clock.now())
    assert "no logs of train (job-1) are stored" in tpu("logs", "train").stderr


def test_a_job_that_is_not_found_is_named_as_typed(world, tpu):
    assert "no job named 'ada/adajob'" in tpu("cancel", "ada/adajob").stderr


def test_log_lines_are_prefixed_unless_one_host_is_selected(world, tpu):
    start_job(world)
    world.send_log("job-1.0", "slice-1/0", 0, b"hello\nworld\n")
    world.send_log("job-1.0", "slice-1/1", 0, b"from the other\n")
    assert sorted(tpu.ok("logs", "job-1").splitlines()) == [
        "[0] hello", "[0] world", "[1] from the other",
    ]  # fmt: skip
    assert tpu.ok("logs", "job-1", "--host", "0", "--tail", "1") == "world\n"
    assert tpu.ok("logs", "job-1", "--host", "all") == tpu.ok("logs", "job-1")
    assert tpu.json("logs", "job-1", "--host", "1")["lines"] == ["from the other"]


def test_logs_are_followed_until_the_job_ends(world, tpu):
    start_job(world)
    world.send_log("job-1.0", "slice-1/0", 0, b"first\n")
    answers = []
    reader = threading.Thread(target=lambda: answers.append(tpu.ok("logs", "-f", "job-1")))
    reader.start()
    world.send_log("job-1.0", "slice-1/0", 6, b"last\n")
    end_job(world, "job-1", JobState.SUCCEEDED)
    reader.join(timeout=900)
    assert answers == ["[0] first\n[0] last\n"]


def test_followed_logs_mark_a_new_attempt(world, tpu):
    attempt = start_job(world)
    world.send_log("job-1.0", "slice-1/0", 0, b"first\n")
    ended = replace(attempt, state=AttemptState.ENDED, ended_at=world.clock.now())
    reader = subprocess.Popen(
        [sys.executable, "-m", "tpufleet", "logs", "-f", "job-1"],
        env={**os.environ, **tpu.environ}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert reader.stdout is not None and reader.stdout.readline() == "[0] first\n"
    world.store.commit(ChangeSet(attempts=[ended]))
    world.add_attempt("job-1", 1, "slice-1")
    world.send_log("job-1.1", "slice-1/0", 0, b"second\n")
    end_job(world, "job-1", JobState.SUCCEEDED)
    assert reader.communicate(timeout=900)[0] == "--- attempt 1 ---\n[0] second\n"


def test_events_are_printed_in_the_time_zone_of_the_user(world, tpu):
    world.submit()
    for zone in ("Asia/Tokyo", "America/New_York"):
        tpu.ok("config", "set", "time_zone", zone)
        clock = world.clock.now().astimezone(ZoneInfo(zone)).strftime("%H:%M")
        assert f"{clock}:" in tpu.ok("events", "job-1")


def test_events_are_printed_oldest_first(world, tpu):
    world.submit()
    record_event(world, JobId("job-1"), "slice-1 was preempted", state="preempted")
    lines = tpu.ok("events", "job-1").splitlines()
    assert lines[-1].split(None, 3)[2:] == ["preempted", "slice-1 was preempted"]
    assert [event["state"] for event in tpu.json("events", "job-1")["events"]][-1] == "preempted"
    assert len(tpu.ok("events", "--limit", "1").splitlines()) == 1
    assert tpu.ok("events", "--since", "3650d") == tpu.ok("events")
    assert tpu.ok("events", "--since", "1h") == "", "the clock of this server stands in the past"


def test_cancel_continues_after_a_job_that_cannot_be_cancelled(world, tpu):
    world.submit("job-1")
    world.submit("job-2")
    world.end_job("job-1")
    answer = tpu("cancel", "job-1", "job-2")
    assert answer.exit_code == 1
    assert "cancelling train (job-2)" in answer.stdout
    assert "job-1" in answer.stderr
    assert [message.job_id for message in world.store.inbox() if message.kind == "cancel"] == [
        "job-2"
    ]


def test_cancel_all_asks_and_cancels_only_your_live_jobs(world, tpu):
    world.submit("job-1")
    world.submit("job-2")
    world.submit("job-3", by="mo")
    world.end_job("job-2")
    assert tpu("cancel", "--all").stderr == ("error: not a terminal; pass --yes to confirm\n")
    assert [row["id"] for row in tpu.json("cancel", "--all", "--yes")["jobs"]] == ["job-1"]


@pytest.mark.parametrize("verb", ["resume", "rerun"])
def test_resume_and_rerun_create_a_child_with_overrides(world, tpu, verb):
    world.submit(env={"A": "1"})
    world.end_job("job-1")
    row = tpu.json(verb, "job-1", "--detach", "--set", "env.B=2", "--set", "timeout=2h")
    child = world.store.job(JobId(row["id"]))
    assert (child.parent, child.parent_relation) == ("job-1", verb)
    assert child.spec.env == {"A": "1", "B": "2"}
    assert child.spec.timeout.total_seconds() == 7200
    assert tpu(verb, row["id"]).exit_code == 1  # it has not ended


@pytest.mark.parametrize("verb", ["resume", "rerun"])
@pytest.mark.parametrize(
    "option", [("--new-code",), ("--new-code=.",), ("--set", "workdir=.")], ids=" ".join
)
def test_new_code_is_uploaded_and_keeps_the_family(world, tpu, work, verb, option):
    tpu.ok("run", "v5e-4", "--detach", "--name", "train", "--", "python", "train.py")
    parent = only_job(world)
    world.end_job(parent.id)
    (work / "train.py").write_text("print('fixed')\n")
    printed = tpu.ok(verb, "train", "--detach", *option)
    child = next(job for job in world.store.jobs(JobQuery()) if job.parent == parent.id)
    assert child.snapshot == snapshots.scan(work).digest != parent.snapshot
    assert (child.checkpoint == parent.checkpoint) is (verb == "resume")
    assert printed.endswith(f"(parent {parent.id}) with new code\n")


def test_without_new_code_the_snapshot_of_the_parent_is_used(world, tpu, work):
    tpu.ok("run", "v5e-4", "--detach", "--", "python", "train.py")
    parent = only_job(world)
    world.end_job(parent.id)
    (work / "train.py").write_text("print('fixed')\n")
    row = tpu.json("resume", "train", "--detach")
    assert world.store.job(JobId(row["id"])).snapshot == parent.snapshot
    assert tpu("rerun", parent.id, "--new-code", "nowhere").exit_code == 2


CHANGED_COMMANDS = [
    pytest.param(["lr=0.1"], ["train.py", "lr=0.1", "--bs=8"], id="replaced"),
    pytest.param(["bs=16"], ["train.py", "lr=1", "--bs=16"], id="dashes are kept"),
    pytest.param(["wd=0"], ["train.py", "lr=1", "--bs=8", "wd=0"], id="appended"),
    pytest.param(["--", "eval.py", "lr=3"], ["eval.py", "lr=3"], id="new command"),
    pytest.param(["lr=2", "--", "eval.py", "lr=3"], ["eval.py", "lr=2"], id="both"),
]


@pytest.mark.parametrize("verb", ["resume", "rerun"])
@pytest.mark.parametrize(("arguments", "expected"), CHANGED_COMMANDS)
def test_resume_and_rerun_change_the_command_like_run(world, tpu, verb, arguments, expected):
    world.submit(command=["train.py", "lr=1", "--bs=8"], tags=["a"])
    world.end_job("job-1")
    options = ("--type", "v4-8", "--tag", "b", "--set", "name=two", "--detach", "--json")
    row = json.loads(tpu.ok(verb, "job-1", *options, *arguments))
    spec = world.store.job(JobId(row["id"])).spec
    assert list(spec.command) == expected
    assert (spec.accelerator, spec.tags, spec.name) == ("v4-8", ("a", "b"), "two")


@pytest.mark.parametrize(
    ("argument", "expected", "said"),
    [
        ("sleep=0.01", ["train.py", "--sleep", "0.01", "--lr", "-3", "-v"], ""),
        ("lr=-4", ["train.py", "--sleep", "0.05", "--lr", "-4", "-v"], ""),
        ("wd=0", ["train.py", "--sleep", "0.05", "--lr", "-3", "-v", "wd=0"],
         "the command has no argument wd; appended wd=0\n"),
    ],
    ids=["two words", "negative number", "appended"],
)  # fmt: skip
def test_an_argument_in_two_words_is_replaced(world, tpu, argument, expected, said):
    world.submit(command=["train.py", "--sleep", "0.05", "--lr", "-3", "-v"])
    world.end_job("job-1")
    answer = tpu("rerun", "job-1", argument, "--detach", "--json")
    assert answer.stderr == said
    row = json.loads(answer.stdout)
    assert list(world.store.job(JobId(row["id"])).spec.command) == expected


@pytest.mark.parametrize("verb", ["resume", "rerun"])
def test_an_argument_of_a_script_is_a_variable_of_its_environment(world, tpu, verb):
    world.submit(command="python train.py --lr $LR", env={"LR": "1", "SEED": "2"})
    world.end_job("job-1")
    row = tpu.json(verb, "job-1", "LR=0.1", "--detach")
    spec = world.store.job(JobId(row["id"])).spec
    assert spec.env == {"LR": "0.1", "SEED": "2"} and "train.py --lr $LR" in spec.command[-1]


def test_a_succeeded_job_is_resumed_only_with_a_change(world, tpu):
    world.submit(command=["train.py", "steps=10"])
    world.end_job("job-1", JobState.SUCCEEDED)
    refused = tpu("resume", "job-1", "--detach")
    assert refused.exit_code == 1 and "job-1 has already succeeded" in refused.stderr
    assert [job.id for job in world.store.jobs(JobQuery())] == ["job-1"]
    assert tpu.json("resume", "job-1", "steps=20", "--detach")["parent"] == "job-1"
    assert tpu.json("rerun", "job-1", "--detach")["parent"] == "job-1"


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (["python", "t.py", "--to", "$CKPT"], "$CKPT"),
        (["python", "t.py", "--to=${CKPT}/a", "$HOME"], "${CKPT}, $HOME"),
        (["./bash", "train.sh", "$CKPT"], "$CKPT"),
        (["bash", "-c", "python t.py --to $CKPT"], ""),
        (["env", "A=1", "/bin/bash", "-eu", "-lc", 'echo "$A"'], ""),
        (["python t.py --to $CKPT"], ""),
        (["python", "t.py", "cost=5$", "$5"], ""),
    ],
)
def test_variables_that_no_shell_replaces_are_named(world, tpu, command, names):
    for dry_run in ("--dry-run", "--detach"):
        said = tpu("run", "v5e-4", dry_run, "--", *command).stderr
        assert (f"no shell replaces {names}:" in said) if names else "no shell" not in said


def test_an_argument_with_dashes_is_explained(world, tpu):
    world.submit()
    world.end_job("job-1")
    answer = tpu("rerun", "job-1", "--lr=0.1")
    assert answer.exit_code == 2 and "write `lr=0.1` without dashes" in answer.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--pool", "nope"), "pool: no pool named 'nope'"),
        (("--secret", "A=nope"), "secrets.A: no secret named 'nope'"),
        (("--notify", "nope"), "no channel"),
        (("--provider", "gke"), "gke is not allowed on this server"),
    ],
)
def test_a_dry_run_is_refused_for_what_submit_refuses(world, tpu, options, message):
    for dry_run in (("--dry-run",), ()):
        answer = tpu("run", "v5e-4", *options, *dry_run, "--", "true")
        assert answer.exit_code == 2 and message in answer.stderr
    assert world.store.jobs(JobQuery()) == []


def test_a_dry_run_goes_on_without_its_server(world, tpu):
    world.stop()
    answer = tpu("run", "v5e-4", "--dry-run", "--", "true")
    assert answer.exit_code == 0 and "not checked by the server" in answer.stderr
    world.start()


def test_a_dry_run_knows_the_provider_of_a_pool(world, admin, tpu):
    admin.ok("pool", "create", "lab", "v5e-4")
    printed = tpu.ok("run", "v5e-4", "--pool", "lab", "--dry-run", "--", "true")
    assert "nothing is billed" in printed


def test_an_argument_that_a_script_does_not_use_is_refused(world, tpu):
    world.submit(command="python train.py lr=1")
    world.end_job("job-1")
    answer = tpu("rerun", "job-1", "lr=2", "--detach")
    assert answer.exit_code == 2 and "pass the whole command after `--`" in answer.stderr
    assert tpu("rerun", "job-1", "nonsense").exit_code == 2


def test_resume_follows_the_job_like_run(world, tpu):
    world.submit()
    world.end_job("job-1")
    thread, answers = start_in_thread(tpu, "resume", "job-1")
    job = wait_until(lambda: next(iter(world.store.jobs(JobQuery(parent="job-1"))), None))
    end_job(world, job.id, JobState.FAILED, reason="because")
    thread.join(timeout=900)
    assert answers[0].exit_code == 1
    assert "failed after 0 attempts: because" in answers[0].stdout
    assert f"`tpu rerun {job.id}` submits it again" in answers[0].stderr


def test_an_invalid_override_is_rejected_before_a_request(world, tpu):
    world.submit()
    world.end_job("job-1")
    answer = tpu("rerun", "job-1", "--set", "rule=resum")
    assert answer.exit_code == 2
    assert answer.stderr.startswith("error: rule: ") and "resume" in answer.stderr


def test_pools_are_created_shown_and_deleted(world, admin, tpu):
    created = admin.json("pool", "create", "lab", "v5e-16", "--largest", "4", "--zone", "local-a")
    assert (created["accelerator"], created["largest"]) == ("v5litepod-16", 4)
    assert tpu.json("pool", "list")["pools"] == [created]
    world.add_slice("slice-1", None, pool="lab")
    printed = tpu.ok("pool", "show", "lab")
    assert "1 now; 0 to 4" in printed and "slice-1  ready  local-a  idle" in printed
    assert "1, $7.68 per hour (simulated)" in printed
    printed = admin.ok("pool", "create", "lab", "v5e-16", "--supersede", "--member", "mel")
    assert "up to 4 × v5e-16" in printed and "changed: members, supersede" in printed
    (changed,) = tpu.json("pool", "list")["pools"]
    assert changed == {**created, "supersede": True, "members": ["mel"]}, "others are kept"
    assert "nothing changed" in admin.ok("pool", "create", "lab", "v5e-16")
    assert tpu("pool", "delete", "lab", "--yes").exit_code == 1  # mel is not an admin
    assert admin("pool", "delete", "lab").exit_code == 2  # not a terminal


def test_settings_of_a_pool_are_changed_without_its_type_and_reset(admin):
    created = admin.json("pool", "create", "lab", "v5e-16", "--largest", "4")
    limits = ("--member", "mel", "--per-user", "2", "--zone", "local-a", "--pod", "cpu=4")
    admin.ok("pool", "create", "lab", *limits)
    cleared = [
        word for option in ("member", "per-user", "zone", "pod") for word in ("--clear", option)
    ]
    printed = admin.ok("pool", "create", "lab", *cleared)
    assert "up to 4 × v5e-16" in printed
    assert "changed: zones, members, slices_per_user, pod" in printed
    assert admin.json("pool", "list")["pools"] == [created]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("other",), "TYPE: required, because there is no pool named 'other' to change"),
        (("lab", "--clear", "member", "--member", "mel"), "not together with --member"),
    ],
    ids=["a new pool without a type", "cleared and given"],
)
def test_a_change_of_a_pool_that_makes_no_sense_is_refused(admin, args, message):
    admin.ok("pool", "create", "lab", "v5e-16")
    answer = admin("pool", "create", *args)
    assert answer.exit_code == 2 and message in answer.stderr


@pytest.mark.parametrize(
    "change", [("v5e-8",), ("--member", "mo")], ids=["another type", "no longer a member"]
)
def test_a_change_of_a_pool_that_fails_queued_jobs_is_confirmed(world, admin, change):
    admin.ok("pool", "create", "lab", "v5e-16", "--largest", "2")
    world.submit(pool="lab")
    admin.ok("pool", "create", "lab", "v5e-16", "--largest", "4")  # fails none
    answer = admin("pool", "create", "lab", *change)
    assert answer.exit_code == 2 and "pass --yes to confirm" in answer.stderr
    assert "this fails 1 queued job in pool lab (of mel)" in answer.stderr
    assert "changed:" in admin.ok("pool", "create", "lab", *change, "--yes")


def test_an_owner_injects_faults_by_job_or_slice(world, admin, tpu):
    start_job(world)
    assert "slice-1" in tpu.ok("inventory", "slices")
    world.add_slice("slice-2", None, pool="lab")
    assert tpu("doctor", "fault", "slice-2", "preempt").exit_code == 1
    tpu.ok("doctor", "fault", "job-1", "preempt")
    admin.ok("doctor", "fault", "slice-1", "kill-host", "--host", "2")
    faults = [item for item in world.store.inbox() if item.kind == "fault"]
    assert [(item.slice_id, item.fault, item.host_index) for item in faults] == [
        ("slice-1", "preempt", None), ("slice-1", "kill-host", 2),
    ]  # fmt: skip


def test_exec_takes_a_job_and_runs_on_all_of_its_slices(world, tpu):
    world.submit("job-1", slices=2)
    for name in ("slice-1", "slice-2"):
        world.add_slice(name, "job-1", provider="tpu-vm")
    script = "echo I am; hostname"
    thread, answers = start_in_thread(tpu, "exec", "train", "--host", "0", "--", script)
    for name in ("slice-1", "slice-2"):
        command = wait_until(lambda name=name: world.send_heartbeat(f"{name}/0").host_commands)[0]
        assert command.command[0] == "bash" and command.command[-1] == script
        result = HostCommandResult(host_id=f"{name}/0", status=0, output=f"I am {name}\n")
        with world.http(world.slice_token(name)) as http:
            http.post(f"/agent/commands/{command.id}", content=encoding.to_json(result))
    thread.join(timeout=900)
    assert answers[0].exit_code == 0, answers[0].output
    assert answers[0].stdout == "[slice-1/0] I am slice-1\n[slice-2/0] I am slice-2\n"


@pytest.mark.parametrize(
    ("timeout", "message"),
    [("0s", "a limit is required"), ("none", "a limit is required"), ("2h", "at most 1h")],
)
def test_exec_names_the_limit_of_its_timeout(tpu, timeout, message):
    refused = tpu("exec", "train", "--timeout", timeout, "--", "date")
    assert refused.exit_code == 2 and f"--timeout: {message}" in refused.stderr
    assert "at most 1h" in tpu.ok("exec", "--help")


def test_commands_on_hosts_explain_what_they_could_not_find(world, tpu):
    assert "no slice or job 'nothing'" in tpu("exec", "nothing", "--", "date").stderr
    world.submit("job-1", slices=2)
    assert "has no hosts; its state is queued" in tpu("doctor", "train").stderr
    for name in ("slice-1", "slice-2"):
        world.add_slice(name, "job-1")
    refused = tpu("doctor", "fault", "train", "preempt")
    assert refused.exit_code == 2 and "name one of slice-1, slice-2" in refused.stderr


def test_archive_hides_jobs_and_unarchive_lists_them_again(world, tpu):
    world.submit("job-1")
    assert "no ended jobs to archive" in tpu("archive").output
    world.end_job("job-1")
    refused = tpu("archive")  # without a job or a filter it asks
    assert refused.exit_code == 2 and "--yes" in refused.output and "job-1" in tpu.ok("jobs")
    assert "archived: 1 job" in tpu.ok("archive", "--query", "state:failed")
    assert "job-1" not in tpu("jobs").output and "job-1" in tpu.ok("jobs", "--archived")
    assert "job-1" in tpu.ok("archive", "undo", "job-1") and "job-1" in tpu.ok("jobs")


def test_jobs_that_a_live_job_continues_are_archived_by_name_only(world, tpu):
    for name in ("first", "other"):
        world.submit(name)
        world.end_job(name)
    second = world.client().resume("first").id
    world.end_job(second)
    world.client().resume(second)
    assert [row["id"] for row in tpu.json("archive", "--query", "state:ended")["jobs"]] == ["other"]
    assert [row["id"] for row in tpu.json("archive", "first")["jobs"]] == ["first"]


def test_all_archived_jobs_or_those_of_a_query_are_listed_again(world, tpu):
    for name in ("job-1", "job-2"):
        world.submit(name, name=name)
        world.end_job(name)
    tpu.ok("archive", "--yes")
    assert tpu("jobs").stderr == "no jobs, except archived ones: `tpu jobs is:archived`\n"
    assert "no jobs match, except archived" in tpu("jobs", "--state", "failed").stderr
    assert tpu("jobs", "--state", "succeeded").stderr == "no jobs match\n"
    assert tpu.ok("archive", "undo", "--query", "name:job-2") == "listed again: job-2 (job-2)\n"
    assert tpu.ok("archive", "undo", "--query", "is:archived") == "listed again: job-1 (job-1)\n"
    assert (
        tpu("archive", "undo", "--query", "is:archived").stderr
        == "no archived jobs to list again\n"
    )
    assert "pass one of JOB, --query" in tpu("archive", "undo").output


def test_purge_lists_files_and_checkpoints_apart_and_asks(world, tpu):
    for name in ("one", "two"):
        tpu.ok("run", "v5e-4", "--detach", "--name", name, "--", "python", "train.py")
    one, two = (world.store.jobs(JobQuery(name=name))[0].id for name in ("one", "two"))
    assert "no files of ended jobs" in tpu("archive", "purge").output
    world.end_job(one)
    checkpoint = world.folder / "checkpoints" / one / "7"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(b"x" * 2000)
    printed = tpu.ok("archive", "purge", "--dry-run")
    assert one in printed and two not in printed and "2.0 kB, kept" in printed
    assert "logs and results of 1 job (" in printed
    assert "checkpoints are kept (2.0 kB)" in printed
    assert "2.0 kB, deleted" in tpu.ok("archive", "purge", "--dry-run", "--checkpoints")
    refused = tpu("archive", "purge")
    assert refused.exit_code == 2 and "--yes" in refused.output
    assert "deleted: " in tpu.ok("archive", "purge", "--yes", "--query", "state:failed")
    assert checkpoint.exists()
    assert one not in tpu.ok("jobs") and one in tpu.ok("jobs", "--archived")
    world.end_job(two, JobState.SUCCEEDED)
    [row] = tpu.json("archive", "purge", two)["jobs"]
    assert (row["id"], row["state"]) == (two, "succeeded")


def test_purging_a_job_again_says_that_nothing_is_left(world, tpu):
    world.submit("one")
    world.end_job("one")
    assert "deleted: logs and results of 1 job" in tpu.ok("archive", "purge", "one", "--yes")
    again = tpu("archive", "purge", "one", "--yes")
    assert (again.exit_code, again.stdout) == (0, "")
    assert again.stderr == "no files of ended jobs to delete\n"
    assert tpu("archive", "purge", "one", "--checkpoints", "--yes").stderr == again.stderr
    assert tpu.json("archive", "purge", "one")["jobs"] == []


def test_a_job_that_another_command_purges_meanwhile_is_not_reported_as_deleted(
    world, tpu, monkeypatch
):
    world.submit("one")
    world.end_job("one")

    def confirm_after_another_purge(*_: object) -> None:
        world.client().purge(PurgeRequest(jobs=(JobId("one"),)))

    monkeypatch.setattr(output, "confirm", confirm_after_another_purge)
    result = tpu("archive", "purge", "one")
    assert result.exit_code == 0 and "deleted:" not in result.stdout
    assert "no files of ended jobs" in result.stderr


def test_a_purged_job_gets_no_advice_that_needs_its_files(world, tpu):
    tpu.ok("run", "v5e-4", "--detach", "--name", "one", "--", "python", "train.py")
    [job] = world.store.jobs(JobQuery(name="one"))
    end_job(world, job.id, JobState.FAILED, end_reason=EndReason.USER_ERROR, reason="exit 1")
    assert "tpu logs" in tpu.ok("why", "one")
    tpu.ok("archive", "purge", "one", "--yes")
    explained = tpu.ok("why", "one")
    assert "tpu logs" not in explained and "logs and code were deleted on" in explained
    assert "deleted on" in tpu.ok("show", "one")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("one", "--query", "state:failed"), "job names"),
        (("--query", "until:never"), "not a duration"),
        (("--query", "stat:failed"), "did you mean state"),
    ],
)
def test_archive_and_purge_reject_invalid_filters(tpu, args, message):
    for verb in ("archive", "purge"):
        answer = tpu(verb, *args)
        assert answer.exit_code != 0 and message in answer.output


def test_a_secret_is_read_from_standard_input_and_never_shown(world, admin):
    admin.ok("secret", "set", "wandb", input="hunter2\n")
    assert admin.ok("secret", "list").split() == ["SECRET", "OWNER", "wandb", "you"]
    assert "hunter2" not in admin.ok("secret", "list", "--json")
    names = [each.name for each in world.store.objects("secrets/own/")]
    assert b"hunter2" not in b"".join(world.store.read_objects(names).values())
    assert admin("secret", "set", "empty", input="").exit_code == 2
    admin.ok("secret", "delete", "wandb")
    admin.ok("secret", "set", "--shared", "hub", input="token\n")
    assert admin.json("secret", "list") == {"own": [], "shared": ["hub"]}
    admin.ok("secret", "delete", "hub", "--shared")


def test_users_and_tokens_are_created_and_deleted(world, admin):
    admin.ok("user", "add", "zoe", "--role", "viewer")
    answer = admin("token", "create", "--user", "zoe", "--note", "laptop")
    value = answer.stdout.strip()
    assert value and value not in answer.stderr
    rows = {row["user"]: row for row in admin.json("token", "list")["tokens"]}
    assert rows["zoe"]["note"] == "laptop" and value not in json.dumps(rows)
    admin.ok("token", "revoke", rows["zoe"]["id"])
    unknown = admin("user", "delete", "zo")  # is not asked about
    assert unknown.exit_code == 1 and "no user named 'zo'" in unknown.stderr
    deleted = admin.ok("user", "delete", "zoe", "--yes")
    what = "cancelled 0 jobs; deleted 0 tokens, 0 secrets; ended 0 reservations"
    assert deleted.strip() == f"deleted user zoe: {what}"
    assert "zoe" not in [row["name"] for row in admin.json("user", "list")["users"]]


def start_in_thread(tpu, *args):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(tpu(*args)))
    thread.start()
    return thread, answers


@pytest.mark.parametrize(
    ("state", "status"),
    [(JobState.SUCCEEDED, 0), (JobState.FAILED, 1), (JobState.CANCELLED, 1)],
)
def test_run_follows_the_job_and_exits_with_its_status(world, tpu, state, status):
    thread, answers = start_in_thread(tpu, "run", "v5e-16", "--", "python", "train.py")
    job = wait_until(lambda: next(iter(world.store.jobs(JobQuery())), None))
    world.add_slice("slice-1", job.id)
    world.add_attempt(job.id, 0, "slice-1")
    world.change_job(job.id, state=JobState.RUNNING)
    record_event(world, job.id, "slice-1 was preempted; asking for another", state="preempted")
    world.send_log(f"{job.id}.0", "slice-1/0", 0, b"step 1\n")
    end_job(world, job.id, state, reason="because")
    thread.join(timeout=900)
    (answer,) = answers
    assert answer.exit_code == status, answer.output
    assert "slice-1 was preempted; asking for another" in answer.stdout
    assert "[0] step 1" in answer.stdout
    assert f"train-{job.id[:4]} {state} after 1 attempt: because" in answer.stdout


@pytest.mark.parametrize(
    ("options", "hosts"),
    [((), [0]), (("--host", "1"), [1]), (("--host", "all"), [0, 1, 2, 3])],
    ids=["default", "one", "all"],
)
def test_run_shows_the_output_of_host_0_unless_asked_for_others(world, tpu, options, hosts):
    thread, answers = start_in_thread(tpu, "run", "v5e-16", *options, "--", "python", "train.py")
    job = wait_until(lambda: next(iter(world.store.jobs(JobQuery())), None))
    world.add_slice("slice-1", job.id)
    world.add_attempt(job.id, 0, "slice-1")
    for host in range(4):
        world.send_log(f"{job.id}.0", f"slice-1/{host}", 0, f"loss on {host}\n".encode())
    end_job(world, job.id, JobState.SUCCEEDED)
    thread.join(timeout=900)
    shown = [line for line in answers[0].stdout.splitlines() if "loss on" in line]
    assert sorted(shown) == [f"[{host}] loss on {host}" for host in hosts]


def test_following_with_json_prints_one_object_per_line(world, tpu):
    thread, answers = start_in_thread(tpu, "run", "v5e-16", "--json", "--", "python", "train.py")
    job = wait_until(lambda: next(iter(world.store.jobs(JobQuery())), None))
    end_job(world, job.id, JobState.SUCCEEDED)
    thread.join(timeout=900)
    lines = [json.loads(line) for line in answers[0].stdout.splitlines()]
    assert {line["kind"] for line in lines} >= {"event", "job"}
    assert [line["job"]["state"] for line in lines if line["kind"] == "job"][-1] == "succeeded"


def test_several_jobs_are_followed_together(world, tpu, work):
    one = "command: [a]\naccelerator: v4-8\n"
    (work / "jobs.yaml").write_text(f"{one}name: a\n---\n{one}name: b\n")
    thread, answers = start_in_thread(tpu, "submit", "jobs.yaml", "--follow")
    wait_until(lambda: len(world.store.jobs(JobQuery())) == 2)
    for job in world.store.jobs(JobQuery()):
        end_job(world, job.id, JobState.SUCCEEDED if job.spec.name == "a" else JobState.FAILED)
    thread.join(timeout=900)
    assert answers[0].exit_code == 1
    assert "a succeeded" in answers[0].stdout and "b failed" in answers[0].stdout


def test_ctrl_c_detaches_and_the_job_continues(world, tpu, work):
    left = subprocess.Popen(
        [sys.executable, "-m", "tpufleet", "run", "v5e-16", "--", "python", "train.py"],
        env={**os.environ, **tpu.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert left.stdout is not None
    wait_until(lambda: "submitted train" in left.stdout.readline())
    wait_until(lambda: "submitted" in left.stdout.readline())  # its first event: it follows now
    left.send_signal(signal.SIGINT)
    _, printed = left.communicate(timeout=900)
    assert left.returncode == 130
    job = only_job(world)
    assert job.state not in ENDED_STATES and job.cancel_requested_by is None
    assert f"`tpu cancel {job.id}`" in printed
    assert "Traceback" not in printed


def test_an_unknown_token_is_reported_in_one_error(world, tpu, tmp_path):
    (tmp_path / "token-mel").write_text("wrong")
    answer = tpu("jobs")
    assert answer.exit_code == 1
    assert answer.stderr.startswith("error: ") and answer.stderr.count("error: ") == 1


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("run python train.py", "next: `tpu run v5e-16 -- python train.py`"),
        ("run train.py -- lr=1", "next: `tpu run v5e-16 -- train.py lr=1`"),
        ("run v5 -- python train.py", "such as v5e-1, to request"),
        ("submit train.py", "next: `tpu run v5e-16 -- python train.py`"),
        ("status job-1", "`tpu show JOB` shows a job"),
        ("show job-1 job-2", "it shows one job"),
        ("budget set mel 100", "`budgets` in the config file of the server"),
        ("priority job-1 5", "job-1 has already ended: the priority is that of its reruns"),
        ("user create zoe", "did you mean `tpu user add`?"),
        ("config set timezone", "`tpu config` lists the settings"),
        ("run v5e-4 --zone us-centrall-a --detach -- true", "did you mean us-central1-a?"),
        ("resume job-1", "job job-1 has already succeeded"),
    ],
)  # fmt: skip
def test_a_mistake_is_answered_with_what_is_meant(world, tpu, typed, said):
    world.submit()
    world.end_job("job-1", JobState.SUCCEEDED)
    assert said in tpu(*typed.split()).stderr


def test_tokens_are_revoked_with_all_of_a_user(world, admin, tpu):
    admin.ok("token", "create", "--user", "mel")
    ended = admin.ok("token", "revoke", "--all", "mel")
    assert ended.startswith("revoked 2 tokens: ")
    assert "pass one of TOKEN, --all USER" in admin("token", "revoke").stderr
    assert "unknown token" in tpu("jobs").stderr
