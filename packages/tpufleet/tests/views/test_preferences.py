"""Settings, aliases, working directories and views, as a user types them."""

from __future__ import annotations

import threading
import time

import pytest

from tests.service.harness import ServiceHarness
from tests.views.cli_runner import Tpu
from tpufleet.errors import BadInput
from tpufleet.model.job.jobs import JobState
from tpufleet.model.people.preferences import (
    SETTINGS,
    PreferenceChanges,
    Preferences,
    apply_changes,
    parse_setting,
)


def test_keys_and_defaults_are_those_of_the_former_job_manager():
    defaults = {key: setting.default for key, setting in SETTINGS.items()}
    assert defaults == {
        "monitor_after_run": True,
        "monitor_upd_time": 5,
        "monitor_length": 800,
        "monitor_dir": True,
        "monitor_tpu": True,
        "monitor_verbose": False,
        "show_length": 200,
        "time_zone": "local",  # there: us, for everybody
    }


@pytest.mark.parametrize(
    ("key", "value", "parsed"),
    [
        ("monitor_after_run", "False", False),
        ("monitor_upd_time", "30", 30),
        ("time_zone", "cn", "cn"),
        ("time_zone", "Europe/Berlin", "Europe/Berlin"),
        ("time_zone", "Mars", BadInput),
        ("time_zone", "../../etc/passwd", BadInput),
        ("monitor_upd_time", "0", BadInput),
        ("monitor_after_run", "maybe", BadInput),
        ("colour", "red", BadInput),
    ],
)
def test_values_are_converted_and_checked(key, value, parsed):
    if parsed is BadInput:
        with pytest.raises(BadInput):
            parse_setting(key, value)
    else:
        assert parse_setting(key, value) == parsed


def test_a_default_alias_can_be_changed_deleted_and_restored():
    mine = Preferences(owner="mel")
    changed = apply_changes(mine, PreferenceChanges(config_aliases={"lr": "config.lr"}))
    assert changed.all_config_aliases["lr"] == "config.lr"
    deleted = apply_changes(changed, PreferenceChanges(config_aliases={"lr": None}))
    assert "lr" not in deleted.all_config_aliases


def test_config_shows_value_and_origin(tpu: Tpu, admin: Tpu):
    tpu.ok("config", "set", "monitor_upd_time", "9")
    shown = {row["key"]: row for row in tpu.json("config")["settings"]}
    assert shown["monitor_upd_time"]["value"] == "9"
    assert shown["monitor_upd_time"]["origin"] == "yours"
    assert shown["show_length"]["origin"] == "default"
    assert shown["server"]["origin"] == "TPUFLEET_SERVER"
    assert admin.ok("config", "get", "monitor_upd_time") == "5\n"
    tpu.ok("config", "reset")
    assert tpu.ok("config", "get", "monitor_upd_time") == "5\n"
    assert "unknown setting 'x'" in tpu("config", "set", "x", "1").stderr


def test_run_uses_aliases_and_directories(tpu: Tpu, world: ServiceHarness, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "main.py").write_text("print(1)\n")
    tpu.ok("config", "dir", "set", str(other), "7")
    assert "not a TPU type" in tpu("config", "alias", "set", "big", "v5e-17").stderr
    assert tpu("config", "alias", "set", "big", "v5e-16").stderr == ""
    tpu.ok("run", "big", "-d", "--dir", "7", "--name", "x", "--config", "lr=0.1=a", "--config",
           "config.seed=3", "--", "python", "main.py")  # fmt: skip
    job = tpu.json("show", "x")["job"]
    assert job["spec"]["accelerator"] == "v5litepod-16"
    assert job["spec"]["command"] == [
        "python", "main.py", "--config.training.learning_rate=0.1=a", "--config.seed=3",
    ]  # fmt: skip
    assert "write KEY=VALUE" in tpu("run", "big", "--config", "zz=1", "--", "x").stderr
    assert "unknown" in tpu("run", "nonsense", "--", "x").stderr


def test_directories(tpu: Tpu, work, tmp_path):
    tpu.ok("config", "dir", "here")
    assert (
        tpu.ok("config", "dir", "get", "1") == f"{work}\n"
        and tpu.ok("config", "dir", "get", "0") == f"{tmp_path}\n"
    )
    tpu.ok("config", "dir", "set", str(tmp_path), "2")
    tpu.ok("config", "dir", "swap", "1", "2")
    assert tpu.json("config", "dir")["folders"] == {"1": str(tmp_path), "2": str(work)}
    tpu.ok("config", "dir", "delete", "2")
    assert work.exists() and list(tpu.json("config", "dir")["folders"]) == ["1"]
    assert "from 1 to 100" in tpu("config", "dir", "here", "101").stderr


def test_run_detaches_when_the_user_has_set_that(tpu: Tpu):
    tpu.ok("config", "set", "monitor_after_run", "false")
    assert "submitted x" in tpu.ok("run", "v5e-16", "--name", "x", "--", "true")


def test_settings_of_the_list_of_jobs(tpu: Tpu, world: ServiceHarness):
    world.submit("job-1", name="train", workdir="/home/mel/vit")
    world.change_job("job-1", state=JobState.RECOVERING, reason="preempted; " + "asking again " * 9)
    shown = tpu.ok("jobs")
    assert "TYPE" in shown and shown.count("asking again") == 9
    assert "/home/mel/vit" in tpu.ok("jobs", "--verbose")
    tpu.ok("config", "set", "monitor_tpu", "false")
    tpu.ok("config", "set", "show_length", "30")
    tpu.ok("config", "set", "monitor_dir", "false")
    shown = tpu.ok("jobs", "--verbose")
    assert "TYPE" not in shown and "/home/mel/vit" not in shown
    assert shown.count("asking again") <= 2 and "preempted" in shown


def add_output(world: ServiceHarness, output: bytes) -> None:
    world.submit("job-1", name="train")
    world.add_slice("slice-1", "job-1")
    world.add_attempt("job-1", 0, "slice-1")
    world.change_job("job-1", state=JobState.RUNNING)
    world.send_log("job-1.0", "slice-1/0", 0, output)


@pytest.mark.parametrize("length", [0, 30, 3000])
def test_monitor_length_is_the_number_of_characters_of_the_output(tpu: Tpu, world, length):
    add_output(world, b"".join(b"step %03d: loss 0.123\n" % number for number in range(200)))
    tpu.ok("config", "set", "monitor_length", str(length))
    _, _, newest = tpu.ok("jobs", "--verbose").partition("(job-1")
    lines = newest.splitlines()[1:]
    assert sum(len(line.removeprefix("  ")) + 1 for line in lines) == length
    assert not length or lines[-1] == "  step 199: loss 0.123"


class CtrlC:
    """During the first pause of the command, instead of it. Threads of the server go on."""

    def __init__(self) -> None:
        self.pause: float | None = None
        self._sleep = time.sleep

    def __call__(self, seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            return self._sleep(seconds)
        self.pause = seconds
        raise KeyboardInterrupt


@pytest.fixture
def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> CtrlC:
    interrupt = CtrlC()
    monkeypatch.setattr(time, "sleep", interrupt)
    return interrupt


def test_a_watch_pauses_for_monitor_upd_time(tpu: Tpu, world, ctrl_c):
    world.submit("job-1", name="train")
    tpu.ok("config", "set", "monitor_upd_time", "1234")
    watched = tpu("jobs", "--watch")
    assert watched.exit_code == 130 and watched.stdout.count("train") == 1
    assert ctrl_c.pause == 1234


def test_a_watch_shows_output_if_monitor_verbose_is_set(tpu: Tpu, world, ctrl_c):
    add_output(world, b"loading weights\n")
    assert "loading weights" not in tpu("jobs", "--watch").stdout
    tpu.ok("config", "set", "monitor_verbose", "true")
    assert "loading weights" in tpu("jobs", "--watch").stdout
    assert "loading weights" not in tpu.ok("jobs"), "only a watch"


def test_views(tpu: Tpu, world: ServiceHarness):
    world.submit("job-1", tags=["a"])
    world.submit("job-2")
    tpu.ok("config", "view", "save", "mine", "tag:a")
    assert [row["id"] for row in tpu.json("jobs", "view:mine")["jobs"]] == ["job-1"]
    assert tpu("config", "view", "save", "wrong", "colour:red").exit_code != 0
    assert "write one of mine" in tpu("jobs", "--view", "other").stderr


@pytest.mark.parametrize(
    "group", ["config view", "config alias", "config dir", "config", "queue", "inventory", "notify"]
)
def test_list_is_accepted_by_every_group_that_lists(tpu: Tpu, group):
    words = group.split()
    assert tpu.ok(*words, "list") == tpu.ok(*words)
    assert tpu.json(*words, "list") == tpu.json(*words)


def test_preferences_of_another_user_require_the_admin_role(world: ServiceHarness):
    with pytest.raises(Exception, match="requires the admin role"):
        world.client("mel").preferences("ada")
    assert world.client("ada").preferences("mel").owner == "mel"
