"""`tpu deploy server`: against an emulated project, whose VM runs the real startup script and
server on this machine. Only what changes a machine (mounts, users, services) is a stand-in."""

from __future__ import annotations

import hashlib
import io
import os
import socket
import stat
import subprocess
import sys
import tarfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from tests.polling import wait_until
from tests.views.cli_runner import Tpu
from tests.views.emulated_cloud import Cloud
from tpufleet.model import bootstrap
from tpufleet.testbed.cloud_tpu import metadata_server
from tpufleet.testbed.cloud_tpu.metadata_server import MetadataServer

STUB = """#!/bin/bash
echo "$(basename "$0") $*" >>"$CALLS"
case "$(basename "$0") $*" in
  "mountpoint"*) [[ -e "$CALLS.mounted" ]] ;;
  "mount "*) touch "$CALLS.mounted" ;;
  "blkid "*) [[ -e "$CALLS.formatted" ]] ;;
  "mkfs"*) touch "$CALLS.formatted" ;;
  "systemctl restart"*)
    if [[ -e "$CALLS.pid" ]]; then
      pid="$(cat "$CALLS.pid")"
      kill "$pid" 2>/dev/null
      while grep -q '^State:.[^Z]' "/proc/$pid/status" 2>/dev/null; do sleep 0.1; done
    fi
    unit="$TPUFLEET_ROOT/etc/systemd/system/tpufleet-server.service"
    here() { sed "s#/var/lib/#$TPUFLEET_ROOT/var/lib/#g; s#/opt/#$TPUFLEET_ROOT/opt/#g"; }
    mapfile -t environment < <(sed -n 's/^Environment=//p' "$unit" | here)
    read -ra command < <(sed -n 's/^ExecStart=//p' "$unit" | here)
    setsid env -i HOME="$TPUFLEET_ROOT" PATH="$PATH" "${environment[@]}" "${command[@]}" \\
      >>"$CALLS.server.log" 2>&1 </dev/null &
    echo $! >"$CALLS.pid"
    ;;
esac
"""
STUBS = ("mountpoint", "mount", "blkid", "mkfs.ext4", "id", "useradd", "chown", "systemctl")


class ServerMachine:
    """The VM: its folder is the root of the script."""

    def __init__(self, folder: Path) -> None:
        self.root, self.calls = folder / "vm", folder / "calls"
        self._bin = folder / "bin"
        for path in (self._bin, self.root / "dev/disk/by-id", folder / "bucket"):
            path.mkdir(parents=True)
        for name in STUBS:
            (self._bin / name).write_text(STUB)
            (self._bin / name).chmod(0o755)
        (self.root / "dev/disk/by-id/google-tpufleet-state").touch()
        self.bundle = folder / "bucket/bundle.tar.gz"
        self.bundle.write_bytes(packed())
        self.metadata = MetadataServer()
        self._bucket = _serve(self.bundle.parent)
        self.output = ""
        self.instance: dict[str, Any] = {}
        self._boots: list[threading.Thread] = []

    def boot(self, instance: dict[str, Any] | None = None) -> None:
        self.instance = instance or self.instance
        boot = threading.Thread(target=self._run_script)
        boot.start()
        self._boots.append(boot)

    def wait(self) -> None:
        for boot in self._boots:
            boot.join(timeout=120)

    def guest_attribute(self, _name: str, path: str) -> str | None:
        values = self.metadata.guest_attributes("vm", 0, path)
        return next(iter(values.values()), None)

    def log(self) -> str:
        log = Path(f"{self.calls}.server.log")
        return self.output + (log.read_text() if log.exists() else "")

    def close(self) -> None:
        self.wait()
        pid = Path(f"{self.calls}.pid")
        if pid.exists() and psutil.pid_exists(int(pid.read_text())):
            process = psutil.Process(int(pid.read_text()))
            process.terminate()
            process.wait(60)
        self.metadata.close()
        self._bucket.shutdown()
        self._bucket.server_close()

    def _run_script(self) -> None:
        items = {item["key"]: item["value"] for item in self.instance["metadata"]["items"]}
        values = metadata_server.instance_values(items)
        values["service-accounts/default/token"] = '{"access_token": "s3cret"}'
        values["network-interfaces/0/ip"] = "127.0.0.1"
        values["network-interfaces/0/access-configs/0/external-ip"] = "127.0.0.1"
        self.metadata.put("vm", values)
        done = subprocess.run(
            ["bash", "-c", items["startup-script"]], capture_output=True, text=True, timeout=240,
            env={
                "PATH": f"{self._bin}:{os.environ['PATH']}", "CALLS": str(self.calls),
                "TPUFLEET_ROOT": str(self.root),
                "TPUFLEET_METADATA_URL": f"{self.metadata.url}/vm/0",
                "TPUFLEET_STORAGE_URL": f"http://127.0.0.1:{self._bucket.server_port}",
            },
        )  # fmt: skip
        self.output += done.stdout + done.stderr


def packed() -> bytes:
    """A bundle whose Python is the one that runs this test."""
    script = f'#!/bin/bash\nexec "{sys.executable}" "$@"\n'.encode()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        entry = tarfile.TarInfo("python/bin/python3")
        entry.size, entry.mode = len(script), 0o755
        archive.addfile(entry, io.BytesIO(script))
    return buffer.getvalue()


def _serve(folder: Path) -> ThreadingHTTPServer:
    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, format: str, *args: object) -> None:
            """Not logged."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture
def cloud(tmp_path):
    cloud = Cloud(tmp_path / "laptop")
    yield cloud
    cloud.emulator.close()


@pytest.fixture
def machine(tmp_path, cloud):
    machine = ServerMachine(tmp_path / "machine")
    compute = cloud.emulator.project.compute
    compute.state.address = "127.0.0.1"
    compute.boot, compute.guest_attribute = machine.boot, machine.guest_attribute
    yield machine
    machine.close()


def resources(cloud: Cloud) -> set[tuple[str, str]]:
    known = cloud.emulator.project.compute.state.resources
    return {(kind, name) for _, kind, name in known}


ALL = {
    ("addresses", "tpufleet-server"), ("disks", "tpufleet-server-state"),
    ("firewalls", "tpufleet-server"), ("instances", "tpufleet-server"),
}  # fmt: skip


def test_the_plan_names_every_resource_and_the_price_and_changes_nothing(cloud):
    printed = cloud.tpu.ok("deploy", "server", "--dry-run", "--allow", "198.51.100.0/24")
    assert "In project my-project, us-central1-a:" in printed
    for _, name in ALL:
        assert name in printed
    assert "TCP 8470 from 10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16, 198.51.100.0/24" in printed
    assert "Price: $0.025 per hour, $18 per month" in printed
    plan = cloud.tpu.json("deploy", "server", "--dry-run", "--machine-type", "n2-standard-8")
    assert plan["usd_per_hour"] is None and len(plan["resources"]) == 4
    assert not resources(cloud)


def test_a_server_is_deployed_used_repeated_and_deleted(cloud, machine, tmp_path):
    port, checksum = free_port(), hashlib.sha256(machine.bundle.read_bytes()).hexdigest()
    options = (
        "--yes",
        "--port",
        port,
        "--bundle",
        "gs://bundle.tar.gz",
        "--bundle-sha256",
        checksum,
    )
    printed = cloud.tpu.ok("deploy", "server", *options)
    assert f"server ready: https://127.0.0.1:{port}" in printed, machine.log()
    assert resources(cloud) == ALL
    folder = tmp_path / "laptop/state/deployed/tpufleet-server"
    token = (folder / "token").read_text().strip()
    assert printed.count(token) == 1
    assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600
    body = str(machine.instance)
    assert token not in body and "PRIVATE KEY" not in body, "metadata holds no secret"
    assert machine.guest_attribute("", f"tpufleet/{bootstrap.CA_KEY}") == (
        folder / "ca.pem"
    ).read_text().rstrip("\n")

    user = {"TPUFLEET_SERVER": f"https://127.0.0.1:{port}",
            "TPUFLEET_CA_FILE": str(folder / "ca.pem"),
            "TPUFLEET_TOKEN_FILE": str(folder / "token")}  # fmt: skip
    laptop = Tpu(**{**cloud.tpu.environ, **user})
    assert laptop.json("jobs")["jobs"] == [], "the token is valid"
    assert "provider   tpu-vm" in laptop("status").stdout

    again = cloud.tpu("deploy", "server", *options)
    assert again.exit_code == 0 and "tpufleet-server exists" in again.stderr, again.stderr
    machine.boot()  # a reboot keeps certificates, state and token
    machine.wait()
    wait_until(lambda: laptop("jobs").exit_code == 0, describe=machine.log)
    assert laptop.json("jobs")["jobs"] == []
    assert machine.calls.read_text().count("mkfs") == 1

    kept = cloud.tpu.ok("deploy", "server", "--delete", "--yes")
    assert kept == "deleted tpufleet-server; disk tpufleet-server-state stays, with the state\n"
    assert resources(cloud) == {("disks", "tpufleet-server-state")}
    cloud.tpu.ok("deploy", "server", "--delete", "--state", "--yes")
    assert not resources(cloud)


def test_what_fails_on_the_vm_is_told(cloud, machine):
    wrong = cloud.tpu("deploy", "server", "--yes", "--bundle", "gs://bundle.tar.gz",
                      "--bundle-sha256", "0" * 64)  # fmt: skip
    assert wrong.exit_code == 1
    assert "installing tpufleet failed: checksum of gs://bundle.tar.gz does not match" in (
        wrong.stderr
    )


def test_a_missing_permission_is_told_with_the_role(cloud):
    cloud.emulator.project.compute.state.denied = True
    answer = cloud.tpu(
        "deploy", "server", "--yes", "--bundle", "gs://b", "--bundle-sha256", "0" * 64
    )
    assert answer.exit_code == 1 and "roles/compute.admin" in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--allow", "198.51.100.1/24"), "--allow: 198.51.100.1/24 has host bits set"),
        (("--name", "Fleet"), "--name: 'Fleet' must be lower-case"),
        (("--bundle", "gs://b"), "--bundle and --bundle-sha256: pass both"),
        ((), "Not a terminal; pass --yes to confirm"),
    ],
    ids=["range", "name", "bundle", "confirmation"],
)
def test_wrong_options_are_told(cloud, arguments, message):
    answer = cloud.tpu("deploy", "server", *arguments)
    assert answer.exit_code != 0 and message in answer.stderr
