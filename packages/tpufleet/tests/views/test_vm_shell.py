"""Verbs that reach into a node by ssh. gcloud is the edge: a stand-in runs what it is printed in a
shell of this machine, once for every host, each with a home of its own."""

from __future__ import annotations

import json
import os
import shlex
import stat
from pathlib import Path

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from tests.views.emulated_cloud import Cloud
from tpufleet.model.fleet import fleets
from tpufleet.views.cli.gcloud import NodeAddress
from tpufleet.views.cli.vm import remote_commands

NAME = "tpu-us-central1-a-0"
SEEN = "devices 4 8"
GCLOUD = """#!/usr/bin/env real-python
import os, pathlib, subprocess, sys
here = pathlib.Path(os.environ["FAKE_GCLOUD"])
with (here / "calls").open("a") as file:
    print(*sys.argv[1:], sep="\\x1f", file=file)
options = dict(arg.removeprefix("--").split("=", 1) for arg in sys.argv[1:] if "=" in arg)
hosts = (0, 1) if options["worker"] == "all" else (int(options["worker"]),)
statuses = []
for host in hosts:
    home = here / f"host{host}"
    home.mkdir(exist_ok=True)
    environ = {**os.environ, "HOME": str(home)}
    statuses.append(subprocess.run(["bash", "-c", options["command"]], env=environ).returncode)
sys.exit(max(statuses))
"""
# What would change this machine only writes down that it was called.
STAND_INS = {
    "sudo": '[ "$1" = fuser ] || exec "$@"\nexit 1',
    "python3": 'case "$2" in *jax*) cd "$FAKE_GCLOUD"; cat answer; ! grep -qi error answer;;'
    ' *) exec "$REAL_PYTHON" "$@";; esac',
    "rm": 'echo "devices 4 8" >"$FAKE_GCLOUD/answer"',
    "find": 'cat "$FAKE_GCLOUD/disks"',
    "mkdir": "true",
    "mountpoint": "false",
    "blkid": 'case "$1" in *empty) false;; esac',
    "mount": 'echo "mount $*" >>"$FAKE_GCLOUD/mounts"',
    "mount.nfs": "true",
    "umount": "true",
    "sleep": "true",
    "curl": 'case "$*" in *tpufleet-adopted) cat "$FAKE_GCLOUD/adopted";;'
    ' *startup-script) cat "$FAKE_GCLOUD/script";; *) exit 22;; esac',
}


@pytest.fixture
def shells(cloud: Cloud, tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    scripts = {name: f"#!/bin/bash\n{body}\n" for name, body in STAND_INS.items()}
    for name, text in {**scripts, "gcloud": GCLOUD}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    real = os.path.realpath("/proc/self/exe")
    (folder / "real-python").symlink_to(real)
    cloud.tpu.environ |= {
        "FAKE_GCLOUD": str(tmp_path),
        "REAL_PYTHON": real,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),  # the stand-in for rm deletes nothing
    }
    (tmp_path / "answer").write_text(SEEN + "\n")
    (tmp_path / "disks").write_text("")
    (tmp_path / "calls").write_text("")
    return tmp_path


def calls_of(shells: Path) -> list[list[str]]:
    return [line.split("\x1f") for line in (shells / "calls").read_text().splitlines()]


def test_check_env_reports_hosts_and_chips(cloud, shells):
    [row] = cloud.tpu.json("vm", "check-env", NAME)["nodes"]
    assert (row["result"], row["message"]) == ("ok", "2 hosts see 8 chips")
    [call] = calls_of(shells)
    assert call[:5] == ["compute", "tpus", "tpu-vm", "ssh", NAME]
    assert {"--zone=us-central1-a", "--worker=all", "--project=my-project"} <= set(call)


@pytest.mark.parametrize(
    ("output", "result"),
    [
        ("RuntimeError: The TPU is already in use by process 12", "chips in use"),
        ("ModuleNotFoundError: No module named 'jax'", "no JAX"),
        ("ERROR: (gcloud) You have no account.\n  $ gcloud auth login\n", "no account"),
        ("ssh error: me@1.2.3.4: Permission denied (publickey).", "no ssh"),
        ("some other error", "failed"),
    ],
)
def test_check_env_recognizes_known_errors(cloud, shells, output, result):
    (shells / "answer").write_text(output)
    answer = cloud.tpu("vm", "check-env", NAME, "--json")
    [row] = json.loads(answer.stdout)["nodes"]
    assert answer.exit_code == 1 and row["result"] == result


def test_solve_recreates_a_preempted_node(cloud, shells):
    cloud.tpu.ok("vm", "apply", NAME, "--type", "v5e-8")
    cloud.preempt(NAME)
    assert cloud.tpu("vm", "repair", NAME).exit_code == 2, "it asks first"
    [row] = cloud.tpu.json("vm", "repair", NAME, "--yes")["nodes"]
    assert row["result"] == "ok" and cloud.states() == {NAME: "READY"}
    described = cloud.tpu.ok("vm", "describe", NAME)
    assert "v5e-8" in described and fleets.EXPIRES in described


def test_solve_mounts_the_disks_of_the_settings_again(cloud, shells):
    cloud.tpu.ok("vm", "apply", "--autostop", "none", NAME, "--type", "v5e-8")
    settings = json.loads(cloud.tpu.environ["TPUFLEET_TPU_VM"])
    settings["data_disks"] = [{"source": "projects/my-project/zones/us-central1-a/disks/d"}]
    cloud.tpu.environ["TPUFLEET_TPU_VM"] = json.dumps(settings)
    (shells / "disks").write_text("/dev/disk/by-id/google-d\n")
    cloud.preempt(NAME)
    checked, mounted = cloud.tpu.json("vm", "repair", NAME, "--yes")["nodes"]
    assert (checked["result"], mounted["result"]) == ("ok", "mounted")
    assert "/mnt/disks/1" in mounted["message"]


def test_solve_removes_a_stale_lock_and_checks_again(cloud, shells):
    cloud.tpu.ok("vm", "apply", "--autostop", "none", NAME, "--type", "v3-8")
    (shells / "answer").write_text("Error: The TPU is already in use by process with pid 12")
    [row] = cloud.tpu.json("vm", "repair", NAME)["nodes"]
    assert row["result"] == "ok"
    probe, cure, again = calls_of(shells)
    assert probe == again and "sudo fuser -s /tmp/libtpu_lockfile ||" in cure[-1]


def test_lian_opens_a_shell_on_one_host_or_runs_a_command_on_all(cloud, shells):
    shown = shlex.split(cloud.tpu.ok("vm", "ssh", NAME, "2", "--dry-run"))
    assert shown[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", NAME]
    assert "--worker=2" in shown and not any(part.startswith("--command") for part in shown)
    shown = shlex.split(
        cloud.tpu.ok("vm", "ssh", NAME, "all", "--command", "ls | wc -l", "--dry-run")
    )
    assert {"--worker=all", "--command=ls | wc -l", "--project=my-project"} <= set(shown)
    for bad in (("all",), ("two",)):
        assert cloud.tpu("vm", "ssh", NAME, *bad).exit_code == 2
    assert calls_of(shells) == []


def test_typed_lines_run_on_every_host(cloud, shells):
    answer = cloud.tpu("vm", "shell", NAME, input='echo "$HOME" | sed s,.*/,,\n\nexit 3\n')
    assert answer.stdout.splitlines()[:2] == ["host0", "host1"]
    assert answer.exit_code == 0 and "exit status 3" in answer.stderr
    output = cloud.tpu.ok("vm", "shell", NAME, "--python", input="print('six', 2 * 3)\n")
    assert output.splitlines() == ["six 6", "six 6"]


def test_disks_are_attached_once_and_mounted_on_every_host(cloud, shells):
    disk = "projects/p/zones/us-central1-a/disks/data"
    cloud.tpu.ok("vm", "apply", "--autostop", "none", NAME, "--type", "v3-8")
    (shells / "disks").write_text("/dev/disk/by-id/google-data\n")
    answer = cloud.tpu("vm", "mount-disk", NAME, "--disk", disk, "--json")
    [row] = json.loads(answer.stdout)["nodes"]
    assert (row["result"], row["message"]) == ("mounted", "/mnt/disks/1")
    assert f"attached {disk}" in answer.stderr
    [node] = cloud.emulator.cloud.nodes.values()
    assert [attached.source_disk for attached in node.template.data_disks] == [disk]
    mounts = (shells / "mounts").read_text().splitlines()
    assert mounts == ["mount -o discard,defaults /dev/disk/by-id/google-data /mnt/disks/1"] * 2
    again = cloud.tpu("vm", "mount-disk", NAME, "--disk", disk)
    assert again.exit_code == 0 and "attached" not in again.stderr


def test_a_disk_without_a_file_system_is_reported_and_not_formatted(cloud, shells):
    cloud.tpu.ok("vm", "apply", "--autostop", "none", NAME, "--type", "v3-8")
    (shells / "disks").write_text("/dev/disk/by-id/google-empty\n")
    answer = cloud.tpu("vm", "mount-disk", NAME)
    assert answer.exit_code == 1 and "no file system" in answer.stdout
    assert not (shells / "mounts").exists()
    (shells / "disks").write_text("")
    answer = cloud.tpu("vm", "mount-disk", NAME)
    assert answer.exit_code == 1 and "no data disk is attached" in answer.stdout


@pytest.mark.parametrize("evil", ["nfs:/a;touch PWNED", "nfs:/$(touch PWNED)", "'nfs:/`id`"])
def test_an_nfs_export_is_mounted_and_its_name_is_never_executed(cloud, shells, evil, tmp_path):
    cloud.tpu.ok("vm", "apply", "--autostop", "none", NAME, "--type", "v3-8")
    assert cloud.tpu.ok("vm", "mount-disk", NAME, "--nfs", "10.0.0.2:/data", "--at", "/kmh-nfs")
    assert (shells / "mounts").read_text() == "mount -t nfs 10.0.0.2:/data /kmh-nfs\n" * 2
    cloud.tpu("vm", "mount-disk", NAME, "--nfs", evil)
    assert not list(tmp_path.rglob("PWNED*")) and not Path("PWNED").exists()


def test_a_wandb_key_is_installed_on_every_host_and_never_an_argument(cloud, shells):
    key, other = "k" * 40, "machine example.com\n  login me\n  password mine\n"
    cloud.tpu.ok("vm", "apply", "--autostop", "none", NAME, "--type", "v5e-16")
    (shells / "host1").mkdir()
    (shells / "host1/.netrc").write_text(
        other + "machine api.wandb.ai\n  login user\n  password old\n"
    )
    answer = cloud.tpu("vm", "set-wandb", NAME, "--json", input=f"{key}\n")
    assert [row["result"] for row in json.loads(answer.stdout)["nodes"]] == ["done"] * 4
    for host in range(4):
        file = shells / f"host{host}/.netrc"
        assert f"machine api.wandb.ai\n  login user\n  password {key}\n" in file.read_text()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    kept = (shells / "host1/.netrc").read_text()
    assert other in kept and "old" not in kept
    assert key not in (shells / "calls").read_text() + answer.output


def test_an_invalid_key_and_a_node_that_is_not_ready_are_rejected(cloud, shells):
    missing = cloud.tpu("vm", "set-wandb", NAME, input="k" * 40)
    assert missing.exit_code == 1 and "not found" in missing.stderr
    cloud.tpu.ok("vm", "apply", "--autostop", "none", NAME, "--type", "v3-8")
    refused = cloud.tpu("vm", "set-wandb", NAME, input="short\n")
    assert refused.exit_code == 2 and "wandb.ai/authorize" in refused.stderr
    assert calls_of(shells) == []


@pytest.mark.parametrize(
    ("script", "result", "message"),
    [
        ("echo ran >>$HOME/ran", "done", "agent started"),
        (
            "echo 'tpufleet: checking chips failed: process 7 uses /dev/accel0' >&2; exit 1",
            "failed",
            "process 7 uses /dev/accel0",
        ),
        ("exit 3", "failed", "exit status 3"),
    ],
    ids=["it runs", "it says why not", "it fails without a word"],
)
def test_the_startup_script_of_an_adopted_node_runs_on_every_host(
    cloud, shells, monkeypatch, script, result, message
):
    for name, value in cloud.tpu.environ.items():
        monkeypatch.setenv(name, value)
    (shells / "adopted").write_text("mels-a1b2c3")
    (shells / "script").write_text(script)
    node = NodeAddress(name="mels", zone="us-central1-a", project="my-project")
    outcome = remote_commands.run_startup_script(node, "mels-a1b2c3")
    assert outcome.result.value == result and message in outcome.message
    if result == "done":
        assert all((shells / f"host{host}" / "ran").exists() for host in (0, 1))
    (shells / "adopted").write_text("of-a-former-adoption")
    late = remote_commands.run_startup_script(node, "mels-a1b2c3")
    assert "the metadata of mels-a1b2c3 has not arrived" in late.message
