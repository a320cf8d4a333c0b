"""The program of a hostile member: prints everything of other jobs and of the servers that it can
reach from its own job. Arguments: folders of the servers, and the id of the other job."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

MARK = b"-".join((b"of", b"the", b"victim"))  # this file does not contain it
*FOLDERS, VICTIM = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)


def readable_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        for path in Path(folder).rglob("*"):
            if path.is_symlink() or not path.is_file() or path.is_relative_to(Path.cwd()):
                continue
            try:
                if MARK in path.read_bytes()[: 1 << 20]:
                    yield path
            except OSError:
                continue


def processes_of_others() -> Iterator[str]:
    for folder in Path("/proc").glob("[0-9]*"):
        for name in ("environ", "cmdline", "root", "cwd", "maps", "fd"):
            path = folder / name
            try:
                if name == "fd":
                    found = " ".join(os.readlink(each) for each in path.iterdir()).encode()
                else:
                    found = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
            except OSError:
                continue
            if MARK in found or b"tpufleet\0serve" in found or b"postgresql://" in found:
                yield f"{path}: {found[:80]!r}"


def shared_memory() -> Iterator[str]:
    for kind in ("shm", "sem", "msg"):
        lines = Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]
        yield from (f"{kind} {line}" for line in lines)


def keyrings() -> Iterator[str]:
    for line in Path("/proc/keys").read_text().splitlines():
        if MARK.decode() in line:
            yield line
    key = libc.syscall(249, b"user", MARK, 0, 0)  # request_key, x86-64
    if key > 0:
        yield f"key {key}"


def abstract_sockets() -> Iterator[str]:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(b"\0" + MARK)
        except OSError:
            return
        yield "connected"


def requests_with_own_token() -> Iterator[str]:
    token_file = os.environ.get("TPUFLEET_TOKEN_FILE", "")
    token = Path(token_file).read_text().strip() if token_file else ""
    context = ssl._create_unverified_context()
    for method, path in (
        ("POST", f"/jobs/{VICTIM}/cancel"),
        ("GET", f"/jobs/{VICTIM}/logs"),
        ("GET", "/secrets"),
        ("GET", "/tokens"),
        ("GET", "/preferences"),
        ("POST", "/tokens"),
        ("GET", f"/jobs/{VICTIM}/events/stream?timeout=1"),
    ):
        url = f"{os.environ['TPUFLEET_SERVER']}/api/v1{path}"
        headers = {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(url, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, context=context, timeout=20) as response:
                yield f"{method} {path}: {response.status}"
        except urllib.error.HTTPError:
            continue


def signals() -> Iterator[str]:
    own = {os.getpid(), os.getppid(), os.getpgid(0), os.getsid(0)}
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        try:
            command = (folder / "cmdline").read_bytes()
            os.kill(pid, 0)
        except OSError:
            continue
        if pid not in own and b"attacker.py" not in command:
            yield f"{pid} {command[:80]!r}"


def escapes() -> Iterator[str]:
    for command in (
        ["umount", "/tmp"], ["mount", "-t", "tmpfs", "x", "/mnt"],
        ["nsenter", "-t", "1", "-m", "true"],
        ["mknod", "/tmp/disk", "b", "254", "0"], ["chroot", "/proc/1/root", "true"],
        ["ls", "/proc/1/root/root"],
    ):  # fmt: skip
        try:
            if subprocess.run(command, capture_output=True).returncode == 0:
                yield " ".join(command)
        except FileNotFoundError:
            continue


CHECKS = {
    "files": lambda: map(str, readable_files("/tmp", "/dev/shm", "/var/tmp", "/run", *FOLDERS)),
    "processes": processes_of_others,
    "shared memory": shared_memory,
    "keyrings": keyrings,
    "abstract sockets": abstract_sockets,
    "requests": requests_with_own_token,
    "signals": signals,
    "escapes": escapes,
}
for name, check in CHECKS.items():
    found = []
    try:
        found.extend(check())
    except Exception as error:
        found.append(f"the check failed: {error!r}")
    print("REACHED" if found else "refused", name, json.dumps(found), flush=True)
