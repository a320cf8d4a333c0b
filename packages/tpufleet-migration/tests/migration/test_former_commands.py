"""Commands of the former job manager, typed as its users typed them, do what they did."""

from __future__ import annotations

import json

import pytest

from tests.service.harness import ServiceHarness
from tests.views.cli_runner import Tpu
from tests.views.job_scenarios import cancelled, end_job
from tests.views.test_terminal_output import Terminal
from tpufleet.model.fleet.pools import Pool
from tpufleet.model.job.jobs import JobId, JobState
from tpufleet.stores.base import ChangeSet


@pytest.fixture
def lab(world: ServiceHarness) -> None:
    pool = Pool(name="lab", provider="local", accelerator="v5litepod-16", largest=2)
    world.store.commit(ChangeSet(pools=[pool]))


@pytest.fixture
def jobs(world: ServiceHarness) -> None:
    """Two of mel, and one of mo."""
    world.submit("job-1", name="train")
    world.submit("job-2", name="eval")
    world.submit("job-3", name="theirs", by="mo")


@pytest.mark.parametrize("spelling", ["check", "check-simp"])
def test_check_lists_my_jobs(tpu: Tpu, jobs, spelling):
    shown = tpu.ok(spelling)
    assert "train" in shown and "eval" in shown and "theirs" not in shown


@pytest.mark.parametrize("who", ["mo", "user=mo"])
@pytest.mark.parametrize("spelling", ["check", "check-simp"])
def test_check_of_another_user_lists_theirs(tpu: Tpu, jobs, spelling, who):
    answer = tpu(spelling, who, "-wdts", "-nt", "col=2")
    assert answer.exit_code == 0, answer.output
    assert "theirs" in answer.stdout and "train" not in answer.stdout
    assert "hint: col=2 is not needed" in answer.stderr
    assert "-wdts" not in tpu.ok("check", "cloud", "--help"), "today's subcommand stays"


def test_the_layout_of_caj_follows_from_the_terminal(tpu: Tpu, jobs):
    answer = tpu("caj", "-wdtsv", "-nf")
    assert answer.exit_code == 0 and "theirs" in answer.stdout and "train" in answer.stdout
    assert "hint: -wdts is not needed: columns follow" in answer.stderr


@pytest.mark.parametrize(
    "words", [("check", "-v"), ("check", "mel", "-wdtsv"), ("check-simp", "-sv")]
)
def test_check_v_shows_the_activity_and_the_newest_output(world, tpu: Tpu, jobs, words):
    world.add_slice("s1", "job-1")
    world.add_attempt("job-1", 0, "s1")
    world.send_log("job-1.0", "s1/0", 0, b"Compiling train_step\nplease wait\n")
    _, _, shown = tpu.ok(*words).partition("\ntrain (job-1")
    heading, *lines = shown.splitlines()
    assert heading.endswith("): compiling") and lines[1] == "  please wait"


def test_monitor_dir_shows_the_folder_that_the_code_came_from(tpu: Tpu, work):
    tpu.ok("run", "v5e-16", "--detach", "--", "true")
    assert f", {work}):" in tpu.ok("check", "-v")
    tpu.ok("set-settings", "monitor_dir", "false")
    assert str(work) not in tpu.ok("check", "-v")


def test_caj_lists_the_jobs_of_everybody(tpu: Tpu, jobs):
    shown = tpu.ok("caj")
    assert "train" in shown and "theirs" in shown


@pytest.mark.parametrize(
    ("spelling", "others"),
    [pytest.param("monitor", False, marks=pytest.mark.slow), ("maj", True)],
)
def test_monitor_refreshes_until_interrupted(world, tpu: Tpu, jobs, spelling, others):
    screen = Terminal(tpu, spelling)
    screen.wait_for("train")
    world.submit("job-9", name="submitted-meanwhile")
    screen.wait_for("submitted-meanwhile")
    assert ("theirs" in screen.shown) == others
    screen.interrupt()
    assert screen.end() in (0, 130)


@pytest.mark.parametrize("spelling", ["kill", "kill-job", "-k", "-kj", "kill-window", "-kw"])
def test_every_spelling_of_kill_cancels_the_job(world, tpu: Tpu, jobs, spelling):
    tpu.ok(spelling, "train")
    assert cancelled(world, "job-1") and not cancelled(world, "job-2")


@pytest.mark.parametrize("spelling", ["kill", "-k", "cancel"])
@pytest.mark.parametrize("name", ["s1", "big", "mels"])
def test_kill_of_a_tpu_cancels_the_job_on_it(world, tpu: Tpu, jobs, lab, spelling, name):
    world.add_slice("s1", "job-1", pool="lab", node="mels")
    world.add_slice("s2", None, pool="lab")
    tpu.ok("inventory", "set", "s1", "--alias", "big")
    tpu.ok(spelling, name)
    assert cancelled(world, "job-1") and not cancelled(world, "job-2")
    assert "no job runs on s2" in tpu(spelling, "s2").stderr
    assert "no job named 'nothing'" in tpu(spelling, "nothing").stderr


def test_words_of_find_and_of_the_log_are_dropped_with_a_reason(world, tpu: Tpu, jobs, lab):
    world.add_slice("s1", None, pool="lab")
    for word in ("style=full", "style=category", "style=category_note", "-del"):
        shown = tpu("find", "v5e", word)
        assert shown.exit_code == 0 and "s1" in shown.stdout
        assert f"hint: {word} is not needed" in shown.stderr
    assert tpu.ok("-Ml", "cn") == tpu.ok("-Ml")


@pytest.mark.parametrize("word", ["-a", "--all"])
def test_run_on_any_free_slice(world, tpu: Tpu, lab, word):
    world.add_slice("s1", None, pool="lab")
    printed = tpu("run", word, "--dry-run", "--json", "--", "true")
    assert json.loads(printed.stdout)["jobs"][0]["spec"]["pool"] == "lab"


def test_run_on_a_node_that_the_server_does_not_know_says_how_to_adopt_it(world, tpu: Tpu, lab):
    refused = tpu("run", "kmh-tpuvm-v4-32-preemptible-1", "--dry-run", "--", "true")
    assert refused.exit_code == 2
    assert "`tpu adopt kmh-tpuvm-v4-32-preemptible-1 " in refused.stderr
    assert "`tpu run v4-32 -- …`" in refused.stderr


def test_the_prefix_of_a_node_may_be_left_out(world, tpu: Tpu, jobs, lab):
    """`kmh-tpuvm-` was written into the former program; here it is any prefix."""
    world.add_slice("s1", "job-1", pool="lab", node="kmh-tpuvm-v5e-16-spot-1")
    world.add_slice("s2", None, pool="lab", node="kmh-tpuvm-v5e-16-spot-11")
    tpu.ok("kill", "v5e-16-spot-1")
    assert cancelled(world, "job-1") and not cancelled(world, "job-2")
    printed = tpu("run", "v5e-16-spot-11", "--dry-run", "--json", "--", "true")
    assert json.loads(printed.stdout)["jobs"][0]["spec"]["pool"] == "lab"
    for part in ("spot-1", "1", "16-spot-1"):
        assert tpu("kill", part).exit_code != 0, "without its type it may be anything"
    world.add_slice("s3", None, pool="lab", node="new-v5e-16-spot-1")
    refused = tpu("kill", "v5e-16-spot-1")
    assert refused.exit_code == 2
    assert "kmh-tpuvm-v5e-16-spot-1, new-v5e-16-spot-1" in refused.stderr


def test_a_node_without_its_prefix_that_is_not_here_says_how_to_adopt_it(tpu: Tpu, lab):
    refused = tpu("run", "v4-32-preemptible-1", "--dry-run", "--", "true")
    assert refused.exit_code == 2 and "`tpu run v4-32 -- …` on a new slice" in refused.stderr


def test_add_tag_and_notes(tpu: Tpu, jobs):
    tpu.ok("add-tag", "train", "paper")
    tpu.ok("ssn", "train", "diverges")
    tpu.ok("asn", "train", "at step 900")
    row = tpu.json("show", "train")["row"]
    assert row["tags"] == ["paper"] and row["notes"].split() == ["diverges", "at", "step", "900"]


@pytest.mark.parametrize("spelling", ["clean", "clear", "clear-all", "clear-finished"])
def test_clean_hides_ended_jobs_only(world, tpu: Tpu, jobs, spelling):
    end_job(world, "job-1", JobState.SUCCEEDED)
    tpu.ok(spelling, "--yes")
    assert [row["name"] for row in tpu.json("jobs")["jobs"]] == ["eval"]
    assert world.store.job(JobId("job-1")) is not None, "nothing is deleted"


def test_clear_error_hides_failed_jobs_only(world, tpu: Tpu, jobs):
    end_job(world, "job-1", JobState.FAILED)
    end_job(world, "job-2", JobState.SUCCEEDED)
    tpu.ok("clear-error", "--yes")
    assert [row["name"] for row in tpu.json("jobs")["jobs"]] == ["eval"]


def test_get_stage_dir_shows_the_snapshot_of_the_code(tpu: Tpu, work):
    tpu.ok("run", "v5e-16", "-q", "--name", "x", "--", "python", "train.py")
    digest = tpu.json("show", "x")["job"]["snapshot"]
    assert len(digest) == 64 and digest[:12] in tpu.ok("get-stage-dir", "x")


def test_directories(tpu: Tpu, work, tmp_path):
    tpu.ok("set-cur", "1")
    tpu.ok("set-dir", str(tmp_path), "2")
    assert tpu.ok("get-dir", "1") == f"{work}\n"
    assert str(tmp_path) in tpu.ok("ls") and str(work) in tpu.ok("lsdir")
    tpu.ok("swap-dir", "1", "2")
    assert tpu.ok("get-dir", "2") == f"{work}\n"
    tpu.ok("del-dir", "2")
    assert str(work) not in tpu.ok("ls") and work.exists()


def test_settings(tpu: Tpu):
    tpu.ok("set-settings", "monitor_upd_time", "9")
    tpu.ok("set-settings", "time_zone", "cn")
    values = {each["key"]: each["value"] for each in tpu.json("get-settings")["settings"]}
    assert str(values["monitor_upd_time"]) == "9" and values["time_zone"] == "cn"
    tpu.ok("reset-settings")
    assert tpu.ok("config", "get", "monitor_upd_time") == "5\n"


@pytest.mark.parametrize("spelling", ["-a", "-alias", "add-config-alias"])
def test_config_aliases(tpu: Tpu, spelling):
    tpu.ok(spelling, "sd", "config.seed")
    for listing in ("-sa", "-la", "show-config-alias"):
        assert "config.seed" in tpu.ok(listing)
    printed = tpu.ok("run", "v5e-16", "sd=3", "--dry-run", "--json", "--", "python", "main.py")
    assert json.loads(printed)["jobs"][0]["spec"]["command"][-1] == "--config.seed=3"
    tpu.ok("del-config-alias", "sd")
    assert "config.seed" not in tpu.ok("-sa")


@pytest.mark.parametrize("spelling", ["-ta", "-ata", "add-tpu-alias"])
def test_tpu_aliases(tpu: Tpu, spelling):
    tpu.ok(spelling, "big", "v5e-64")
    assert "big" in tpu.ok("-lta") and "big" in tpu.ok("-sta")
    printed = tpu.ok("run", "big", "--dry-run", "--json", "--", "true")
    assert json.loads(printed)["jobs"][0]["spec"]["accelerator"] == "v5litepod-64"


@pytest.mark.parametrize("spelling", ["rm-lock", "rel", "release"])
def test_zhan_reserves_for_30_minutes_and_is_released(world, tpu: Tpu, lab, spelling):
    tpu.ok("zhan", "lab")
    [made] = world.client().reservations()
    assert (made.ends_at - made.starts_at).total_seconds() == 30 * 60
    tpu.ok(spelling, made.id)
    assert world.client().reservations() == ()


@pytest.mark.parametrize("spelling", ["rm-lock", "rel", "release"])
def test_a_reservation_is_released_by_its_pool(world, tpu: Tpu, lab, spelling):
    tpu.ok("zhan", "lab", "mel")
    tpu.ok(spelling, "lab", "mel")
    assert world.client().reservations() == ()


def test_find_takes_several_generations(world, tpu: Tpu, lab):
    v4 = Pool(name="four", provider="local", accelerator="v4-8", largest=2)
    world.store.commit(ChangeSet(pools=[v4]))
    world.add_slice("s1", None, pool="lab")
    world.add_slice("s2", None, pool="four", accelerator="v4-8")
    shown = tpu.ok("find", "v34")
    assert "s2" in shown and "s1" not in shown
    assert "s1" in tpu.ok("find", "v2345") and "s2" not in tpu.ok("find", "v23")
    assert tpu("find", "v34", "-n").exit_code == 0


def test_an_admin_sets_the_directory_of_a_new_user(world, tpu: Tpu, admin: Tpu, work):
    admin.ok("add-user", "nora")
    assert f"folder 1 of nora is {work}" in admin.ok("set-cur", "1", "nora")
    admin.ok("set-dir", str(work.parent), "2", "nora")
    token = admin.json("register-web", "--user", "nora")["token"]
    with world.http(token) as http:
        folders = http.get("/preferences").json()["folders"]
    assert folders == {"1": str(work), "2": str(work.parent)}
    assert tpu("set-cur", "1", "nora").exit_code == 2, "others are not admins"


def test_the_parent_of_a_running_job_stays_in_sight(world, tpu: Tpu, jobs):
    end_job(world, "job-1", JobState.FAILED)
    child = tpu.json("resume", "train", "--detach")["id"]
    end_job(world, "job-2", JobState.SUCCEEDED)
    tpu.ok("clean", "--yes")
    assert {row["id"] for row in tpu.json("jobs")["jobs"]} == {"job-1", child}
    end_job(world, child, JobState.SUCCEEDED)
    tpu.ok("clean", "--yes")
    assert tpu.json("jobs")["jobs"] == []


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_of_a_command_is_asked_for_in_either_order(tpu: Tpu, option):
    assert "Usage: tpu logs" in tpu.ok(option, "logs")
    assert "Usage: tpu cancel" in tpu.ok(option, "kill")
    assert "Usage: tpu [OPTIONS]" in tpu.ok(option)


def test_the_queue(world, tpu: Tpu, admin: Tpu, lab):
    for name in ("a", "b"):
        world.submit(name, name=name, pool="lab")
    assert tpu.ok("vq").index(" a ") < tpu.ok("vq").index(" b ")
    admin.ok("dqr", "mel/b")
    assert tpu.ok("vq").index(" b ") < tpu.ok("vq").index(" a ")
    for spelling, name in (("dequeue", "a"), ("dq", "b")):
        tpu.ok(spelling, name)
        assert cancelled(world, name)


@pytest.mark.parametrize("spelling", ["uss", "upd-status-spreadsheet", "gtis", "twsi"])
def test_the_sheet_shows_what_is_observed(world, tpu: Tpu, lab, spelling):
    world.submit("job-1", name="train")
    world.add_slice("s1", "job-1", pool="lab")
    shown = tpu.ok(spelling)
    assert "running" in shown and "mel" in shown and "train" in shown


@pytest.mark.parametrize("name", ["v5e", "v4+", "v*", "s1", "big", "mels"])
def test_run_takes_a_free_slice_of_a_generation_or_a_slice_by_name(world, tpu: Tpu, lab, name):
    world.add_slice("s1", None, pool="lab", node="mels" if name == "mels" else "")
    if name == "big":
        tpu.ok("inventory", "set", "s1", "--alias", "big")
    printed = tpu("run", name, "--dry-run", "--json", "--", "true")
    assert printed.exit_code == 0, printed.output
    spec = json.loads(printed.stdout)["jobs"][0]["spec"]
    assert (spec["accelerator"], spec["pool"]) == ("v5litepod-16", "lab")
    assert f"{name}: v5e-16 in pool lab" in printed.stderr


def test_run_says_when_no_slice_of_a_generation_is_free(world, tpu: Tpu, lab):
    refused = tpu("run", "v2", "--dry-run", "--", "true")
    assert refused.exit_code != 0 and "no free slice of v2 in any pool" in refused.stderr
    assert "unknown TPU type" in tpu("run", "vv5", "--dry-run", "--", "true").stderr


def test_an_alias_moves_from_an_old_slice_to_a_new_one(world, tpu: Tpu, lab):
    """What `fang` did for a node that replaced another."""
    world.add_slice("s1", None, pool="lab")
    world.add_slice("s2", None, pool="lab")
    tpu.ok("inventory", "set", "s1", "--alias", "v4-32-p2")
    tpu.ok("inventory", "set", "s1", "--alias", "")
    tpu.ok("inventory", "set", "s2", "--alias", "v4-32-p2")
    rows = {row["id"]: row["alias"] for row in tpu.json("inventory")["rows"]}
    assert (rows["s1"], rows["s2"]) == ("", "v4-32-p2")


def test_users_and_tokens(world, admin: Tpu):
    admin.ok("add-user", "nora")
    assert "nora" in admin.ok("list-users") and "nora" in admin.ok("-lu")
    token = admin.json("register-web", "--user", "nora")["token"]
    with world.http(token) as http:
        assert http.get("/me").json()["name"] == "nora"
    admin.ok("del-user", "nora", "--yes")
    assert "nora" not in admin.ok("-lu")


def test_the_log_of_the_monitor_is_the_list_of_events(world, tpu: Tpu, jobs):
    first, *_, last = tpu.ok("-Ml").splitlines()
    assert "job-1" in first and "submitted by mel" in first, "it says what it is about"
    assert "job-3" in last and "submitted by mo" in last


def test_keng_shows_where_capacity_was_granted(world, tpu: Tpu, lab):
    world.add_slice("s1", None, pool="lab", up_at=world.clock.now())
    assert "local-a" in tpu.ok("keng")


@pytest.mark.parametrize("line", ["dq --all --yes", "dequeue * --yes"])
def test_dequeue_removes_what_waits(tpu: Tpu, world, jobs, line):
    world.change_job("job-2", state=JobState.RUNNING)
    removed = tpu.ok(*line.split())
    assert "train" in removed and "eval" not in removed and "theirs" not in removed


def test_t_and_m_say_how_often_an_apply_is_tried(cloud):
    node = ("apply", "a", "--zone", "us-central1-a", "--type", "v3-8")
    tried = cloud.tpu.json(*node, "t=0", "m=2")["nodes"]
    assert [row["name"] for row in tried] == ["a"]
    assert "--max-retries" in cloud.tpu(*node, "m=0").stderr


def test_check_rules_shows_the_rules(alone: Tpu):
    assert alone.json("check-rules") == alone.json("config", "rules")
