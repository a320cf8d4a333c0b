"""Real servers in folders of their own, and finding every process that belongs to them."""

from __future__ import annotations

import glob
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from tests.polling import wait_until
from tpufleet.client.fleet import FleetClient
from tpufleet.errors import FleetError
from tpufleet.linux.cgroups import Cgroup
from tpufleet.providers.local.processes import MARKER_VARIABLE, leftovers, root_marker

T = TypeVar("T")

SERVE = (sys.executable, "-m", "tpufleet", "serve")
START_TIMEOUT = 180.0  # seconds; the machine may be busy with other tests
STOP_TIMEOUT = 60.0
TAIL_LINES = 60


class Server:
    """`tpu serve` in a state folder. It can be killed and started again."""

    def __init__(
        self,
        home: Path,
        *,
        descriptors: int | None = None,
        timeout: float = 900.0,
        **environment: str,
    ) -> None:
        self.home = home
        self._timeout = timeout  # of the client
        self._descriptors = descriptors
        self.data = Path(environment.get("TPUFLEET_DATA", home))
        self.url = ""
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._client: FleetClient | None = None
        home.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def client(self) -> FleetClient:
        assert self._client is not None, "the server has not been started"
        return self._client

    def start(self) -> None:
        """Returns when it answers."""
        self.launch()
        wait_until(self._answers, START_TIMEOUT, lambda: f"the server answers\n{self.log_tail()}")

    def launch(self) -> None:
        """Returns at once."""
        assert self._process is None
        with (self.home / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                SERVE if self._descriptors is None else (*_with_limit(self._descriptors), *SERVE),
                env=_clean_environment(self.home) | self._environment,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """SIGKILL, at whatever it is doing."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def suspend(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> int:
        """SIGTERM. Its exit status."""
        assert self._process is not None
        self._process.terminate()
        status = self._process.wait(STOP_TIMEOUT)
        self._process = None
        return status

    def cleanup(self) -> None:
        """Leave nothing running, whatever happened before."""
        if self._client is not None:
            self._client.close()
        if self._process is not None:
            self.kill()
        for found in server_processes(self.home, self.data):
            _kill(found)
        for group in _control_groups(root_marker(self.data / "local")):
            Cgroup(group).remove()

    def log_tail(self) -> str:
        path = self.home / "server.log"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join(lines[-TAIL_LINES:])

    def _answers(self) -> bool:
        assert self._process is not None
        status = self._process.poll()
        assert status is None, f"the server left with status {status}:\n{self.log_tail()}"
        try:
            record = json.loads((self.home / "server.json").read_text())
            if record["pid"] != self._process.pid:
                return False  # what a killed one left behind
            if self._client is not None:
                self._client.close()
            self.url = record["url"]
            token = (self.home / "token").read_text().strip()
            ca_file = self._environment.get("TPUFLEET_CA_FILE")
            self._client = FleetClient(
                self.url, token, reconnect_timeout=5.0, ca_file=ca_file, timeout=self._timeout
            )
            self._client.me()
        except (FileNotFoundError, FleetError):
            return False
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class HostProcesses:
    """The processes of the simulated hosts of one state folder, by what they do."""

    agents: tuple[int, ...] = ()
    guards: tuple[int, ...] = ()
    workloads: tuple[int, ...] = ()


def host_processes(local: Path) -> HostProcesses:
    """What runs now under the root of the local provider."""
    known = _recorded_agents(local)
    agents, guards, workloads = [], [], []
    for process in _marked(local):
        try:
            if "TPUFLEET_ATTEMPT" in process.environ():
                workloads.append(process.pid)
            elif process.pid in known:
                agents.append(process.pid)
            else:
                guards.append(process.pid)
        except psutil.Error:
            continue  # ended while we looked
    return HostProcesses(
        agents=tuple(sorted(agents)),
        guards=tuple(sorted(guards)),
        workloads=tuple(sorted(workloads)),
    )


def server_processes(*folders: Path) -> list[psutil.Process]:
    """Servers of these folders, and everything that their simulated hosts ever started."""
    found = {process.pid: process for folder in folders for process in _marked(folder / "local")}
    homes = {str(folder) for folder in folders}
    for process in psutil.process_iter():
        try:
            if process.environ().get("TPUFLEET_HOME") in homes:
                found[process.pid] = process
        except (psutil.Error, OSError):
            continue  # ended while we looked, or somebody else's
    return [process for process in found.values() if _lives(process)]


def no_processes_left(home: Path) -> bool:
    return not leftovers(home / "local") and not server_processes(home)


def describe_processes(processes: Iterable[psutil.Process]) -> str:
    lines = []
    for process in processes:
        try:
            lines.append(f"{process.pid} ({process.status()}): {' '.join(process.cmdline())}")
        except psutil.Error:
            continue
    return "\n".join(lines)


def slices_in(local: Path) -> list[str]:
    """Names of the slices that the local provider still holds, half-made ones included."""
    plain = [item for item in local.glob("*") if not item.name.startswith(".")]
    hidden = [item for name in ("staging", "orders", "trash") for item in local.glob(f".{name}/*")]
    return sorted(item.name for item in (*plain, *hidden))


def _with_limit(descriptors: int) -> tuple[str, ...]:
    """Runs a command that can open this many files."""
    return ("sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh")


def _recorded_agents(local: Path) -> set[int]:
    found = set()
    for path in local.glob("*/slice.json"):
        try:
            record = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            continue  # released while we looked
        found.update(agent["pid"] for agent in record.get("agents", {}).values())
    return found


def _marked(local: Path) -> list[psutil.Process]:
    prefix = root_marker(local) + "/"
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER_VARIABLE, "").startswith(prefix) and _lives(process):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return


def _clean_environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TPUFLEET_")}
    return {
        **kept,
        "TPUFLEET_HOME": str(home),
        "TPUFLEET_CONFIG": os.devnull,
        "PYTHONUNBUFFERED": "1",
    }


def _control_groups(marker: str) -> list[Path]:
    """Of the slices of a state folder, below the group of whoever runs the tests."""
    return [  # `Path.glob` fails when groups of other tests are removed meanwhile
        Path(group)
        for above in ("", "*/", "*/*/")
        for group in glob.glob(f"/sys/fs/cgroup/{above}tpufleet-{marker}-*")
    ]
