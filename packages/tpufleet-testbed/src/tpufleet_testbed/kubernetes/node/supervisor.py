"""Runs the processes of a node in their own PID and mount namespaces:
`python -m tpufleet_testbed.kubernetes.node.supervisor CONFIG`.

When PID 1 of the namespace ends, the kernel kills all its other processes, containers included, and
drops their mounts. However the supervisor dies, only folders, cgroups and a bridge stay behind. The
network namespace is that of the machine.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from tpufleet.clocks import wait_until

CLONE_NEWNS, CLONE_NEWPID = 0x00020000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG = 1
MARKER_FILE = ".made-by-tpufleet"
SOCKET_TIMEOUT = 120.0  # seconds
RESTART_DELAY = 1.0  # seconds before a program that ended is restarted


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisedProgram:
    name: str
    argv: Sequence[str]
    wait_for_socket: str = ""  # path of a socket that must accept connections first


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisorConfig:
    namespace_file: str  # a PidNamespace is written there
    logs: str
    programs: Sequence[SupervisedProgram]
    bind_mounts: Mapping[str, str] = field(default_factory=dict)  # mount point → source folder


def namespaces_allowed() -> bool:
    """Whether this process may create PID and mount namespaces. Root in a container often may
    not, for lack of CAP_SYS_ADMIN."""
    flags = CLONE_NEWNS | CLONE_NEWPID
    trial = f"import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare({flags}) != 0)"
    result = subprocess.run([sys.executable, "-S", "-c", trial], capture_output=True, check=False)
    return result.returncode == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PidNamespace:
    """The kernel gives the number of a namespace that ended to the next one. PID 1, which is reaped
    after all others, tells them apart. PIDs are those that the machine sees."""

    number: int
    first: int  # its PID 1
    first_started: int  # in clock ticks since the machine started

    @classmethod
    def begun_by(cls, first: int) -> PidNamespace:
        started = _start_tick(first)
        if started is None:
            raise ProcessLookupError(f"process {first} ended")
        return cls(number=_namespace_number(first), first=first, first_started=started)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PidNamespace | None:
        try:
            return cls(**json.loads(Path(path).read_text()))
        except FileNotFoundError:
            return None

    def save(self, path: str | os.PathLike[str]) -> None:
        temporary = Path(f"{os.fspath(path)}.new")
        temporary.write_text(json.dumps(asdict(self)))
        temporary.replace(path)

    def members(self) -> list[int]:
        pids = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and _namespace_number(entry.name) == self.number:
                    pids.append(int(entry.name))
            except OSError:
                continue  # ended meanwhile
        return pids if _start_tick(self.first) == self.first_started else []


def _namespace_number(pid: int | str) -> int:
    return os.stat(f"/proc/{pid}/ns/pid").st_ino


def _start_tick(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])


def create_mount_points(paths: Iterable[str]) -> None:
    """Create missing folders, marked so that remove_mount_points may remove them."""
    for path in map(Path, paths):
        if not path.exists():
            path.mkdir(parents=True)
            (path / MARKER_FILE).touch()


def remove_mount_points(paths: Iterable[str]) -> None:
    """Remove marked folders that are no longer a mount point. Removing a folder would unmount it
    in every other mount namespace."""
    mounted = _mount_points()
    for path in map(Path, paths):
        only_marker = path.is_dir() and [item.name for item in path.iterdir()] == [MARKER_FILE]
        if only_marker and str(path) not in mounted:
            (path / MARKER_FILE).unlink()
            path.rmdir()


def _mount_points() -> set[str]:
    """Of every mount namespace on this machine."""
    namespaces: set[str] = set()
    mount_points: set[str] = set()
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdecimal():
                continue
            namespace = os.readlink(entry / "ns" / "mnt")
            if namespace not in namespaces:
                lines = (entry / "mountinfo").read_text().splitlines()
                namespaces.add(namespace)
                mount_points.update(line.split()[4] for line in lines)
        except OSError:
            continue  # ended meanwhile
    return mount_points


def run(config: SupervisorConfig) -> int:
    """Until SIGTERM, or until PID 1 of the namespace ends."""
    _call("unshare", CLONE_NEWNS | CLONE_NEWPID)
    _call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    # A SIGTERM that comes before the handler is set waits for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    recorded, record = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(record)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os._exit(_run_as_pid_1(config, recorded))
    PidNamespace.begun_by(first).save(config.namespace_file)
    os.write(record, b"1")
    os.close(record)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(first, signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    # waitpid returns only after all other processes of the namespace are gone.
    _, status = os.waitpid(first, 0)
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 0


def _run_as_pid_1(config: SupervisorConfig, recorded: int) -> int:
    """Start the programs, restart those that end, and reap orphans. It begins once its namespace
    is recorded, which `recorded` tells."""
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    if not os.read(recorded, 1):
        return 1  # the supervisor ended before
    os.close(recorded)
    _call("mount", b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
    for mount_point, source in config.bind_mounts.items():
        _call("mount", source.encode(), mount_point.encode(), None, MS_BIND, None)
    running: dict[int, tuple[SupervisedProgram, subprocess.Popen[bytes]]] = {}
    for program in config.programs:
        process = _start(program, config)
        running[process.pid] = program, process
    while True:
        pid, status = os.wait()
        if pid not in running:
            continue
        program, process = running.pop(pid)
        process.returncode = status  # already reaped by os.wait
        print(f"{program.name} exited; restarting it", file=sys.stderr, flush=True)
        time.sleep(RESTART_DELAY)
        process = _start(program, config)
        running[process.pid] = program, process


def _start(program: SupervisedProgram, config: SupervisorConfig) -> subprocess.Popen[bytes]:
    """The caller must keep the Popen: Python reaps a dropped one when it starts the next process,
    and os.wait would never report its end."""
    if path := program.wait_for_socket:
        wait_until(lambda: socket_accepts(path), SOCKET_TIMEOUT, 0.02)
    with open(Path(config.logs) / f"{program.name}.log", "ab") as log:
        return subprocess.Popen(
            program.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def socket_accepts(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(path) == 0


def _call(name: str, *args: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    converted = [ctypes.c_ulong(arg) if isinstance(arg, int) else arg for arg in args]
    if getattr(libc, name)(*converted) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{args}: {os.strerror(number)}")


if __name__ == "__main__":
    sys.exit(run(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=SupervisorConfig)))
