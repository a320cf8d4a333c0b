"""Keeps the processes of an attempt together, so that none survives it; on simulated hosts, hides
the server's state folder from them.

The strongest mechanism that the host offers is used, and reported:
control group > PID namespace > orphans adopted by the agent, and marks in the environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import stat
import subprocess
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

import psutil

from tpufleet import deep_folders
from tpufleet.agent import threads
from tpufleet.agent.workload import processes, untrusted_files
from tpufleet.agent.workload.job_user import JobUser, find_user, python_folders
from tpufleet.linux import cgroups, sandbox
from tpufleet.linux.cgroups import Cgroup
from tpufleet.linux.launcher_environment import launcher_environment

# Python, without its site packages: starts in about 15 ms.
SANDBOX = (sys.executable, "-I", "-S", sandbox.__file__)
KILL_SECONDS = 30.0
END_SECONDS = 5.0
# Threads count too. Ten times what JAX, its data loaders and a compiler use on a 224-core host.
MAX_PROCESSES = 65536
MEMORY_FOR_AGENT = 512 * 2**20  # so that the kernel kills the workload, and not the agent
PR_SET_CHILD_SUBREAPER = 36
# On simulated hosts, instead of the agent's own user: of all jobs, and of those of members.
JOB_USER_VARIABLE = "TPUFLEET_JOB_USER"
MEMBER_JOB_USER_VARIABLE = "TPUFLEET_MEMBER_JOB_USER"
# Tell `tpu doctor` the guarantee, and whether it is too weak for jobs of strangers.
IN_USE_VARIABLE = "TPUFLEET_CONTAINMENT_IN_USE"
WEAK_VARIABLE = "TPUFLEET_CONTAINMENT_WEAK"


# Of each job of a member instead of the folders that all users of a machine share. Half of what
# Linux gives to one, as there are three.
SCRATCH = {Path("/tmp"): "25%", Path("/var/tmp"): "25%", Path("/dev/shm"): "25%"}


class Mechanism(StrEnum):
    CGROUP = "cgroup"
    NAMESPACE = "namespace"
    MARKS = "marks"


_GUARANTEES = {
    Mechanism.CGROUP: "control group: no process of a job outlives it",
    Mechanism.NAMESPACE: "PID namespace: no process of a job outlives it",
    Mechanism.MARKS: (
        "marks: a process that clears its environment and its session can outlive a killed agent, "
        "and one that forks without pause can outlive its job"
    ),
}

# What the controllers of control groups limit.
_LIMITS = {"pids": "processes", "memory": "memory"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Containment:
    """What this host uses for every attempt."""

    mechanism: Mechanism
    work_dir: Path
    cgroup: Cgroup | None = None  # the agent's own; attempts get groups below it
    isolated: bool = False  # attempts run in namespaces of their own and see no hidden folder
    hidden: tuple[Path, ...] = ()
    isolation_error: str = ""  # why they are not isolated although folders are to be hidden
    user: JobUser | None = None  # of all jobs; None: the user of the agent
    member_user: JobUser | None = None  # of jobs whose owner is no admin; None: as all jobs
    private: bool = False  # attempts share as little with other jobs as this host allows
    shares_sockets: bool = False  # even those: abstract ones

    @property
    def user_ids(self) -> tuple[int, int] | None:
        return None if self.user is None else self.user.ids

    @property
    def covered(self) -> tuple[Path, ...]:
        """Folders and files that attempts see nothing of."""
        return (*self.hidden, *self._scratch)

    @property
    def _scratch(self) -> Mapping[Path, str]:
        return SCRATCH if self.private and self.isolated else MappingProxyType({})

    @property
    def weak(self) -> bool:
        """Processes may outlive their job, read the server's state or connect to other jobs."""
        exposed = not self.isolated or self.shares_sockets
        return self.mechanism is Mechanism.MARKS or bool(self.hidden and exposed)

    @property
    def description(self) -> str:
        parts = [_GUARANTEES[self.mechanism]]
        if self.isolated:
            parts.append("jobs cannot see the server's state or its processes")
            if user := self.user or self.member_user:
                whose, rest = (
                    ("", "") if self.user else (" of members", ", those of admins as root")
                )
                parts.append(f"jobs{whose} run as user {user.uid} ({user.name}){rest}")
        elif self.hidden:
            parts.append(
                "jobs can read the server's state, and share /tmp and shared memory "
                f"({self.isolation_error})"
            )
        if self.hidden and self.shares_sockets:
            parts.append("jobs share abstract sockets (needs Linux 6.12 with Landlock)")
        offered = self.cgroup.controllers() if self.cgroup is not None else []
        if missing := [what for name, what in _LIMITS.items() if name not in offered]:
            parts.append(f"not limited on this host: {' and '.join(missing)} of jobs")
        return "; ".join(parts)

    def for_owner(self, *, admin: bool) -> Containment:
        """Of the jobs of an admin, or of those of other users."""
        if admin:
            return self
        private = bool(self.hidden) and sys.platform.startswith("linux")
        return replace(self, user=self.member_user or self.user, private=private)

    def open(self, folder: Path, checkpoint: str, shared: Sequence[Path] = ()) -> AttemptProcesses:
        """Prepare for one attempt, which also uses the `shared` folders. Call `close` when it has
        ended."""
        cgroup = None
        if self.cgroup is not None:
            cgroup = Cgroup(self.cgroup.path / f"{self._prefix}{folder.name}").create()
            limits = {"pids.max": MAX_PROCESSES}
            if (memory := psutil.virtual_memory().total - MEMORY_FOR_AGENT) > MEMORY_FOR_AGENT:
                limits["memory.max"] = memory
            cgroup.limit(limits)
        if self.mechanism is not Mechanism.NAMESPACE and not self.isolated:
            adopted = self.mechanism is Mechanism.MARKS
            return AttemptProcesses(cgroup=cgroup, adopted=adopted, limits=self._process_limits())
        if self._scratch and checkpoint.startswith("/"):
            self.require_visible(checkpoint)  # else it would end with the attempt
        own = [Path(os.path.realpath(path)) for path in (folder, *shared)]
        visible = [*own, *_visible_checkpoint(checkpoint, self.hidden)]
        hidden, user = self.hidden, None
        if self.user is not None:
            _give_to(self.user.ids, visible)
            hidden, user = (*self.user.covered, *hidden), self.user.ids
            visible += self.user.needed
        visible += [path for path in python_folders() if _below(path, self._scratch)]
        init = NamespaceInit(self.isolated, hidden, visible, self._scratch)
        return AttemptProcesses(
            cgroup=cgroup,
            init=init,
            isolated=self.isolated,
            user=user,
            home=folder,
            limits=self._process_limits(),
        )

    def _process_limits(self) -> dict[str, int] | None:
        """Of each process, where no control group limits the attempt. None: not private."""
        if not self.private:
            return None
        offered = self.cgroup.controllers() if self.cgroup is not None else []
        memory = psutil.virtual_memory().total - MEMORY_FOR_AGENT
        limits = {"pids": ("RLIMIT_NPROC", MAX_PROCESSES), "memory": ("RLIMIT_DATA", memory)}
        return dict(each for name, each in limits.items() if name not in offered and each[1] > 0)

    def require_visible(self, checkpoint: str) -> None:
        """Raises PermissionError when jobs must not see this folder, or one in it."""
        if _visible_checkpoint(checkpoint, self.hidden):
            return
        real = Path(os.path.realpath(checkpoint))
        covered = self.user.covered if self.user is not None else ()
        for path in (Path(os.path.realpath(path)) for path in (*self.covered, *covered)):
            if path == real or path in real.parents or real in path.parents:
                raise PermissionError(errno.EACCES, f"{checkpoint} is hidden from jobs")

    def is_own(self, checkpoint: str) -> bool:
        """Whether it is a location that the server gave to the job."""
        return _below_hidden(checkpoint, self.hidden) is not None

    def beside_checkpoint(self, checkpoint: str, kind: str) -> Path | None:
        """A folder of the same job for something else; None unless `is_own`. Created if needed."""
        if (below := _below_hidden(checkpoint, self.hidden)) is None:
            return None
        root, path = below
        return untrusted_files.make_folder_below(root, Path(kind, path.parts[1]))

    def list_folder(self, path: Path, checkpoint: str) -> list[str]:
        """As an attempt with this checkpoint location may list it."""
        below = _below_hidden(checkpoint, self.hidden)
        granted = below[0] / below[1] if below is not None else None
        return untrusted_files.list_named_by_job(path, self.covered, self.user_ids, granted)

    def kill_leftovers(self) -> bool:
        """Kill what an earlier agent of this work folder left in control groups."""
        if self.cgroup is None:
            return True
        groups = [Cgroup(path) for path in self.cgroup.path.glob(f"{self._prefix}*")]
        return all([group.kill_within(KILL_SECONDS) for group in groups])

    @property
    def _prefix(self) -> str:
        """Several agents may share one group, as on a simulated slice."""
        return f"tpufleet-{hashlib.sha256(str(self.work_dir).encode()).hexdigest()[:12]}-"


class NamespaceInit:
    """Process 1 of the namespaces of an attempt. It ends with the agent, and with it all others."""

    def __init__(
        self,
        isolated: bool,
        hidden: Sequence[Path],
        visible: Sequence[Path],
        scratch: Mapping[Path, str] = MappingProxyType({}),
    ) -> None:
        settings = {
            "isolated": isolated,
            "scratch": {str(path): size for path, size in scratch.items()},
            "hidden": [str(path) for path in hidden if isolated],
            "visible": [str(path) for path in visible if isolated],
        }
        self._process = subprocess.Popen(
            [*SANDBOX, "init", json.dumps(settings)],
            stdin=subprocess.PIPE,  # its end ends the namespaces
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=launcher_environment(),
            start_new_session=True,
        )
        assert self._process.stdout and self._process.stderr
        lines = self._process.stdout.read().split()  # closed once it is ready, or has failed
        if b"ready" not in lines:
            self._end()
            error = self._process.stderr.read().decode(errors="replace").strip()
            raise OSError(f"cannot create namespaces: {error.rpartition(chr(10))[2]}")
        self.pid = next(int(line) for line in lines if line.isdigit())
        # While it is open, the kernel cannot give the number of the namespace to another one.
        pin = os.open(f"/proc/{self.pid}/ns/pid", os.O_RDONLY)
        weakref.finalize(self, os.close, pin)
        self._namespace = os.fstat(pin).st_ino

    def pids(self) -> set[int]:
        """Every other process in the namespaces, and in those below."""
        tree = _children_by_parent()
        pids = set()
        for pid in {pid for children in tree.values() for pid in children}:
            try:
                if pid != self.pid and os.stat(f"/proc/{pid}/ns/pid").st_ino == self._namespace:
                    pids.add(pid)
            except OSError:
                continue  # ended meanwhile, or another user's
        return pids | _descendants(pids, tree)

    def close(self) -> None:
        """Kills every process in the namespaces."""
        self._end()

    def _end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        # Process 1 ends after all others, of which one may be stuck in the kernel.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)


class AttemptProcesses:
    """The processes of one attempt: how they start, which they are, how they are killed."""

    def __init__(
        self,
        *,
        cgroup: Cgroup | None = None,
        init: NamespaceInit | None = None,
        isolated: bool = False,
        adopted: bool = False,
        user: tuple[int, int] | None = None,
        home: Path | None = None,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        self._limits = limits  # of private attempts
        self._user = user
        self._home = home
        self._cgroup = cgroup
        self._init = init
        self._isolated = isolated
        self._adopted = adopted

    @property
    def wraps(self) -> bool:
        return self._cgroup is not None or self._init is not None or self._limits is not None

    @property
    def environment(self) -> dict[str, str]:
        """Variables that differ from those of the agent."""
        own = {"HOME": str(self._home), "USER": "", "LOGNAME": ""} if self._user else {}
        private = self._init is not None and self._limits is not None
        return {**own, "TMPDIR": "/tmp"} if private else own

    def wrap(
        self,
        argv: Sequence[str],
        folder: Path,
        *,
        errors: int,
        environment: int,
        as_agent: bool = False,
    ) -> list[str]:
        """The command that runs `argv` inside. `errors` and `environment`: file descriptors, see
        `sandbox`. Start it with `launcher_environment`. `as_agent`: not as the user of the job."""
        if not self.wraps:
            return list(argv)
        settings = {
            "cgroup": str(self._cgroup.path) if self._cgroup else "",
            "init": self._init.pid if self._init else 0,
            "isolated": self._isolated,
            "user": None if as_agent else self._user,
            "limits": None if as_agent else self._limits,
            "folder": str(folder),
            "errors": errors,
            "environment": environment,
        }
        return [*SANDBOX, "run", json.dumps(settings), "--", *argv]

    def pids(self) -> set[int]:
        if self._cgroup is not None:
            return self._cgroup.pids()
        if self._init is not None:
            return self._init.pids()
        return processes.adopted_orphans() if self._adopted else set()

    def kill(self) -> None:
        """At once, where the mechanism can."""
        if self._init is not None:
            self._init.close()
        if self._cgroup is not None:
            self._cgroup.kill()

    def close(self) -> None:
        """Kill what is left. A list of processes misses those that fork faster than it is read. The
        namespaces end first: `sandbox run` is outside of them and reaps its child, which else is
        left to the first process of the host. That may reap late or never, and until then both
        namespaces and group look busy."""
        if self._init is not None:
            self._init.close()
        if self._cgroup is not None:
            while not self._cgroup.kill_within(KILL_SECONDS):
                threads.log(f"processes in {self._cgroup.path} survived SIGKILL; trying again")


def detect(
    work_dir: Path, hidden: Sequence[Path] = (), only: Mechanism | None = None
) -> Containment:
    """The strongest mechanism of this host, or the one asked for."""
    marks = Containment(mechanism=Mechanism.MARKS, work_dir=work_dir, hidden=tuple(hidden))
    if not sys.platform.startswith("linux"):
        return replace(marks, isolation_error="needs Linux")
    marks = replace(marks, shares_sockets=not sandbox.confines_sockets())
    namespaces_error = _namespaces_error(bool(hidden)) if hidden or only is not None else ""
    isolation = replace(
        marks,
        isolated=bool(hidden) and not namespaces_error,
        isolation_error=namespaces_error,
    )
    if only in (None, Mechanism.CGROUP) and (own := cgroups.writable_cgroup()):
        return replace(isolation, mechanism=Mechanism.CGROUP, cgroup=own)
    if only in (None, Mechanism.NAMESPACE):
        if not hidden and only is None:
            namespaces_error = _namespaces_error(False)
        if not namespaces_error:
            return replace(isolation, mechanism=Mechanism.NAMESPACE)
    return marks if only is Mechanism.MARKS else isolation


def from_environ(environ: Mapping[str, str], work_dir: Path) -> Containment:
    hidden = [Path(path) for path in environ.get("TPUFLEET_HIDDEN", "").split(os.pathsep) if path]
    only = environ.get("TPUFLEET_CONTAINMENT", "")
    found = detect(work_dir, hidden, Mechanism(only) if only else None)
    return with_users(
        found, environ.get(JOB_USER_VARIABLE, ""), environ.get(MEMBER_JOB_USER_VARIABLE, "")
    )


def with_users(found: Containment, name: str, member_name: str = "") -> Containment:
    """Raises ValueError when jobs cannot run as these users."""
    if not name and not member_name:
        return found
    if not found.isolated or os.geteuid() != 0:
        reason = found.isolation_error or "the server does not run as root"
        raise ValueError(f"jobs cannot run as {name or member_name}: {reason}")
    return replace(
        found,
        user=find_user(name, [found.work_dir]) if name else None,
        member_user=find_user(member_name, [found.work_dir]) if member_name else None,
    )


def _give_to(user: tuple[int, int], folders: Sequence[Path]) -> None:
    """What a job writes to. Not its output log, which the agent writes; and no file with another
    link, which may lead to another user's file. Other jobs may change the folder meanwhile."""
    for folder in folders:
        root = untrusted_files.open_folder(folder)
        try:
            for each in deep_folders.walk(".", dir_fd=root):
                os.chown(each.descriptor, *user)
                for name in (*each.folders, *each.files):
                    if each.names or not name.endswith(".log"):
                        _give_entry_to(user, name, each.descriptor)
        finally:
            os.close(root)


def _give_entry_to(user: tuple[int, int], name: str, folder: int) -> None:
    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode) or status.st_nlink == 1:
            os.chown(name, *user, dir_fd=folder, follow_symlinks=False)


def make_room_for_limits(own: Cgroup) -> Cgroup:
    """Limits need a group that holds no process itself: move the agent into a group of its own."""
    if not {"pids", "memory"} & set(own.controllers()):
        return own
    agent = Cgroup(own.path / "agent")
    try:
        agent.create().enter()
        own.enable(("pids", "memory"))
    except OSError as error:  # another process is in the group, or it is not delegated
        threads.log(f"jobs run without limits on processes and memory: {error}")
    return own


def adopt_orphans() -> None:
    """Orphans of this process's descendants become its children, and can be found."""
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        threads.log("cannot adopt orphans: the kernel has no child subreapers")


def _namespaces_error(isolated: bool) -> str:
    try:
        NamespaceInit(isolated, (), ()).close()
    except OSError as error:
        return str(error)
    return ""


def _visible_checkpoint(checkpoint: str, hidden: Sequence[Path]) -> list[Path]:
    """The checkpoint folder, if it lies in `checkpoints` of a hidden folder; created if needed."""
    below = _below_hidden(checkpoint, hidden)
    return [] if below is None else [untrusted_files.make_folder_below(*below)]


def _below_hidden(checkpoint: str, hidden: Sequence[Path]) -> tuple[Path, Path] | None:
    """The hidden folder and the path in it, if the location lies in its `checkpoints`. The path
    itself must say so, as the server has checked it: a link there may lead to the folder of another
    job."""
    if not checkpoint.startswith("/") or "://" in checkpoint:
        return None
    folder = Path("/", os.path.normpath(checkpoint).lstrip("/"))
    for path in hidden:
        real = Path(os.path.realpath(path))
        for root in (path, real):
            if root / "checkpoints" in folder.parents and real.is_dir():
                return real, folder.relative_to(root)
    return None


def _below(path: Path, folders: Iterable[Path]) -> bool:
    return any(folder in path.parents for folder in folders)


def _children_by_parent() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for process in psutil.process_iter():
        try:
            children.setdefault(process.ppid(), []).append(process.pid)
        except psutil.Error:
            continue  # ended meanwhile
    return children


def _descendants(pids: set[int], children: Mapping[int, Sequence[int]]) -> set[int]:
    found: set[int] = set()
    queue = list(pids)
    while queue:
        for pid in children.get(queue.pop(), ()):
            if pid not in found:
                found.add(pid)
                queue.append(pid)
    return found
