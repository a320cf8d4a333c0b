"""A room of its own for the processes of a node: `python -m tpufleet.testbed.kubernetes.node.supervisor PLAN`.

They get a process and a mount namespace. When the first process in there ends, the kernel ends all
others, containers included, and their mounts go with them: however this process dies, nothing of a
node stays behind but folders, control groups and a bridge. The network stays that of the machine.
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

CLONE_NEWNS, CLONE_NEWPID = 0x00020000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG = 1
MARKER_FILE = ".made-by-tpufleet"
SOCKET_WITHIN = 30.0  # seconds
AGAIN_AFTER = 1.0  # seconds until a part that died is started again


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisedProgram:
    name: str
    argv: Sequence[str]
    wait_for_socket: str = ""  # path of a socket that must answer first


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisorConfig:
    namespace_file: str  # file for the number of the process namespace
    logs: str
    programs: Sequence[SupervisedProgram]
    bind_mounts: Mapping[str, str] = field(default_factory=dict)  # folder of the machine → ours

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def parse_config(text: str) -> SupervisorConfig:
    said = json.loads(text)
    return SupervisorConfig(
        **{**said, "programs": [SupervisedProgram(**row) for row in said["programs"]]}
    )


def namespace_of(pid: int | str) -> str:
    return os.readlink(f"/proc/{pid}/ns/pid")


def namespace_members(namespace: str) -> list[int]:
    """Processes of this machine that live in there."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and namespace_of(entry.name) == namespace:
                found.append(int(entry.name))
        except OSError:
            continue  # ended while we looked
    return found


def create_mount_points(paths: Iterable[str]) -> None:
    """Folders to cover, where the machine has none; marked, so that the last removes them."""
    for path in map(Path, paths):
        if not path.exists():
            path.mkdir(parents=True)
            (path / MARKER_FILE).touch()


def remove_mount_points(paths: Iterable[str]) -> None:
    """Remove folders that were only made to be covered, and that nobody covers any more. To remove
    one that is covered in another namespace would uncover it there."""
    covered = _mount_points()
    for path in map(Path, paths):
        only_mark = path.is_dir() and [one.name for one in path.iterdir()] == [MARKER_FILE]
        if only_mark and str(path) not in covered:
            (path / MARKER_FILE).unlink()
            path.rmdir()


def _mount_points() -> set[str]:
    """Of every mount namespace on this machine."""
    seen: set[str] = set()
    found: set[str] = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and (name := os.readlink(entry / "ns" / "mnt")) not in seen:
                lines = (entry / "mountinfo").read_text().splitlines()
                seen.add(name)
                found.update(line.split()[4] for line in lines)
        except OSError:
            continue  # ended while we looked
    return found


def run(plan: SupervisorConfig) -> int:
    """Until SIGTERM, or until the first process inside ends."""
    _call("unshare", CLONE_NEWNS | CLONE_NEWPID)
    _call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    first = os.fork()
    if first == 0:
        os._exit(_inside(plan))
    signal.signal(signal.SIGTERM, lambda *_: os.kill(first, signal.SIGKILL))
    # The first process is not gone before all others in its namespace are.
    _, status = os.waitpid(first, 0)
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 0


def _inside(plan: SupervisorConfig) -> int:
    """The first process: starts the others, and takes in orphans."""
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    _call("mount", b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
    for covered, ours in plan.bind_mounts.items():
        _call("mount", ours.encode(), covered.encode(), None, MS_BIND, None)
    Path(plan.namespace_file).write_text(namespace_of("self"))
    running: dict[int, tuple[SupervisedProgram, subprocess.Popen[bytes]]] = {}
    for program in plan.programs:
        process = _start(program, plan)
        running[process.pid] = program, process
    while True:
        pid, status = os.wait()
        if pid not in running:
            continue
        program, process = running.pop(pid)
        process.returncode = status  # it was taken in here, and is not to be waited for again
        print(f"{program.name} ended and is started again", file=sys.stderr, flush=True)
        time.sleep(AGAIN_AFTER)
        process = _start(program, plan)
        running[process.pid] = program, process


def _start(program: SupervisedProgram, plan: SupervisorConfig) -> subprocess.Popen[bytes]:
    """To be kept while it runs: starting the next takes in those that nobody holds any more, and
    the loop of the first process would never hear that they ended."""
    deadline = time.monotonic() + SOCKET_WITHIN
    while (
        program.wait_for_socket
        and not socket_accepts(program.wait_for_socket)
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    with open(Path(plan.logs) / f"{program.name}.log", "ab") as log:
        return subprocess.Popen(
            program.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def socket_accepts(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as one:
        return one.connect_ex(path) == 0


def _call(name: str, *args: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    wide = [ctypes.c_ulong(one) if isinstance(one, int) else one for one in args]
    if getattr(libc, name)(*wide) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{args}: {os.strerror(number)}")


if __name__ == "__main__":
    sys.exit(run(parse_config(Path(sys.argv[1]).read_text())))
