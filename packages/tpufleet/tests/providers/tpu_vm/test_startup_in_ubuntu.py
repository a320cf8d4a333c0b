"""The startup script end to end on Ubuntu 22.04: a real bundle, a real agent, a real disk."""

from __future__ import annotations

import ensurepip
import hashlib
import shutil
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")

from tests.agent.control_plane import FakeControlPlane
from tests.agent.test_environment_variables import ASSIGNMENT
from tests.polling import wait_until
from tests.ports import free_port
from tests.providers.tpu_vm import apt_repository
from tests.providers.tpu_vm.ubuntu_host import UbuntuHost, build_bundle
from tpufleet.client.fleet import FleetClient
from tpufleet.model.fleet.bootstrap import BootstrapStage
from tpufleet.model.job.attempts import AttemptId
from tpufleet.providers.tpu_vm import startup_script

# By default the script runs without Ubuntu and a bundle, in test_startup_script.py.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture
def control_plane():
    control_plane = FakeControlPlane()
    yield control_plane
    control_plane.close()


@pytest.fixture
def host(bundle, control_plane, tmp_path):
    host = UbuntuHost(tmp_path / "host", bundle, control_plane.url)
    yield host
    host.close()


def connected(host, control_plane):
    wait_until(lambda: control_plane.heartbeats, 120, host.agent_log)
    wait_until(lambda: host.report.stage is BootstrapStage.CONNECTED, 60, host.agent_log)


def test_a_host_with_python_3_10_installs_the_bundle_and_its_agent_connects(host, control_plane):
    assert host.run("python3", "-V").stdout.startswith("Python 3.10")
    result = host.startup()
    assert result.returncode == 0, result.stdout + result.stderr
    connected(host, control_plane)
    agent = host.run("cat", "/run/agent.pid").stdout.strip()
    program = host.run("readlink", f"/proc/{agent}/exe").stdout
    assert program.startswith("/opt/tpufleet/") and "/python/bin/python3" in program
    _run_job(control_plane, host)
    # Run again, as an operator would: nothing changes.
    result = host.startup()
    assert result.returncode == 0, result.stderr
    assert host.systemctl_calls().count("restart tpufleet-agent") == 1
    assert host.run("cat", "/run/agent.pid").stdout.strip() == agent
    assert host.report.stage is BootstrapStage.CONNECTED
    # After a reboot the bundle is there, and the agent is accepted again.
    earlier = control_plane.heartbeats[-1].boot
    host.reboot()
    result = host.startup()
    assert result.returncode == 0 and "downloading" not in result.stdout
    wait_until(lambda: control_plane.heartbeats[-1].boot != earlier, 60, host.agent_log)
    connected(host, control_plane)
    _run_job(control_plane, host, "j1.1")
    assert host.run("cat", "/proc/1/comm").stdout == "sleep\n"


PROGRAM = """
import os, subprocess, sys, tpufleet.runtime
print(sys.version_info[:2], "python" in sys.prefix, os.environ["VIRTUAL_ENV"] == sys.prefix)
print([name for name in os.environ if "/opt/tpufleet" in os.environ[name]])
print(tpufleet.run.__name__, subprocess.check_output(["tpu", "--version"], text=True).split()[0])
try:
    open("/opt/tpufleet/nonce")
except PermissionError:
    print("no nonce")
try:
    import google.cloud.storage
except ImportError:
    print("only what tpufleet needs")
"""


def _run_job(control_plane, host, attempt="j1.0"):
    """In its own environment, made by the bundle's uv, with nothing of the agent's but tpufleet,
    which works as everywhere."""
    wheels = host.root / "wheels"  # in place of an index
    wheels.mkdir(exist_ok=True)
    for wheel in Path(ensurepip.__file__).parent.glob("_bundled/pip*.whl"):
        shutil.copy(wheel, wheels)
    control_plane.assignment = replace(
        ASSIGNMENT,
        env={"UV_FIND_LINKS": "/wheels", "UV_NO_INDEX": "1", "UV_OFFLINE": "1"},
        attempt_id=AttemptId(attempt),
        command=("python", "-c", PROGRAM),
        dependencies=(),
        checkpoint="",
    )

    def ended() -> bool:
        return "exited with status" in control_plane.log(attempt).partition("command:")[2]

    wait_until(ended, 120, lambda: control_plane.log(attempt) + host.agent_log())
    log = control_plane.log(attempt)
    assert "True True\n[]\nrun tpu" in log and "only what tpufleet needs" in log, log
    assert "no nonce" in log
    control_plane.assignment = None


def test_a_host_that_cannot_reach_the_server_reports_its_address_and_the_error(host):
    host.attributes["tpufleet-server"] = "http://127.0.0.1:1"
    assert host.startup().returncode == 0
    wait_until(lambda: host.report.stage is BootstrapStage.CONNECTING, 60, host.agent_log)
    assert "http://127.0.0.1:1" in host.report.message and "refused" in host.report.message
    assert not host.report.failed, "it keeps trying"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"tpufleet-bundle-sha256": "0" * 64}, "does not match", id="checksum"),
        pytest.param({"tpufleet-bundle": "gs://missing.tar.gz"}, "404", id="missing"),
        pytest.param({"tpufleet-bundle": "ftp://x"}, "must be a gs:// or https:// URL", id="url"),
    ],
)
def test_a_bundle_that_cannot_be_installed_is_a_reported_failure(host, changes, message):
    host.attributes |= changes
    result = host.startup()
    assert result.returncode != 0, result.stdout
    assert host.report.failed and message in host.report.message
    assert not (host.root / "opt/tpufleet/current").exists()
    assert not list((host.root / "opt/tpufleet").glob(".draft*/root")), "nothing is left installed"


def test_chips_of_a_driver_that_loads_late_are_waited_for(host, control_plane):
    (host.root / "dev/vfio/3").unlink()
    done = threading.Thread(target=host.startup)
    done.start()
    wait_until(lambda: host.report and host.report.stage is BootstrapStage.WAITING_FOR_CHIPS, 60)
    assert host.report.message == "3 of 4"
    host.add_chips(4)
    done.join(900)
    connected(host, control_plane)


# As unattended-upgrades does at boot: it holds a lock until the file is deleted.
HOLD_LOCK = """
import fcntl, os, sys, time
lock = open(sys.argv[1], "w")
fcntl.lockf(lock, fcntl.LOCK_EX)
held = open(sys.argv[2], "w")
while os.path.exists(sys.argv[2]):
    time.sleep(0.1)
"""


def test_gcsfuse_is_installed_once_others_release_the_locks_of_apt(host, control_plane):
    apt_repository.build(host.root / "repository", "gcsfuse", "gcsfuse-jammy")
    host.attributes |= {"tpufleet-mounts": "/data", "tpufleet-gcsfuse": "yes"}
    locks = {
        "lists": ("/var/lib/apt/lists/lock", "Could not get lock /var/lib/apt/lists/lock"),
        "packages": ("/var/lib/dpkg/lock-frontend", "Waiting for cache lock"),
    }
    held = {name: host.root / "var/lib" / f"{name}.held" for name in locks}
    threads = [
        threading.Thread(
            target=host.run,
            args=("python3", "-c", HOLD_LOCK, path, f"/var/lib/{held[name].name}"),
        )
        for name, (path, _) in locks.items()
    ]
    (host.root / "startup.sh").write_text(startup_script.script())
    command = ("bash", "-c", "bash /startup.sh >/var/log/startup 2>&1")
    environ = {"TPUFLEET_PACKAGES_URL": "file:///repository"}
    log = host.root / "var/log/startup"
    try:
        for thread in threads:
            thread.start()
        wait_until(lambda: all(file.exists() for file in held.values()))
        threads.append(threading.Thread(target=host.with_services, args=command, kwargs=environ))
        threads[-1].start()
        for name, (_, message) in locks.items():
            wait_until(lambda m=message: log.exists() and m in log.read_text(), 60, log.read_text)
            held[name].unlink()
        connected(host, control_plane)
    finally:
        for file in held.values():
            file.unlink(missing_ok=True)
        for thread in threads:
            thread.join(900)
    assert host.run("gcsfuse").stdout == "gcsfuse\n", log.read_text()


def test_an_attached_disk_is_formatted_only_if_allowed_and_mounted_after_each_boot(host):
    device = host.add_disk()
    # Folders for buckets are made on the way, where the user of jobs may not make them.
    host.attributes |= {"tpufleet-mounts": "/data\n/etc/data", "tpufleet-gcsfuse": "yes"}
    result = host.startup(TPUFLEET_PACKAGES_URL="http://127.0.0.1:1")
    assert result.returncode == 1 and "gcsfuse cannot be installed" in result.stderr
    assert host.run("stat", "-c", "%U", "/data", "/mnt/buckets").stdout == "tpufleet\ntpufleet\n"
    assert host.run("ls", "/etc/data").returncode != 0, "not below folders of the system"
    assert host.run("blkid", device).returncode != 0, "not formatted without permission"
    del host.attributes["tpufleet-gcsfuse"]
    host.attributes["tpufleet-format-disks"] = "yes"
    host.reboot()
    result = host.startup()
    assert result.returncode == 0, result.stderr
    assert host.run("mountpoint", "/mnt/disks/1").returncode == 0
    assert host.run("touch", "/mnt/disks/1/kept").returncode == 0
    host.run("sync")
    host.reboot()
    assert host.startup().returncode == 0
    assert host.run("ls", "/mnt/disks/1/kept").returncode == 0, "a file system is never formatted"


def test_a_machine_becomes_a_server_with_its_state_on_a_disk(bundle, tmp_path):
    """The script of `tpu deploy server` on Ubuntu, with a real disk, certificates and server."""
    port = free_port()
    machine = UbuntuHost(tmp_path / "vm", bundle, "", serves=port)
    try:
        machine.add_disk(size_mib=256, name="tpufleet-state")
        token = "tpf_" + "a" * 43
        machine.attributes |= {
            "tpufleet-port": str(port),
            "tpufleet-config": "providers: [local]\n",
            "tpufleet-admin-token-sha256": hashlib.sha256(token.encode()).hexdigest(),
        }
        for _ in range(2):  # after a reboot everything is there
            result = machine.startup(startup_script.server_script())
            assert result.returncode == 0, result.stdout + result.stderr + machine.agent_log()
            assert machine.report.stage is BootstrapStage.CONNECTED
            ca = tmp_path / "ca.pem"
            [certificate] = machine.metadata.guest_attributes("node", 0, "tpufleet/ca").values()
            ca.write_text(certificate)
            with FleetClient(f"https://127.0.0.1:{port}", token, ca_file=ca, timeout=900) as client:
                assert client.me().name == "admin"
            assert "/var/lib/tpufleet-server" in machine.run("cat", "/proc/mounts").stdout
            machine.reboot()
    finally:
        machine.close()


def test_a_host_reaches_what_the_test_gives_it_and_nothing_else(host, control_plane, bundle):
    assert host.startup().returncode == 0
    reach = lambda url: host.run("curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", url)
    assert reach(control_plane.url).stdout != "000"
    flavor = ["-H", "Metadata-Flavor: Google"]
    path = "computeMetadata/v1/instance/attributes/tpufleet-server"
    asked = host.run("curl", "-sS", *flavor, f"http://169.254.169.254/{path}")
    assert asked.stdout == control_plane.url
    with socket.create_server(("127.0.0.1", 0)) as other:
        hidden = f"http://127.0.0.1:{other.getsockname()[1]}"
        assert "onnect" in reach(hidden).stderr and reach(hidden).returncode == 7
    routes = host.run("cat", "/proc/net/route").stdout.splitlines()
    assert len(routes) == 1, "the header: no route leaves the machine"
