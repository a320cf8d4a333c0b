"""Commands on TPU VMs with ssh, through gcloud: for users, and for nodes without an agent."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from tpufleet.errors import BadInput


@dataclass(frozen=True, slots=True)
class SshResult:
    status: int
    output: str  # standard output, then standard error
    timed_out: bool = False


def ssh(
    name: str, zone: str, project: str | None, worker: str, command: Sequence[str] = ()
) -> list[str]:
    """The argument vector of gcloud. The remote side is a shell, so arguments are quoted for it."""
    return ssh_script(name, zone, project, worker, shlex.join(command) or None)


def ssh_script(
    name: str, zone: str, project: str | None, worker: str, command: str | None
) -> list[str]:
    """The same for a command line that the remote shell interprets."""
    argv = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", name, f"--zone={zone}",
            f"--worker={worker}"]  # fmt: skip
    if project:
        argv.append(f"--project={project}")
    if command is not None:
        argv.append(f"--command={command}")
    return argv


def require_gcloud() -> None:
    if shutil.which("gcloud") is None:
        raise BadInput(
            "gcloud is not installed\n"
            "  next: install it from https://cloud.google.com/sdk, or use `tpu exec`"
        )


def run(argv: Sequence[str], timeout: float, stdin: str = "") -> SshResult:
    """Secrets go through standard input: the arguments of a process are visible to others."""
    require_gcloud()
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=timeout, check=False,
            input=stdin,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
        output = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
        return SshResult(124, output, timed_out=True)
    return SshResult(done.returncode, done.stdout + done.stderr)
