"""Starts processes in a control group, and in namespaces of their own.

Run as a script, with the standard library alone, so that it starts in milliseconds:

`sandbox.py init JSON` creates the namespaces and stays as their first process (process 1) until its
standard input is closed. The kernel then kills every process in them. It prints its process id and
`ready`.

`sandbox.py run JSON -- COMMAND…` enters the group and the namespaces and runs the command there,
with the variables in the file descriptor `environment` (a JSON object). Nothing but the command may
see them: they are the job's, and this script has rights that the job must not get. A command that
cannot be started is reported on the file descriptor `errors` as `errno message`.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import stat
import struct
import sys
import warnings  # noqa: F401  # `os.execvpe` imports it, when we may no longer read it

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x10000000, 0x20000000
CLONE_NEWIPC = 0x8000000  # System V shared memory, semaphores and queues; POSIX queues
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, LAST_CAPABILITY = 24, 38, 63
# What a program of root may still do: own and read files, change users, open low ports. Not: mount,
# trace, load modules, create devices, open files by handle.
KEPT_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 10)
# Flags that a remount inside a user namespace must repeat, by their names in /proc/self/mountinfo.
_LOCKED_FLAGS = {
    "nosuid": MS_NOSUID,
    "nodev": MS_NODEV,
    "noexec": MS_NOEXEC,
    "noatime": 1024,
    "nodiratime": 2048,
    "relatime": 1 << 21,
}
# By machine: its number for audits, and those of add_key, request_key and keyctl. Keyrings belong
# to a user, and have no namespaces.
KEY_CALLS = {
    "x86_64": (0xC000003E, (248, 249, 250)),
    "aarch64": (0xC00000B7, (217, 218, 219)),
}
PR_SET_SECCOMP, SECCOMP_MODE_FILTER, SECCOMP_ALLOW, SECCOMP_ERRNO = 22, 2, 0x7FFF0000, 0x50000
LOAD_WORD, JUMP_IF_EQUAL, JUMP_IF_ABOVE, RETURN = 0x20, 0x15, 0x35, 0x06
OTHER_ABI = 0x40000000  # from this number on: calls of x32
LANDLOCK_CREATE_RULESET, LANDLOCK_RESTRICT_SELF = 444, 446
LANDLOCK_VERSION, LANDLOCK_SCOPES_SINCE, LANDLOCK_SCOPE_ABSTRACT_SOCKETS = 1, 6, 1
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    call(
        "mount",
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() or None,
        ctypes.c_ulong(flags),
        options.encode() or None,
    )


def init(settings: dict) -> int:
    """Create the namespaces; returns in a child that is process 1 of them."""
    isolated, privileged = settings["isolated"], os.geteuid() == 0
    create_namespaces(privileged, CLONE_NEWIPC if isolated else 0)
    if isolated:
        hide(settings["hidden"], settings["visible"], settings["scratch"])
        if privileged:
            protect_system()
    ignore_signals()
    child = os.fork()
    if child:
        os.write(1, f"{child}\n".encode())
        os.close(1)
        return relay_exit(child)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reaps every orphan
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    if isolated and privileged:
        for path in filter(os.path.exists, ("/proc/sys", "/proc/sysrq-trigger")):
            mount(path, path, flags=MS_BIND | MS_REC)
            mount("", path, flags=MS_REMOUNT | MS_BIND | MS_RDONLY)
    os.write(1, b"ready\n")
    os.close(1)
    while os.read(0, 1024):
        continue
    os._exit(0)


def create_namespaces(privileged: bool, more: int) -> None:
    uid, gid = os.geteuid(), os.getegid()
    kinds = CLONE_NEWNS | CLONE_NEWPID | (0 if privileged else CLONE_NEWUSER) | more
    call("unshare", kinds)
    if not privileged:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    mount("", "/", flags=MS_REC | MS_PRIVATE)


def hide(hidden: list, visible: list, scratch: dict) -> None:
    """Cover the hidden folders and files, except the visible folders and links inside them. Scratch
    folders, given with their size, begin empty and end with the namespaces."""
    kept = [(path, open_exactly(path)) for path in visible]
    covered = []
    for path, size in scratch.items():
        if os.path.isdir(path):
            mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={size}")
    for path in hidden:
        if os.path.isdir(path):
            mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
            covered.append(path)
        elif os.path.exists(path):
            mount("/dev/null", path, flags=MS_BIND)
    for path, descriptor in kept:
        if stat.S_ISLNK(os.fstat(descriptor).st_mode):
            if not os.path.lexists(path):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                os.symlink(os.readlink("", dir_fd=descriptor), path)
        else:
            os.makedirs(path, exist_ok=True)
            mount(f"/proc/self/fd/{descriptor}", path, flags=MS_BIND | MS_REC)
        os.close(descriptor)
    for path in covered:
        if os.path.ismount(path):  # not one that another one covers
            mount("", path, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def open_exactly(path: str) -> int:
    """Open a real path. Another job may have put a link there a moment ago."""
    descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    if os.readlink(f"/proc/self/fd/{descriptor}") != path:
        raise OSError(errno.ELOOP, f"{path} is a link")
    return descriptor


def protect_system() -> None:
    """Root owns what controls the machine: cover the disks, and make /sys read-only."""
    for folder, _, names in os.walk("/dev"):
        for name in names:
            path = os.path.join(folder, name)
            if _is_block_device(path):
                mount("/dev/null", path, flags=MS_BIND)
    with open("/proc/self/mountinfo") as file:
        mounts = [line.split()[4:6] for line in file]
    for path, options in mounts:
        # One that does not exist is covered by another mount.
        if (path == "/sys" or path.startswith("/sys/")) and os.path.exists(path):
            flags = sum(_LOCKED_FLAGS.get(option, 0) for option in options.split(","))
            mount("", path, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | flags)


def _is_block_device(path: str) -> bool:
    try:
        return stat.S_ISBLK(os.lstat(path).st_mode)
    except FileNotFoundError:  # deleted meanwhile, as files in /dev/shm are
        return False


def drop_capabilities() -> None:
    kept = KEPT_CAPABILITIES if os.geteuid() == 0 else ()
    for capability in range(LAST_CAPABILITY + 1):
        if capability not in kept:
            # Fails for numbers that this kernel does not have.
            _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def keep_to_itself(limits: dict | None) -> None:
    """What no namespace does, and every user may: no keyring and no abstract socket that other jobs
    have, too. The limits are for hosts whose control groups set none. None: nothing of this."""
    if limits is None:
        return
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for name, value in limits.items():
        kind = getattr(resource, name)
        hardest = resource.getrlimit(kind)[1]
        value = value if hardest == resource.RLIM_INFINITY else min(value, hardest)
        resource.setrlimit(kind, (value, value))
    if confines_sockets():
        rules = (ctypes.c_uint64 * 3)(0, 0, LANDLOCK_SCOPE_ABSTRACT_SOCKETS)
        ruleset = _libc.syscall(LANDLOCK_CREATE_RULESET, rules, ctypes.sizeof(rules), 0)
        call("syscall", LANDLOCK_RESTRICT_SELF, ruleset, 0)
        os.close(ruleset)
    if os.uname().machine in KEY_CALLS:
        refuse_calls(*KEY_CALLS[os.uname().machine])


def confines_sockets() -> bool:
    """Whether the kernel can keep abstract sockets of other jobs from a process."""
    version = _libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_VERSION)
    return version >= LANDLOCK_SCOPES_SINCE


def refuse_calls(machine: int, numbers: tuple) -> None:
    """As if the kernel did not have them; nor those of other machines, which have other numbers."""
    count = len(numbers)
    filters = [
        (LOAD_WORD, 0, 0, 4),
        (JUMP_IF_EQUAL, 0, count + 3, machine),
        (LOAD_WORD, 0, 0, 0),
        (JUMP_IF_ABOVE, count + 1, 0, OTHER_ABI),
        *((JUMP_IF_EQUAL, count - at, 0, number) for at, number in enumerate(numbers)),
        (RETURN, 0, 0, SECCOMP_ALLOW),
        (RETURN, 0, 0, SECCOMP_ERRNO | errno.ENOSYS),
    ]
    program = b"".join(struct.pack("HBBI", *each) for each in filters)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HP", len(filters), ctypes.addressof(buffer))
    call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0)


def become(uid: int, gid: int) -> None:
    """For good: the saved ids change too, and no program can regain privileges."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def run(settings: dict, argv: list) -> int:
    os.set_inheritable(settings["errors"], False)
    try:
        if settings["cgroup"]:
            with open(os.path.join(settings["cgroup"], "cgroup.procs"), "w") as file:
                file.write("0")
        if not settings["init"]:
            os.chdir(settings["folder"])
            keep_to_itself(settings["limits"])
            execute(argv, settings["environment"])
        enter_namespaces(settings["init"])
        ignore_signals()
        child = os.fork()
        if not child:
            os.setsid()
            os.chdir(settings["folder"])
            if settings["isolated"]:
                drop_capabilities()
            if settings["user"]:
                become(*settings["user"])
            keep_to_itself(settings["limits"])
            execute(argv, settings["environment"])
    except OSError as error:
        os.write(settings["errors"], f"{error.errno} {error.strerror}".encode())
        os._exit(126)
    except ValueError as error:  # a name or value that no variable can have
        os.write(settings["errors"], f"{errno.EINVAL} {error}".encode())
        os._exit(126)
    os.close(settings["errors"])
    for descriptor in (0, 1, 2, settings["environment"]):
        os.close(descriptor)  # the output ends with the command
    return relay_exit(child)


def enter_namespaces(process: int) -> None:
    folder = f"/proc/{process}/ns"
    every = {
        "user": CLONE_NEWUSER, "ipc": CLONE_NEWIPC, "pid": CLONE_NEWPID, "mnt": CLONE_NEWNS
    }  # fmt: skip
    # Only root may enter those that are the host's own.
    kinds = [
        (name, kind)
        for name, kind in every.items()
        if os.stat(f"{folder}/{name}").st_ino != os.stat(f"/proc/self/ns/{name}").st_ino
    ]
    descriptors = [(os.open(f"{folder}/{name}", os.O_RDONLY), kind) for name, kind in kinds]
    for descriptor, kind in descriptors:
        call("setns", descriptor, kind)
        os.close(descriptor)


def execute(argv: list, environment: int) -> None:
    """With the variables of the job, when all rights that it must not have are gone."""
    with os.fdopen(environment, "rb") as file:
        variables = json.loads(file.read())
    # As `subprocess` does: Python ignores these signals, programs expect the default.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, *FORWARDED_SIGNALS):
        signal.signal(number, signal.SIG_DFL)
    os.execvpe(argv[0], argv, variables)


def ignore_signals() -> None:
    """The agent sends them to the child as well, whose exit decides."""
    for number in FORWARDED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def relay_exit(child: int) -> int:
    """Wait for the child and end in the same way."""
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    call("prctl", 4, 0, 0, 0, 0)  # not dumpable: the child has left the core file
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)


if __name__ == "__main__":
    if sys.argv[1] == "init":
        init(json.loads(sys.argv[2]))
    else:
        run(json.loads(sys.argv[2]), sys.argv[4:])
